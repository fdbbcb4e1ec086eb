"""How far two arrays are apart, and how far rounding alone may drive them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT16_ROUNDOFF = 2.0**-11
"""Largest relative error of rounding to float16 (half a unit in the last place)."""


def relative_l2(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """||got - expected|| / ||expected|| in float64; infinite when shapes, types or non-finite values differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return math.inf
    a, b = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    finite = np.isfinite(a)
    if not (np.array_equal(a[~finite], b[~finite], equal_nan=True) and np.isfinite(b[finite]).all()):
        return math.inf
    difference, norm = float(np.linalg.norm(b[finite] - a[finite])), float(np.linalg.norm(a[finite]))
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf


def float16_bound(top_k: int) -> float:
    """Relative L2 error that rounding to float16 may leave in the output of a MoE block.

    A value is rounded about 8 + k times on its way to the output: gate, sigmoid, two products, up, down, mixing
    weight, weighting, and k sums. Each rounding is off by at most 2^-11, independently of the others, so over many
    values the errors add up in quadrature: sqrt(8 + k) * 2^-11.
    """
    return math.sqrt(8 + top_k) * FLOAT16_ROUNDOFF
