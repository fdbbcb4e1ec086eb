"""Quantised weights for tests of the op: random tensors of every format, and the layer whose activations are int8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graph_passes import reference
from graph_passes.moe_spec import FIELDS, MoeSpec, split_field
from graph_passes.op_schema import FLOAT_TYPES
from graph_passes.quantize.formats import E2M1
from tests.tensors import numpy_type

Array = npt.NDArray[np.float64]
Tensors = dict[str, np.ndarray]
U = 2.0**-24


def with_parts(names: Iterable[str], formats: Mapping[str, str], zero_points: bool) -> list[str]:
    """`weight_inputs` with scales, and maybe zero points, behind each field of `formats`."""
    made = []
    for name in names:
        made.append(name)
        if name in formats:
            made.append(f"{name}_scales")
            if zero_points and formats[name] != "mxfp4":
                made.append(f"{name}_zero_points")
    return made


def random_parts(spec: MoeSpec, name: str, rng: np.random.Generator, types: Mapping[str, str]) -> Tensors:
    """Codes, scales and zero points of the quantised projection `name`, such that weights are of size 1/sqrt(K).

    Every bit is random, that of the padding too; a scale may be negative. `types` may say int8 for the codes of `int8`,
    a float type for scales (float32 unless it does), and one for the zero points of `int4`, which are then no integers.
    """
    form, (n, k) = spec.formats[name], spec.matrix_shape(name)
    leading = () if FIELDS[name].shared else (spec.num_experts,)
    shapes = dict(zip(("", "_scales", "_zero_points"), form.shapes(n, k), strict=True))

    def some_bytes(part: str) -> np.ndarray:
        return rng.integers(0, 256, (*leading, *shapes[part]), np.uint8)

    codes_type = types.get(name, "uint8")
    parts = {name: some_bytes("").view(codes_type)}
    size = (*leading, *shapes["_scales"])
    if form.name == "mxfp4":
        usual = 127 - round(math.log2(math.sqrt(k * np.mean(E2M1**2))))
        parts[f"{name}_scales"] = rng.integers(usual - 1, usual + 2, size).astype(np.uint8)
        return parts
    mean_square = (4.0**form.bits - 1.0) / 12.0  # of a random code around the middle
    if f"{name}_zero_points" in spec.weight_inputs:
        mean_square *= 2.0
        zero_type = types.get(f"{name}_zero_points", codes_type)
        if zero_type in FLOAT_TYPES:
            zeros = rng.uniform(0.0, 15.0, size).astype(numpy_type(zero_type))
        else:
            zeros = some_bytes("_zero_points").view(zero_type)
        parts[f"{name}_zero_points"] = zeros
    scale_type = numpy_type(types.get(f"{name}_scales", "float32"))
    scales = rng.uniform(0.5, 1.5, size) * rng.choice([-1.0, 1.0], size) / math.sqrt(k * mean_square)
    parts[f"{name}_scales"] = scales.astype(scale_type)
    return parts


def reshaped(spec: MoeSpec, weights: Tensors) -> Tensors:
    """The same tensors as MatMulNBits has them: codes with an axis of blocks, scales and zero points flattened."""
    made = dict(weights)
    for name, form in spec.formats.items():
        axes = 1 if FIELDS[name].shared else 2
        blocks = form.blocks(spec.matrix_shape(name)[1])
        made[name] = weights[name].reshape(*weights[name].shape[:axes], blocks, -1)
        for part in (f"{name}_scales", f"{name}_zero_points"):
            if part in weights:
                made[part] = weights[part].reshape(*weights[part].shape[: axes - 1], -1)
    return made


def values(spec: MoeSpec, weights: Tensors, expert: int | None) -> dict[str, Array]:
    """Float64 values of the projections and biases of one expert, or (None) of the shared one, by name."""
    shared = expert is None
    names = [name for name in spec.weight_inputs if FIELDS[name].shared == shared and not split_field(name)[1]]
    return {name: reference.values_of(spec, weights, name, expert) for name in names if name != "shared_expert_gate"}


def round_trip(x: Array, error: Array, unit: int) -> tuple[Array, Array]:
    """Tokens `[t, k]` as int8 codes times scales, as ops_cpp/kernels/qdot/qdot.h says, and a bound on their error.

    `error` bounds how far the op's own values may be from these. Its code is another one where a value lies that close
    to the middle between two codes; the error is then a whole step. It also moves the largest value, hence all codes,
    of a unit. Values without error, which are float32, give the op's own codes.
    """
    t, k = x.shape
    count = -(-k // unit)
    room = ((0, 0), (0, count * unit - k))
    units = np.pad(x, room).reshape(t, count, unit).astype(np.float32)
    off = np.pad(error, room).reshape(units.shape)
    largest = np.abs(units).max(-1, keepdims=True)
    usable = largest >= np.float32(2.0**-100)
    top = np.where(usable & np.isfinite(largest), largest, np.float32(1.0))
    position = np.where(usable, units, np.float32(0.0)) * (np.float32(127.0) / top)
    codes = np.rint(position)
    step = np.where(np.isfinite(largest), np.where(usable, top / np.float32(127.0), 0.0), np.nan).astype(np.float64)
    result = codes * step
    moved = off.max(-1, keepdims=True) / top
    shift = off * (127.0 / top) + np.abs(codes) * moved + np.where(off > 0, 127.0 * 2.0 * U, 0.0)
    another = (np.abs(np.abs(position - codes) - 0.5) <= shift) & (off > 0)
    slack = np.where(another, step, 0.0) + np.abs(result) * moved
    return result.reshape(t, count * unit)[:, :k], slack.reshape(t, count * unit)[:, :k]


def int8_layer(
    spec: MoeSpec,
    hidden_states: np.ndarray,
    ids: npt.NDArray[np.int64],
    mixing: Array,
    weights: Tensors,
    shared_mixing: Array,
) -> tuple[Array, Array]:
    """Output `[T, H]` of the layer with accuracy_level 4, and a bound on what a float32 kernel may be off, elementwise.

    The bound covers what rounding does before it meets the quantisation of FC2's inputs (see `round_trip`), and of
    FC1's where mixing weights multiply them; roundings after that are those of any layer.
    """
    x = hidden_states.astype(np.float64)
    output, bound = np.zeros_like(x), np.zeros_like(x)
    layer = _Layer(spec, weights, hidden_states.dtype == ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        for expert in range(spec.num_experts):
            tokens, slots = np.nonzero(ids == expert)
            if not len(tokens):
                continue
            inputs, scale = x[tokens], mixing[tokens, slots][:, None]
            error = np.zeros_like(inputs)
            if spec.apply_weights_to == "input":
                inputs = (inputs.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
                if spec.router_input != "topk_ids":
                    error = 4.0 * U * (8.0 + math.sqrt(spec.hidden_size)) * np.abs(inputs)
                scale = np.ones_like(scale)
            made, slack = layer.mlp("", expert, inputs, error)
            np.add.at(output, tokens, made * scale)
            np.add.at(bound, tokens, slack * np.abs(scale))
        if spec.has_shared_expert:
            made, slack = layer.mlp("shared_", None, x, np.zeros_like(x))
            output, bound = output + made * shared_mixing, bound + slack * shared_mixing
    return output, bound


@dataclass
class _Layer:
    """Values `[t, k]` go through it together with a bound on their error."""

    spec: MoeSpec
    weights: Tensors
    bfloat16: bool  # the activations

    def mlp(self, prefix: str, expert: int | None, x: Array, error: Array) -> tuple[Array, Array]:
        spec = self.spec
        matrices = values(spec, self.weights, expert)
        weighted = not prefix and spec.apply_weights_to == "input"

        def project(name: str, x: Array, error: Array) -> tuple[Array, Array]:
            return self.project(matrices, prefix + name, x, error, narrowed=weighted or name == "down_proj")

        if prefix + "gate_up_proj" in matrices:
            both = project("gate_up_proj", x, error)
            half = both[0].shape[-1] // 2
            halves = [slice(half), slice(half, None)]
            if spec.gate_up_interleaved:
                halves = [slice(0, None, 2), slice(1, None, 2)]
            gate, up = ([part[:, where] for part in both] for where in halves)
            if spec.gate_up_order == "up_gate":
                gate, up = up, gate
        elif prefix + "gate_proj" in matrices:
            gate, up = list(project("gate_proj", x, error)), list(project("up_proj", x, error))
        else:
            gate, up = list(project("up_proj", x, error)), []
        return project("down_proj", *self.activated(gate, up))

    def project(
        self, matrices: Mapping[str, Array], name: str, x: Array, error: Array, *, narrowed: bool
    ) -> tuple[Array, Array]:
        """A float32 dot product is off by about U |w| |x| (see `node.tolerance`), a worst one by four times that.

        Plain bfloat16 weights take their tokens, where activations are bfloat16 too, rounded to that: each by at most
        2^-8 of itself, by 2^-8 / sqrt(3) in the mean square. Four times the sum over random signs is allowed.
        """
        matrix = matrices[name]
        if form := self.spec.formats.get(name):
            x, error = round_trip(x, error, 16 if form.block == 16 else 32)
        made = x @ matrix.T
        off = 4.0 * U * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(matrix, axis=1) + error @ np.abs(matrix).T
        if narrowed and self.bfloat16 and any(part.dtype == ml_dtypes.bfloat16 for part in self.weights[name]):
            off += 4.0 / math.sqrt(3.0) * 2.0**-8 * np.sqrt(x**2 @ (matrix**2).T)
        bias = matrices.get(f"{name}_bias", np.zeros(len(matrix)))
        return made + bias, off + U * np.abs(bias)

    def activated(self, gate: list[Array], up: list[Array]) -> tuple[Array, Array]:
        """What FC1 leaves; its error is what it is at most at the corners of its inputs' errors, and some roundings."""
        limit = self.spec.activation_limit if up else math.inf

        def inner(a: float, b: float) -> Array:
            g = np.minimum(gate[0] + a * gate[1], limit)
            if not up:
                return reference._activate(self.spec, g)
            u = np.clip(up[0] + b * up[1], -limit, limit) + self.spec.activation_beta
            return reference._activate(self.spec, g) * u

        made = inner(0.0, 0.0)
        moved = [np.abs(inner(a, b) - made) for a, b in product((-1.0, 1.0), repeat=2)]
        size = np.abs(gate[0]) * (np.abs(up[0] + self.spec.activation_beta) if up else 1.0)
        return made, np.max(moved, 0) + 8.0 * U * (size + np.abs(made))
