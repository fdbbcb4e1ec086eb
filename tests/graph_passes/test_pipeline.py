"""All passes in order: everything or nothing, and what the report says."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.pipeline import fuse_model
from tests.graphs import parse
from tests.unrolled_graphs import Loop, model_of


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


def two_blocks(**second: object) -> ir.Model:
    """Two blocks one directly behind the other."""
    return model_of(Loop(result="mid", prefix="a_"), Loop(source="mid", prefix="b_", seed=1, **second))


def test_every_block_is_fused() -> None:
    model = two_blocks()
    stages: list[tuple[str, int, int]] = []
    report = fuse_model(model, progress=lambda stage, done, total: stages.append((stage, done, total)))
    assert report.applied and report.fused == report.found and not report.refused
    assert [node.op_type for node in model.graph] == ["HinaMoE", "HinaMoE"]
    first, second = model.graph
    assert second.inputs[0] is first.outputs[0]
    assert (report.nodes_before > 100, report.nodes_after) == (True, 2)
    assert [block.bytes for block in report.fused] == [3 * 4 * 6 * 8 * 4] * 2
    assert all(block.worst_relative_l2 < 1e-5 and block.family == "unrolled_loop" for block in report.fused)
    assert ("checking MoE blocks", 2, 2) in stages and ("rewriting MoE blocks", 2, 2) in stages


def test_a_refused_block_leaves_everything_as_it_was() -> None:
    model = two_blocks(experts=[0, 1, 2])
    before = serialized(model)
    report = fuse_model(model)
    assert (len(report.found), len(report.refused), report.fused, report.applied) == (1, 1, [], False)
    assert "expert 3 is missing" in report.refused[0].reason
    assert report.nodes_before == report.nodes_after
    assert serialized(model) == before


def test_partial_fuses_the_rest() -> None:
    model = two_blocks(experts=[0, 1, 2])
    report = fuse_model(model, partial=True)
    assert (len(report.fused), len(report.refused), report.applied) == (1, 1, True)
    assert [node.op_type for node in model.graph].count("HinaMoE") == 1
    assert any(node.op_type == "NonZero" for node in model.graph)


def test_nothing_to_fuse() -> None:
    model = parse("(float[B, 8] x) => (float[B, 8] y) { y = MatMul(x, w) }", {"w": np.eye(8, dtype=np.float32)})
    before = serialized(model)
    report = fuse_model(model)
    assert (report.found, report.refused, report.applied) == ([], [], False)
    assert serialized(model) == before


def test_a_block_that_the_probe_rejects_is_refused() -> None:
    model = model_of(Loop())
    before = serialized(model)
    report = fuse_model(model, rtol=1e-12)
    assert "relative L2 difference" in report.refused[0].reason
    assert serialized(model) == before
