"""`hina-ort inspect`, and the account of bytes per layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes import external_data
from hina_ort.cli import app
from hina_ort.inspection import inspect_model
from hina_ort.weights import OUTSIDE, layer_of, weights_by_layer
from tests.hina_ort import tiny

EXPERT_BYTES = 4 * 3 * tiny.EXPERTS * tiny.HIDDEN * tiny.INTERMEDIATE


def test_recognised_and_refused_blocks(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,))
    content = path.read_bytes()
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    found = json.loads(result.stdout)
    good, bad = found["blocks"]
    assert result.exit_code == 0 and found["model"] == str(path)
    assert found["nodes"] == len(onnx.load(path).graph.node)
    assert (good["state"], good["family"], good["bytes"]) == ("recognised", "batched_mm", EXPERT_BYTES)
    assert good["spec"]["num_experts"] == tiny.EXPERTS and good["reason"] is None
    assert bad["state"] == "refused" and bad["reason"] and bad["spec"] is None
    assert path.read_bytes() == content
    text = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "300"}).stdout
    assert "recognised (batched_mm)" in text and bad["reason"] in text


def test_fused_blocks_say_the_spec_that_was_fused(exported: Path, tmp_path: Path) -> None:
    report = hina_ort.convert(exported, tmp_path / "fused")
    found = inspect_model(tmp_path / "fused")
    assert [block.state for block in found.blocks] == ["fused", "fused"]
    for block, was in zip(found.blocks, report.fused, strict=True):
        assert block.spec is not None
        assert block.spec == replace(was.spec, experts_stacked=block.spec.experts_stacked)
        assert block.bytes == was.bytes == EXPERT_BYTES


def test_quantised_blocks_say_their_formats(exported: Path, tmp_path: Path) -> None:
    report = hina_ort.convert(exported, tmp_path / "fused", weights="int4", block=16, accuracy_level=4)
    found = inspect_model(tmp_path / "fused")
    for block, node in zip(found.blocks, report.weights, strict=True):
        assert block.state == "fused" and block.spec is not None
        assert block.spec.weight_formats == ("gate_up_proj=int4:16", "down_proj=int4:16")
        sizes = (block.spec.hidden_size, block.spec.intermediate_size, block.spec.accuracy_level)
        assert sizes == (tiny.HIDDEN, tiny.INTERMEDIATE, 4)
        assert block.bytes == node.to_dict()["bytes_after"] < EXPERT_BYTES / 4
    text = CliRunner().invoke(app, ["inspect", str(tmp_path / "fused")], env={"COLUMNS": "300"}).stdout
    assert text.count("int4:16 weights, accuracy_level=4") == 2
    assert json.loads(json.dumps(found.to_dict()))["blocks"][0]["spec"]["weight_formats"]


def test_a_model_without_experts(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "dense.onnx", dense=True)
    assert inspect_model(path).blocks == []
    assert "no MoE blocks" in CliRunner().invoke(app, ["inspect", str(path)]).stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("attribute", "unknown attribute"),
        ("weights", "lacks weights"),
        ("names", "down_proj"),
        ("router", "router"),
        ("formats", "must hold down_proj_scales"),
        ("shape", "has the shape"),
    ],
)
def test_a_broken_node_is_refused_with_its_reason(model: Path, tmp_path: Path, change: str, words: str) -> None:
    path = tmp_path / "fused.onnx"
    hina_ort.convert(model, path)
    proto = onnx.load(path, load_external_data=False)
    node = next(n for n in proto.graph.node if n.op_type == "HinaMoE")
    attributes = {a.name: a for a in node.attribute}
    match change:
        case "attribute":
            attributes["top_k"].name = "top_q"
        case "weights":
            del node.input[-1]
        case "names":
            attributes["weight_inputs"].s = b"gate_up_proj"
        case "router":
            node.input[1] = ""
        case "formats":
            node.attribute.append(onnx.helper.make_attribute("weight_formats", "down_proj=int8"))
        case "shape":
            tensor = next(t for t in proto.graph.initializer if t.name == node.input[-1])
            tensor.dims[:] = [tensor.dims[0] * tensor.dims[1] * tensor.dims[2]]
    path.write_bytes(proto.SerializeToString())
    block = inspect_model(path).blocks[0]
    assert block.state == "refused" and words in str(block.reason)


def node_named(name: str, **metadata: str) -> ir.Node:
    node = ir.Node("", "MatMul", [], name=name, num_outputs=1)
    node.metadata_props.update(metadata)
    return node


def test_layers_are_read_from_names_and_scopes() -> None:
    assert layer_of(node_named("/model/layers.12/mlp/MatMul_3")) == "layers.12"
    assert layer_of(node_named("node_3", namespace=": M/model.layers.7: L/mlp: Moe/node_3")) == "layers.7"
    assert layer_of(node_named("transformer.h.4.mlp")) == "layers.4"
    assert layer_of(node_named("lm_head/MatMul")) == OUTSIDE
    fused = ir.Node("hina", "HinaMoE", [], name="block_a", num_outputs=1)
    assert layer_of(fused) == "block_a"


def test_layers_come_in_order_and_shared_weights_count_once(tmp_path: Path) -> None:
    model = external_data.load(tiny.save_model(tmp_path / "model.onnx", layers=11))
    layers = weights_by_layer(model)
    assert [layer.layer for layer in layers] == [*(f"layers.{n}" for n in range(11)), OUTSIDE]
    total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    assert sum(layer.bytes_left for layer in layers) == total and not any(layer.bytes_fused for layer in layers)
