"""Whether engines compute the same layer: the check before anything is timed, with tolerances that are derived.

All errors are relative L2 norms over an output. An engine's result differs from the exact one by

- float32 sums of n products: 2^-24 sqrt(n), the root-mean-square growth of rounding errors of either sign (Higham and
  Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis"); n = H for gate and for up, I for down;
- each rounding of a value to 16 bits: at most 2^-11 (float16) or 2^-8 (bfloat16) of it;
- tokens quantised to int8: measured, as the error of quantising normal tokens and, before down_proj, act(gate) * up of
  normal gate and up, which is what random weights make of them.

Weights are independent of those errors, so a product passes on their relative size, and so does the activation (the
factor of silu on normal numbers is 1.03). The tolerance is twice the sum of all parts: parts add up at worst, and the
factor 2 covers what a sample differs from its expectation. A swapped nibble, a wrong scale or expert is off by 0.1 and
more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_passes.accuracy import relative_l2
from graph_passes.reference import hina_moe
from hina_ort.bench.engine import Arithmetic
from hina_ort.bench.inputs import Inputs
from hina_ort.bench.onnx_engines import layer_spec
from hina_ort.bench.options import Shape
from hina_ort.bench.weights import Matrix, Reading, WeightFile, matrices

Array = npt.NDArray[np.float64]
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
__all__ = ["reference", "relative_l2", "tolerance"]


class _Experts:
    """The matrices of one field, read when an expert is asked for."""

    def __init__(self, file: WeightFile, layer: int, matrix: Matrix, reading: Reading) -> None:
        self._arguments = file, layer, matrix
        self._reading = reading

    def __getitem__(self, expert: int) -> Array:
        return self._reading.matrix(*self._arguments, expert)


def reference(shape: Shape, file: WeightFile, reading: Reading, layer: int, inputs: Inputs) -> Array:
    """The exact output `[T, H]` of one layer, in float64, on the numbers that `reading` makes of the weights."""
    weights: dict[str, Any] = {}
    for matrix in matrices(shape):
        experts = _Experts(file, layer, matrix, reading)
        weights[matrix.name] = experts[0] if matrix.name.startswith("shared_") else experts
    if shape.shared_gated:
        weights["shared_expert_gate"] = file.array(f"{layer}.shared_expert_gate")
    spec = layer_spec(shape, tuple(weights))
    tensors: Mapping[str, npt.NDArray[Any]] = weights
    return hina_moe(spec, inputs.x, tensors, router_logits=inputs.logits[layer])[0]


def tolerance(shape: Shape, arithmetic: Arithmetic) -> float:
    """The relative L2 error that a right engine may show."""
    h, i = shape.hidden_size, max(shape.intermediate_size, shape.shared_intermediate_size)
    parts = UNIT_ROUNDOFF["f32"] * (2 * math.sqrt(h) + math.sqrt(i))
    parts += arithmetic.roundings * UNIT_ROUNDOFF[arithmetic.type]
    if arithmetic.int8_block is not None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((16, h))
        gate, up = rng.standard_normal((2, 16, i))
        gate, up = np.minimum(gate, shape.limit), np.clip(up, -shape.limit, shape.limit)
        hidden = gate / (1 + np.exp(-shape.alpha * gate)) * (up + shape.beta)
        parts += 2 * int8_error(x, arithmetic.int8_block) + int8_error(hidden, arithmetic.int8_block)
    return 2 * parts


def int8_error(tokens: Array, block: int) -> float:
    """Relative L2 error of `tokens` `[T, n]` rounded to 255 levels of each `block` of values; 0 is a whole token."""
    block = block or tokens.shape[1]
    padding = -tokens.shape[1] % block
    blocks = np.pad(tokens, ((0, 0), (0, padding))).reshape(len(tokens), -1, block)
    steps = np.abs(blocks).max(-1, keepdims=True) / 127
    steps[steps == 0] = 1
    return relative_l2(np.rint(blocks / steps) * steps, blocks)
