"""`hina-ort convert --weights`: what the models compute afterwards, what is reported, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import relative_l2
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.reference import values_of
from hina_ort import conversion
from hina_ort.cli import app
from hina_ort.comparison import CheckError, Comparison
from hina_ort.conversion import ConversionReport
from hina_ort.files import UsageError
from tests import node as harness
from tests.hina_ort import tiny

IDS = np.array([[1, 2, 3], [4, 5, 6]])
HIDDEN = 49
"""Odd, and no multiple of a block; tiny's intermediate size, 12, is less than any block."""

TYPES: list[tuple[dict[str, Any], str]] = [
    ({"weights": "f32"}, ""),
    ({"weights": "f16"}, ""),
    ({"weights": "bf16"}, ""),
    ({"weights": "int8"}, "int8:32"),
    ({"weights": "int8", "symmetric": True}, "int8:32"),
    ({"weights": "int8", "block": 0}, "int8"),
    ({"weights": "int8", "block": 64}, "int8:64"),
    ({"weights": "int4"}, "int4:32"),
    ({"weights": "int4", "block": 16, "symmetric": True}, "int4:16"),
    ({"weights": "int4", "block": 256}, "int4:256"),
    ({"weights": "int4", "block": 0}, "int4"),
    ({"weights": "mxfp4"}, "mxfp4"),
]


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert", *(str(a) for a in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def options_of(types: dict[str, Any]) -> list[str]:
    words = []
    for name, value in types.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def logits(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), hina_ort.session_options(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": IDS})[0]


def hina_nodes(path: Path) -> list[ir.Node]:
    return [node for node in external_data.load(path).graph.all_nodes() if is_hina_moe(node)]


def arrays(node: ir.Node) -> dict[str, np.ndarray]:
    """The weights of a node whose experts are stacked, by field."""
    found = {}
    for name, (value,) in weights_of(node).items():
        assert value.const_value is not None
        found[name] = value.const_value.numpy()
    return found


def with_weights_of(fused: Path, original: Path, target: Path) -> Path:
    """The unfused model with the experts' weights that `fused` stands for, as float32."""
    proto = onnx.load(original)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    for layer, node in enumerate(hina_nodes(fused)):
        spec, found = spec_of(node), arrays(node)
        for name in ("gate_up_proj", "down_proj"):
            values = np.stack([values_of(spec, found, name, expert) for expert in range(spec.num_experts)])
            tensor = initializers[f"model.layers.{layer}.mlp.experts.{name}"]
            assert relative_l2(numpy_helper.to_array(tensor).astype(np.float64), values) < 0.3
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    onnx.save(proto, target)
    return target


@pytest.mark.parametrize(("types", "word"), TYPES, ids=[" ".join(options_of(types)) for types, _ in TYPES])
def test_a_model_computes_what_its_new_weights_say(tmp_path: Path, types: dict[str, Any], word: str) -> None:
    """The fused model agrees with the unfused one, given the same rounded weights, as closely as without rounding."""
    model = tiny.save_model(tmp_path / "model.onnx", hidden=HIDDEN)
    target = tmp_path / "fused.onnx"
    code, out, err = invoke(model, target, *options_of(types), "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    for node in hina_nodes(target):
        spec = spec_of(node)
        assert spec.weight_formats == ((f"gate_up_proj={word}", f"down_proj={word}") if word else ())
        if not word:
            dtype = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[types["weights"]]
            assert {array.dtype.name for array in arrays(node).values()} == {dtype}
        assert ("down_proj_zero_points" in spec.weight_inputs) == (word.startswith("int") and "symmetric" not in types)
    same = with_weights_of(target, model, tmp_path / "same.onnx")
    assert relative_l2(logits(same), logits(target)) < 1e-5
    if types["weights"] != "f32":
        assert len(report["weights"]) == 2
        for layer, entry in enumerate(report["weights"]):
            assert entry["layer"] == f"layers.{layer}"
            assert entry["bytes_before"] == 4 * 3 * tiny.EXPERTS * HIDDEN * tiny.INTERMEDIATE
            spent = sum(array.nbytes for array in arrays(hina_nodes(target)[layer]).values())
            assert entry["bytes_after"] == spent
            errors = {p["name"]: p["relative_l2"] for p in entry["projections"]}
            assert set(errors) == {"gate_up_proj", "down_proj"}
            assert 0 < entry["worst_relative_l2"] == max(errors.values())
    check_errors(report, original=model, fused=target)


def check_errors(report: dict[str, Any], original: Path, fused: Path) -> None:
    """The errors in the report are those of the weights in the file."""
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(original).graph.initializer}
    for layer, (entry, node) in enumerate(zip(report["weights"], hina_nodes(fused), strict=True)):
        spec, found = spec_of(node), arrays(node)
        for projection in entry["projections"]:
            name = projection["name"]
            values = np.stack([values_of(spec, found, name, expert) for expert in range(spec.num_experts)])
            was = before[f"model.layers.{layer}.mlp.experts.{name}"].astype(np.float64)
            assert projection["relative_l2"] == pytest.approx(relative_l2(was, values), rel=1e-4)


def test_a_model_that_is_fused_already_is_converted(exported: Path, tmp_path: Path) -> None:
    hina_ort.convert(exported, tmp_path / "fused")
    code, out, _ = invoke(tmp_path / "fused", tmp_path / "int4", "--weights", "int4", "--check", 1, "--json")
    report = json.loads(out)
    assert code == 0 and report["fused"] == [] and report["already_fused"] == 2
    assert report["written"] == str(tmp_path / "int4")
    assert {path.name for path in (tmp_path / "int4").iterdir()} >= {"model.onnx", "config.json", "tokenizer.json"}
    direct = hina_ort.convert(exported, tmp_path / "direct", weights="int4")
    np.testing.assert_array_equal(logits(tmp_path / "int4" / "model.onnx"), logits(tmp_path / "direct" / "model.onnx"))
    assert [node.worst_relative_l2 for node in direct.weights] == [w["worst_relative_l2"] for w in report["weights"]]


def test_converting_to_the_same_format_copies_the_model(model: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.onnx", tmp_path / "twice.onnx"
    assert invoke(model, once, "--weights", "int4")[0] == 0
    code, out, _ = invoke(once, twice, "--weights", "int4", "--check", 1)
    assert code == 0 and "wrote" in out and "Converted weights" not in out
    assert "--weights: nothing to convert, the projections are int4:32 already" in out
    assert "not held to --rtol" not in out, "nothing changed, so that both have to agree"
    np.testing.assert_array_equal(logits(once), logits(twice))
    assert invoke(once, tmp_path / "kept.onnx")[0] == 3, "keep, and nothing to fuse"


def test_weights_in_another_format_are_refused(model: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.onnx"
    invoke(model, once, "--weights", "int4")
    before = sorted(tmp_path.iterdir())
    for words in (["int8"], ["bf16"], ["int4", "--block", "64"], ["int4", "--symmetric"]):
        code, out, err = invoke(once, tmp_path / "twice.onnx", "--weights", *words)
        assert (code, out) == (1, "") and err.count("\n") == 1
        assert "gate_up_proj of model.layers.0.mlp/HinaMoE is quantised already" in err
    assert sorted(tmp_path.iterdir()) == before


def test_accuracy_levels(model: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.onnx" for name in ("floats", "bytes", "again")]
    assert invoke(model, paths[0], "--weights", "int8")[0] == 0
    assert invoke(model, paths[1], "--weights", "int8", "--accuracy-level", 4)[0] == 0
    code, out, _ = invoke(paths[0], paths[2], "--accuracy-level", 4, "--json", "--check", 1)
    assert code == 0
    assert [(w["accuracy_level_before"], w["accuracy_level"]) for w in json.loads(out)["weights"]] == [(0, 4)] * 2
    assert [[spec_of(node).accuracy_level for node in hina_nodes(path)] for path in paths] == [[0, 0], [4, 4], [4, 4]]
    floats, rounded, again = map(logits, paths)
    np.testing.assert_array_equal(rounded, again)
    assert 0 < relative_l2(floats, rounded) < 1
    code, out, err = invoke(paths[2], tmp_path / "back.onnx", "--accuracy-level", 0, "--check", 2)
    assert (code, err) == (0, "")
    assert "activations of 2 layers: int8 to float" in out
    assert "not held to --rtol, as weights or activations have other types now" in out
    np.testing.assert_array_equal(logits(tmp_path / "back.onnx"), floats)
    out = invoke(paths[0], tmp_path / "up.onnx", "--accuracy-level", 4, "--check", 2)[1]
    assert "activations of 2 layers: float to int8" in out
    code, out, _ = invoke(paths[2], tmp_path / "same.onnx", "--accuracy-level", 4, "--check", 2)
    assert code == 0 and "--accuracy-level: it is 4 already" in out and "activations of" not in out


def test_a_check_of_the_same_weights_has_rtol(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once.onnx"
    hina_ort.convert(model, once, weights="int4")
    fake_check(monkeypatch, 0.9e-4)
    assert hina_ort.convert(once, tmp_path / "near.onnx", weights="int4", check=1, rtol=1e-4).written
    fake_check(monkeypatch, 1.1e-4)
    with pytest.raises(CheckError, match="the converted model differs from the original"):
        hina_ort.convert(once, tmp_path / "far.onnx", weights="int4", check=1, rtol=1e-4)


def test_what_changes_nothing_is_told(model: Path, tmp_path: Path) -> None:
    def told(*options: object) -> list[str]:
        report = json.loads(invoke(model, tmp_path / "out.onnx", *options, "--dry-run", "--json")[1])
        return report["without_effect"]  # type: ignore[no-any-return]

    assert told("--weights", "int4") == told("--weights", "int8", "--accuracy-level", 0) == told() == []
    assert told("--weights", "f32") == ["--weights: nothing to convert, the projections are float32 already"]
    assert told("--weights", "int4", "--shared-weights", "int8") == ["--shared-weights: there are no shared experts"]


def test_what_is_read_of_the_files_of_the_source_is_told(tmp_path: Path) -> None:
    """Beside its source, a model reads the embedding and lm_head from there; the old experts do not count."""
    source, target = tiny.save_model(tmp_path / "model.onnx", external=True), tmp_path / "int4.onnx"
    report = json.loads(invoke(source, target, "--weights", "int4", "--json")[1])
    (data,) = report["reads"]
    assert data["file"] == str((tmp_path / "model.onnx_data").resolve())
    read = 2 * 4 * tiny.VOCABULARY * tiny.HIDDEN
    assert data["bytes"] == read, "the router, of 256 bytes, lies in the model file"
    written = target.stat().st_size + (tmp_path / "int4.onnx.data").stat().st_size
    assert report["bytes_after"] == written + read
    out = invoke(source, target, "--weights", "int4", "--overwrite")[1]
    assert f"int4.onnx still reads 5.0 KiB of {data['file']}; keep it" in out.replace("\n", "")
    (tmp_path / "other").mkdir()
    alone = hina_ort.convert(source, tmp_path / "other" / "int4.onnx", weights="int4")
    assert alone.reads == []
    assert alone.bytes_after == sum(path.stat().st_size for path in (tmp_path / "other").iterdir())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("weights", "shared"), [("int4", "int8"), ("keep", "mxfp4"), ("bf16", "int4"), ("int8", None)])
def test_shared_experts(tmp_path: Path, weights: str, shared: str | None, stacked: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 60, "intermediate_size": 44, "shared_intermediate_size": 33}
    spec = harness.make_spec(**sizes, bias=True, shared_bias=True, shared_expert_gate=True, experts_stacked=stacked)
    rng = np.random.default_rng(0)
    node = harness.random_node(spec, rng, router_bias=True)
    source, target = tmp_path / "moe.onnx", tmp_path / "converted.onnx"
    source.write_bytes(harness.make_model(node, tokens_per_expert=True).SerializeToString())
    hina_ort.convert(source, target, weights=weights, shared_weights=shared, block=16 if "int" in weights else None)

    (made,) = hina_nodes(target)
    found = {}
    for name, values in weights_of(made).items():
        each = [value.const_value.numpy() for value in values]  # type: ignore[union-attr]
        found[name] = each[0] if len(each) == 1 else np.stack(each)
    words = {"int4": "int4:16", "int8": "int8:16", "mxfp4": "mxfp4"}
    routed = {words[weights]} if weights in words else set()
    formats = {name: str(form) for name, form in spec_of(made).formats.items()}
    assert {form for name, form in formats.items() if not name.startswith("shared_")} == routed
    want = shared or weights
    form = words[want] if "int" in weights else {"int4": "int4:32", "mxfp4": "mxfp4"}[want]
    assert {form for name, form in formats.items() if name.startswith("shared_")} == {form}
    assert found["up_proj"].dtype.name == {"keep": "float32", "bf16": "bfloat16"}.get(weights, "uint8")
    converted = harness.Node(spec_of(made), weights=found, constants=node.constants)
    feeds = harness.random_feeds(converted, rng, (7,))
    harness.assert_right(converted, feeds, harness.run(harness.make_session(target), feeds))


def test_people_see_bytes_and_errors(model: Path, tmp_path: Path) -> None:
    code, out, _ = invoke(model, tmp_path / "out.onnx", "--weights", "int4", "--check", 2)
    assert code == 0
    assert "Converted weights" in out and "gate_up_proj int4:32 " in out and "worst relative L2" in out
    assert "checked on 2 random inputs" in out and "not held to --rtol" in out
    assert "logits" in out, "the difference of each output"
    assert invoke(model, tmp_path / "quiet.onnx", "--weights", "int4", "--check", 1, "--quiet") == (0, "", "")


def test_a_dry_run_measures_but_writes_nothing(model: Path, tmp_path: Path) -> None:
    code, out, _ = invoke(model, tmp_path / "out.onnx", "--weights", "int4", "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0 and report["written"] is None
    wet = json.loads(invoke(model, tmp_path / "out.onnx", "--weights", "int4", "--json")[1])
    for dry, real in zip(report["weights"], wet["weights"], strict=True):
        assert dry["worst_relative_l2"] is None and dry["bytes_after"] == real["bytes_after"]
    (tmp_path / "out.onnx").unlink()
    (tmp_path / "out.onnx.data").unlink()
    text = invoke(model, tmp_path / "out.onnx", "--weights", "int4", "--dry-run")[1]
    assert "dry run" in text and "Converted weights" in text
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_progress_has_a_stage_of_its_own(model: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    hina_ort.convert(model, tmp_path / "out.onnx", weights="int8", progress=lambda *stage: stages.append(stage))
    matrices = 2 * 2 * tiny.EXPERTS
    for stage in ("measuring weights", "quantising"):
        assert [s for s in stages if s[0] == stage] == [(stage, done, matrices) for done in range(1, matrices + 1)]


def test_a_refused_block_stops_the_conversion_unless_partial(tmp_path: Path) -> None:
    mixed = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,))
    code, out, _ = invoke(mixed, tmp_path / "out.onnx", "--weights", "int4", "--json")
    assert code == 4 and json.loads(out)["weights"] == [] and not (tmp_path / "out.onnx").exists()
    assert "--partial goes on with the rest" in invoke(mixed, tmp_path / "out.onnx", "--weights", "int4")[1]
    code, out, _ = invoke(mixed, tmp_path / "out.onnx", "--weights", "int4", "--partial", "--json")
    assert code == 4 and len(json.loads(out)["weights"]) == 1
    assert [spec_of(node).formats != {} for node in hina_nodes(tmp_path / "out.onnx")] == [True]


def test_partial_is_named_where_only_weights_are_left_to_convert(tmp_path: Path) -> None:
    mixed, half = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,)), tmp_path / "half.onnx"
    invoke(mixed, half, "--partial")
    code, out, _ = invoke(half, tmp_path / "out.onnx", "--weights", "int4")
    assert code == 4 and "--partial goes on with the rest" in out and not (tmp_path / "out.onnx").exists()
    assert invoke(half, tmp_path / "out.onnx", "--weights", "int4", "--partial")[0] == 4
    assert (tmp_path / "out.onnx").exists()
    assert "--partial" not in invoke(half, tmp_path / "kept.onnx")[1], "it would change nothing"


def test_a_model_without_experts_has_nothing_to_convert(tmp_path: Path) -> None:
    dense = tiny.save_model(tmp_path / "dense.onnx", dense=True)
    assert invoke(dense, tmp_path / "out.onnx", "--weights", "int4")[0] == 3
    assert not (tmp_path / "out.onnx").exists()


def with_weight(model: Path, value: float) -> Path:
    """`model` with one weight of an expert changed."""
    proto = onnx.load(model)
    tensor = next(t for t in proto.graph.initializer if t.name == "model.layers.1.mlp.experts.down_proj")
    array = numpy_helper.to_array(tensor).copy()
    array[2, 3, 4] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, model)
    return model


@pytest.mark.parametrize(
    ("weights", "value", "words"),
    [
        ("int4", math.nan, "it holds NaN"),
        ("int8", -math.inf, "it holds NaN, infinities"),
        ("mxfp4", math.nan, "it holds NaN"),
        ("f16", 1e6, "it holds 1e+06, too large for float16; use bf16"),
    ],
)
def test_weights_that_cannot_be_converted_are_named(
    model: Path, tmp_path: Path, weights: str, value: float, words: str
) -> None:
    fused = tmp_path / "fused.onnx"
    hina_ort.convert(model, fused)
    proto = onnx.load(fused)
    onnx.save(proto, fused)  # in one file, so that it can be edited
    (tmp_path / "fused.onnx.data").unlink()
    source = with_weight(fused, value)
    before = sorted(tmp_path.iterdir())
    for options in ([], ["--dry-run"]):
        code, out, err = invoke(source, tmp_path / "out.onnx", "--weights", weights, *options)
        assert (code, out) == (1, "") and err.count("\n") == 1
        assert "model.layers.1.mlp.experts.down_proj, expert 2, cannot be converted" in err and words in err
    assert sorted(tmp_path.iterdir()) == before


def fake_check(monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    checks = [Comparison({"batch": 1}, "logits", difference, {"logits": difference})]
    monkeypatch.setattr(conversion, "compare_models", lambda *_: checks)


def test_a_check_of_rounded_weights_reports_and_does_not_judge(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = hina_ort.convert(model, tmp_path / "real.onnx", weights="int4", check=2)
    assert not report.must_agree
    for check in report.checks:
        assert set(check.outputs) == {"logits"} and 1e-3 < check.outputs["logits"] == check.relative_l2 < 0.5
    fake_check(monkeypatch, 0.5)
    assert hina_ort.convert(model, tmp_path / "far.onnx", weights="int4", check=1).written
    fake_check(monkeypatch, math.inf)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckError, match="output logits of the converted model has NaN"):
        hina_ort.convert(model, tmp_path / "broken.onnx", weights="int4", check=1)
    assert sorted(tmp_path.iterdir()) == before


def test_a_check_of_exact_weights_judges(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report: ConversionReport = hina_ort.convert(model, tmp_path / "real.onnx", weights="f32", check=1)
    assert report.must_agree and report.checks[0].relative_l2 < 1e-5
    fake_check(monkeypatch, 0.5)
    with pytest.raises(CheckError, match="differs from the original"):
        hina_ort.convert(model, tmp_path / "far.onnx", weights="f32", check=1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int3"}, "--weights is 'int3', expected keep, f32, f16, bf16, int8, int4 or mxfp4"),
    ({"weights": "int8", "shared_weights": "fp8"}, "--shared-weights is 'fp8'"),
    ({"weights": "int4", "block": 24}, "--block is 24, expected 0 (one scale per row), 16, 32, 64, 128 or 256"),
    ({"weights": "int4", "block": -1}, "--block is -1"),
    ({"weights": "bf16", "block": 32}, "--block is for int8 and int4 weights, not for bf16"),
    ({"weights": "mxfp4", "block": 32}, "--block is for int8 and int4 weights, not for mxfp4"),
    ({"block": 32}, "--block is for int8 and int4 weights, not for keep"),
    ({"weights": "mxfp4", "symmetric": True}, "--symmetric is for int8 and int4 weights, not for mxfp4"),
    ({"weights": "f16", "shared_weights": "bf16", "symmetric": True}, "not for f16 and bf16"),
    ({"weights": "int4", "accuracy_level": 3}, "--accuracy-level is 3, expected 0 (float activations) or 4"),
    ({"weights": "bf16", "accuracy_level": 4}, "--accuracy-level is for quantised weights, not for bf16"),
    ({"accuracy_level": 4}, "--accuracy-level is for quantised weights, and"),
    ({"accuracy_level": 0}, "--accuracy-level is for quantised weights, and"),
]


@pytest.mark.parametrize(("types", "words"), WRONG, ids=[" ".join(options_of(types)) for types, _ in WRONG])
def test_options_that_do_not_go_together(model: Path, tmp_path: Path, types: dict[str, Any], words: str) -> None:
    code, out, err = invoke(model, tmp_path / "out.onnx", *options_of(types))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    with pytest.raises(UsageError, match=re.escape(words)):
        hina_ort.convert(model, tmp_path / "out.onnx", **types)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
