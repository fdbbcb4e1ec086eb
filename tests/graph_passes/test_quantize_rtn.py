"""Round to nearest: no other code is nearer, errors are within bounds that are derived, and bad weights are named."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.quantize.formats import BLOCKS, E2M1, WeightFormat, e8m0, unpack
from graph_passes.quantize.rtn import (
    CHUNK,
    LARGEST,
    Rounded,
    WeightError,
    cast,
    check_cast,
    check_mxfp4,
    fits_float16,
    quantise,
)

INTEGERS = ["int8", "int4", *(f"{name}:{block}" for name in ("int8", "int4") for block in BLOCKS)]
U = 2.0**-24


def weights_like(kind: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random float32 weights `[n, k]`: of both signs, of one, mostly zero, or of sizes far apart."""
    normal = rng.standard_normal((n, k)).astype(np.float32)
    match kind:
        case "positive":
            return np.abs(normal) + np.float32(0.5)
        case "negative":
            return -np.abs(normal)
        case "sparse":
            return np.where(rng.random((n, k)) < 0.1, normal, np.float32(0))
        case "wide":
            return normal * np.exp2(rng.integers(-60, 60, (n, k))).astype(np.float32)
        case "tiny":
            return normal * np.float32(2.0**-140)
        case "huge":
            return normal / np.abs(normal).max() * np.float32(LARGEST)
        case _:
            return normal


KINDS = ["normal", "positive", "negative", "sparse", "wide", "tiny", "huge"]


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    n, k = draw(st.integers(1, 5)), draw(st.integers(1, 70) | st.sampled_from([128, 257, 544]))
    return weights_like(draw(st.sampled_from(KINDS)), n, k, np.random.default_rng(draw(st.integers(0, 2**32))))


def values(rounded: Rounded, form: WeightFormat, n: int, k: int) -> np.ndarray:
    zeros = rounded.parts[2] if len(rounded.parts) == 3 else None
    return form.dequantise(rounded.parts[0], rounded.parts[1], zeros, n, k)


def per_weight(form: WeightFormat, blocks: np.ndarray, k: int) -> np.ndarray:
    """One number for each block `[n, blocks]` as one for each weight `[n, k]`."""
    place = np.arange(k) // form.block if form.block else np.zeros(k, np.int64)
    return np.asarray(blocks, np.float64)[:, place]


@given(matrices(), st.sampled_from(INTEGERS), st.booleans(), st.sampled_from([np.float32, np.float16]))
def test_errors_are_within_half_a_step(w: np.ndarray, word: str, symmetric: bool, scale_type: Any) -> None:
    """With s a scale as stored, a weight is off by s / 2, and by what lies beyond the codes at the ends.

    A stored scale may be too small by a factor 1 - e, e = 2^-11 (normal float16) or 2^-24, so that w / s reaches
    2^bits - 1 steps by e times as many beyond. Asymmetric: the zero point is rounded by half a step at most, so the
    last value is half a step and that far from its code. Symmetric: codes end at 2^(bits - 1) - 1, and weights may
    reach 2^(bits - 1). The quotient w / s is rounded to float32, by less than 2^bits * 2^-24.
    """
    form = WeightFormat.parse(word)
    if scale_type == np.float16 and not fits_float16(w, form, symmetric):
        scale_type = np.float32
    n, k = w.shape
    rounded = quantise(w, form, symmetric=symmetric, scale_type=scale_type)
    assert len(rounded.parts) == (2 if symmetric else 3)
    for part, shape in zip(rounded.parts, form.shapes(n, k), strict=False):
        assert part.shape == shape
    assert rounded.parts[1].dtype == scale_type
    steps = np.abs(per_weight(form, rounded.parts[1], k))
    error = np.abs(values(rounded, form, n, k) - w)
    top, e = 2.0**form.bits - 1, 2.0**-11 if scale_type == np.float16 else U
    allowed = np.full(w.shape, 0.5)
    if symmetric:
        with np.errstate(divide="ignore", invalid="ignore"):
            reached = np.where(steps > 0, w / np.where(per_weight(form, rounded.parts[1], k) < 0, -steps, steps), 0)
        allowed = np.maximum(allowed, reached - (2.0 ** (form.bits - 1) - 1))
    # A scale below float32's normal range is stored to 2^-150 and may be off by any factor.
    lost = np.abs(w) * (steps < 2.0**-126) + top * 2.0**-149
    assert (error <= steps * (allowed + top * e / (1 - e) + (top + 1) * U) + lost).all()
    assert (error[w == 0] == 0).all()


@given(matrices(), st.sampled_from(INTEGERS), st.booleans())
def test_no_other_code_is_nearer(w: np.ndarray, word: str, symmetric: bool) -> None:
    """... than the rounding of w / s to float32 can tell, with the scale and the zero point as stored."""
    form, (n, k) = WeightFormat.parse(word), w.shape
    scale_type = np.float16 if fits_float16(w, form, symmetric) else np.float32
    rounded = quantise(w, form, symmetric=symmetric, scale_type=scale_type)
    scales = per_weight(form, rounded.parts[1], k)
    middle = np.full((n, form.blocks(k)), 2.0 ** (form.bits - 1))
    zeros = per_weight(form, middle if symmetric else zero_points(rounded, form), k)
    every = (np.arange(2.0**form.bits) - zeros[..., None]) * scales[..., None]
    nearest = np.abs(every - w[..., None]).min(-1)
    error = np.abs(values(rounded, form, n, k) - w)
    assert (error <= nearest + np.abs(scales) * 2.0**form.bits * U + 2.0**-149).all()


def zero_points(rounded: Rounded, form: WeightFormat) -> np.ndarray:
    stored = rounded.parts[2]
    return unpack(stored)[:, : rounded.parts[1].shape[1]] if form.name == "int4" else stored


def slow_mxfp4(block: np.ndarray) -> tuple[int, list[int]]:
    """Section 6.3 of the OCP standard by hand: the scale byte and the codes of one block."""
    largest = max(abs(float(w)) for w in block)
    exponent = -127 if largest == 0 else max(-127, math.floor(math.log2(largest)) - 2)
    codes = []
    for w in block:
        magnitude = abs(float(w)) / 2.0**exponent
        code = min(range(8), key=lambda c: (abs(E2M1[c] - magnitude), c % 2))  # the even one when halfway
        codes.append(code + 8 * bool(np.signbit(w)))
    return exponent + 127, codes


@given(matrices())
def test_mxfp4_is_that_of_the_standard(w: np.ndarray) -> None:
    form, (n, k) = WeightFormat("mxfp4", 32), w.shape
    codes, exponents = quantise(w, form).parts
    for row in range(n):
        for place in range(form.blocks(k)):
            block = w[row, 32 * place : 32 * place + 32]
            scale, want = slow_mxfp4(block)
            assert exponents[row, place] == scale
            found = unpack(codes[row, 16 * place : 16 * place + 16])
            assert list(found) == want + [0] * (32 - len(want))


def test_halfway_cases_of_mxfp4_go_to_the_even_code() -> None:
    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 4.0], np.float32)  # 4: the scale is 1
    row = np.concatenate([halfway, -halfway, np.nextafter(halfway, np.float32(9))])[None]
    form = WeightFormat("mxfp4", 32)
    codes, exponents = quantise(row, form).parts
    assert (exponents == 127).all()
    assert list(unpack(codes)[0][:9]) == [0, 2, 2, 4, 4, 6, 6, 7, 6]
    assert list(unpack(codes)[0][9:18]) == [8, 10, 10, 12, 12, 14, 14, 15, 14]
    assert list(unpack(codes)[0][18:27]) == [1, 2, 3, 4, 5, 6, 7, 7, 6]
    as_cast = row.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(unpack(codes)[:, :27], as_cast)


@pytest.mark.parametrize("word", [*INTEGERS, "mxfp4"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_of_zeros_and_padding_stand_for_zero(word: str, symmetric: bool) -> None:
    form, n, k = WeightFormat.parse(word), 3, 65
    w = np.random.default_rng(0).uniform(1, 2, (n, k)).astype(np.float32)
    w[1] = 0
    rounded = quantise(w, form, symmetric=symmetric, scale_type=np.float16)
    assert (rounded.parts[1][1] == 0).all()
    width = form.row_bytes(k) * 8 // form.bits
    padded = form if form.block else WeightFormat(form.name, 256)
    if width > k and form.block:  # read the padding as if it were weights
        zeros = rounded.parts[2] if len(rounded.parts) == 3 else None
        assert (padded.dequantise(rounded.parts[0], rounded.parts[1], zeros, n, width)[:, k:] == 0).all()
    if word == "int4":  # one scale per row, and half a byte too much
        last = unpack(rounded.parts[0])[:, k]
        assert list(last) == ([8] * n if symmetric else list(zero_points(rounded, form)[:, 0]))
    assert (values(rounded, form, n, k)[1] == 0).all()


@pytest.mark.parametrize("word", ["int4:32", "int8", "mxfp4"])
def test_weights_of_16_bits_and_of_many_rows_are_rounded_alike(word: str) -> None:
    form, k = WeightFormat.parse(word), 96
    w = np.random.default_rng(1).standard_normal((3 * (CHUNK // k) + 5, k)).astype(np.float16)
    rows = [quantise(row[None], form).parts for row in w]
    for part, pieces in zip(quantise(w, form).parts, zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.concatenate(pieces))
    for narrow in (w, w.astype(ml_dtypes.bfloat16)):
        wide = quantise(narrow.astype(np.float32), form)
        for part, other in zip(quantise(narrow, form).parts, wide.parts, strict=True):
            np.testing.assert_array_equal(part, other)


@given(matrices(), st.sampled_from([*INTEGERS, "mxfp4"]), st.booleans())
def test_the_error_that_is_reported_is_the_error(w: np.ndarray, word: str, symmetric: bool) -> None:
    form = WeightFormat.parse(word)
    rounded = quantise(w, form, symmetric=symmetric)
    wide = w.astype(np.float64)
    assert rounded.squared_norm == pytest.approx(float((wide**2).sum()), rel=1e-12)
    error = float(((values(rounded, form, *w.shape) - wide) ** 2).sum())
    # Values are rounded to float32 before the difference, by U of the weight, and the difference once more.
    rounding = 4 * U * math.sqrt(rounded.squared_norm) + 2.0**-140
    assert abs(math.sqrt(rounded.squared_error) - math.sqrt(error)) <= rounding


def test_symmetric_scales_put_the_largest_weight_on_the_lowest_code() -> None:
    w = np.array([[0.5, -3.0, 2.9], [0.5, 3.0, -2.9]], np.float32)
    codes, scales = quantise(w, WeightFormat("int8"), symmetric=True).parts
    np.testing.assert_array_equal(scales, np.float32([[3 / 128], [-3 / 128]]))
    assert codes[0, 1] == codes[1, 1] == 0


def relative(rounded: Rounded) -> float:
    return math.sqrt(rounded.squared_error / rounded.squared_norm)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_symmetric_scale_is_the_better_one(bits: int) -> None:
    """The other scale, amax over the largest positive code, has more error on normal weights, as the module says."""
    w = np.random.default_rng(2).standard_normal((512, 1024)).astype(np.float32)
    half = 2 ** (bits - 1)
    blocks = w.reshape(512, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(half - 1)
    other = np.linalg.norm(np.clip(np.rint(blocks / scale), -half, half - 1) * scale - blocks) / np.linalg.norm(w)
    signed = relative(quantise(w, WeightFormat(f"int{bits}", 32), symmetric=True))
    asymmetric = relative(quantise(w, WeightFormat(f"int{bits}", 32)))
    assert asymmetric < signed < other


def test_scales_fit_float16_or_not() -> None:
    form = WeightFormat("int4", 32)
    normal = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    zeros = np.zeros_like(normal)
    assert fits_float16(normal, form, False) and fits_float16(zeros, form, False)
    for factor in (1e-5, 1e6):
        assert not fits_float16(np.concatenate([zeros, normal, normal * np.float32(factor)]), form, False)
    last = np.concatenate([np.repeat(normal * np.float32(1e6), CHUNK // 64, 0), normal])
    last[-1, -1] = np.nan
    with pytest.raises(WeightError, match="NaN"):  # though the answer is known before
        fits_float16(last, form, False)
    edge = np.full((1, 32), 8 * 2.0**-14, np.float32)  # symmetric: a scale of -2^-14, the least normal number
    assert fits_float16(edge, form, True) and not fits_float16(edge * np.float32(0.999), form, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.1 * LARGEST])
@pytest.mark.parametrize("word", ["int8", "int4:32", "mxfp4"])
def test_nan_and_infinities_cannot_be_quantised(word: str, bad: float) -> None:
    w = np.ones((3, 40), np.float32)
    w[2, 39] = bad
    with pytest.raises(WeightError, match="NaN, infinities"):
        quantise(w, WeightFormat.parse(word))
    with pytest.raises(WeightError, match="NaN, infinities"):
        if word == "mxfp4":
            check_mxfp4(w, WeightFormat.parse(word))
        else:
            fits_float16(w, WeightFormat.parse(word), False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_casts_round_to_nearest_and_keep_what_is_not_finite(dtype: Any) -> None:
    w = np.random.default_rng(4).standard_normal((3 * (CHUNK // 96) + 5, 96)).astype(np.float32)
    w[0, :3] = np.nan, np.inf, -np.inf
    rounded = cast(w, dtype)
    (made,) = rounded.parts
    assert made.dtype == dtype
    np.testing.assert_array_equal(made.astype(np.float32), w.astype(dtype).astype(np.float32))
    finite = np.isfinite(w)
    error = np.linalg.norm(made[finite].astype(np.float64) - w[finite])
    assert relative(rounded) == pytest.approx(error / np.linalg.norm(w[finite].astype(np.float64)), rel=1e-6)
    assert (relative(rounded) == 0) == (dtype == np.float32)


def test_casts_beyond_the_range_are_errors() -> None:
    w = np.zeros((2, 3), np.float32)
    w[1, 2] = -65519  # the last one that rounds to a float16
    assert cast(w, np.float16).parts[0][1, 2] == -65504
    w[1, 2] = -65520
    check_cast(np.array([[-65519, np.nan, np.inf]], np.float32), np.float16)
    for convert in (cast, check_cast):
        w[1, 2] = -65520
        with pytest.raises(WeightError, match=r"-65520, too large for float16; use bf16"):
            convert(w, np.float16)
        w[1, 2] = np.finfo(np.float32).max
        with pytest.raises(WeightError, match="use f32"):
            convert(w, ml_dtypes.bfloat16)


def test_scales_of_mxfp4_stay_in_range() -> None:
    w = np.array([[2.0**-149], [2.0**-126], [LARGEST]], np.float32)
    codes, exponents = quantise(w, WeightFormat("mxfp4", 32)).parts
    assert list(exponents[:, 0]) == [0, 0, 252]
    np.testing.assert_array_equal(e8m0(exponents)[:, 0] * E2M1[unpack(codes)[:, 0]], [0, 2.0**-126, LARGEST])
