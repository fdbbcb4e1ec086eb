"""Weights inside a large model file are mapped where they lie."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graph_passes import inline_weights
from graph_passes.external_data import ModelFileError, load, save
from graph_passes.mapped import InlineTensor
from hina_ort.files import external_bytes

BIG = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


@pytest.fixture(autouse=True)
def _every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_weights, "WHOLE_BYTES", 0)


def proto() -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(BIG, "big"), numpy_helper.from_array(BIG[:1, :1], "small")]
    floats = helper.make_tensor("floats", TensorProto.FLOAT, [64, 32], BIG.ravel())  # float_data, not raw_data
    tensors += [floats, numpy_helper.from_array(BIG.astype(np.float16), "half")]
    branch = helper.make_graph([], "branch", [], [], [numpy_helper.from_array(BIG + 1, "inner")])
    nodes = [
        helper.make_node("MatMul", ["x", "big"], ["y"], doc_string="a node"),
        helper.make_node("Custom", ["y"], ["z"], domain="d", branch=branch, number=1.5),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors, doc_string="a graph")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("d", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    helper.set_model_props(model, {"key": "value"})
    return model


def written(folder: Path) -> Path:
    (folder / "m.onnx").write_bytes(proto().SerializeToString())
    return folder / "m.onnx"


def test_nothing_but_large_weights_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    model = inline_weights.read_model(path, 1024)
    places = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}
    assert set(places) == {"big", "half"}
    content = path.read_bytes()
    for tensor in model.graph.initializer:
        if place := places.get(tensor.name):
            assert place["location"] == "m.onnx"
            start, length = int(place["offset"]), int(place["length"])
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = content[start : start + length]
    assert model == proto()


def test_a_small_file_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(inline_weights, "WHOLE_BYTES", path.stat().st_size)
    assert inline_weights.read_model(path, 1024) == proto()


def test_they_are_mapped_and_written_to_a_data_file(tmp_path: Path) -> None:
    model = load(written(tmp_path))
    for name, array in (("big", BIG), ("half", BIG.astype(np.float16))):
        tensor = model.graph.initializers[name].const_value
        assert isinstance(tensor, InlineTensor)
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert external_bytes(model) == {}
    save(model, tmp_path / "beside.onnx")
    again = onnx.load(tmp_path / "beside.onnx")
    arrays = {t.name: numpy_helper.to_array(t) for t in again.graph.initializer}
    np.testing.assert_array_equal(arrays["big"], BIG)
    np.testing.assert_array_equal(arrays["half"], BIG)
    os.remove(tmp_path / "m.onnx")
    assert isinstance(load(tmp_path / "beside.onnx").graph.initializers["big"].const_value, ir.ExternalTensor)


def test_the_file_itself_is_no_target(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ModelFileError, match=r"m.onnx holds weights of the model being saved"):
        save(load(path), path)
    assert onnx.load(path) == proto()


@pytest.mark.parametrize("cut", [1, 100, 5000, 9000, 20000])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(ModelFileError, match=r"m.onnx is no ONNX model, or it is cut off"):
        load(path)


@pytest.mark.parametrize(
    "content", [b"", b"not a model at all, but some text that goes on", b"\xff" * 100, b"\x0f\x00"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"m.onnx is no ONNX model, or it is cut off"):
        load(tmp_path / "m.onnx")
