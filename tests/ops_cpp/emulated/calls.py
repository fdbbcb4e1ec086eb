"""One function for each family of kernels: arrays in, arrays out, every contract on what may be written checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.ops_cpp.emulated.cpu import Out
from tests.ops_cpp.emulated.tables import Kernel

# In the order of DataType and WeightFormat (ops_cpp/kernels/types.h).
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FORMATS = (None, "uint8", "int8", "int4", "mxfp4")

GAP = 3  # elements between the results of two tokens
UNTOUCHED = np.float32(-77.0)


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """The bytes of `array` and `by` more: an operand that ends so many bytes before the end of its page."""
    return np.concatenate([array.view(np.uint8).ravel(), np.full(by, 0xFF, np.uint8)])


class Results:
    """Where `n_rows` x `n_tokens` results go, with gaps, and no byte behind the last one."""

    def __init__(self, n_rows: int, n_tokens: int) -> None:
        self.stride = n_rows + GAP
        self._shape = n_tokens, n_rows
        used = (n_tokens - 1) * self.stride + n_rows if n_rows and n_tokens else 0
        self.out = Out(np.full(used, UNTOUCHED))

    def take(self) -> np.ndarray:
        """[n_tokens, n_rows] float32; raises AssertionError if the gaps were written."""
        n_tokens, n_rows = self._shape
        flat = np.full(n_tokens * self.stride, UNTOUCHED)
        flat[: self.out.array.size] = self.out.array
        whole = flat.reshape(n_tokens, self.stride)
        assert np.all(whole[:, n_rows:] == UNTOUCHED), "something between the results was written"
        return whole[:, :n_rows]


def dot(kernel: Kernel, rows: Sequence[np.ndarray], tokens: Sequence[np.ndarray], k: int) -> np.ndarray:
    """[n_tokens, n_rows] float32 dot products of the first `k` elements."""
    results = Results(len(rows), len(tokens))
    kernel.fn(list(rows), len(rows), list(tokens), len(tokens), k, results.out, results.stride)
    return results.take()


@dataclass(frozen=True)
class QuantisedRows:
    """A block of rows: bytes [row_bytes] each, and float32 scales and zero points [units] each."""

    values: list[np.ndarray]
    scales: list[np.ndarray]
    zero_points: list[np.ndarray]
    row_bytes: int
    unit: int

    def words(self) -> list[object]:
        """The struct QRows, with a QNext where no memory is."""
        nowhere = 1 << 45
        following = [nowhere, nowhere + 9, nowhere + 77, 300, 80]
        return [self.values, self.scales, self.zero_points, len(self.values), self.row_bytes, self.unit, *following]

    def first(self, n: int) -> QuantisedRows:
        """The first `n` rows."""
        return QuantisedRows(self.values[:n], self.scales[:n], self.zero_points[:n], self.row_bytes, self.unit)


def quantise(kernel: Kernel, x: np.ndarray, unit: int, cuts: Sequence[int] = ()) -> np.ndarray:
    """The token of `x`, written in parts that `cuts` (multiples of `unit`) separate."""
    k = x.size
    token = Out(np.full(kernel.token_bytes(k, unit), 0xFF, np.uint8))
    for begin, end in zip((0, *cuts), (*cuts, k), strict=True):
        kernel.quantise(np.ascontiguousarray(x[begin:end]), begin, end, k, unit, token)
    return token.array


def few(kernel: Kernel, rows: QuantisedRows, tokens: Sequence[np.ndarray], k: int) -> np.ndarray:
    """[n_tokens, n_rows] results of the kernel that reads rows as they lie."""
    results = Results(len(rows.values), len(tokens))
    kernel.few(rows.words(), list(tokens), len(tokens), k, results.out, results.stride)
    return results.take()


def pack(kernel: Kernel, rows: QuantisedRows, k: int) -> np.ndarray:
    """The panel of a block of rows."""
    panel = Out(np.full(kernel.panel_bytes(k, rows.unit), 0xFF, np.uint8))
    kernel.pack(rows.words(), k, panel)
    return panel.array


def many(kernel: Kernel, panel: np.ndarray, n_rows: int, unit: int, tokens: Sequence[np.ndarray], k: int) -> np.ndarray:
    """[n_tokens, n_rows] results of the kernel that reads a panel."""
    results = Results(n_rows, len(tokens))
    kernel.many(panel, n_rows, unit, list(tokens), len(tokens), k, results.out, results.stride)
    return results.take()


def dequantise(
    kernel: Kernel, values: np.ndarray, k: int, unit: int, scales: np.ndarray, zero_points: np.ndarray
) -> np.ndarray:
    """[k] float32 weights."""
    out = Out(np.full(k, UNTOUCHED))
    kernel.fn(values, k, unit, scales, zero_points, out)
    return out.array


def widen(kernel: Kernel, source: np.ndarray, n: int) -> np.ndarray:
    """[n] float32."""
    out = Out(np.full(n, UNTOUCHED))
    kernel.widen(source, out, n)
    return out.array


def narrow(kernel: Kernel, source: np.ndarray, shift: int = 0) -> np.ndarray:
    """[n] of the kernel's type; the target ends `shift` bytes before a page."""
    kind = FLOATS[kernel.type]
    out = Out(np.full(source.size * kind.itemsize + shift, 0xFF, np.uint8))
    kernel.narrow(source, out, source.size)
    target = out.array[: source.size * kind.itemsize]
    assert np.all(out.array[target.size :] == 0xFF), "bytes behind the target were written"
    return target.copy().view(kind)


def activate(
    kernel: Kernel, parameters: tuple[float, float, float], gate: np.ndarray, up: np.ndarray | None, in_place: bool
) -> np.ndarray:
    """[n] float32; `parameters` are alpha, beta and limit."""
    out = Out(gate.copy() if in_place else np.full(gate.size, UNTOUCHED))
    kernel.fn(np.array(parameters, np.float32), out if in_place else gate, 0 if up is None else up, out, gate.size)
    return out.array


def score(function: Callable[..., None], logits: np.ndarray, in_place: bool = False) -> np.ndarray:
    """[n] float32 that `softmax` or `sigmoid` of a kernel makes of `logits [n]`."""
    out = Out(logits.copy() if in_place else np.full(logits.size, UNTOUCHED))
    function(out if in_place else logits, out, logits.size)
    return out.array


def top_k(kernel: Kernel, scores: np.ndarray, k: int, ties_to_highest: bool) -> list[int]:
    """Ids of the `k` best of `scores [n]`."""
    out = Out(np.full(k, -1, np.int32))
    kernel.top_k(scores, scores.size, k, int(ties_to_highest), out)
    return out.array.tolist()


def scatter(kernel: Kernel, values: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """`sums [n, rows]` with those of `values [rows, n]` times `weights [n]` added, float32."""
    out = [Out(row.copy()) for row in sums]
    kernel.fn(values, *values.shape, weights, out)
    return np.array([row.array for row in out])


def pack_tile(kernel: Kernel, x: np.ndarray, weights: np.ndarray | None, shift: int) -> np.ndarray:
    """The panel of tokens `x [n, k]`, each of which ends `shift` bytes before a page."""
    n, k = x.shape
    panel = Out(np.full(kernel.panel_bytes(k, n), 0xFF, np.uint8))
    kernel.pack([shifted(token, shift) for token in x], 0 if weights is None else weights, n, k, panel)
    return panel.array


def pack_tile_rows(kernel: Kernel, x: np.ndarray, pieces: Sequence[tuple[int, int]]) -> np.ndarray:
    """The same panel, written in pieces from .. to of `k`."""
    n, k = x.shape
    panel = Out(np.full(kernel.panel_bytes(k, n), 0xFF, np.uint8))
    for begin, end in pieces:
        kernel.pack_rows(np.ascontiguousarray(x[:, begin:end].T), end - begin, n, begin, k, panel)
    return panel.array


def unpack_tile(kernel: Kernel, rows: QuantisedRows, k: int, centred: bool, stride: int) -> np.ndarray:
    """[n, k] int8 of four-bit rows; bytes of the result lie `stride` apart."""
    n = len(rows.values)
    out = Out(np.full(-(-n * stride // 64) * 64, 0x77, np.uint8))  # begins at a multiple of 64 wherever it ends
    kernel.unpack(rows.values, n, rows.row_bytes, k, int(centred), out, stride)
    assert np.all(out.array[n * stride :] == 0x77), "bytes behind the rows were written"
    return out.array[: n * stride].reshape(n, stride)[:, :k].view(np.int8)
