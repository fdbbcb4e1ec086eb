"""Pictures of blocks: repeated branches are one box, stages are told apart, and what breaks is marked."""

from __future__ import annotations

import pytest

from graph_passes.matchers import MoeMatch
from graph_passes.picture import Drawing, block_after, block_before, nodes_of, surroundings
from tests.families import FAMILIES
from tests.graphs import only_match
from tests.unrolled_graphs import Loop, model_of


def boxes_of(drawing: Drawing) -> list[tuple[str, str, str]]:
    return [(box.stage, box.text, box.note) for box in drawing.boxes if box.stage != "input"]


def match_of(**loop: object) -> MoeMatch:
    return only_match(model_of(Loop(**loop)))


@pytest.mark.parametrize("scatter_add", [False, True])
def test_a_loop_looks_the_same_whatever_the_number_of_experts(scatter_add: bool) -> None:
    few, many = (block_before(match_of(width=width, scatter_add=scatter_add)) for width in (5, 12))
    assert boxes_of(few) == boxes_of(many) and few.edges == many.edges
    for drawing, experts in ((few, 5), (many, 12)):
        counts = {box.note: box.count for box in drawing.boxes if box.text == "MatMul"}
        assert counts == {"router_weight": 1, "gate_proj": experts, "up_proj": experts, "down_proj": experts}
        assert drawing.operators["experts"]["MatMul"] == 3 * experts


def test_every_node_is_counted_in_one_stage() -> None:
    match = match_of(width=4)
    drawing = block_before(match)
    assert sum(n for stage in drawing.operators.values() for n in stage.values()) == len(nodes_of(match))
    stage_of = {box.text: box.stage for box in drawing.boxes}
    assert stage_of["TopK"] == "top-k" and stage_of["Softmax"] == "router" and stage_of["Sigmoid"] == "experts"
    assert stage_of["ScatterElements"] == "combine" and stage_of["NonZero"] == "dispatch"


@pytest.mark.parametrize("family", FAMILIES)
def test_data_flows_down_from_the_input_to_the_output(family: str) -> None:
    drawing = block_before(only_match(FAMILIES[family]()))
    rows = [box.row for box in drawing.boxes]
    assert all(rows[source] < rows[target] for source, target in drawing.edges)
    assert drawing.boxes[0].text == "hidden_states" and drawing.boxes[-1].text == "output"
    reached = {0}
    for source, target in sorted(drawing.edges):
        if source in reached:
            reached.add(target)
    assert reached == set(range(len(drawing.boxes))), "every box is computed from the input"
    assert {"router", "experts"} <= {box.stage for box in drawing.boxes}
    assert any("router_weight" in box.note and box.stage == "router" for box in drawing.boxes)


def test_the_node_has_its_inputs_and_one_output() -> None:
    spec = match_of().spec
    drawing = block_after(spec, [("hidden_states", ""), ("router_weight", ""), ("shared_up_proj", "a note")])
    assert [box.stage for box in drawing.boxes] == ["input", "router", "shared expert", "output", "input"]
    assert drawing.edges == ((0, 3), (1, 3), (2, 3), (3, 4))


def test_the_surroundings_stay_small_however_many_neighbours_are_alike() -> None:
    match = match_of(width=40)
    ids = next(node for node in nodes_of(match) if node.op_type == "TopK")
    drawing = surroundings(ids)
    assert len(drawing.boxes) < 12
    assert [box.text for box in drawing.boxes if box.marked] == ["TopK"]
    hot = next(node for node in nodes_of(match) if node.op_type == "Transpose" and len(node.outputs[0].consumers()) > 9)
    assert max(box.count for box in surroundings(hot).boxes) == 40
