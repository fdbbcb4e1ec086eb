"""Round-to-nearest of one float matrix: every weight becomes the code, or the float, whose value is nearest to it.

int8 and int4: a block's values are cut into 2^bits - 1 equal steps. Asymmetric, the steps span the values and zero, and
the zero point, a whole code, makes zero exact. Symmetric, there are no zero points: the value of largest magnitude
becomes the lowest code, -2^(bits - 1), so that a scale may be negative, as the quantiser of com.microsoft::MatMulNBits
has it. The other choice, amax / (2^(bits - 1) - 1), has more error: on normal weights in blocks of 32, relative L2 is
0.097 against 0.086 with int4, and 0.00535 against 0.00531 with int8 (asymmetric: 0.081 and 0.00475).

mxfp4: OCP Microscaling Formats v1.0, section 6.3. A block's scale is 2^(floor(log2(amax)) - 2), and values are rounded
to E2M1, ties to even, beyond its range to its largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_passes.quantize.formats import E2M1, Bytes, WeightFormat, e8m0, pack

Floats = npt.NDArray[np.float32]

CHUNK = 1 << 16
"""Weights worked on at a time: what is computed from them stays in the caches of a core."""

LARGEST = 2.0**127
"""Weights up to here stay finite when they are rounded."""


class WeightError(Exception):
    """Weights cannot be converted; the message says why, the caller which."""


@dataclass(frozen=True)
class Rounded:
    """One matrix rounded, and the sums over its weights of (w - value)^2 and w^2.

    `parts` are the values in another float type, or codes, scales and maybe zero points as `WeightFormat.shapes` says.
    """

    parts: tuple[npt.NDArray[Any], ...]
    squared_error: float
    squared_norm: float


def fits_float16(weights: npt.NDArray[Any], form: WeightFormat, symmetric: bool) -> bool:
    """Whether every int8 or int4 scale of the matrix is zero or a normal float16.

    Raises WeightError for NaN and infinities, wherever they are.
    """
    smallest, largest = np.finfo(np.float16).tiny, np.finfo(np.float16).max
    fits = True
    for blocks in _chunks(weights, form):
        scales = np.abs(_scales(*_extremes(blocks), form, symmetric))
        fits = fits and not np.any((scales > largest) | ((scales > 0) & (scales < smallest)))
    return fits


def check_mxfp4(weights: npt.NDArray[Any], form: WeightFormat) -> None:
    """Raise the WeightError of `quantise` for weights that cannot become mxfp4, and compute nothing."""
    for blocks in _chunks(weights, form):
        _extremes(blocks)


def check_cast(weights: npt.NDArray[Any], dtype: npt.DTypeLike) -> None:
    """Raise the WeightError of `cast` for weights beyond the range of `dtype`, and keep nothing."""
    for _ in _casts(weights, dtype):
        pass


def quantise(
    weights: npt.NDArray[Any], form: WeightFormat, *, symmetric: bool = False, scale_type: npt.DTypeLike = np.float32
) -> Rounded:
    """Round `weights [N, K]` (any float type) to `form`; int8 and int4 scales are stored as `scale_type`.

    Codes are rounded against the scales as stored. Raises WeightError for NaN and infinities.
    """
    n, k = weights.shape
    code_shape, scale_shape, zero_shape = form.shapes(n, k)
    mxfp4 = form.name == "mxfp4"
    codes = np.empty(code_shape, np.uint8)
    scales = np.empty(scale_shape, np.uint8 if mxfp4 else scale_type)
    zero_points = None if mxfp4 or symmetric else np.empty(zero_shape, np.uint8)
    row, squared_error, squared_norm = 0, 0.0, 0.0
    for blocks in _chunks(weights, form):
        rows = slice(row, row + len(blocks))
        row = rows.stop
        low, high = _extremes(blocks)
        if mxfp4:
            scales[rows] = _exponents(low, high)
            numbers, values = _round_to_e2m1(blocks, scales[rows])
        else:
            scales[rows] = _scales(low, high, form, symmetric)
            stored = scales[rows].astype(np.float32)
            zeros = _zero_points(low, stored, form, symmetric)
            numbers, values = _round_to_steps(blocks, stored, zeros, 2**form.bits - 1)
            if zero_points is not None:
                whole = zeros.astype(np.uint8)
                zero_points[rows] = pack(whole) if form.name == "int4" else whole
        numbers = numbers.reshape(len(blocks), -1)
        codes[rows] = pack(numbers) if form.bits == 4 else numbers
        values -= blocks
        squared_error += _squared_sum(values)
        squared_norm += _squared_sum(blocks)
    parts = (codes, scales) if zero_points is None else (codes, scales, zero_points)
    return Rounded(parts, squared_error, squared_norm)


def cast(weights: npt.NDArray[Any], dtype: npt.DTypeLike) -> Rounded:
    """Round `weights [N, K]` to another float type; the sums are over finite weights.

    Raises WeightError when a finite weight is beyond the range of `dtype`.
    """
    values = np.empty(weights.shape, dtype)
    row, squared_error, squared_norm = 0, 0.0, 0.0
    for before, rounded in _casts(weights, dtype):
        values[row : row + len(rounded)] = rounded
        row += len(rounded)
        finite = np.isfinite(before)
        squared_error += _squared_sum(rounded.astype(np.float32)[finite] - before[finite])
        squared_norm += _squared_sum(before[finite])
    return Rounded((values,), squared_error, squared_norm)


def _casts(weights: npt.NDArray[Any], dtype: npt.DTypeLike) -> Iterator[tuple[Floats, npt.NDArray[Any]]]:
    """Some rows at a time, as float32 and as `dtype`; WeightError for a finite weight beyond its range."""
    step = max(1, CHUNK // max(1, weights.shape[1]))
    for start in range(0, len(weights), step):
        rows = weights[start : start + step].astype(np.float32)
        with np.errstate(over="ignore"):
            rounded = rows.astype(dtype)
        if np.any(beyond := np.isinf(rounded) & ~np.isinf(rows)):
            wider = "bf16" if rounded.dtype == np.float16 else "f32"
            raise WeightError(f"it holds {rows[beyond][0]:g}, too large for {rounded.dtype.name}; use {wider}")
        yield rows, rounded


def _chunks(weights: npt.NDArray[Any], form: WeightFormat) -> Iterator[Floats]:
    """Some rows at a time as float32 `[rows, blocks, values of a block]`, padded with zeros."""
    n, k = weights.shape
    width = form.row_bytes(k) * 8 // form.bits
    step = max(1, CHUNK // width)
    for start in range(0, n, step):
        part = weights[start : start + step]
        rows: Floats = np.zeros((len(part), width), np.float32) if width > k else np.empty((len(part), k), np.float32)
        rows[:, :k] = part
        yield rows.reshape(len(part), form.blocks(k), -1)


def _extremes(blocks: Floats) -> tuple[Floats, Floats]:
    """Least and largest value of each block, and of zero; WeightError when they are too large."""
    columns = np.moveaxis(blocks, -1, 0).copy()  # numpy reduces the first axis 4 times as fast as a short last one
    low, high = np.minimum(columns.min(0), 0), np.maximum(columns.max(0), 0)
    if not ((low >= -LARGEST).all() and (high <= LARGEST).all()):  # NaN is neither
        raise WeightError("it holds NaN, infinities or numbers beyond 2^127, which cannot be quantised")
    return low, high


def _scales(low: Floats, high: Floats, form: WeightFormat, symmetric: bool) -> Floats:
    """The scales that blocks ask for, before they are stored."""
    low, high = low.astype(np.float64), high.astype(np.float64)  # their difference may be beyond it
    if symmetric:
        return (np.where(high > -low, high, low) / -(2.0 ** (form.bits - 1))).astype(np.float32)
    return ((high - low) / (2.0**form.bits - 1)).astype(np.float32)


def _zero_points(low: Floats, scales: Floats, form: WeightFormat, symmetric: bool) -> Floats:
    if symmetric:
        return np.full(scales.shape, 2 ** (form.bits - 1), np.float32)
    zeros: Floats = np.clip(np.rint(-low / _divisors(scales)), 0, 2**form.bits - 1)
    return zeros


def _divisors(scales: Floats) -> Floats:
    """The scales, or 1 where they are 0: every value of such a block becomes the zero point."""
    return np.where(scales == 0, np.float32(1), scales)


def _round_to_steps(blocks: Floats, scales: Floats, zeros: Floats, top: int) -> tuple[Bytes, Floats]:
    """Codes and values of `blocks`, codes from 0 to `top`."""
    values = blocks / _divisors(scales)[..., None]
    np.rint(values, out=values)
    values += zeros[..., None]
    np.clip(values, 0, top, out=values)
    codes = values.astype(np.uint8)
    values -= zeros[..., None]
    values *= scales[..., None]
    return codes, values


def _exponents(low: Floats, high: Floats) -> Bytes:
    """E8M0 scales: two binary orders below the largest magnitude, as the largest of E2M1 is 6 = 1.5 * 2^2."""
    largest = np.maximum(-low, high)
    _, exponents = np.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponents = np.where(largest > 0, exponents - 1 - 2 + 127, 0)
    result: Bytes = np.clip(exponents, 0, 254).astype(np.uint8)
    return result


def _round_to_e2m1(blocks: Floats, exponents: Bytes) -> tuple[Bytes, Floats]:
    """Codes and values of `blocks`.

    The code of a magnitude m is 2 m below 2, m + 2 up to 4 and m / 2 + 4 above, rounded to an even code when halfway;
    whichever is the least, as m grows.
    """
    scales = e8m0(exponents).astype(np.float32)[..., None]
    scaled = np.abs(blocks)
    scaled /= scales
    codes = np.rint(scaled * 2)
    np.minimum(codes, np.rint(scaled) + 2, out=codes)
    np.minimum(codes, np.rint(scaled * np.float32(0.5)) + 4, out=codes)
    numbers = np.minimum(codes, 7).astype(np.uint8)
    numbers |= np.signbit(blocks).view(np.uint8) << np.uint8(3)
    values = E2M1.astype(np.float32)[numbers]
    values *= scales
    return numbers, values


def _squared_sum(values: Floats) -> float:
    flat = values.astype(np.float64).reshape(-1)  # squares of float32 may be beyond float32
    return float(np.einsum("i,i->", flat, flat))  # np.dot starts threads, which slow each other down on busy cores
