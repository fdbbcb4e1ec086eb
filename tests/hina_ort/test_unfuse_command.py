"""`hina-ort unfuse`: what it writes, what it prints, and every exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.unfuse import UnfusedBlock
from hina_ort.cli import app
from tests.hina_ort import tiny
from tests.hina_ort.test_errors import BROKEN, ROOT

IDS = np.array([[1, 2, 3], [4, 5, 6]])


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["unfuse", *(str(a) for a in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def logits(path: Path, options: onnxruntime.SessionOptions | None = None) -> np.ndarray:
    """The model's output, in ONNX Runtime without our library unless `options` have it."""
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": IDS})[0]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def fused(model: Path, tmp_path: Path) -> Path:
    """A converted model, alone in its folder."""
    folder = tmp_path / "converted"
    folder.mkdir()
    hina_ort.convert(model, folder / "fused.onnx")
    return folder / "fused.onnx"


@pytest.fixture
def fused_folder(exported: Path, tmp_path: Path) -> Path:
    hina_ort.convert(exported, tmp_path / "fused")
    return tmp_path / "fused"


def test_the_result_runs_without_the_library_and_is_the_same(model: Path, fused: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain.onnx"
    code, out, err = invoke(fused, target)
    assert (code, err) == (0, "")
    assert "unfused 2 x HinaMoE: E=4 k=2" in out and f"wrote {target}" in out
    assert relative_l2(logits(model), logits(target)) < 1e-5


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "mxfp4"])
def test_converted_weights_keep_their_type(model: Path, tmp_path: Path, weights: str) -> None:
    big = tiny.save_model(tmp_path / "big.onnx", hidden=96, experts=8)
    fused, target = tmp_path / "fused.onnx", tmp_path / "plain.onnx"
    hina_ort.convert(big, fused, weights=weights, accuracy_level=None if weights == "bf16" else 0)
    report = hina_ort.unfuse(fused, target)
    assert relative_l2(logits(fused, hina_ort.session_options()), logits(target)) < 1e-5
    assert report.bytes_after is not None
    weights_of = {path: sum(np.prod(t.dims) for t in initializers(path) if len(t.dims) > 2) for path in (fused, target)}
    assert weights_of[fused] == weights_of[target] > 0
    assert set(report.reads[0].file.split("/")) >= {"fused.onnx.data"}
    assert not (tmp_path / "plain.onnx.data").exists() or (tmp_path / "plain.onnx.data").stat().st_size < 16384


def initializers(path: Path) -> list[onnx.TensorProto]:
    return list(onnx.load(path, load_external_data=False).graph.initializer)


def test_a_model_is_fused_again(model: Path, fused: Path, tmp_path: Path) -> None:
    plain, again = tmp_path / "plain.onnx", tmp_path / "again.onnx"
    hina_ort.unfuse(fused, plain)
    report = hina_ort.convert(plain, again, check=2)
    assert [block.family for block in report.fused] == ["unrolled_loop"] * 2
    assert relative_l2(logits(model), logits(again, hina_ort.session_options())) < 1e-5


def test_json_says_what_happened(fused: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain.onnx"
    code, out, err = invoke(fused, target, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert set(report) == {
        *("source", "written", "unfused", "nodes_before", "nodes_after", "bytes_before", "bytes_after", "reads"),
        "seconds",
    }
    assert report["source"] == str(fused) and report["written"] == str(target)
    assert [set(block) for block in report["unfused"]] == [{"node", "spec"}] * 2
    assert report["unfused"][0]["spec"]["num_experts"] == tiny.EXPERTS
    assert report["nodes_after"] > report["nodes_before"]
    assert report["bytes_before"] == sum(len(content) for content in contents(fused.parent).values())
    assert report["bytes_after"] == sum(path.stat().st_size for path in tmp_path.glob("plain.onnx*"))
    assert report["reads"] == []


def test_a_folder_is_unfused_with_its_side_files(exported: Path, fused_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain"
    code, _, err = invoke(fused_folder, target)
    assert (code, err) == (0, "")
    assert files(target) == {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"}
    assert relative_l2(logits(exported / "model.onnx"), logits(target / "model.onnx")) < 1e-5
    assert files(tmp_path) >= {"exported", "fused", "plain"}
    assert not [name for name in files(tmp_path) if name.startswith(".")]


def test_a_model_beside_its_source_shares_the_weights(fused: Path) -> None:
    target = fused.with_name("plain.onnx")
    code, out, _ = invoke(fused, target)
    data = fused.with_name("fused.onnx.data")
    assert code == 0 and f"{target} still reads" in out and str(data) in out
    assert files(fused.parent) == {"fused.onnx", "fused.onnx.data", "plain.onnx"}


def test_quiet_prints_nothing(fused: Path, model: Path, tmp_path: Path) -> None:
    assert invoke(fused, tmp_path / "plain.onnx", "--quiet") == (0, "", "")
    assert invoke(model, tmp_path / "other.onnx", "--quiet") == (3, "", "")


def test_a_model_without_hina_moe_is_left_alone(model: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    code, out, err = invoke(model, tmp_path / "plain.onnx")
    assert (code, err) == (3, "")
    assert out.splitlines() == [f"nothing was written: {model} holds no HinaMoE node"]
    code, out, _ = invoke(model, tmp_path / "plain.onnx", "--json")
    assert code == 3
    assert json.loads(out)["written"] is None and json.loads(out)["bytes_after"] is None
    assert contents(tmp_path) == before


def test_an_existing_target_is_kept_unless_overwrite_is_given(fused: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain.onnx"
    target.write_text("precious")
    code, out, err = invoke(fused, target)
    assert (code, out) == (1, "") and "--overwrite" in err
    assert target.read_text() == "precious"
    assert invoke(fused, target, "--overwrite")[0] == 0
    onnx.checker.check_model(target)


@pytest.mark.parametrize(("make", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_source(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    source = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = invoke(source, tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err and source.name in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_node_that_cannot_be_said_is_one_sentence(fused: Path, tmp_path: Path) -> None:
    proto = onnx.load(fused, load_external_data=False)
    next(entry for entry in proto.opset_import if not entry.domain).version = 12
    fused.write_bytes(proto.SerializeToString())
    before = contents(tmp_path)
    code, out, err = invoke(fused, tmp_path / "plain.onnx")
    assert (code, out) == (1, "")
    assert err.startswith("error: the model imports opset 12") and err.count("\n") == 1
    assert contents(tmp_path) == before


def test_wrong_usage(fused: Path, fused_folder: Path, tmp_path: Path) -> None:
    data = fused.with_name("fused.onnx.data")
    content = contents(tmp_path)
    for source, target, words in (
        (fused, fused, "same"),
        (fused, data, "holds the weights"),
        (fused, fused_folder, "must be a file too"),
        (fused_folder, tmp_path / "plain.onnx", "must be a folder too"),
    ):
        code, out, err = invoke(source, target, "--overwrite")
        assert (code, out) == (2, "") and words in err
    assert CliRunner().invoke(app, ["unfuse", str(fused)]).exit_code == 2
    assert contents(tmp_path) == content


SLOW_CLI = """
import signal, time
from graph_passes import external_data
from hina_ort.cli import app

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore Ctrl-C

def stop(*_):
    print("ready", flush=True)
    time.sleep(60)

save = external_data.save
external_data.save = lambda model, path, progress=None: save(model, path, stop)
app()
"""


@pytest.mark.parametrize(("kind", "number", "code"), [("file", signal.SIGINT, 130), ("folder", signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(
    fused: Path, fused_folder: Path, tmp_path: Path, kind: str, number: int, code: int
) -> None:
    source, target = (fused, tmp_path / "plain.onnx") if kind == "file" else (fused_folder, tmp_path / "plain")
    before = contents(tmp_path)
    command = [sys.executable, "-c", SLOW_CLI, "unfuse", str(source), str(target)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()
    assert contents(tmp_path) == before


def test_the_api_returns_the_report(fused: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    report = hina_ort.unfuse(fused, tmp_path / "plain.onnx", progress=lambda *stage: stages.append(stage))
    assert [type(block) for block in report.unfused] == [UnfusedBlock] * 2
    assert {stage for stage, _, _ in stages} == {"reading", "writing"}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        hina_ort.unfuse(fused, tmp_path / "plain.onnx")
