"""Sparsemixer, the router of Phi-3.5-MoE at inference (arXiv:2409.12136): two masked softmaxes, one expert each."""

from __future__ import annotations

import math

import onnx_ir as ir

from graph_passes.matchers.views import (
    NoMatch,
    dim,
    is_last_axis,
    operand,
    other_operand,
    produced_by,
    reduces_last,
    scalar,
    strip,
)


def recognise_sparsemixer(mixing: ir.Value, ids: ir.Value) -> tuple[ir.Value, float] | None:
    """Read the router that concatenates two rounds into (logits, jitter_eps); None when nothing is concatenated.

    Raises NoMatch when two values are concatenated but the rounds are not those of sparsemixer.
    """
    weights, experts = produced_by(mixing, "Concat"), produced_by(ids, "Concat")
    if weights is None or experts is None or len(weights.inputs) != 2 or len(experts.inputs) != 2:
        return None
    for node in (weights, experts):
        if not is_last_axis(node.attributes.get_int("axis", 0), node.outputs[0]):
            raise NoMatch(node, "Concat does not join the two rounds of the router on the last axis")
    first, second = (strip(operand(experts, i)) for i in (0, 1))
    left = _arg_max_of(first)
    logits, threshold = _round(operand(weights, 0), first, left, left)
    without_first = _arg_max_of(second)
    _, second_threshold = _round(operand(weights, 1), second, without_first, logits)
    scatter = produced_by(without_first, "ScatterElements")
    if (
        scatter is None
        or strip(operand(scatter, 0)) is not logits
        or strip(operand(scatter, 1)) is not first
        or scalar(scatter.inputs[2]) != -math.inf
        or not is_last_axis(scatter.attributes.get_int("axis", 0), operand(scatter, 1))
    ):
        raise NoMatch(without_first.producer(), "the second round does not exclude the first expert")
    if threshold != second_threshold or threshold < 0.0:
        raise NoMatch(
            weights, f"the thresholds of the rounds, {threshold:g} and {second_threshold:g}, are not one jitter"
        )
    return logits, threshold / 2.0


def _arg_max_of(ids: ir.Value) -> ir.Value:
    """The value over whose last axis `ids` is the ArgMax."""
    node = produced_by(ids, "ArgMax")
    if (
        node is None
        or not is_last_axis(node.attributes.get_int("axis", 0), operand(node, 0))
        or node.attributes.get_int("select_last_index", 0) != 0
    ):
        raise NoMatch(ids.producer(), "the expert of a round is not the ArgMax of its logits")
    logits = strip(operand(node, 0))
    if dim(logits, -1) != dim(operand(node, 0), -1):
        raise NoMatch(node, "ArgMax runs over a part of the experts")
    return logits


def _round(weight: ir.Value, chosen: ir.Value, left: ir.Value, logits: ir.Value) -> tuple[ir.Value, float]:
    """Check one round, Softmax(Where(far, -inf, left)) at `chosen`; return (logits, threshold)."""
    gather = produced_by(weight, "GatherElements")
    softmax = None if gather is None else produced_by(operand(gather, 0), "Softmax")
    where = None if softmax is None else produced_by(operand(softmax, 0), "Where")
    if gather is None or softmax is None or where is None or strip(operand(gather, 1)) is not chosen:
        raise NoMatch(weight.producer(), "the weight of a round is not a masked Softmax at the chosen expert")
    if not is_last_axis(softmax.attributes.get_int("axis", -1), operand(softmax, 0)):
        raise NoMatch(softmax, "Softmax does not run over the last axis")
    if scalar(where.inputs[1]) != -math.inf or strip(operand(where, 2)) is not left:
        raise NoMatch(where, "a round does not mask its own logits by -inf")
    greater = produced_by(operand(where, 0), "Greater")
    threshold = None if greater is None else scalar(greater.inputs[1])
    distance = None if greater is None else produced_by(operand(greater, 0), "Div")
    if threshold is None or distance is None or not _is_distance(distance, left, logits):
        raise NoMatch(where, "a round does not mask logits by (max - logit) / max(|logit|, max)")
    return logits, threshold


def _is_distance(node: ir.Node, left: ir.Value, logits: ir.Value) -> bool:
    """Whether the node is (best - logits) / Max(|logits|, best) with best = ReduceMax(left)."""
    difference, divisor = produced_by(operand(node, 0), "Sub"), produced_by(operand(node, 1), "Max")
    if difference is None or divisor is None or len(divisor.inputs) != 2:
        return False
    best = produced_by(operand(difference, 0), "ReduceMax")
    if best is None or not reduces_last(best, keepdims=True) or strip(operand(best, 0)) is not left:
        return False
    magnitude = produced_by(other_operand(divisor, best.outputs[0]), "Abs")
    return (
        strip(operand(difference, 1)) is logits
        and any(v is not None and strip(v) is best.outputs[0] for v in divisor.inputs)
        and magnitude is not None
        and strip(operand(magnitude, 0)) is logits
    )
