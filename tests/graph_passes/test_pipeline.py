"""All passes in order: everything or nothing, and what the report says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes import fuse_moe, pipeline
from graph_passes.matchers import Miss, MoeMatch, WeightSource
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


def test_blocks_that_read_the_same_tokens_are_both_fused() -> None:
    """They share the flattening of the tokens, which neither owns."""
    loops = Loop(prefix="a_", result="ya"), Loop(prefix="b_", result="yb", seed=3)
    model = model_of(*loops, after="y = Add(ya, yb)")
    report = fuse_model(model)
    assert report.refused == []
    *nodes, last = model.graph
    assert [node.op_type for node in (*nodes, last)] == ["HinaMoE", "HinaMoE", "Add"]
    for node, loop in zip(nodes, loops, strict=True):
        x, router = node.inputs[0], node.inputs[1]
        assert x is model.graph.inputs[0]
        assert router is not None and router.const_value is not None
        np.testing.assert_array_equal(router.const_value.numpy(), loop.router)
    assert list(last.inputs) == [node.outputs[0] for node in nodes]


def test_a_block_inside_another_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MATCHERS", 2 * pipeline.MATCHERS)
    report = fuse_model(model_of(Loop()))
    assert len(report.found) == len(report.refused) == 1
    assert f"overlaps with {report.found[0].name}, which" in report.refused[0].reason


def test_a_block_in_a_type_without_kernels_is_refused() -> None:
    loop = Loop()
    arrays = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in loop.arrays.items()}
    text = loop.text().replace("ConstantOfShape(", "Expand(zero, ")
    tokens = "double[B, S, 8]"
    report = fuse_model(parse(f"({tokens} x) => ({tokens} y) {{\n{text}\n}}", {**arrays, "zero": np.zeros(())}))
    assert (report.found, report.applied) == ([], False)
    assert "has type float64, HinaMoE takes float32, float16, bfloat16" in report.refused[0].reason


def claimed(monkeypatch: pytest.MonkeyPatch, change: Callable[[MoeMatch], MoeMatch]) -> None:
    """Let every matcher claim something else than it found."""

    def careless(graph: ir.Graph, matcher: Callable[[ir.Graph], list[MoeMatch | Miss]]) -> list[MoeMatch | Miss]:
        return [change(found) if isinstance(found, MoeMatch) else found for found in matcher(graph)]

    changed = tuple(partial(careless, matcher=matcher) for matcher in pipeline.MATCHERS)
    monkeypatch.setattr(pipeline, "MATCHERS", changed)


@pytest.mark.parametrize("field", ["router_bias", "e_score_correction_bias", "down_proj_bias"])
def test_a_tensor_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    one = WeightSource(ir.Value(name="one", const_value=ir.tensor(np.zeros(1, np.float32), name="one")))

    def change(match: MoeMatch) -> MoeMatch:
        if field in match.weights:
            return replace(match, weights={**match.weights, field: (one,) * 4})
        return replace(match, constants={**match.constants, field: one})

    claimed(monkeypatch, change)
    report = fuse_model(model_of(Loop(bias=True)))
    assert (report.found, report.applied) == ([], False)
    assert f"{field} (one) is [1], expected [" in report.refused[0].reason


def test_names_of_the_model_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ir.Model] = []
    names = fuse_moe.UniqueNames
    monkeypatch.setattr(pipeline, "UniqueNames", lambda model: made.append(model) or names(model))
    monkeypatch.setattr(fuse_moe, "UniqueNames", lambda model: made.append(model) or names(model))
    assert len(fuse_model(two_blocks()).fused) == 2
    assert len(made) == 1


def test_failed_shape_inference_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """ONNX's TopK has no bfloat16, which its shape inference says with a traceback."""
    text = "k = Constant<value = int64[1] {2}>() v, i = TopK(x, k) y = Identity(v)"
    header = '<ir_version: 9, opset_import: ["": 20]> test (bfloat16[T, 8] x) => (bfloat16[T, 2] y)'
    fuse_model(ir.from_proto(onnx.parser.parse_model(f"{header} {{ {text} }}")))
    assert caplog.records == []
