"""`hina-ort convert --genai`: the library and genai_config.json beside the model, without onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hina_ort import conversion, genai
from hina_ort.comparison import Comparison, compare_in_full, compare_models
from hina_ort.runtime import LIBRARY_NAME, get_library_path
from tests.hina_ort import tiny
from tests.hina_ort.test_convert import files, invoke, logits, op_types

# Written by hand: two spaces, a list in one line, numbers and letters that a JSON writer would spell otherwise.
CONFIG = """{
  "model": {
    "eos_token_id": [2, 3], "name": "naïve",
    "embedding": {"session_options": {"log_id": "e"}},
    "decoder": {
      "session_options": {
        "log_id": "onnxruntime-genai",
        "provider_options": []
      },
      "filename": "model.onnx"
    }
  },
  "search": {"temperature": 1.00, "epsilon": 1E-6}
}
"""


@pytest.fixture
def folder(exported: Path) -> Path:
    (exported / "genai_config.json").write_text(CONFIG, encoding="utf-8")
    return exported


def configure(folder: Path, **decoder: object) -> None:
    values = json.loads(CONFIG)
    values["model"]["decoder"].update(decoder)
    (folder / "genai_config.json").write_text(json.dumps(values, indent=4))


def options(folder: Path) -> dict[str, object]:
    values = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    found: dict[str, object] = values["model"]["decoder"]["session_options"]
    return found


def test_the_library_is_placed_and_named(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    code, out, err = invoke(folder, target, "--genai", "--check", 1)
    assert (code, err) == (0, "") and LIBRARY_NAME in out
    assert files(target) == files(folder) - {"model.onnx_data"} | {"model.onnx.data", LIBRARY_NAME}
    # onnxruntime-genai follows no link out of the folder.
    library = target / LIBRARY_NAME
    assert not library.is_symlink() and library.read_bytes() == Path(get_library_path()).read_bytes()
    line = f'        "custom_ops_library": "{LIBRARY_NAME}",\n'
    text = (target / "genai_config.json").read_text(encoding="utf-8")
    assert text.count(line) == 1 and text.replace(line, "") == CONFIG
    assert options(target)["custom_ops_library"] == LIBRARY_NAME
    assert (folder / "genai_config.json").read_text(encoding="utf-8") == CONFIG


@pytest.mark.parametrize("text", ['{"model":{"decoder":{"filename":"model.onnx"}}}', CONFIG.replace("\n", "\r\n")])
def test_other_spellings(exported: Path, tmp_path: Path, text: str) -> None:
    (exported / "genai_config.json").write_bytes(text.encode())
    assert invoke(exported, tmp_path / "fused", "--genai")[0] == 0
    expected = json.loads(text)
    expected["model"]["decoder"].setdefault("session_options", {})["custom_ops_library"] = LIBRARY_NAME
    found = (tmp_path / "fused" / "genai_config.json").read_bytes().decode()
    assert json.loads(found) == expected and found.count("\r\n") == max(0, text.count("\r\n") + 1) * ("\r\n" in text)


def test_a_second_time_changes_nothing(folder: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert invoke(folder, once, "--genai")[0] == 0
    (once / LIBRARY_NAME).write_bytes(b"an older one")
    code, out, _ = invoke(once, twice, "--genai", "--weights", "f16", "--json")
    assert code == 0 and len(json.loads(out)["genai"]) == 1
    assert (twice / "genai_config.json").read_bytes() == (once / "genai_config.json").read_bytes()
    assert (twice / LIBRARY_NAME).read_bytes() == Path(get_library_path()).read_bytes()


def test_without_the_option_the_report_names_it(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    code, out, _ = invoke(folder, target)
    assert code == 0 and "--genai" in out
    assert (target / "genai_config.json").read_text(encoding="utf-8") == CONFIG and LIBRARY_NAME not in files(target)
    assert invoke(folder, tmp_path / "with", "--genai")[0] == 0
    assert "--genai" not in invoke(tmp_path / "with", tmp_path / "again", "--weights", "f16")[1]


def test_the_model_that_the_configuration_names(folder: Path, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx_data"):
        (folder / name).rename(folder / name.replace("model.", "decoder."))
    model = onnx.load(folder / "decoder.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("model.onnx_data", "decoder.onnx_data")
    onnx.save(model, folder / "decoder.onnx")
    assert "model.onnx" in invoke(folder, tmp_path / "fused")[2]
    configure(folder, filename="decoder.onnx")
    assert invoke(folder, tmp_path / "fused", "--genai")[0] == 0
    assert op_types(tmp_path / "fused" / "decoder.onnx").count("HinaMoE") == 2
    assert {"decoder.onnx", "decoder.onnx.data"} <= files(tmp_path / "fused")


def test_a_model_file_of_any_name(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    model.rename(folder / "decoder.bin")
    (folder / "genai_config.json").write_text(CONFIG.replace("model.onnx", "decoder.bin"), encoding="utf-8")
    assert invoke(folder, tmp_path / "fused", "--genai")[0] == 0
    assert op_types(tmp_path / "fused" / "decoder.bin").count("HinaMoE") == 2


def test_letters_that_no_file_can_hold(exported: Path, tmp_path: Path) -> None:
    text = CONFIG.replace('"log_id": "e"', '"log_id": "\\ud800", "shared_initializers": []')
    (exported / "genai_config.json").write_text(text, encoding="utf-8")
    assert invoke(exported, tmp_path / "fused", "--genai")[0] == 0
    found = json.loads((tmp_path / "fused" / "genai_config.json").read_text(encoding="utf-8"))
    assert found["model"]["embedding"]["session_options"] == {"log_id": "\ud800"}


def other_model(path: Path, decoder: Path) -> None:
    """A model that reads the embedding in the data file of `decoder`, and a weight of its own."""
    weights = onnx.load(decoder, load_external_data=False).graph.initializer
    shared = next(tensor for tensor in weights if tensor.name == "embed_tokens.weight")
    assert shared.external_data
    own = numpy_helper.from_array(np.random.default_rng(1).standard_normal((tiny.HIDDEN, 64)).astype(np.float32), "own")
    nodes = [
        helper.make_node("Gather", [shared.name, "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "own"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "other",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [shared],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    model.graph.initializer.append(own)
    onnx.save(model, path)


def test_other_models_are_copied_and_keep_the_weights_they_share(folder: Path, tmp_path: Path) -> None:
    import onnxruntime

    other_model(folder / "mtp.onnx", folder / "model.onnx")
    (folder / "unused.onnx").write_text("the configuration does not name it")
    values = json.loads(CONFIG)
    values["model"]["mtp"] = {"filename": "mtp.onnx", "shared_initializers": [{"data_file": "model.onnx_data"}]}
    values["model"]["vision"] = {"filename": "absent.onnx"}
    (folder / "genai_config.json").write_text(json.dumps(values))
    code, out, _ = invoke(folder, tmp_path / "fused", "--genai")
    assert code == 0 and "mtp.onnx was copied" in out
    assert {"mtp.onnx", "mtp.onnx.data"} <= files(tmp_path / "fused") and "unused.onnx" not in files(tmp_path / "fused")
    found = json.loads((tmp_path / "fused" / "genai_config.json").read_text())
    assert found["model"]["mtp"] == {"filename": "mtp.onnx"}
    tensors = onnx.load(tmp_path / "fused" / "mtp.onnx", load_external_data=False).graph.initializer
    assert {e.value for t in tensors for e in t.external_data if e.key == "location"} == {
        "model.onnx.data",
        "mtp.onnx.data",
    }
    feeds = {"ids": np.arange(tiny.VOCABULARY)}
    one, other = (
        onnxruntime.InferenceSession(str(home / "mtp.onnx"), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for home in (folder, tmp_path / "fused")
    )
    assert np.array_equal(one, other)
    assert np.allclose(logits(folder / "model.onnx"), logits(tmp_path / "fused" / "model.onnx"), atol=1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no genai_config.json"),
        ("{", "is no JSON"),
        ("[" * 100_000 + "]" * 100_000, "is no JSON"),
        (CONFIG.replace("1E-6", "[" * 800 + "]" * 800), "802 levels deep"),
        ("[]", "model.decoder.filename"),
        ('{"model": {"decoder": {"pipeline": []}}}', "convert the model files one by one"),
        (CONFIG.replace("model.onnx", "sub/model.onnx"), "model.decoder.filename"),
        (CONFIG.replace("model.onnx", "other.onnx"), "names the model 'other.onnx', which is not there"),
        (CONFIG.replace('"log_id": "o', '"custom_ops_library": "libother.so", "log_id": "o'), "names libother.so"),
    ],
)
def test_what_cannot_be_converted(exported: Path, tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (exported / "genai_config.json").write_text(text, encoding="utf-8")
    code, out, err = invoke(exported, tmp_path / "fused", "--genai")
    assert code == 1 and out == "" and words in err and err.count("\n") == 1
    assert files(tmp_path) == {"exported"}


def test_a_file_is_wrong_usage(model: Path, tmp_path: Path) -> None:
    code, _, err = invoke(model, tmp_path / "fused.onnx", "--genai")
    assert code == 2 and "no folder" in err


def test_a_missing_library_is_said_before_anything_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hina_ort.runtime.LIBRARY_NAME", "libabsent.so")
    code, _, err = invoke(folder, tmp_path / "fused", "--genai")
    assert code == 1 and "make library" in err and files(tmp_path) == {"exported"}


def test_a_check_knows_the_size_of_cached_heads(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(CONFIG.replace('"filename"', '"head_size": 16, "filename"'))
    assert genai.axis_sizes(tmp_path) == {"kv_cache_dim": 16} and genai.axis_sizes(tmp_path / "none") == {}
    x = helper.make_tensor_value_info("past_key", TensorProto.FLOAT, ["batch", "past_sequence_length", "kv_cache_dim"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    sixteen = numpy_helper.from_array(np.ones((16, 1), np.float32), "ones")
    graph = helper.make_graph([helper.make_node("MatMul", ["past_key", "ones"], ["y"])], "g", [x], [y], [sixteen])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    assert len(compare_models(path, path, 2)) == 2 and len(compare_in_full(path, path)[0]) == 8


def test_a_failure_leaves_the_target_as_it_was(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "fused"
    assert invoke(folder, target, "--genai")[0] == 0
    kept = {path: path.read_bytes() for path in target.iterdir()}
    monkeypatch.setattr(conversion, "compare_models", lambda *_: [Comparison({"batch": 1}, "logits", 0.25)])
    assert invoke(folder, target, "--genai", "--overwrite", "--check", 1)[0] == 1
    assert {path: path.read_bytes() for path in target.iterdir()} == kept


@pytest.mark.parametrize("option", [(), ("--genai",)])
@pytest.mark.parametrize("kind", ["granitemoehybrid", "llama"])
def test_experts_that_the_builder_dropped_are_named(tmp_path: Path, kind: str, option: tuple[str, ...]) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "m.onnx")
    values = {"model": {"type": kind, "decoder": {"filename": "m.onnx", "session_options": {}}}}
    (folder / "genai_config.json").write_text(json.dumps(values))
    source, target = (folder, tmp_path / "fused") if option else (folder / "m.onnx", tmp_path / "fused.onnx")
    code, out, _ = invoke(source, target, *option)
    assert code == (4 if kind == "granitemoehybrid" else 3) and not target.exists()
    assert ("leaves out the routed experts of granitemoehybrid models" in " ".join(out.split())) == (code == 4)
