"""The weights of a benchmark: several layers in one data file, that every engine maps or packs from.

Gate and up rows are interleaved, `[E, 2I, H]`: the one form that com.microsoft::MoE and QMoE run on CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from graph_passes.quantize.formats import E2M1, WeightFormat
from hina_ort.bench.options import LayerOptions, Shape

Array = npt.NDArray[Any]
FLOATS: dict[str, npt.DTypeLike] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
PAGE = 4096
_POOL = 4_194_301
"""Random numbers that float weights are cut from: a prime, so that no two rows begin at the same one for long."""


@dataclass(frozen=True)
class Matrix:
    """A weight field: `[count, rows, columns]`, a matrix for each expert, or `[rows, columns]` of the shared one."""

    name: str
    count: int
    rows: int
    columns: int

    def stacked(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Dimensions of the field, when `dims` are those of one matrix."""
        return dims if self.name.startswith("shared_") else (self.count, *dims)


def matrices(shape: Shape) -> tuple[Matrix, ...]:
    """The projections of the layer; the gate of the shared expert is not among them, it is never quantised."""
    e, h, i, s = shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.shared_intermediate_size
    routed = (Matrix("gate_up_proj", e, 2 * i, h), Matrix("down_proj", e, h, i))
    shared = (
        Matrix("shared_gate_proj", 1, s, h),
        Matrix("shared_up_proj", 1, s, h),
        Matrix("shared_down_proj", 1, h, s),
    )
    return (*routed, *shared) if s else routed


class WeightFile:
    """Tensors in one file, each on a page of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w+b")
        self._tensors: dict[str, tuple[np.dtype[Any], tuple[int, ...], int]] = {}

    def add(self, name: str, dtype: npt.DTypeLike, dims: tuple[int, ...], parts: Iterable[Array]) -> None:
        """Append the tensor `name`; `parts` are its elements in order."""
        offset = -(-self._file.tell() // PAGE) * PAGE
        self._file.seek(offset)
        for part in parts:
            part.tofile(self._file)
        self._tensors[name] = (np.dtype(dtype), dims, offset)

    def close(self) -> None:
        """End writing. All is on the disk then, so that writing it back does not disturb what is timed."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor."""
        dtype, dims, _ = self._tensors[name]
        return dtype.itemsize * math.prod(dims)

    def array(self, name: str) -> Array:
        """The mapped tensor; writing to it changes a private copy."""
        dtype, dims, offset = self._tensors[name]
        return np.memmap(self.path, dtype, "c", offset, dims)

    def initializer(self, name: str) -> TensorProto:
        """The tensor as an ONNX initializer that lies in the file."""
        dtype, dims, offset = self._tensors[name]
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self.path.name), ("offset", offset), ("length", self.bytes_of(name))):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


@dataclass(frozen=True)
class Reading:
    """How an engine takes the tensors of the file: what their bytes stand for, and which copies it needs.

    Readings of the same `values` stand for the same numbers. The suffixes name the copies that hold values and scales.
    """

    values: str
    format: WeightFormat | None = None
    suffix: str = ""
    scales: str = "_scales"
    zero_points: bool = False

    def names(self, layer: int, field: str) -> tuple[str, ...]:
        """Names of the field's tensors: values, then scales and zero points where there are."""
        name = f"{layer}.{field}"
        names = [name + self.suffix]
        if self.format is not None:
            names.append(name + self.scales)
            names += [f"{name}_zero_points"] if self.zero_points else []
        return tuple(names)

    def matrix(self, file: WeightFile, layer: int, matrix: Matrix, expert: int = 0) -> npt.NDArray[np.float64]:
        """The numbers `[N, K]` of one expert's matrix."""
        parts = [file.array(name) for name in self.names(layer, matrix.name)]
        if not matrix.name.startswith("shared_"):
            parts = [part[expert] for part in parts]
        if self.format is None:
            return parts[0].astype(np.float64)
        zero_points = parts[2] if self.zero_points else None
        return self.format.dequantise(parts[0], parts[1], zero_points, matrix.rows, matrix.columns)


def own_reading(options: LayerOptions) -> Reading:
    """The weights as asked for: what HinaMoE reads."""
    return Reading("own", options.format, zero_points=options.zero_points)


def layer_bytes(options: LayerOptions) -> int:
    """Bytes of one layer as HinaMoE reads it."""
    return sum(m.count * matrix_bytes(options, m) for m in matrices(options.shape))


def matrix_bytes(options: LayerOptions, matrix: Matrix) -> int:
    """Bytes of one matrix, its scales and zero points included."""
    form, n, k = options.format, matrix.rows, matrix.columns
    if form is None:
        return n * k * np.dtype(FLOATS[options.weights]).itemsize
    codes, scales, zeros = (math.prod(shape) for shape in form.shapes(n, k))
    return codes + scales * (1 if form.name == "mxfp4" else 2) + (zeros if options.zero_points else 0)


def write_weights(path: Path, options: LayerOptions, layers: int, readings: Iterable[Reading]) -> WeightFile:
    """Write `layers` layers of random weights, values near N(0, 1/K), and the copies that `readings` ask for."""
    file, rng = WeightFile(path), np.random.default_rng(0)
    readings = list(readings)
    pool = rng.standard_normal(_POOL, np.float32)
    for layer in range(layers):
        for matrix in matrices(options.shape):
            if options.format is None:
                _write_floats(file, layer, matrix, FLOATS[options.weights], pool, rng, readings)
            else:
                _write_codes(file, layer, matrix, options, rng, readings)
        if options.shape.shared_gated:
            h = options.shape.hidden_size
            gate = rng.standard_normal((1, h), np.float32) / np.float32(h**0.5)
            file.add(f"{layer}.shared_expert_gate", np.float32, (1, h), [gate])
    file.close()
    return file


def _write_floats(
    file: WeightFile,
    layer: int,
    matrix: Matrix,
    dtype: npt.DTypeLike,
    pool: npt.NDArray[np.float32],
    rng: np.random.Generator,
    readings: list[Reading],
) -> None:
    dims = matrix.stacked((matrix.rows, matrix.columns))
    numbers = (pool / np.float32(matrix.columns**0.5)).astype(dtype)
    begins = rng.integers(_POOL, size=matrix.count)

    def parts(source: Array) -> Iterator[Array]:
        for begin in begins:
            left = matrix.rows * matrix.columns
            while left:
                part = source[begin : begin + left]
                yield part
                left, begin = left - len(part), 0

    name = f"{layer}.{matrix.name}"
    file.add(name, dtype, dims, parts(numbers))
    if any(r.suffix == "@f32" for r in readings):
        file.add(f"{name}@f32", np.float32, dims, parts(numbers.astype(np.float32)))


def _write_codes(
    file: WeightFile,
    layer: int,
    matrix: Matrix,
    options: LayerOptions,
    rng: np.random.Generator,
    readings: list[Reading],
) -> None:
    form, name = options.format, f"{layer}.{matrix.name}"
    assert form is not None
    codes, scales, zeros = map(matrix.stacked, form.shapes(matrix.rows, matrix.columns))
    size = math.prod(codes) // matrix.count
    if matrix.name.startswith("shared_"):  # an axis of blocks, as MatMulNBits wants it
        blocks = form.blocks(matrix.columns)
        codes = (matrix.rows, blocks, codes[1] // blocks)
    file.add(name, np.uint8, codes, (np.frombuffer(rng.bytes(size), np.uint8) for _ in range(matrix.count)))
    if form.name == "mxfp4":
        middle = round(127 - math.log2(matrix.columns**0.5 * float(np.sqrt(np.mean(E2M1**2)))))
        file.add(f"{name}_scales", np.uint8, scales, [rng.integers(middle - 1, middle + 1, scales, np.uint8)])
    else:
        values = _random_scales(rng, scales, form.bits, matrix.columns)
        file.add(f"{name}_scales", np.float16, scales, [values.astype(np.float16)])
        if any(r.scales == "_scales@f32" for r in readings):
            file.add(f"{name}_scales@f32", np.float32, scales, [values])
    if any(r.scales == "_scales@int4" for r in readings):
        file.add(f"{name}_scales@int4", np.float32, scales, [_random_scales(rng, scales, 4, matrix.columns)])
    if any(r.scales == "_scales@rows" for r in readings):
        rows = matrix.stacked((matrix.rows, 1))
        file.add(f"{name}_scales@rows", np.float32, rows, [_random_scales(rng, rows, 8, matrix.columns)])
    if options.zero_points:
        # Both halves of a byte of int4, or the byte of int8, lie about the middle of the codes.
        low, high = (96, 160) if form.bits == 8 else (4, 12)
        points = rng.integers(low, high, zeros, np.uint8)
        if form.bits == 4:
            points |= rng.integers(low, high, zeros, np.uint8) << np.uint8(4)
        file.add(f"{name}_zero_points", np.uint8, zeros, [points])


def _random_scales(rng: np.random.Generator, dims: tuple[int, ...], bits: int, columns: int) -> npt.NDArray[np.float32]:
    """Scales that give codes of `bits` bits values near N(0, 1/columns); exact in bfloat16 and in float16."""
    spread = math.sqrt((4**bits - 1) / 12)
    scales = (rng.random(dims, np.float32) + np.float32(0.5)) / np.float32(spread * columns**0.5)
    return scales.astype(ml_dtypes.bfloat16).astype(np.float32)
