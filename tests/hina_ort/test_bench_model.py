"""`bench model`: its counts are those of the kernels, and its times follow from the counts."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from docs import generate_amx
from hina_ort.bench.inputs import Router, distinct_experts
from hina_ort.bench.model import KERNELS, LEAST_WORKERS, Machine, expected_experts, piece_tokens, predict
from hina_ort.bench.model_counts import Counts, Kernel, Piece, Workers, layer_counts
from hina_ort.bench.options import SHAPES, LayerOptions, Shape, parse_shape
from hina_ort.bench.weights import layer_bytes
from hina_ort.cli import app
from tests.ops_cpp.amx.environment import needs_amx
from tests.ops_cpp.test_amx import counts

TILES = ("loads", "products", "stores", "configurations")
KERNEL_OF = {
    ("bfloat16", "bfloat16"): Kernel(1),
    ("bfloat16", "float32"): Kernel(2),
    ("int8", "float32"): KERNELS["int8"],
    ("int4:32", "float32"): KERNELS["int4"],
    ("mxfp4", "bfloat16"): KERNELS["mxfp4"],
}


@needs_amx
@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [((544, 97), [1, 2, 15, 17, 32, 33, 100, 150]), ((2048, 128), [1, 16, 40])],  # tails; tasks of several blocks
)
def test_counts_are_those_of_the_kernels(sizes: tuple[int, int], tokens: list[int], tmp_path: Path) -> None:
    """Executed by the emulator, with one expert that takes all tokens."""
    found = counts(tmp_path, *((word, kind, sizes, tokens) for word, kind in KERNEL_OF))
    workers = Workers(max(len(os.sched_getaffinity(0)), LEAST_WORKERS), 1 << 21)
    shape = Shape("counted", 3, 1, *sizes)
    for ((word, kind), kernel), runs in zip(KERNEL_OF.items(), found, strict=True):
        for n, executed in zip(tokens, runs, strict=True):
            wanted = layer_counts(shape, kernel, Piece(n, {n: 1.0}), kind == "bfloat16", workers)
            assert {name: executed[name] for name in TILES} == {name: getattr(wanted, name) for name in TILES}, (
                word,
                n,
            )


def test_experts_are_those_of_uniform_routing() -> None:
    """As formulas say, and as the benchmark of a layer draws them."""
    shape = SHAPES["qwen3.6-35b-a3b"]
    for tokens in (1, 7, 64, 4096):
        experts = expected_experts(shape, tokens)
        assert sum(experts.values()) == pytest.approx(256 * (1 - (1 - 8 / 256) ** tokens), rel=1e-6)
        assert sum(n * times for n, times in experts.items()) == pytest.approx(8 * tokens, rel=1e-6)
    router = Router(shape, 1, 0.0)
    drawn = [distinct_experts(router.draw(16, i), shape.top_k) for i in range(200)]
    # The standard deviation of a draw is below 5.
    assert sum(drawn) / 200 == pytest.approx(sum(expected_experts(shape, 16).values()), abs=5 * 5 / math.sqrt(200))
    assert expected_experts(parse_shape("4,4,64,64"), 9) == {9: 4.0}


def test_bounds_follow_from_counts_and_rates() -> None:
    executed = Counts(loads=100, load_bytes=4800, products=60, stores=40, configurations=1, vectors=50, panel_bytes=56)
    machine = Machine(cores=2, ghz=0.5, bytes_per_second=1e6)
    cycles = {"l3": 7, "l2": 100, "loads": 800, "tmul": 960 + 204, "stores": 640, "vectors": 25}
    assert machine.bounds(executed, 3.0) == pytest.approx(
        {"dram": 3e-6} | {name: n * 1e-9 for name, n in cycles.items()}
    )


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "mxfp4"])
def test_bytes_are_those_of_the_layer(weights: str) -> None:
    """Once for each piece of the tokens, when all experts have some."""
    options = LayerOptions(SHAPES["qwen3.6-35b-a3b"], weights, (1024, 4096))
    cells = predict(options, Machine())["cells"]
    for cell in cells:
        tokens = 2 * 4 * 2048 * cell["tokens"]
        assert cell["memory_bytes"] - tokens == pytest.approx(cell["pieces"] * layer_bytes(options), rel=1e-6)
    assert cells[1]["pieces"] > 1


def test_pieces_keep_the_workspace_small() -> None:
    """Floats of a token: those of a hidden expert k I, logits E and 4 k, panels of 2 k H (two terms of two bytes)."""
    options = LayerOptions(SHAPES["qwen3-30b-a3b"], "bf16", activations="f32")
    floats = 8 * 768 + 128 + 4 * 8 + 8 * 2048
    assert piece_tokens(options, Kernel(2)) == (128 << 20) // 4 // floats
    assert piece_tokens(LayerOptions(parse_shape("8,8,65536,8"), "bf16"), Kernel(2)) == 1024


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "model", *arguments], env={"COLUMNS": "200"})


def test_the_prediction_is_marked_as_one(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    done = invoke("--weights", "int8", "--tokens", "1,4096", "--json", str(file))
    assert done.exit_code == 0
    assert "predicted by a model, not measured: 56 cores at 2 GHz, 250 GB/s" in done.stdout
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["note"] == "predicted by a model, not measured"
    assert re.search(r"\n +1 .* DRAM *\n", done.stdout) and re.search(r"\n +4096 .* vectors *\n", done.stdout)
    for cell, bound in zip(result["cells"], ("dram", "vectors"), strict=True):
        assert cell["bound"] == bound and cell["predicted_ms"] == max(cell["bounds_ms"].values())
        assert cell["predicted_ms"] == cell["bounds_ms"][bound]
        assert cell["apart_ms"] == pytest.approx(sum(cell["bounds_ms"].values()))


def test_what_does_not_fit_the_cache_is_told() -> None:
    assert "exceed" not in invoke("--tokens", "4096").stdout
    done = invoke("--shape", "mixtral-8x7b", "--tokens", "1,4096")
    assert "with 4096 tokens a block of rows and its tokens exceed the 2 MiB of L2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "f32"], "--weights is 'f32', for which there is no AMX kernel: use bf16, int8, int4 or mxfp4"),
        (["--cores", "0"], "--cores is 0, expected a number above 0"),
        (["--bandwidth", "inf"], "--bandwidth is inf, expected a number above 0"),
        (["--shape", "qwen"], "--shape is 'qwen', expected E,k,H,I or"),
        (["--json", "/tmp"], "--json names /tmp, which is a folder; name a file"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_the_page_has_these_predictions() -> None:
    assert generate_amx.PAGE.read_text(encoding="utf-8") == generate_amx.page(), "run python -m docs.generate_amx"
