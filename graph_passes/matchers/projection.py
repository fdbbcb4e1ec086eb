"""Projections by stored weights: x @ W.T + b, as MatMul or Gemm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.views import (
    NoMatch,
    integers,
    is_standard,
    node_axes,
    operand,
    produced_by,
    rank,
    strip,
    swaps_last_two,
    weight,
)


@dataclass(frozen=True)
class Projection:
    """x @ weight.T + bias, with `weight` `[N, K]` and `bias`, if there is one, as it is stored."""

    node: ir.Node
    x: ir.Value
    weight: WeightSource
    bias: WeightSource | None


def projection(value: ir.Value, behind: Callable[[ir.Value], ir.Value] = strip) -> Projection:
    """The projection that computes `value`; `behind` goes through views. Raises NoMatch when there is none."""
    value = behind(value)
    bias: WeightSource | None = None
    addition = produced_by(value, "Add", through_views=False)
    if addition is not None:
        for index in (0, 1):
            bias = stored_weight(operand(addition, index))
            if bias is not None:
                value = behind(operand(addition, 1 - index))
                break
    node = produced_by(value, "MatMul", "Gemm", through_views=False)
    if node is None:
        raise NoMatch(value.producer(), f"expected a projection (MatMul or Gemm) at {value.name}")
    source = stored_weight(operand(node, 1))
    if source is None:
        raise NoMatch(node, "the weights of the projection are computed by the graph or not stored as an initializer")
    if node.op_type == "MatMul":
        return Projection(node, operand(node, 0), replace(source, transpose=not source.transpose), bias)
    attributes = node.attributes
    plain = attributes.get_float("alpha", 1.0) == 1.0 and attributes.get_float("beta", 1.0) == 1.0
    if not plain or attributes.get_int("transA", 0) != 0:
        raise NoMatch(node, "Gemm scales or transposes what it projects")
    if not attributes.get_int("transB", 0):
        source = replace(source, transpose=not source.transpose)
    own = node.inputs[2] if len(node.inputs) > 2 else None
    if own is not None and (bias is not None or (bias := stored_weight(own)) is None):
        raise NoMatch(node, "the bias of a projection is computed by the graph or added twice")
    return Projection(node, operand(node, 0), source, bias)


def stored_weight(value: ir.Value) -> WeightSource | None:
    """The stored weights behind `value`, also when they are one entry, picked by a constant, of a stacked tensor."""
    direct = weight(value)
    if direct is not None:
        return direct
    transpose, leading = False, 0
    while (node := value.producer()) is not None and is_standard(node):
        if node.op_type == "Transpose" and swaps_last_two(node):
            transpose = not transpose
        elif node.op_type == "Squeeze" and node_axes(node) == (0,):
            leading += 1
        elif node.op_type != "Identity":
            break
        value = operand(node, 0)
    if node is None or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    stacked, index = weight(operand(node, 0)), integers(node.inputs[1])
    if stacked is None or index is None or len(index) != 1 or index[0] < 0 or rank(operand(node, 1)) != leading:
        return None
    return WeightSource(stacked.value, stacked.transpose != transpose, index[0])
