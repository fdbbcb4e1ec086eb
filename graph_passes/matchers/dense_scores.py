"""Scores `[T, E]` of all experts for all tokens, of which a TopK chose k: how they reach the experts, and their router.

They are the k mixing weights of a token scattered into zeros, or Sigmoid or Softmax of its k largest logits scattered
into -inf; either way an expert that was not chosen has a score of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from graph_passes.matchers import router
from graph_passes.matchers.views import (
    NoMatch,
    constant,
    dim,
    follow,
    integers,
    is_last_axis,
    operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    scalar,
    strip,
)


@dataclass(frozen=True)
class Scores:
    """Scores `[T, E]`: what `scatter` writes, `function` ("sigmoid", "softmax" or "") of it."""

    scatter: ir.Node
    function: str


def read_scores(value: ir.Value, experts: int) -> Scores:
    """Read `value` `[E, ..., 1]`, or `[E * T, 1]`: the transposed scores of all experts. Raises NoMatch."""
    value = follow(value)
    transpose = produced_by(value, "Transpose", through_views=False)
    width = None if transpose is None else _moved_first(transpose)
    if transpose is None or width is None:
        raise NoMatch(value.producer(), f"{value.name} is not a transposed [tokens, {experts}] of scores")
    _check_width(transpose, width, experts)
    inner = follow(operand(transpose, 0))
    function = produced_by(inner, "Sigmoid", "Softmax", through_views=False)
    if function is not None:
        scored = operand(function, 0)
        axis_fits = function.op_type == "Sigmoid" or is_last_axis(function.attributes.get_int("axis", -1), scored)
        if not axis_fits or dim(scored, -1) != width:
            raise NoMatch(function, f"{function.op_type} does not run over the {experts} experts of a token")
        inner = follow(scored)
    scatter = produced_by(inner, "ScatterElements", through_views=False)
    if scatter is None:
        raise NoMatch(inner.producer(), "the scores of the experts are not scattered from those of a TopK")
    _check_scatter(scatter, experts, -math.inf if function is not None else 0.0)
    return Scores(scatter, "" if function is None else function.op_type.lower())


def _moved_first(transpose: ir.Node) -> int | None:
    """The size of the axis, the last one but for ones, that the node moves to the front; None if it does not."""
    value = operand(transpose, 0)
    axes = range(rank(value) or 0)
    first, *others = transpose.attributes.get_ints("perm", None) or axes[::-1] or [0]
    behind = [dim(value, axis) for axis in axes[first + 1 :]]
    return dim(value, first) if others == sorted(others) and set(behind) <= {1} else None


def _check_width(node: ir.Node, width: int | None, experts: int) -> None:
    if width != experts:
        raise NoMatch(
            node,
            f"the router scores {'an unknown number of' if width is None else width} experts, but the weights hold "
            f"{experts}: experts are missing or unused; export the model again",
        )


def _check_scatter(scatter: ir.Node, experts: int, fill: float) -> None:
    """NoMatch unless the node writes the scores of distinct experts into `[T, experts]` filled with `fill`."""
    ids, data = operand(scatter, 1), operand(scatter, 0)
    _distinct_ids(ids)
    if not is_last_axis(scatter.attributes.get_int("axis", 0), ids):
        raise NoMatch(scatter, "ScatterElements does not scatter over the experts of a token")
    if (reduction := scatter.attributes.get_string("reduction", "none")) != "none":
        raise NoMatch(scatter, f"ScatterElements combines the scores by {reduction}, expected to set them")
    if scalar(data) != fill:
        raise NoMatch(scatter, f"the scores of experts that were not chosen are not {fill:g} before the scatter")
    _check_width(scatter, dim(scatter.outputs[0], -1), experts)
    filled = constant(data)
    shape = produced_by(data, "ConstantOfShape", through_views=False)
    sizes = integers(operand(shape, 0)) if shape is not None else None
    if (filled is not None and filled.ndim) or (sizes is not None and min(sizes) > 0):
        raise NoMatch(
            scatter,
            "the number of tokens whose scores are scattered is fixed: the export is valid only for the tokens that it "
            "was traced with; export it again with dynamic axes",
        )
    refuse_fixed_tokens(strip(data).producer())


def _distinct_ids(ids: ir.Value) -> ir.Node:
    """The TopK over the last axis whose indices `ids` are: no token can choose an expert twice."""
    top_k = produced_by(ids, "TopK")
    if top_k is None or strip(ids) is not top_k.outputs[1]:
        raise NoMatch(strip(ids).producer(), "the experts whose scores are scattered are not those of a TopK")
    if not is_last_axis(top_k.attributes.get_int("axis", -1), operand(top_k, 0)):
        raise NoMatch(top_k, "TopK does not run over the last axis, the experts of a token")
    return top_k


def recognise_router(scores: Scores, tokens: ir.Value, experts: int) -> tuple[router.Router, int]:
    """The router that gives `scores`, and k."""
    ids, chosen = operand(scores.scatter, 1), operand(scores.scatter, 2)
    top_k = dim(ids, -1)
    if top_k is None or rank(ids) != 2:
        raise router.unknown_top_k(scores.scatter, ids)
    if not scores.function:
        return router.recognise(chosen, ids, tokens, top_k), top_k
    node = _distinct_ids(ids)
    if strip(chosen) is not node.outputs[0] or not node.attributes.get_int("largest", 1):
        raise NoMatch(
            scores.scatter, "the scattered logits are not the largest ones, of the TopK that chose the experts"
        )
    logits = operand(node, 0)
    fields = {"score_func": f"{scores.function}_topk"}
    if (drawn_in := router.router_projection(logits, tokens)) is not None:
        return router.Router({**fields, "router_input": "router_weight"}, {}, drawn_in, experts), top_k
    inputs = {"router_logits": router.per_token(logits, experts)}
    return router.Router({**fields, "router_input": "router_logits"}, inputs, {}, experts), top_k
