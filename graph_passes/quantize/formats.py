"""How quantised weights lie in their tensors, and what they mean.

A matrix of N rows of K values has scales, and maybe zero points, one for each `block` of values of a row, or one for
the whole row. A value is `(code - zero_point) * scale`.

- `int8`: a code is a byte, unsigned (zero point 128 unless given) or two's complement (0 unless given).
- `int4`: a code is four bits (zero point 8 unless given), two to a byte, the first in the low half.
- `mxfp4`: a code stands for an E2M1 number, packed as int4; 32 of them share a scale 2^(e - 127), e a byte, 255 is NaN
  (OCP Microscaling Formats v1.0). It has no zero points.

Rows are padded to whole blocks, and to whole bytes, as com.microsoft::MatMulNBits has them; com.microsoft::QMoE has the
same bytes without the axis of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

BLOCKS = (16, 32, 64, 128, 256)
MXFP4_BLOCK = 32
BITS = {"int8": 8, "int4": 4, "mxfp4": 4}

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1: Array = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
"""The numbers of the 16 codes of E2M1; code 8 is -0."""


@dataclass(frozen=True)
class WeightFormat:
    """A format and its block length; `block` 0 is one scale per row. Raises ValueError for what does not exist."""

    name: str
    block: int = 0

    def __post_init__(self) -> None:
        if self.name not in BITS:
            raise ValueError(f"weight format {self.name!r} is not known, expected {either(BITS)}")
        if self.name == "mxfp4":
            if self.block != MXFP4_BLOCK:
                raise ValueError(f"mxfp4 has blocks of {MXFP4_BLOCK}, got {self.block}")
        elif self.block and self.block not in BLOCKS:
            raise ValueError(f"block is {self.block}, expected {either(BLOCKS)}")

    @classmethod
    def parse(cls, word: str) -> WeightFormat:
        """Read `int8`, `int4:32`, `mxfp4`, ...; ValueError for any other word."""
        name, colon, block = word.partition(":")
        if name == "mxfp4" and not colon:
            return cls(name, MXFP4_BLOCK)
        if colon and (name == "mxfp4" or block not in map(str, BLOCKS)):
            raise ValueError(
                f"weight format {word!r} is not known, expected int8, int4, int8:BLOCK, int4:BLOCK or mxfp4, "
                f"BLOCK being {either(BLOCKS)}"
            )
        return cls(name, int(block or 0))

    def __str__(self) -> str:
        return f"{self.name}:{self.block}" if self.block and self.name != "mxfp4" else self.name

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.name]

    def blocks(self, k: int) -> int:
        """Scales of a row of `k` values."""
        return -(-k // self.block) if self.block else 1

    def row_bytes(self, k: int) -> int:
        """Bytes of the codes of a row of `k` values, padding included."""
        values = self.blocks(k) * self.block or k
        return -(-values * self.bits // 8)

    def shapes(self, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Shapes of codes, scales and zero points of a matrix `[n, k]`, as `quantise` writes them."""
        blocks = self.blocks(k)
        return (n, self.row_bytes(k)), (n, blocks), (n, -(-blocks // 2) if self.name == "int4" else blocks)

    def dequantise(
        self,
        codes: npt.NDArray[Any],
        scales: npt.NDArray[Any],
        zero_points: npt.NDArray[Any] | None,
        n: int,
        k: int,
    ) -> Array:
        """The float64 values `[n, k]` of one matrix.

        The arrays may have any of the shapes that the op takes, flattened ones too: only their number of elements
        counts. `zero_points` of int4 are packed when they are uint8, else one number for each block.
        """
        blocks, signed = self.blocks(k), codes.dtype == np.int8
        rows = np.asarray(codes).reshape(n, self.row_bytes(k))
        values = rows.astype(np.float64) if self.bits == 8 else unpack(rows).astype(np.float64)
        if self.name == "mxfp4":
            values, steps, zeros = E2M1[values.astype(np.uint8)], e8m0(scales), np.zeros((n, blocks))
        else:
            steps = np.asarray(scales, np.float64)
            zeros = np.full((n, blocks), 0.0 if signed else 2.0 ** (self.bits - 1))
            if zero_points is not None and self.name == "int4" and zero_points.dtype == np.uint8:
                zeros = unpack(zero_points.reshape(n, -1))[:, :blocks].astype(np.float64)
            elif zero_points is not None:
                zeros = np.asarray(zero_points, np.float64).reshape(n, blocks)
        block = np.minimum(np.arange(k) // (self.block or k), blocks - 1)
        with np.errstate(invalid="ignore"):
            result: Array = (values[:, :k] - zeros[:, block]) * steps.reshape(n, blocks)[:, block]
        return result


def either(choices: Iterable[object]) -> str:
    """The choices, two or more, in words: `a, b or c`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}"


def pack(codes: Bytes) -> Bytes:
    """Four-bit codes `[..., m]` two to a byte `[..., ceil(m / 2)]`, the first in the low half; padding is 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    packed: Bytes = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def unpack(packed: npt.NDArray[Any]) -> Bytes:
    """The four-bit codes `[..., 2 m]` of bytes `[..., m]`."""
    halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    codes: Bytes = halves.reshape(*packed.shape[:-1], -1)
    return codes


def e8m0(exponents: npt.NDArray[Any]) -> Array:
    """The float64 scales of E8M0 bytes."""
    scales: Array = np.where(exponents == 255, np.nan, 2.0 ** (np.asarray(exponents, np.float64) - 127.0))
    return scales
