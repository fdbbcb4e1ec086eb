"""What the AMX kernels execute for one MoE layer, counted as `ops_cpp/moe` and `ops_cpp/kernels/tile_*` do it.

The functions follow the C++ of the same purpose: `Layer::cut_tasks`, `fc1_in_tiles`, `fc2_in_tiles` and the two
`multiply.h`. Tile instructions are exact; vector instructions are those of the AVX-512 sources, arithmetic and shuffles
only, since loads and stores have ports of their own. Every expert is in tiles, as with HINA_AMX_FROM=1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache

from hina_ort.bench.options import Shape

ROWS = 16  # of a tile, and tokens of a panel: kTileRows, kPanelTokens
STEP_BYTES = 64  # of a row in a tile
CHUNK = 128  # kTileChunk
TASK_ROWS = 32  # kRows
STREAM_TOKENS, STREAM_RUN, TILE_RUN, TASKS_PER_WORKER = 4, 4, 4, 4  # kStreamTokens, kMostRun, kMostTileRows / kRows, ..
MOST_TILE_ROWS, RESULT_ROWS = 128, 64  # kMostTileRows; kTileFloats / kTileChunk
UNIT = 32  # values that share a scale, at least: kUnit
ROW_TILES = 6  # kMaxRowTiles
MOST_PANELS, PAIR_PANELS = 5, 2  # kMostPanels, kPairPanels

# Vector instructions for 16 values; docs/amx.md derives them.
PACK = {1: 13.5, 2: 31.0, 0: 16.0}  # by terms, 0: int8
PACK_ROWS = {1: 8.0, 2: 21.0, 0: 11.0}
ACTIVATE = 42.0
SCATTER = 6.0
UNPACK = 5.0 / 4  # of four bits
FACTORS = 2.0 / UNIT  # scales become float32


@dataclass
class Counts:
    """Instructions; bytes that tiles are loaded from; and bytes of panels that come from beyond a core's L2 cache."""

    loads: float = 0.0
    load_bytes: float = 0.0
    products: float = 0.0
    stores: float = 0.0
    configurations: float = 0.0
    vectors: float = 0.0
    panel_bytes: float = 0.0

    def add(self, other: Counts, times: float = 1.0) -> None:
        """Add `other` so many times."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + times * getattr(other, field.name))


@dataclass(frozen=True)
class Kernel:
    """The kernels of a weight type: `terms` of bfloat16 for each token, or 0 for int8 codes.

    `nibbles`: rows are unpacked before they are multiplied.
    """

    terms: int
    nibbles: bool = False

    def panel_bytes(self, k: int) -> int:
        """Of one token of `k` values, rounded up to 64."""
        units = ceil_div(k, UNIT)
        size = 64 * units * self.terms if self.terms else 32 * (units + ceil_div(units, 2)) + 8 * units
        return ceil_div(size, 64) * 64

    def rows_at_once(self, tokens: int, parts: int) -> int:
        """Rows of each of the blocks for the tokens of an expert: `tile_rows_at_once`."""
        return MOST_TILE_ROWS if self.terms and tokens <= PAIR_PANELS * ROWS else RESULT_ROWS // parts

    def row_bytes(self, k: int) -> int:
        """Bytes from row to row, as tiles are loaded."""
        return 2 * k if self.terms else k if not self.nibbles else ceil_div(k, UNIT) * UNIT


def ceil_div(a: int, b: int) -> int:
    """Rounded up."""
    return -(-a // b)


def pieces(total: int, size: int) -> Iterator[int]:
    """`size` as often as it fits, then what is left."""
    yield from [size] * (total // size)
    if total % size:
        yield total % size


@cache
def multiply(kernel: Kernel, parts: tuple[int, int], tokens: int, k: int) -> Counts:
    """A call of `TileKernel::multiply`: rows of both parts times so many tokens of `k` values."""
    counts, state = Counts(), _Configuration()
    panels = tuple(pieces(tokens, ROWS))
    if kernel.terms:
        _multiply_bf16(kernel.terms, parts, panels, ceil_div(k, 32), counts, state)
    else:
        _multiply_int8(parts, panels, k, counts, state)
    counts.configurations = state.loaded
    return counts


class _Configuration:
    """Counts LDTILECFG: one for each change of the tiles' shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.loaded = 0

    def load(self, shapes: list[tuple[int, int]]) -> None:
        if shapes != self.shapes:
            self.shapes, self.loaded = shapes, self.loaded + 1


def _multiply_bf16(
    terms: int, parts: tuple[int, int], panels: tuple[int, ...], steps: int, counts: Counts, state: _Configuration
) -> None:
    """Pairs of tiles of rows meet up to two panels, or single ones up to five at once. What is left begins earlier
    rather than to have fewer rows.
    """
    pair = 2 if len(panels) <= PAIR_PANELS else 1
    blocks = ((part, rows) for part in parts for rows in pieces(part, pair * ROWS))
    for tiles, height in ((ceil_div(rows, ROWS), min(part, ROWS)) for part, rows in blocks):
        at = 0
        for n in _even_groups(len(panels), MOST_PANELS):
            together = panels[at : at + n]
            at += n
            shapes = [(height, 4 * tokens) for tokens in together] + [(tiles, STEP_BYTES)]
            state.load([*shapes, (ROWS, 4 * together[0]), (ROWS, 4 * together[-1])])
            counts.loads += steps * (tiles + terms * n)
            counts.load_bytes += steps * (tiles * height * STEP_BYTES + terms * ROWS * 4 * sum(together))
            counts.products += steps * terms * tiles * n
            counts.stores += tiles * n


def _even_groups(n: int, most: int) -> Iterator[int]:
    """As few groups as possible, of about the same size."""
    left = ceil_div(n, most)
    while n:
        yield n // left
        n, left = n - n // left, left - 1


def _multiply_int8(
    parts: tuple[int, int], panels: tuple[int, ...], k: int, counts: Counts, state: _Configuration
) -> None:
    units = ceil_div(k, UNIT)
    pairs = ceil_div(units, 2)
    for rows, n in _alike([rows for part in parts for rows in pieces(part, ROWS)]):
        for tokens in panels:
            state.load([(rows, 4 * tokens)] * 4 + [(rows, STEP_BYTES)] * 2 + [(ROWS, 4 * tokens)] * 2)
            # Sums are loaded, too, from a row of the L1 cache that holds what they start with.
            counts.loads += pairs * n + units + units * n
            counts.load_bytes += pairs * n * rows * STEP_BYTES + units * ROWS * 4 * tokens
            counts.products += units * n
            counts.stores += 2 * pairs * n
            # For each row a difference, a product and an fma; beside tiles there is one port for the latter two.
            counts.vectors += units * (2 + n * rows * 4)


def _alike(tiles: list[int]) -> Iterator[tuple[int, int]]:
    """`Group::take`: (rows, number) of tiles that share those of a panel, next to each other and with as many rows."""
    at = 0
    while at < len(tiles):
        n = 1
        while n < ROW_TILES and at + n < len(tiles) and tiles[at + n] == tiles[at]:
            n += 1
        yield tiles[at], n
        at += n


@dataclass(frozen=True)
class Piece:
    """Tokens that go through the layer at once; `experts` says how many experts have so many of them."""

    tokens: int
    experts: Mapping[int, float]


@dataclass(frozen=True)
class Workers:
    """How many share the work, and bytes of the L2 cache of each."""

    number: int
    l2_bytes: int


def layer_counts(shape: Shape, kernel: Kernel, piece: Piece, as_it_is: bool, workers: Workers) -> Counts:
    """What all workers execute for the experts. `as_it_is`: tokens are bfloat16, and one that is alone is its panel."""
    counts = Counts()
    active = sum(piece.experts.values())
    streams = piece.tokens * shape.top_k <= STREAM_TOKENS * active
    most = STREAM_RUN if streams else TILE_RUN

    def task_rows(blocks: float) -> int:
        return TASK_ROWS * int(max(1, min(blocks // (TASKS_PER_WORKER * workers.number), most)))

    def reads(tasks: int, size: float) -> float:
        """Bytes, when every task reads `size` of them: once a worker where they stay in its cache."""
        return size * (min(tasks, workers.number) if size <= workers.l2_bytes else tasks)

    fc1_rows = task_rows(active * ceil_div(shape.intermediate_size, TASK_ROWS))
    fc2_rows = task_rows(ceil_div(shape.hidden_size, TASK_ROWS))
    groups = [(shape.intermediate_size, fc1_rows, tokens, times) for tokens, times in piece.experts.items()]
    if shape.shared_intermediate_size:
        groups.append((shape.shared_intermediate_size, TASK_ROWS, piece.tokens, 1.0))
    hidden_bytes = 0.0
    for size, rows, tokens, times in groups:
        counts.add(_expert(shape.hidden_size, size, kernel, tokens, (rows, fc2_rows), as_it_is), times)
        counts.panel_bytes += times * reads(ceil_div(size, rows), tokens * kernel.panel_bytes(shape.hidden_size))
        hidden_bytes += times * tokens * kernel.panel_bytes(size)
    counts.panel_bytes += reads(ceil_div(shape.hidden_size, fc2_rows), hidden_bytes)  # a task of FC2 takes all experts
    return counts


@cache
def _expert(hidden: int, size: int, kernel: Kernel, tokens: int, task_rows: tuple[int, int], as_it_is: bool) -> Counts:
    """One expert with `tokens` tokens: packing, FC1, activation, FC2, and adding its results to the output."""
    counts = Counts()
    steps = (kernel.rows_at_once(tokens, 2), kernel.rows_at_once(tokens, 1))
    for chunk in pieces(tokens, CHUNK):
        for rows in _blocks(size, task_rows[0], steps[0]):
            counts.add(multiply(kernel, (rows, rows), chunk, hidden))
        for rows in _blocks(hidden, task_rows[1], steps[1]):
            counts.add(multiply(kernel, (rows, 0), chunk, size))
    # A panel costs as much as a full one.
    vectors = ceil_div(tokens, ROWS) * (size * (ACTIVATE + PACK_ROWS[kernel.terms]) + hidden * SCATTER)
    if tokens > 1:
        vectors += ceil_div(tokens, ROWS) * hidden * PACK[kernel.terms]
    elif not (as_it_is and kernel.terms == 1 and hidden % 32 == 0):
        vectors += hidden / 16 * PACK[kernel.terms]
    if not kernel.terms:
        vectors += 3 * hidden * size / 16 * (FACTORS + (UNPACK if kernel.nibbles else 0))
    counts.vectors += vectors
    return counts


def _blocks(total: int, task_rows: int, step: int) -> Iterator[int]:
    """Rows of the blocks that tasks of so many rows go through."""
    for rows in pieces(total, task_rows):
        yield from pieces(rows, step)
