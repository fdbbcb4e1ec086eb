"""`hina-ort bench model`: the time that one MoE layer would take on a machine with AMX, predicted and not measured.

What the kernels execute is counted (model_counts.py), for uniform routing; divided by what a machine does at most in a
second, it gives bounds. The largest is the prediction, where all overlap; their sum is what it takes where none does.
docs/amx.md has the sources of the rates, and what the model leaves out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hina_ort.bench.command import check_files
from hina_ort.bench.model_counts import CHUNK, MOST_PANELS, ROWS, Counts, Kernel, Piece, Workers, layer_counts
from hina_ort.bench.options import LayerOptions, Shape, parse_shape, parse_tokens
from hina_ort.bench.weights import matrices, matrix_bytes
from hina_ort.files import UsageError

NOTE = "predicted by a model, not measured"
KERNELS = {
    "int8": Kernel(0),
    "int4": Kernel(0, nibbles=True),
    "mxfp4": Kernel(0, nibbles=True),
}
PIECE_BYTES, LEAST_PIECE = 128 << 20, 1024  # kPieceBytes, kLeastPiece
LEAST_WORKERS = 8  # of worker_bound()
RARE = 1e-9
"""Numbers of tokens that an expert has less often than this are left out."""


@dataclass(frozen=True)
class Machine:
    """A socket: cores, their clock, and what memory gives them. Rates are per core and cycle, cycles per instruction.

    The defaults are those of a Xeon Platinum 8480+ (Sapphire Rapids) at its base clock; sources in docs/amx.md.
    """

    cores: int = 56
    ghz: float = 2.0
    bytes_per_second: float = 250e9
    l2_bytes: int = 2 << 20
    l2_bytes_per_cycle: float = 48.0
    l3_bytes_per_cycle: float = 8.0
    load_cycles: float = 8.0
    product_cycles: float = 16.0
    store_cycles: float = 16.0
    configuration_cycles: float = 204.0
    vectors_per_cycle: float = 2.0

    def __post_init__(self) -> None:
        given = {"cores": self.cores, "ghz": self.ghz, "bandwidth": self.bytes_per_second / 1e9}
        for name, value in (given | {"l2": self.l2_bytes_per_cycle}).items():
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name} is {value:g}, expected a number above 0")

    def bounds(self, counts: Counts, memory_bytes: float) -> dict[str, float]:
        """Seconds that each resource needs, if the work is spread evenly over the cores; L3 is what panels need."""
        cycles = {
            "l3": counts.panel_bytes / self.l3_bytes_per_cycle,
            "l2": counts.load_bytes / self.l2_bytes_per_cycle,
            "loads": counts.loads * self.load_cycles,
            "tmul": counts.products * self.product_cycles + counts.configurations * self.configuration_cycles,
            "stores": counts.stores * self.store_cycles,
            "vectors": counts.vectors / self.vectors_per_cycle,
        }
        seconds = {name: value / (self.cores * self.ghz * 1e9) for name, value in cycles.items()}
        return {"dram": memory_bytes / self.bytes_per_second} | seconds


def kernel_of(options: LayerOptions) -> Kernel:
    """The kernels that multiply these weights; UsageError when none does."""
    if options.weights == "bf16":
        return Kernel(1 if options.activations == "bf16" else 2)
    if options.weights not in KERNELS:
        raise UsageError(
            f"--weights is {options.weights!r}, for which there is no AMX kernel: use bf16, int8, int4 or mxfp4"
        )
    return KERNELS[options.weights]


def expected_experts(shape: Shape, tokens: int) -> dict[int, float]:
    """How many experts have n >= 1 of the tokens, by n, when every token chooses k of E with the same chance.

    An expert then has Binomial(T, k / E) tokens: E (1 - (1 - k / E)^T) experts have some.
    """
    chance = shape.top_k / shape.num_experts
    if chance == 1.0:
        return {tokens: float(shape.num_experts)}
    found = {}
    for n in range(1, tokens + 1):
        ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
        share = math.exp(ways + n * math.log(chance) + (tokens - n) * math.log1p(-chance))
        if share > RARE:
            found[n] = shape.num_experts * share
    return found


def piece_tokens(options: LayerOptions, kernel: Kernel) -> int:
    """Tokens that the op takes at once, so that its workspace stays small: `tokens_at_once`."""
    shape, hidden = options.shape, options.shape.hidden_size
    panels = shape.top_k + (1 if shape.shared_intermediate_size else 0)
    floats = shape.top_k * shape.intermediate_size + shape.shared_intermediate_size + shape.num_experts
    floats += 4 * shape.top_k + panels * kernel.panel_bytes(hidden) // 4
    floats += 0 if options.activations == "f32" else 2 * hidden
    floats += 0 if kernel.terms else hidden
    return int(max(PIECE_BYTES // 4 // floats, LEAST_PIECE))


def predict(options: LayerOptions, machine: Machine) -> dict[str, Any]:
    """The prediction for each number of tokens; the keys are those of docs/cli.md."""
    kernel = kernel_of(options)
    return {
        "note": NOTE,
        "shape": asdict(options.shape) | {"limit": str(options.shape.limit)},
        "weights": options.weights,
        "block": options.format.block if options.format else None,
        "activations": options.activations,
        "accuracy_level": 4 if options.int8_activations else 0,
        "machine": asdict(machine),
        "cells": [_cell(options, kernel, machine, tokens) for tokens in options.tokens],
    }


def _cell(options: LayerOptions, kernel: Kernel, machine: Machine, tokens: int) -> dict[str, Any]:
    shape, counts, memory = options.shape, Counts(), 0.0
    routed, shared = (
        sum(matrix_bytes(options, m) for m in matrices(shape) if m.name.startswith("shared_") == is_shared)
        for is_shared in (False, True)
    )
    size, workers = piece_tokens(options, kernel), Workers(max(machine.cores, LEAST_WORKERS), machine.l2_bytes)
    sizes = [min(size, tokens - begin) for begin in range(0, tokens, size)]
    for piece in (Piece(n, expected_experts(shape, n)) for n in sizes):
        counts.add(layer_counts(shape, kernel, piece, options.activations == "bf16", workers))
        memory += sum(piece.experts.values()) * routed + shared
    active = sum(expected_experts(shape, tokens).values())
    bytes_of_token = 4 if options.activations == "f32" else 2
    memory += 2 * tokens * shape.hidden_size * bytes_of_token  # input and output
    bounds = machine.bounds(counts, memory)
    binding = max(bounds, key=lambda name: bounds[name])
    return {
        "tokens": tokens,
        "distinct_experts": active,
        "tokens_per_expert": tokens * shape.top_k / active,
        "pieces": len(sizes),
        "operations": shape.operations(tokens),
        **asdict(counts),
        "memory_bytes": memory,
        "block_bytes": _block_bytes(shape, kernel, math.ceil(tokens * shape.top_k / active)),
        "bounds_ms": {name: 1e3 * seconds for name, seconds in bounds.items()},
        "predicted_ms": 1e3 * bounds[binding],
        "apart_ms": 1e3 * sum(bounds.values()),
        "bound": binding,
    }


def _block_bytes(shape: Shape, kernel: Kernel, tokens: int) -> int:
    """What the L2 cache has to hold: panels, and rows that meet more of them than the tiles hold at once."""
    rows, at_once = (ROWS, MOST_PANELS * ROWS) if kernel.terms else (kernel.rows_at_once(tokens, 1), ROWS)
    sizes = (shape.hidden_size, shape.intermediate_size, shape.shared_intermediate_size)
    rows = rows if tokens > at_once else 0
    return max(rows * kernel.row_bytes(k) + min(tokens, CHUNK) * kernel.panel_bytes(k) for k in sizes)


def run_model(
    *,
    shape: str,
    weights: str,
    activations: str,
    tokens: str,
    cores: int,
    ghz: float,
    bandwidth: float,
    l2: float,
    json_file: Path | None,
) -> dict[str, Any]:
    """Predict, with arguments as words, and write what was asked for; UsageError for arguments that do not fit."""
    options = LayerOptions(parse_shape(shape), weights, parse_tokens(tokens), activations=activations)
    machine = Machine(cores, ghz, bandwidth * 1e9, l2_bytes_per_cycle=l2)
    check_files({"--json": json_file})
    result = predict(options, machine)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
