"""Projections by stored weights: x @ W.T + b, as MatMul or Gemm, one of ONNX Runtime's own, or MatMulNBits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.quantised_weights import nbits_weight
from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import NoMatch, is_standard, operand, produced_by, strip

_PRODUCTS = {"": ("MatMul", "Gemm"), "com.microsoft": ("FusedMatMul", "FusedGemm", "MatMulNBits")}
_BIASES = {"Gemm": 2, "FusedGemm": 2, "MatMulNBits": 5}
"""Which input of a product is its bias."""

_ON_INTEGERS = frozenset(
    {
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QGemm",
        "QLinearMatMul",
        "QuantizeLinear",
    }
)
_STEPS = 4
"""How far behind a value nodes that quantise activations are looked for, to say so."""


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
    node = value.producer()
    if node is None or node.op_type not in _PRODUCTS.get("" if is_standard(node) else node.domain, ()):
        _refuse_quantised_activations(value)
        raise NoMatch(node, f"expected a projection (MatMul or Gemm) at {value.name}")
    source = _weights(node)
    place = _BIASES.get(node.op_type, len(node.inputs))
    own = node.inputs[place] if place < len(node.inputs) else None
    if own is not None and (bias is not None or (bias := stored_weight(own)) is None):
        raise NoMatch(node, "the bias of a projection is computed by the graph or added twice")
    _refuse_quantised_activations(operand(node, 0))
    return Projection(node, operand(node, 0), source, bias)


def _weights(node: ir.Node) -> WeightSource:
    """The stored weights `[N, K]` of a product, which neither scales nor transposes what it projects, else NoMatch."""
    if node.op_type == "MatMulNBits":
        return nbits_weight(node)
    source = stored_weight(operand(node, 1))
    if source is None:
        raise NoMatch(
            node,
            "the weights of the projection are computed by the graph or not stored as an initializer; export with "
            "constants folded, as torch.onnx.export does by default",
        )
    if len(source.shape) < 2:
        raise NoMatch(node, f"{node.op_type} multiplies by the vector {source.value.name}, which is no projection")
    numbers = {name: node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
    flags = {name: node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")}
    if any(number != 1.0 for number in numbers.values()) or any(flags.values()):
        raise NoMatch(node, f"{node.op_type} scales or transposes what it projects")
    if activation := node.attributes.get_string("activation", ""):
        raise NoMatch(node, f"{node.op_type} applies {activation} to what it projects")
    return source if node.attributes.get_int("transB", 0) else replace(source, transpose=not source.transpose)


def _refuse_quantised_activations(value: ir.Value) -> None:
    """NoMatch when `value` was made of integers that the graph quantised, as far as a few nodes behind it show that."""
    pending, seen = [value], 0
    while pending and seen < _STEPS:
        node = pending.pop(0).producer()
        seen += 1
        if node is not None and node.op_type in _ON_INTEGERS:
            raise NoMatch(
                node,
                f"{node.op_type} quantises the inputs of the experts, which HinaMoE takes as floats; quantise the "
                "weights alone",
            )
        if node is not None:
            pending.extend(v for v in node.inputs[:1] if v is not None)
