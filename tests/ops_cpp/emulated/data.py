"""Operands of kernels: random, but with everything in them that a kernel could get wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tests.ops_cpp.emulated.calls import FLOATS, FORMATS, QuantisedRows, shifted
from tests.ops_cpp.emulated.tables import Kernel

DOT_ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
DOT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 25, 52)
DOT_SIZES = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 60, 96, 127, 544, 1057, 2080)

EXPERTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 60, 64, 65, 128, 255, 257)

QDOT_ROWS = (0, 1, 2, 3, 4, 5, 8, 11, 15, 16, 17, 31, 32)
QDOT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)
QDOT_SIZES = (1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129, 288, 544)


def mixtures(number: int, of: int, rows: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Part `number` of `of` parts of all pairs of a number of rows and one of tokens."""
    every = list(itertools.product(rows, tokens))
    order = np.random.default_rng(5).permutation(len(every))
    return [every[i] for i in order[number % of :: of]]


def dot_operands(kernel: Kernel, k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Nine rows and 18 tokens of the kernel's types."""
    rng = np.random.default_rng(k)
    rows = [rng.standard_normal(k).astype(FLOATS[kernel.weight_type]) for _ in range(9)]
    return rows, [rng.standard_normal(k).astype(FLOATS[kernel.token_type]) for _ in range(18)]


def quantised_rows(rng: np.random.Generator, kernel: Kernel, k: int, unit: int, padded: bool) -> QuantisedRows:
    """A full block of random codes, at any address, with scales of any size. The first rows have whole zero points and
    share them, the last have fractional ones. `padded`: the last unit is complete, with codes that must not matter.
    """
    units = -(-k // unit)
    form = FORMATS[kernel.format]
    row_bytes = -(-(units * unit if padded else k) * (4 if form in ("int4", "mxfp4") else 8) // 8)
    n = max(QDOT_ROWS)
    scales = np.exp(rng.normal(-3, 4, (n, units))) * rng.choice([-1, 1], (n, units))
    scales[rng.random((n, units)) < 0.05] = 0
    zero_points = rng.integers(0, {"int4": 16, "mxfp4": 25}.get(str(form), 256), (n, units)).astype(np.float32)
    zero_points[n // 2 :] += rng.random((n - n // 2, units), np.float32)
    shared = [zero_points[0]] * (n // 4) + list(zero_points[n // 4 :])
    values = [shifted(row, int(rng.integers(0, 4))) for row in rng.integers(0, 256, (n, row_bytes), np.uint8)]
    return QuantisedRows(values, list(scales.astype(np.float32)), shared, row_bytes, unit)


def activations(rng: np.random.Generator, k: int) -> list[np.ndarray]:
    """Tokens of many magnitudes: ties of rounding, zeros, units too small to count and just not, infinities, NaN."""
    n = max(QDOT_TOKENS)
    x = (rng.standard_normal((n, k)) * np.exp(rng.normal(0, 6, (n, 1)))).astype(np.float32)
    x[1] = rng.integers(-254, 255, k) / 2  # codes are halves to round: exactly with 127 in the unit, nearly with others
    x[1, ::13] = 127
    x[7] = x[1] * np.repeat(rng.random(-(-k // 16)) + 0.5, 16)[:k]
    x[2] *= rng.random(k) < 0.1
    x[3] = rng.standard_normal(k) * np.repeat(2.0 ** rng.integers(-140, -90, -(-k // 16)), 16)[:k]
    x[4] *= np.float32(2.0) ** rng.integers(-130, 100, k)
    x[5, rng.integers(k)] = np.nan
    x[6, rng.integers(k)] = -np.inf
    return list(x)


def gates(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """`n` values of gate and of up; exp overflows for some."""
    gate = rng.standard_normal(n).astype(np.float32) * rng.choice(np.array([0.01, 2, 20, 60], np.float32), n)
    return gate, (4 * rng.standard_normal(n)).astype(np.float32)


def router_rows(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Logits of `n` experts: of several sizes, in order, with ties, with infinities and NaN."""
    rows = [rng.standard_normal(n) * size for size in (0.01, 1, 20)]
    rows += [np.sort(rows[1]), np.sort(rows[1])[::-1], np.zeros(n), np.full(n, -np.inf)]
    few = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])
    rows += [rng.choice(few[:kinds], n) for kinds in (3, 4, 7)]
    rows += [np.where(rng.random(n) < 0.3, -np.inf, rows[1]), np.where(rng.random(n) < 2 / n, np.nan, rows[1])]
    return [row.astype(np.float32) for row in rows]


def floats_to_narrow(rng: np.random.Generator) -> list[np.ndarray]:
    """Values at and beside each point where a 16-bit type rounds up, overflows or becomes subnormal, and any others."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    bits: list[np.ndarray] = [upper | np.uint32(lower) for lower in (0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    bits += [halves + np.uint32(above) for above in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    bits += [rng.integers(0, 1 << 32, 1 << 16, np.uint32)]
    return [part.view(np.float32) for part in bits]
