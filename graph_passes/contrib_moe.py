"""com.microsoft::MoE and QMoE in numpy, for the nodes that ONNX Runtime has no CPU kernel for.

Its kernels run SwiGLU with interleaved rows alone, and no FC3. What the other nodes compute is written down here from
the schemas of the two operators, in float64 and without anything of `reference`, which it is the oracle for: the block
around the node is evaluated by `onnx.reference`. Slow and obvious on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir import serde

DOMAIN = "com.microsoft"

FC3 = {"MoE": (6, 7), "QMoE": (8, 9, 10, 13)}
"""The inputs of the third projection."""

Array = npt.NDArray[np.float64]
Tensor = npt.NDArray[Any]
_Matrix = Callable[[int], tuple[Array, Array]]


def is_contrib_moe(node: ir.Node) -> bool:
    """Whether `node` is a MoE or QMoE node of com.microsoft."""
    return node.domain == DOMAIN and node.op_type in FC3


def runs_on_cpu(node: ir.Node) -> bool:
    """Whether ONNX Runtime has a CPU kernel for a MoE or QMoE node."""
    if any(index < len(node.inputs) and node.inputs[index] is not None for index in FC3[node.op_type]):
        return False
    swiglu = node.attributes.get_string("activation_type", "relu") == "swiglu"
    return not swiglu or node.attributes.get_int("swiglu_fusion", 0) == 1


def evaluator(model: ir.Model) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A function that computes the one output of `model` from its inputs by name.

    ONNX Runtime knows the operators also where a model does not import their domain, as transformers leaves it.
    """
    proto = serde.serialize_model(model)
    if not any(imported.domain == DOMAIN for imported in proto.opset_import):
        proto.opset_import.add(domain=DOMAIN, version=1)
    session = ReferenceEvaluator(proto, new_ops=[MoE, QMoE])

    def compute(inputs: Mapping[str, Tensor]) -> Tensor:
        outputs = session.run(None, dict(inputs))
        assert isinstance(outputs, list)
        output: Tensor = outputs[0]
        return output

    return compute


class MoE(OpRun):
    """com.microsoft::MoE."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Tensor,
        logits: Tensor,
        fc1: Tensor,
        fc1_bias: Tensor | None,
        fc2: Tensor,
        fc2_bias: Tensor | None = None,
        fc3: Tensor | None = None,
        fc3_bias: Tensor | None = None,
        **attributes: Any,
    ) -> tuple[Tensor]:
        def matrix(weights: Tensor, bias: Tensor | None) -> _Matrix:
            return lambda e: (weights[e].astype(np.float64), _bias(bias, e))

        third = None if fc3 is None else matrix(fc3, fc3_bias)
        return (_layer(x, logits, matrix(fc1, fc1_bias), matrix(fc2, fc2_bias), third, attributes),)


class QMoE(OpRun):
    """com.microsoft::QMoE with quant_type int."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Tensor,
        logits: Tensor,
        fc1: Tensor,
        fc1_scales: Tensor,
        fc1_bias: Tensor | None,
        fc2: Tensor,
        fc2_scales: Tensor,
        fc2_bias: Tensor | None = None,
        fc3: Tensor | None = None,
        fc3_scales: Tensor | None = None,
        fc3_bias: Tensor | None = None,
        fc1_zeros: Tensor | None = None,
        fc2_zeros: Tensor | None = None,
        fc3_zeros: Tensor | None = None,
        **attributes: Any,
    ) -> tuple[Tensor]:
        bits = attributes.get("expert_weight_bits", 4)

        def matrix(codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> _Matrix:
            return lambda e: (_values(codes[e], scales[e], None if zeros is None else zeros[e], bits), _bias(bias, e))

        first = matrix(fc1, fc1_scales, fc1_zeros, fc1_bias)
        second = matrix(fc2, fc2_scales, fc2_zeros, fc2_bias)
        third = None if fc3 is None or fc3_scales is None else matrix(fc3, fc3_scales, fc3_zeros, fc3_bias)
        return (_layer(x, logits, first, second, third, attributes),)


def _bias(bias: Tensor | None, expert: int) -> Array:
    return np.zeros(1) if bias is None else bias[expert].astype(np.float64)


def _values(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Array:
    """(code - zero point) * scale `[N, K]`; codes `[N, K * bits / 8]`, scales `[N]` or `[N, K / block]`."""
    steps = scales.astype(np.float64).reshape(len(codes), -1)
    offsets = np.full(steps.shape, 2.0 ** (bits - 1)) if zeros is None else _split(zeros, bits).reshape(len(codes), -1)
    numbers = _split(codes, bits)
    length = numbers.shape[1] // steps.shape[1]
    offsets = offsets[:, : steps.shape[1]]
    values: Array = (numbers - np.repeat(offsets, length, axis=1)) * np.repeat(steps, length, axis=1)
    return values


def _split(packed: Tensor, bits: int) -> Array:
    """The numbers of `bits` bits in bytes, along the last axis, the lowest bits first."""
    if bits == 8:
        return packed.astype(np.float64)
    halves = np.stack([packed % 16, packed // 16], axis=-1).astype(np.float64)
    return halves.reshape(*packed.shape[:-1], -1)


def _layer(
    x: Tensor, logits: Tensor, fc1: _Matrix, fc2: _Matrix, fc3: _Matrix | None, attributes: Mapping[str, Any]
) -> Tensor:
    """Softmax over all experts, the k best, their weights divided by their sum if asked for, and the sum over k."""
    tokens = x.astype(np.float64).reshape(-1, x.shape[-1])
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    mixing = exponentials / exponentials.sum(axis=-1, keepdims=True)
    count = mixing.shape[-1] - attributes.get("k", 1)
    for row in mixing:
        row[np.argsort(row, kind="stable")[:count]] = 0.0
    if attributes.get("normalize_routing_weights", 0):
        mixing = mixing / mixing.sum(axis=-1, keepdims=True)
    output = np.zeros_like(tokens)
    for expert in range(mixing.shape[-1]):
        rows = np.flatnonzero(mixing[:, expert])
        inner = _activated(tokens[rows], fc1(expert), None if fc3 is None else fc3(expert), attributes)
        weights, bias = fc2(expert)
        output[rows] += mixing[rows, expert][:, None] * (inner @ weights.T + bias)
    return output.reshape(x.shape).astype(x.dtype)


def _activated(
    x: Array, fc1: tuple[Array, Array], fc3: tuple[Array, Array] | None, attributes: Mapping[str, Any]
) -> Array:
    first = x @ fc1[0].T + fc1[1]
    half = first.shape[-1] // 2
    activation, fusion = attributes.get("activation_type", "relu"), attributes.get("swiglu_fusion", 0)
    if fc3 is not None:
        gate, linear = first, x @ fc3[0].T + fc3[1]
    elif fusion == 2:
        gate, linear = first[:, :half], first[:, half:]
    else:
        gate, linear = first[:, 0::2], first[:, 1::2]
    if activation == "silu" and fc3 is not None:
        alpha, beta, limit = 1.0, 0.0, math.inf
    elif activation == "swiglu" and (fc3 is None) == (fusion in (1, 2)):
        alpha, beta = attributes.get("activation_alpha", 1.0), attributes.get("activation_beta", 0.0)
        limit = attributes.get("swiglu_limit", math.inf)
    else:
        raise ValueError(f"activation_type {activation} with swiglu_fusion {fusion} is not written down here")
    gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    result: Array = gate / (1.0 + np.exp(-alpha * gate)) * (linear + beta)
    return result
