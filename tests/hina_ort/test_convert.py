"""`hina-ort convert`: what it writes, what it prints, and every exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import FusedBlock
from hina_ort import conversion
from hina_ort.cli import app
from hina_ort.comparison import FULL, Comparison
from tests.hina_ort import tiny

IDS = np.array([[1, 2, 3], [4, 5, 6]])


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert", *(str(a) for a in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def logits(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), hina_ort.session_options(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": IDS})[0]


def op_types(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_block_is_fused_and_the_result_is_the_same(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused.onnx"
    code, out, _ = invoke(model, target)
    assert code == 0
    assert "fused 2 x batched_mm" in out and "wrote" in out
    assert op_types(target).count("HinaMoE") == 2
    assert relative_l2(logits(model), logits(target)) < 1e-5


def test_json_says_what_happened(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused.onnx"
    code, out, err = invoke(model, target, "--json", "--check", 3)
    report = json.loads(out)
    assert code == 0 and err == ""
    keys = {"node", "family", "spec", "worst_relative_l2", "bytes", "note"}
    assert [set(block) for block in report["fused"]] == [keys] * 2
    assert report["fused"][0]["spec"]["num_experts"] == tiny.EXPERTS
    assert report["fused"][0]["bytes"] == 4 * 3 * tiny.EXPERTS * tiny.HIDDEN * tiny.INTERMEDIATE
    assert report["refused"] == [] and report["already_fused"] == 0
    assert report["nodes_before"] == len(op_types(model)) > report["nodes_after"] == len(op_types(target))
    assert report["bytes_before"] == model.stat().st_size
    assert report["bytes_after"] == target.stat().st_size + target.with_name("fused.onnx.data").stat().st_size
    assert report["seconds"] > 0 and report["peak_rss_bytes"] > 1 << 20
    assert report["source"] == str(model) and report["written"] == str(target)
    assert [layer["layer"] for layer in report["layers"]] == ["layers.0", "layers.1", "outside the layers"]
    router = 4 * tiny.EXPERTS * tiny.HIDDEN
    assert report["layers"][1]["bytes_fused"] == report["fused"][1]["bytes"] + router
    assert report["bytes_fused"] == sum(layer["bytes_fused"] for layer in report["layers"])
    assert report["bytes_left"] >= 2 * 4 * tiny.VOCABULARY * tiny.HIDDEN
    assert len(report["checks"]) == 3
    assert all(0 <= check["relative_l2"] < 1e-5 and check["output"] == "logits" for check in report["checks"])


def test_a_full_check(model: Path, tmp_path: Path) -> None:
    code, out, _ = invoke(model, tmp_path / "fused.onnx", "--json", "--check", "full")
    report = json.loads(out)
    assert code == 0 and len(report["checks"]) == len(FULL) and report["checks_skipped"] == []
    assert {check["sizes"]["batch"] for check in report["checks"]} == {1, 2, 3}


def test_quiet_prints_nothing(model: Path, tmp_path: Path) -> None:
    assert invoke(model, tmp_path / "fused.onnx", "--quiet") == (0, "", "")


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    code, out, _ = invoke(model, tmp_path / "fused.onnx", "--dry-run")
    assert code == 0 and "can fuse 2 x" in out and "dry run" in out
    assert files(tmp_path) == {"model.onnx"}


def test_a_dry_run_may_name_what_exists(model: Path, exported: Path, tmp_path: Path) -> None:
    target, folder = tmp_path / "fused.onnx", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert invoke(model, target, "--dry-run", "--quiet") == (0, "", "")
    assert invoke(exported, folder, "--dry-run", "--quiet") == (0, "", "")
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    assert invoke(model, target)[0] == 1 and invoke(model, model, "--dry-run")[0] == 2


def test_nothing_to_fuse(tmp_path: Path) -> None:
    dense = tiny.save_model(tmp_path / "dense.onnx", dense=True)
    code, out, _ = invoke(dense, tmp_path / "fused.onnx")
    assert code == 3 and "no MoE block" in out
    assert files(tmp_path) == {"dense.onnx"}


def test_converting_twice_changes_nothing(model: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.onnx"
    invoke(model, once)
    before = files(tmp_path)
    code, out, _ = invoke(once, tmp_path / "twice.onnx", "--json")
    report = json.loads(out)
    assert code == 3 and report["already_fused"] == 2 and report["fused"] == []
    assert files(tmp_path) == before


def test_a_refused_block_stops_the_conversion(tmp_path: Path) -> None:
    mixed = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,))
    code, out, _ = invoke(mixed, tmp_path / "fused.onnx", "--json")
    report = json.loads(out)
    assert code == 4 and report["written"] is None
    assert report["fused"] == [] and report["proven"] == 1
    assert [set(miss) for miss in report["refused"]] == [{"node", "reason", "family"}]
    assert report["refused"][0]["node"].startswith("model.layers.1")
    assert report["bytes_fused"] == 0
    assert files(tmp_path) == {"mixed.onnx"}


def test_partial_fuses_the_rest_and_says_what_is_left(tmp_path: Path) -> None:
    mixed = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,))
    target = tmp_path / "fused.onnx"
    code, out, _ = invoke(mixed, target, "--partial", "--json", "--check", 1)
    layers = {layer["layer"]: layer for layer in json.loads(out)["layers"]}
    assert code == 4
    assert op_types(target).count("HinaMoE") == 1
    assert layers["layers.1"]["bytes_fused"] == 0 < layers["layers.1"]["bytes_left"]
    assert relative_l2(logits(mixed), logits(target)) < 1e-5


def test_a_folder_is_converted_with_its_side_files(exported: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    code, _, err = invoke(exported, target, "--check", 1)
    assert (code, err) == (0, "")
    assert files(target) == {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"}
    assert relative_l2(logits(exported / "model.onnx"), logits(target / "model.onnx")) < 1e-5
    assert files(tmp_path) == {"exported", "fused"}
    assert target.stat().st_mode & 0o777 == exported.stat().st_mode & 0o777


def test_an_existing_target_is_kept_unless_overwrite_is_given(model: Path, exported: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused.onnx"
    target.write_text("precious")
    code, _, err = invoke(model, target)
    assert code == 1 and "--overwrite" in err
    assert target.read_text() == "precious"
    assert invoke(model, target, "--overwrite")[0] == 0
    assert op_types(target).count("HinaMoE") == 2

    data = tmp_path / "other.onnx.data"
    data.write_text("precious")
    assert invoke(model, tmp_path / "other.onnx")[0] == 1
    assert data.read_text() == "precious" and not (tmp_path / "other.onnx").exists()

    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")
    assert invoke(exported, folder)[0] == 1
    assert files(folder) == {"notes.txt"}
    assert invoke(exported, folder, "--overwrite")[0] == 0
    assert files(folder) == {"notes.txt", "model.onnx", "model.onnx.data", "config.json", "tokenizer.json"}


def test_two_models_go_into_one_folder(model: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other.onnx", experts=8)
    folder = tmp_path / "out"
    folder.mkdir()
    for source in (model, other):
        assert invoke(source, folder / source.name)[0] == 0
    for source in (model, other):
        assert relative_l2(logits(source), logits(folder / source.name)) < 1e-5


def test_a_model_beside_its_source_shares_the_weights(tmp_path: Path) -> None:
    source = tiny.save_model(tmp_path / "model.onnx", external=True)
    target = tmp_path / "fused.onnx"
    code, out, _ = invoke(source, target, "--json", "--check", 1)
    report = json.loads(out)
    assert code == 0
    assert files(tmp_path) == {"model.onnx", "model.onnx_data", "fused.onnx"}
    assert report["bytes_after"] == target.stat().st_size + (tmp_path / "model.onnx_data").stat().st_size


@pytest.mark.parametrize("folder", [False, True])
def test_a_failed_check_keeps_nothing(
    model: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    differs = [Comparison({"batch": 1}, "logits", 0.25)]
    monkeypatch.setattr(conversion, "compare_models", lambda *_: differs)
    before = files(tmp_path)
    source, target = (exported, tmp_path / "fused") if folder else (model, tmp_path / "fused.onnx")
    code, _, err = invoke(source, target, "--check", 1)
    assert code == 1 and "logits" in err and "0.25" in err
    assert files(tmp_path) == before


@pytest.mark.parametrize("folder", [False, True])
def test_a_failed_check_keeps_what_was_there(
    model: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    source, target = (exported, tmp_path / "fused") if folder else (model, tmp_path / "fused.onnx")
    assert invoke(source, target)[0] == 0
    written = target / "model.onnx" if folder else target
    kept = {path: path.read_bytes() for path in written.parent.iterdir() if path.is_file()}
    monkeypatch.setattr(conversion, "compare_models", lambda *_: [Comparison({"batch": 1}, "logits", 0.25)])
    assert invoke(source, target, "--overwrite", "--check", 1)[0] == 1
    assert {path: path.read_bytes() for path in written.parent.iterdir() if path.is_file()} == kept


def test_the_api_returns_the_report(model: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    report = hina_ort.convert(model, tmp_path / "fused.onnx", check=1, progress=lambda *stage: stages.append(stage))
    assert [type(block) for block in report.fused] == [FusedBlock] * 2
    assert report.fused[0].spec.top_k == tiny.TOP_K
    assert {stage for stage, _, _ in stages} >= {"reading", "writing", "checking"}
    assert all(0 <= done <= total for _, done, total in stages)
