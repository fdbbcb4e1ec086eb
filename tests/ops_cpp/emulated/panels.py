"""Panels of tokens and unpacked rows by their definition: tile.h and the layout.h of tile_bf16 and tile_int8."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graph_passes.quantize.formats import E2M1

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 129, 288, 545)
TOKENS = (1, 2, 3, 7, 8, 9, 15, 16)
UNIT = 32


def bf16_terms(x: np.ndarray, terms: int) -> np.ndarray:
    """Of `x` float32: the terms of bfloat16 that tokens are rounded to, `[terms, *x.shape]`."""
    rest, parts = x, []
    for _ in range(terms):
        parts.append(rest.astype(ml_dtypes.bfloat16))
        rounded = parts[-1].astype(np.float32)
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(rounded), rest - rounded, np.float32(0))
    return np.array(parts)


def terms_in(panel: np.ndarray, n: int, terms: int) -> np.ndarray:
    """The values in a panel of bfloat16, `[terms, n, padded k]`: it is [steps, terms, 16 groups, n] pairs."""
    pairs = panel.view(ml_dtypes.bfloat16).reshape(-1, terms, 16, n, 2)
    return pairs.transpose(1, 3, 0, 2, 4).reshape(terms, n, -1)


def int8_panel(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `x [n, k]` float32: its groups of four codes, with the zeros between, as bytes; scales and sums of units."""
    n, k = x.shape
    count = -(-k // UNIT)
    units = np.pad(x, ((0, 0), (0, count * UNIT - k))).reshape(n, count, UNIT)
    largest = np.abs(units).max(-1)  # NaN of NaN
    used = np.isfinite(largest) & (largest >= np.float32(2.0**-100))
    top = np.where(used, largest, np.float32(1))
    scaled = np.where(used[..., None], units, np.float32(0)) * (np.float32(127) / top)[..., None]
    codes = np.rint(scaled).astype(np.int8)
    groups = np.zeros((-(-count // 2) * 3, UNIT // 4, n), np.uint32)  # of a pair: codes, zeros, codes
    rows = np.arange(count) // 2 * 3 + np.arange(count) % 2 * 2
    groups[rows] = codes.view(np.uint32).transpose(1, 2, 0)
    scales = np.where(np.isfinite(largest), np.where(used, top / np.float32(127), np.float32(0)), np.float32(np.nan))
    sums = codes.sum(-1, dtype=np.int32).astype(np.float32)
    return groups[: rows[-1] + 1 + count % 2].view(np.uint8).ravel(), np.concatenate([scales.T, sums.T]).ravel()


def unpacked(rows: np.ndarray, form: str, k: int, centred: bool) -> np.ndarray:
    """Of rows of four-bit codes, the codes of qdot.h, or (`centred`) these without their middle, `[n, k]` int8."""
    nibbles = np.stack([rows & 15, rows >> 4], -1).reshape(len(rows), -1)[:, :k]
    values = 2 * E2M1 if form == "mxfp4" else np.arange(16) - 8
    middle = 12 if form == "mxfp4" else 8
    return (values[nibbles] + (0 if centred else middle)).astype(np.int8)
