"""How a graph chooses experts: from the mixing weights and ids back to the logits, in every spelling.

`recognise` reads, from the end to the beginning: scaling, normalisation, the k weights, the top-k, the group mask,
the correction bias, the scores, the logits. A router that it cannot read in full stays in the graph, and the node
gets ids and weights: an unknown router hinders a fusion only where its ids may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.places import recognised
from graph_passes.matchers.projection import projection
from graph_passes.matchers.quantised_weights import QuantisedWeight
from graph_passes.matchers.sparsemixer import recognise_sparsemixer
from graph_passes.matchers.views import (
    NoMatch,
    dim,
    integers,
    is_last_axis,
    is_standard,
    is_view,
    operand,
    other_operand,
    produced_by,
    rank,
    reduces_last,
    scalar,
    strip,
    weight,
    with_scalar,
)

_MOVES = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split", "Transpose", "Expand", "Tile"})
"""Operators whose result holds nothing but elements of their first input."""


@dataclass(frozen=True)
class Router:
    """The router part of a match: MoeSpec `fields` (router_input among them), node `inputs` and `constants`.

    `num_experts` is the width of the router, None when the router was not recognised; `note` says why it was not.
    """

    fields: Mapping[str, Any]
    inputs: Mapping[str, ir.Value] = field(default_factory=dict)
    constants: Mapping[str, WeightSource] = field(default_factory=dict)
    num_experts: int | None = None
    note: str = ""


def recognise(mixing: ir.Value, ids: ir.Value, hidden_states: ir.Value, top_k: int) -> Router:
    """Read the router of a block.

    `mixing` and `ids` are the k weights and expert ids of each token, both `[..., k]` up to views, in the same
    order; `hidden_states` are the tokens, which decides whether the router's own projection can be drawn in; k is
    `top_k`. Raises NoMatch when the router is not recognised and its ids may be negative, or no value has an axis of
    that size.
    """
    try:
        read = _recognise(mixing, ids, hidden_states, top_k)
        recognised("router", f"{read.fields['score_func']} of {read.num_experts} experts, top {top_k}")
        return read
    except NoMatch as problem:
        if not _are_ids(ids):
            raise NoMatch(
                strip(ids).producer(),
                f"{ids.name} may hold negative expert ids: it is neither chosen by TopK or ArgMax nor looked up in a "
                "constant of ids; HinaMoE does not count experts from the end",
            ) from problem
        chosen = produced_by(ids, "TopK")
        if chosen is not None and integers((*chosen.inputs, None)[1]) not in (None, (top_k,)):
            raise NoMatch(
                chosen, f"TopK chooses {_k_of(chosen)} experts, but {top_k} are used for each token"
            ) from problem
        inputs = {"topk_ids": per_token(ids, top_k), "topk_weights": per_token(mixing, top_k)}
        recognised("router", f"left in the graph, as {problem.reason}")
        return Router({"router_input": "topk_ids"}, inputs, note=problem.reason)


def unknown_top_k(node: ir.Node | None, ids: ir.Value) -> NoMatch:
    """The objection to `ids` of which the graph does not say that they are k for each token."""
    return NoMatch(
        node,
        f"the graph does not say how many experts per token {ids.name} holds; export with dynamic axes for batch and "
        "sequence only",
    )


def per_token(value: ir.Value, size: int) -> ir.Value:
    """The value with a last axis of `size` behind `value` and its views; NoMatch when there is none."""
    candidate: ir.Value | None = value
    while candidate is not None:
        if dim(candidate, -1) == size and (rank(candidate) or 0) > 1:
            return candidate
        node = candidate.producer()
        candidate = operand(node, 0) if node is not None and is_view(node) else None
    raise NoMatch(
        value.producer(),
        f"the graph does not say that {value.name} holds {size} numbers for each token; name the dynamic axes when "
        "exporting",
    )


def _are_ids(value: ir.Value) -> bool:
    """Whether no element of `value` can be negative: indices of TopK or ArgMax, and constants looked up by such."""
    pending, seen = [value], {value}
    while pending:
        value = strip(pending.pop())
        node, numbers = value.producer(), integers(value)
        if numbers is not None:
            if min(numbers, default=0) < 0:
                return False
        elif node is None or not is_standard(node):
            return False
        elif node.op_type == "Concat" or node.op_type in _MOVES:
            parts = node.inputs if node.op_type == "Concat" else [operand(node, 0)]
            new = {part for part in parts if part is not None} - seen
            pending += new
            seen |= new
        elif not (node.op_type == "ArgMax" or (node.op_type == "TopK" and value is node.outputs[1])):
            return False
    return True


def _recognise(mixing: ir.Value, ids: ir.Value, hidden_states: ir.Value, top_k: int) -> Router:
    fields: dict[str, Any] = {}
    constants: dict[str, WeightSource] = {}
    mixing, factor = _scaling(mixing)
    if factor != 1.0:
        fields["routed_scaling_factor"] = factor
    mixing, norm = _normalisation(mixing)
    fields |= norm
    sparsemixer = recognise_sparsemixer(mixing, ids)
    if sparsemixer is not None:
        logits, jitter = sparsemixer
        width = dim(logits, -1)
        fields |= {"score_func": "sparsemixer", "sparsemixer_jitter_eps": jitter}
    else:
        chosen = _top_k_of(ids)
        width = dim(operand(chosen, 0), -1)
        logits = _top_k_router(mixing, ids, chosen, top_k, fields, constants)
    if width is None:
        raise NoMatch(logits.producer(), f"the graph does not say how many experts {logits.name} scores")
    if any(source.shape[-1] != width for source in constants.values()):
        raise NoMatch(
            logits.producer(), f"the bias of the expert selection does not hold one number for each of {width}"
        )
    return _with_logits(logits, width, hidden_states, fields, constants)


def _scaling(mixing: ir.Value) -> tuple[ir.Value, float]:
    factor = 1.0
    while True:
        division = produced_by(mixing, "Div")
        divisor = None if division is None else scalar(division.inputs[1])
        if (scaled := with_scalar(mixing, "Mul")) is not None:
            mixing, factor = scaled[0], factor * scaled[1]
        elif division is not None and divisor:
            mixing, factor = operand(division, 0), factor / divisor
        else:
            return strip(mixing), factor


def _normalisation(mixing: ir.Value) -> tuple[ir.Value, dict[str, Any]]:
    """Split w / norm(w), or w * Reciprocal(norm(w)), into w and the MoeSpec fields of the norm."""
    if (division := produced_by(mixing, "Div")) is not None:
        weights, norm = operand(division, 0), operand(division, 1)
    else:
        product = produced_by(mixing, "Mul")
        inverse = (
            next((n for v in product.inputs if v and (n := produced_by(v, "Reciprocal"))), None) if product else None
        )
        if product is None or inverse is None:
            return mixing, {}
        weights, norm = other_operand(product, inverse.outputs[0]), operand(inverse, 0)
    fields: dict[str, Any] = {"norm_topk_prob": True}
    if (floored := _floor(norm)) is not None:
        norm, fields["norm_floor"] = floored
        if floored[1] < 0.0:
            raise NoMatch(norm.producer(), f"the floor of the norm of the mixing weights is negative: {floored[1]:g}")
    if (added := with_scalar(norm, "Add")) is not None:
        norm, fields["norm_eps"] = added
    normed = _norm(norm)
    if normed is None or strip(normed[0]) is not strip(weights):
        raise NoMatch(norm.producer(), "the mixing weights are divided by something other than their own norm")
    if normed[1] != 1.0:
        fields["norm_p"] = normed[1]
    return strip(weights), fields


def _norm(value: ir.Value) -> tuple[ir.Value, float] | None:
    """What `value` is the p-norm of, over the last axis, and p; None when it is something else."""
    root = produced_by(value, "Pow")
    total = produced_by(value if root is None else operand(root, 0), "ReduceSum", "ReduceL1", "ReduceL2")
    if total is None or not reduces_last(total, keepdims=True):
        return None
    if root is None:
        return operand(total, 0), 2.0 if total.op_type == "ReduceL2" else 1.0
    power = produced_by(operand(total, 0), "Pow") if total.op_type == "ReduceSum" else None
    p, inverse = None if power is None else scalar(power.inputs[1]), scalar(root.inputs[1])
    if power is None or p is None or p <= 0.0 or inverse is None or not math.isclose(p * inverse, 1.0, rel_tol=1e-6):
        return None
    magnitude = produced_by(operand(power, 0), "Abs")
    return operand(power if magnitude is None else magnitude, 0), p


def _floor(value: ir.Value) -> tuple[ir.Value, float] | None:
    """Split Clip(x, min) or Max(x, min) into x and min."""
    if (clip := produced_by(value, "Clip")) is not None:
        low = scalar(clip.inputs[1]) if len(clip.inputs) > 1 else None
        if low is None or (len(clip.inputs) > 2 and clip.inputs[2] is not None):
            raise NoMatch(clip, "Clip of the norm of the mixing weights is not a floor")
        return operand(clip, 0), low
    return with_scalar(value, "Max")


def _top_k_router(
    mixing: ir.Value,
    ids: ir.Value,
    top_k: ir.Node,
    k: int,
    fields: dict[str, Any],
    constants: dict[str, WeightSource],
) -> ir.Value:
    """Read a router built on the node `top_k` into `fields` and `constants`; return its logits."""
    over_k = None
    if (function := _over_last_axis(mixing, k)) is not None:
        over_k, mixing = function.op_type.lower() + "_topk", strip(operand(function, 0))
    if mixing is top_k.outputs[0]:
        source = None
    elif (gather := produced_by(mixing, "GatherElements")) is not None:
        if strip(operand(gather, 1)) is not strip(ids) or not _on_last_axis(gather, 0):
            raise NoMatch(gather, "the mixing weights are gathered by other ids than the experts are")
        source = strip(operand(gather, 0))
    else:
        raise NoMatch(mixing.producer(), "the mixing weights do not come from the scores by top-k or GatherElements")
    selection = strip(operand(top_k, 0))
    if over_k is not None:
        fields["score_func"] = over_k
        if source is not None and source is not selection:
            _selection_bias(selection, source, constants)
        return operand(top_k, 0) if source is None else source
    unmasked = _group_mask(selection, fields)
    scores = source if source is not None else _scores_of(unmasked)
    if scores is not unmasked:
        _selection_bias(unmasked, scores, constants)
    if source is None and scores is not selection:
        fields["mixing_source"] = "selection"
    function = _over_last_axis(scores, dim(operand(top_k, 0), -1))
    if function is None:
        raise NoMatch(scores.producer(), "the scores are neither Softmax nor Sigmoid of the logits over the experts")
    fields["score_func"] = function.op_type.lower()
    return operand(function, 0)


def _top_k_of(ids: ir.Value) -> ir.Node:
    top_k = produced_by(ids, "TopK")
    if top_k is None or strip(ids) is not top_k.outputs[1]:
        raise NoMatch(strip(ids).producer(), "the expert ids are not those of a TopK")
    if not top_k.attributes.get_int("largest", 1) or not _on_last_axis(top_k, 0):
        raise NoMatch(top_k, "TopK does not take the largest over the last axis")
    return top_k


def _on_last_axis(node: ir.Node, index: int) -> bool:
    default = 0 if node.op_type == "GatherElements" else -1
    return is_last_axis(node.attributes.get_int("axis", default), operand(node, index))


def _over_last_axis(value: ir.Value, size: int | None) -> ir.Node | None:
    """The Softmax over a last axis of `size`, or the Sigmoid, that computes `value`."""
    node = produced_by(value, "Softmax", "Sigmoid")
    if node is None or node.op_type == "Sigmoid":
        return node
    if not _on_last_axis(node, 0) or size is None or dim(operand(node, 0), -1) != size:
        raise NoMatch(node, f"Softmax does not run over the last axis, or not over all {size} experts")
    return node


def _scores_of(selection: ir.Value) -> ir.Value:
    """The scores in `scores` or `scores + correction bias`."""
    addition = produced_by(selection, "Add")
    if addition is None:
        return selection
    for index in (0, 1):
        if weight(operand(addition, index)) is not None:
            return strip(operand(addition, 1 - index))
    return selection


def _selection_bias(selection: ir.Value, scores: ir.Value, constants: dict[str, WeightSource]) -> None:
    """Read selection = scores + e_score_correction_bias."""
    addition = produced_by(selection, "Add")
    if addition is None or not any(strip(v) is scores for v in addition.inputs if v is not None):
        raise NoMatch(selection.producer(), "experts are selected by something else than scores plus a bias")
    bias = weight(other_operand(addition, scores))
    if bias is None or not bias.shape or bias.stored.size != bias.shape[-1]:
        raise NoMatch(addition, "the bias of the expert selection is not a constant vector")
    constants["e_score_correction_bias"] = bias


def _group_mask(selection: ir.Value, fields: dict[str, Any]) -> ir.Value:
    """Read Where(group chosen, x, fill) into `fields` and return x; a selection without groups is returned as it is."""
    where = produced_by(selection, "Where")
    if where is None:
        return selection
    condition, chosen, rejected = (operand(where, i) for i in range(3))
    if (inverse := produced_by(condition, "Not")) is not None:
        condition, chosen, rejected = operand(inverse, 0), rejected, chosen
    fill = scalar(rejected)
    if fill is None:
        raise NoMatch(where, "the experts of rejected groups do not get one constant score")
    scores = strip(chosen)
    group_top_k = _chosen_groups(condition)
    group_scores = strip(operand(group_top_k, 0))
    function, groups = _group_scores(group_scores)
    grouped = groups.producer()
    n_group, topk_group = dim(groups, -2), _k_of(group_top_k)
    if grouped is None or n_group is None or strip(groups) is not scores:
        raise NoMatch(where, "the groups are not formed from the scores that they mask")
    if n_group > 1:
        fields |= {"n_group": n_group, "topk_group": topk_group, "group_score_func": function}
        fields["group_mask_value"] = fill
    elif topk_group != 1:
        raise NoMatch(group_top_k, f"{topk_group} groups are chosen out of one")
    return scores


def _k_of(top_k: ir.Node) -> int:
    k = integers(operand(top_k, 1))
    if k is None:
        raise NoMatch(top_k, "the K of TopK is not constant")
    return k[0]


def _chosen_groups(condition: ir.Value) -> ir.Node:
    """The TopK whose groups `condition` marks, spelled as ones scattered into zeros and spread over the experts."""
    value = condition
    while (node := value.producer()) is not None and node.op_type in (
        "Cast",
        "Reshape",
        "Expand",
        "Unsqueeze",
        "Identity",
    ):
        value = operand(node, 0)
    if node is None or node.op_type != "ScatterElements" or not _on_last_axis_of_scatter(node):
        raise NoMatch(node, "the mask of the groups is not one that ScatterElements draws")
    ones, zeros = scalar(node.inputs[2]), scalar(node.inputs[0])
    if ones is None or ones == 0.0 or zeros != 0.0 or node.attributes.get_string("reduction", "none") != "none":
        raise NoMatch(node, "the mask of the groups is not ones scattered into zeros")
    return _top_k_of(operand(node, 1))


def _on_last_axis_of_scatter(node: ir.Node) -> bool:
    return is_last_axis(node.attributes.get_int("axis", 0), operand(node, 1))


def _group_scores(value: ir.Value) -> tuple[str, ir.Value]:
    """The score function of groups, and the value `[T, n_group, E / n_group]` that it is taken of."""
    if (maximum := produced_by(value, "ReduceMax")) is not None and reduces_last(maximum, keepdims=False):
        return "max", operand(maximum, 0)
    total = produced_by(value, "ReduceSum")
    if total is not None and reduces_last(total, keepdims=False):
        best = produced_by(operand(total, 0), "TopK")
        if best is not None and strip(operand(total, 0)) is best.outputs[0] and _k_of(best) == 2:
            return "top2_sum", operand(_top_k_of(best.outputs[1]), 0)
    raise NoMatch(value.producer(), "the score of a group is neither its best nor the sum of its two best")


def _with_logits(
    logits: ir.Value,
    width: int,
    hidden_states: ir.Value,
    fields: dict[str, Any],
    constants: dict[str, WeightSource],
) -> Router:
    """Draw the projection of the router in when it reads `hidden_states`, else hand the logits over."""
    drawn_in = router_projection(logits, hidden_states)
    if drawn_in is not None and drawn_in["router_weight"].shape[0] == width:
        return Router({**fields, "router_input": "router_weight"}, {}, {**constants, **drawn_in}, width)
    inputs = {"router_logits": per_token(logits, width)}
    return Router({**fields, "router_input": "router_logits"}, inputs, constants, width)


def router_projection(logits: ir.Value, hidden_states: ir.Value) -> dict[str, WeightSource] | None:
    """Read logits = hidden_states @ W (+ b) with constant W and b; None when it is something else.

    Gives router_weight `[E, H]` and, if there is one, router_bias `[E]`.
    """
    try:
        found = projection(logits)
    except NoMatch:
        return None
    if strip(found.x) is not strip(hidden_states) or len(found.weight.shape) != 2:
        return None
    if isinstance(found.weight, QuantisedWeight) or isinstance(found.bias, QuantisedWeight):
        return None
    if found.bias is None:
        return {"router_weight": found.weight}
    if found.bias.shape != found.weight.shape[:1]:
        return None
    return {"router_weight": found.weight, "router_bias": found.bias}
