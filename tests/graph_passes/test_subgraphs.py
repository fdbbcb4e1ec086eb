"""Blocks in the bodies of If, Loop and Scan: matched, proven and fused where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import relative_l2
from graph_passes.normalize import normalize
from graph_passes.pipeline import fuse_model
from tests.bodies import inside_if, inside_loop, inside_scan
from tests.families import FAMILIES, tokens
from tests.graphs import copy_of, parse, run_original
from tests.unrolled_graphs import Loop, model_of

Feeds = dict[str, np.ndarray]


def check(model: ir.Model, *feeds: Feeds, blocks: int = 1) -> ir.Model:
    """The model with all its `blocks` fused; it gives what it gave before on each of `feeds`."""
    fused = copy_of(model)
    report = fuse_model(fused)
    assert report.refused == [] and len(report.fused) == blocks
    nodes = list(fused.graph.all_nodes())
    assert sum(node.op_type == "HinaMoE" for node in nodes) == blocks
    assert not {node.op_type for node in nodes} & {"TopK", "MatMul", "Gemm", "MoE", "QMoE", "ScatterElements"}
    for feed in feeds:
        expected = run_original(model, feed)
        for one, other in zip(expected, run_original(fused, feed, options=hina_ort.session_options()), strict=True):
            assert relative_l2(one.astype(np.float64), other.astype(np.float64)) < 1e-5
    return fused


def both_ways(model: ir.Model, x: np.ndarray) -> tuple[Feeds, Feeds]:
    """Feeds of a model of `inside_if` that take either branch."""
    name, condition = (str(value.name) for value in model.graph.inputs)
    return {name: x, condition: np.array(True)}, {name: x, condition: np.array(False)}


@pytest.mark.parametrize("weights_outside", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_of_if(family: str, weights_outside: bool) -> None:
    block = FAMILIES[family]()
    model = inside_if(block, weights_outside=weights_outside)
    check(model, *both_ways(model, tokens(block, 2, 9)))


@pytest.mark.parametrize("weights_outside", [False, True])
def test_a_branch_within_a_branch(weights_outside: bool) -> None:
    block = model_of(Loop())
    model = inside_if(inside_if(block, weights_outside=weights_outside), weights_outside=weights_outside)
    x = tokens(block, 2, 3)
    feeds = [
        {"x": x, "y_first": np.array(second), "y_chosen_first": np.array(first)}
        for first in (True, False)
        for second in (True, False)
    ]
    check(model, *feeds)


@pytest.mark.parametrize("weights_outside", [False, True])
@pytest.mark.parametrize("family", ["loop", "loop of ScatterND", "MoE"])
def test_the_body_of_a_loop(family: str, weights_outside: bool) -> None:
    block = FAMILIES[family]()
    x = tokens(block, 2, 4)
    check(
        inside_loop(block, weights_outside=weights_outside),
        *({"start": x, "times": np.array(times)} for times in (0, 1, 3)),
    )


@pytest.mark.parametrize("family", ["loop", "MoE"])
def test_the_body_of_a_scan(family: str) -> None:
    block = FAMILIES[family]()
    xs = np.stack([tokens(block, 2, 4, seed) for seed in range(3)])
    check(inside_scan(block), {"xs": xs})


def test_a_weight_that_a_loop_carries_is_refused() -> None:
    model = inside_loop(model_of(Loop()), carried="gate1")
    before = ir.to_proto(model)
    report = fuse_model(model)
    assert report.found == [] and len(report.refused) == 1
    assert ir.to_proto(model) == before


def test_a_missing_expert_in_a_body_is_refused() -> None:
    report = fuse_model(inside_if(model_of(Loop(experts=[0, 1, 3]))))
    assert report.found == [] and "expert 2 is missing" in report.refused[0].reason


def test_the_router_may_stay_outside() -> None:
    loop = Loop()
    text = loop.text()
    head = text[: text.index("flat_shape")]
    parts = f"{head} out = If (c) <then_branch = t () => (float[B, S, 8] y) {{ {text[len(head) :]} }}, "
    parts += "else_branch = e () => (float[B, S, 8] z) { z = Neg(x) }>"
    used = {name: array for name, array in loop.arrays.items() if name in text}
    model = ir.to_proto(parse(f"(float[B, S, 8] x, bool c) => (float[B, S, 8] out) {{ {parts} }}", {}))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in used.items())
    x = tokens(model_of(loop), 2, 5)
    fused = check(ir.from_proto(model), {"x": x, "c": np.array(True)}, {"x": x, "c": np.array(False)})
    assert [node.op_type for node in fused.graph] == ["If"]


def test_branches_that_share_weights_go_on_sharing_them(tmp_path: Path) -> None:
    """Each body has its own initializers, which older versions of ONNX Runtime ask for, on the same bytes."""
    block = model_of(Loop(hidden=32, inter=24))
    model = inside_if(block, weights_outside=True, twice=True)
    fused = check(model, *both_ways(model, tokens(block, 2, 5)), blocks=2)
    first, second = (node for node in fused.graph.all_nodes() if node.op_type == "HinaMoE")
    for node in (first, second):
        assert all(v.graph is node.graph for v in node.inputs[1:] if v is not None)
    assert [v and v.const_value for v in first.inputs[1:]] == [v and v.const_value for v in second.inputs[1:]]
    external_data.save(fused, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size < 1.3 * 3 * 4 * 32 * 24 * 4
    session = ort.InferenceSession(tmp_path / "model.onnx", hina_ort.session_options())
    for feeds in both_ways(model, tokens(block, 2, 5)):
        assert relative_l2(run_original(model, feeds)[0], session.run(None, feeds)[0]) < 1e-5


def test_weights_in_place_are_the_same_tensors_in_the_body() -> None:
    model = inside_if(model_of(Loop(weights="gemm", scatter_add=True)), weights_outside=True)
    tensors = {str(v.name): v.const_value for v in model.graph.initializers.values()}
    report = fuse_model(model)
    (node,) = (node for node in model.graph.all_nodes() if node.op_type == "HinaMoE")
    assert len(report.fused) == 1
    weights = [value for value in node.inputs if value is not None and value.const_value is not None]
    assert all(value.graph is node.graph and value.name not in tensors for value in weights)
    held = {id(value.const_value) for value in weights}
    assert all(id(tensors[f"{name}{e}"]) in held for name in ("gate", "up", "down") for e in range(4))
    assert not any(name.startswith(("gate", "up", "down")) for name in model.graph.initializers)


def test_weights_of_two_bodies_are_quantised_once(tmp_path: Path) -> None:
    block = model_of(Loop(hidden=32, inter=32))
    model = inside_if(block, weights_outside=True, twice=True)
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    external_data.save(model, source)
    report = hina_ort.convert(source, target, weights="int8")
    assert len(report.weights) == 2
    assert (tmp_path / "target.onnx.data").stat().st_size < 1.3 * 3 * 4 * 32 * 32
    session = ort.InferenceSession(target, hina_ort.session_options())
    for feeds in both_ways(model, tokens(block, 2, 5)):
        (expected,) = run_original(model, feeds)
        (output,) = session.run(None, feeds)
        assert relative_l2(expected.astype(np.float64), output.astype(np.float64)) < 0.02


def test_converting_twice_changes_nothing() -> None:
    model = inside_if(model_of(Loop()), weights_outside=True)
    fuse_model(model)
    once = ir.to_proto(model)
    assert not fuse_model(model).applied
    assert ir.to_proto(model) == once


def test_a_body_that_hands_out_what_it_captures_keeps_its_identity() -> None:
    """Else the body would give a value of the graph around it, which ONNX Runtime refuses."""
    loop = Loop(result="m")
    after = (
        "y = If (c) <then_branch = t () => (float[B, S, 8] p) { p = Identity(m) }, "
        "else_branch = e () => (float[B, S, 8] q) { q0 = Cast<to = 1>(m) q = Identity(q0) }>"
    )
    model = ir.to_proto(model_of(loop, after=after))
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    x = tokens(model_of(Loop()), 2, 5)
    check(ir.from_proto(model), *({"x": x, "c": np.array(c)} for c in (True, False)))


def test_what_normalisation_does_in_bodies() -> None:
    """Constants become initializers and are computed, casts and identities go, equal nodes become one."""
    body = "a0 = Identity(x) a1 = Cast<to = 1>(a0) a2 = Neg(a1) a3 = Neg(x) a4 = Add(a2, a3) "
    body += "one = Constant<value = int64[1] {1}>() two = Add(one, one) p = Unsqueeze(a4, two)"
    text = f"y = If (c) <then_branch = t () => (float[4, 4, 1] p) {{ {body} }}, "
    text += "else_branch = e () => (float[4, 4, 1] q) { r = Constant<value = int64[1] {2}>() q = Unsqueeze(x, r) }>"
    model = parse(f"(float[4, 4] x, bool c) => (float[4, 4, 1] y) {{ {text} }}", {})
    normalize(model)
    (node,) = model.graph
    assert [inner.op_type for inner in node.attributes["then_branch"].as_graph()] == ["Neg", "Add", "Unsqueeze"]
