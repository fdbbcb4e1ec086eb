"""Explanations: nodes are found by what a person calls them, and what is said of them is what the matchers saw."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graph_passes import external_data
from graph_passes.explain import explain, view
from graph_passes.fuse_moe import fuse
from graph_passes.matchers import MATCHERS, MoeMatch
from graph_passes.names import matching
from graph_passes.pipeline import find_blocks, fuse_model
from tests.hina_ort import tiny
from tests.unrolled_graphs import Loop, model_of, rewritten


@pytest.fixture
def mixed(tmp_path: Path) -> ir.Model:
    """Two layers; the experts of the second have an unknown activation."""
    return external_data.load(tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,)))


def test_nodes_are_named_by_name_value_or_module(mixed: ir.Model) -> None:
    nodes = list(mixed.graph)
    softmax = next(node for node in nodes if node.op_type == "Softmax")
    assert matching(nodes, str(softmax.name)) == [softmax]
    assert matching(nodes, str(softmax.outputs[0].name)) == [softmax]
    assert {node.op_type for node in matching(nodes, "model.layers.1.mlp.experts.down_proj")} == {"GatherND"}
    assert matching(nodes, "input_ids") == [nodes[0]]
    module = matching(nodes, "layers.1.mlp")
    assert softmax not in module and len(module) > 10
    assert matching(nodes, "/layers/1/mlp/") == matching(nodes, "model.layers.1.mlp") == module
    assert matching(nodes, "layers.2") == matching(nodes, "") == []
    with pytest.raises(ValueError, match=r"several modules: model\.layers\.0\.mlp, model\.layers\.1\.mlp; name one"):
        matching(nodes, "mlp")


def test_scopes_of_torch_are_modules() -> None:
    def node(scopes: str, name: str) -> ir.Node:
        made = ir.Node("", "Add", [], name=name, num_outputs=1)
        made.metadata_props["pkg.torch.onnx.name_scopes"] = scopes
        return made

    first = node("['', 'model', 'model.layers.0', 'model.layers.0.mlp', 'add_1']", "node_1")
    second = node("['', 'model', 'model.layers.1', 'model.layers.1.mlp', 'add_2']", "node_2")
    broken = node("['", "node_3")
    assert matching([first, second, broken], "layers.1.mlp") == [second]


def test_a_block_is_described_and_proven(mixed: ir.Model) -> None:
    found = explain(mixed, "layers.0.mlp")
    (place,) = found.places
    assert (found.distance, place.state, place.family, place.node) == (
        0,
        "recognised",
        "batched_mm",
        "model.layers.0.mlp",
    )
    assert place.spec is not None and place.spec.num_experts == tiny.EXPERTS
    assert place.proof is not None and place.proof.proven and place.proof.worst_relative_l2 < 1e-5
    assert [(s.field, s.shape) for s in place.constants] == [("router_weight", [tiny.EXPERTS, tiny.HIDDEN])]
    assert {s.field for s in place.weights} == set(place.spec.weight_inputs)
    parts = [step.partition(":")[0] for step in place.steps]
    assert parts == ["products", "combine", "expert MLP", "router", "experts", "ends"]
    assert "router: softmax of 4 experts, top 2" in place.steps


def test_a_router_that_stays_in_the_graph_is_named_with_its_reason() -> None:
    (place,) = explain(rewritten(Loop(), ("Softmax<axis=1>", "Softplus")), "y").places
    assert place.state == "recognised" and place.spec is not None and place.spec.router_input == "topk_ids"
    assert any(step.startswith("router: left in the graph, as the scores are neither") for step in place.steps)


def test_a_refusal_says_what_was_recognised_and_where_it_broke(mixed: ir.Model) -> None:
    found = explain(mixed, "model.layers.1.mlp")
    (place,) = found.places
    assert (place.state, place.family, place.spec) == ("refused", "batched_mm", None)
    assert any(step.startswith("combine: ") for step in place.steps)
    broken = place.broke_at
    assert broken is not None and broken.name == place.node
    assert broken.inputs and broken.inputs[0].shape and broken.readers
    assert broken.inputs[0].producer is not None and broken.inputs[0].producer.inputs
    deepest = broken.inputs[0].producer.inputs[-1].producer
    assert deepest is None or not deepest.inputs
    assert explain(mixed, broken.name).places[0].node == place.node


def test_how_many_experts_were_read_before_one_broke() -> None:
    found = explain(model_of(Loop(width=4, fixed_expand=2)), "x")
    (place,) = found.places
    assert place.family == "unrolled_loop" and "fixes the shape" in str(place.reason)
    assert any("4 branches" in step for step in place.steps) and any("expert 1" in step for step in place.steps)


def test_outside_of_blocks_the_nearest_is_shown(mixed: ir.Model) -> None:
    found = explain(mixed, "logits")
    assert found.distance and found.distance > 0
    assert "model.layers.1/mlp/MatMul_45" in [place.node for place in found.places] or len(found.places) == 1
    assert not found.patterns


def test_without_blocks_the_patterns_are_named(tmp_path: Path) -> None:
    found = explain(external_data.load(tiny.save_model(tmp_path / "dense.onnx", dense=True)), "logits")
    assert found.distance is None and found.places == []
    assert len(found.patterns) == len(MATCHERS) and all(len(words) > 20 for words in found.patterns.values())


def test_unknown_names_get_similar_ones(mixed: ir.Model) -> None:
    with pytest.raises(ValueError, match=r"called model\.layers\.0/mlp/Softmax_4; did you mean model\.layers\.0/mlp/S"):
        explain(mixed, "model.layers.0/mlp/Softmax_4")
    with pytest.raises(ValueError, match="lists the MoE blocks"):
        explain(mixed, "?")


def test_a_node_that_normalisation_removes_is_explained_all_the_same(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "model.onnx", layers=1)
    proto = onnx.load(path)
    softmax = next(node for node in proto.graph.node if node.op_type == "Softmax")
    index = list(proto.graph.node).index(softmax)
    proto.graph.node.insert(index, helper.make_node("Identity", [softmax.input[0]], ["same"], name="the_identity"))
    softmax.input[0] = "same"
    onnx.save(proto, path)
    found = explain(external_data.load(path), "the_identity")
    assert found.distance == 0 and found.places[0].node == "model.layers.0.mlp"


def test_a_fused_node_is_described(mixed: ir.Model) -> None:
    fuse_model(mixed, partial=True)
    found = explain(mixed, "model.layers.0.mlp/HinaMoE")
    assert [place.state for place in found.places] == ["fused"]
    assert [stored.field for stored in found.places[0].constants] == ["router_weight"]
    assert found.places[0].bytes == 4 * 3 * tiny.EXPERTS * tiny.HIDDEN * tiny.INTERMEDIATE


def test_a_match_that_is_not_proven_is_refused_with_its_spec() -> None:
    model = model_of(Loop())
    (match,) = find_blocks(model)
    assert isinstance(match, MoeMatch)
    (place,) = explain(model, match.name, rtol=1e-12).places
    assert place.state == "refused" and place.spec is not None and place.proof is not None
    assert "does not compute what it seems to" in str(place.reason) and place.proof.reason == place.reason
    assert fuse(model, match).op_type == "HinaMoE"


def test_long_lists_of_neighbours_are_cut() -> None:
    model = model_of(Loop(width=20))
    find_blocks(model)
    hot = max(model.graph, key=lambda node: len(node.outputs[0].consumers()))
    shown = view(hot)
    assert len(shown.readers) <= 6 and shown.left_out >= 14
