"""What a conversion promises for every family: once is enough, names do not clash, and what is not the block stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import fuse_model
from tests.families import FAMILIES, tokens
from tests.graphs import copy_of, run_original

LOOP, SCATTERED, NAMES = ("logits", "probs", "ids", "mixing"), ("l", "ids", "w0", "sc"), ("l", "s", "t", "w")
ROUTER_VALUES = {
    "loop": LOOP,
    "loop of ScatterND": LOOP,
    "dense": SCATTERED,
    "dense, weights on the input": SCATTERED,
    "MoE": ("l",),
    "QMoE": ("l",),
}
"""Logits, scores, ids and weights of the routers of some families; those of the others are `NAMES`."""

families = pytest.mark.parametrize("family", FAMILIES)


def fused(model: ir.Model) -> ir.Model:
    """A copy of the model with its block fused."""
    copy = copy_of(model)
    report = fuse_model(copy)
    assert len(report.fused) == 1 and report.refused == []
    return copy


def assert_equal_outputs(model: ir.Model, other: ir.Model) -> None:
    """Both give the same on a few inputs, by the same names."""
    assert [v.name for v in model.graph.outputs] == [v.name for v in other.graph.outputs]
    for length in (1, 9):
        x = tokens(model, 2, length)
        expected, found = run_original(model, x), run_original(other, x, options=hina_ort.session_options())
        for one, result in zip(expected, found, strict=True):
            assert (one.dtype, one.shape) == (result.dtype, result.shape)
            assert relative_l2(one.astype(np.float64), result.astype(np.float64)) <= 1e-5


def names_of(model: ir.Model) -> list[str | None]:
    """Names of all values."""
    graph = model.graph
    return [*graph.initializers, *(v.name for v in graph.inputs), *(v.name for n in graph for v in n.outputs)]


@families
def test_converting_twice_changes_nothing(family: str, tmp_path: Path) -> None:
    external_data.save(FAMILIES[family](), tmp_path / "model.onnx")
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    assert hina_ort.convert(tmp_path / "model.onnx", first).written
    report = hina_ort.convert(first, second)
    assert (report.already_fused, report.written, second.exists()) == (1, None, False)
    model = external_data.load(first)
    before = ir.to_proto(model)
    assert not fuse_model(model).applied
    assert ir.to_proto(model) == before


@families
def test_names_do_not_clash(family: str) -> None:
    """Other values and nodes of the model have the names that the conversion would give."""
    model = FAMILIES[family]()
    plain = fused(model)
    (node,) = (node for node in plain.graph if node.op_type == "HinaMoE")
    wanted = [name for name in names_of(plain) if name not in names_of(model)] + [node.name]
    for name in wanted:
        taken = ir.node("Neg", [model.graph.inputs[0]], name=name)
        taken.outputs[0].name = name
        taken.outputs[0].type, taken.outputs[0].shape = model.graph.inputs[0].type, model.graph.inputs[0].shape
        model.graph.append(taken)
        model.graph.outputs.append(taken.outputs[0])
    result = fused(model)
    assert len(set(names_of(result))) == len(names_of(result))
    assert len({node.name for node in result.graph}) == len(result.graph)
    assert_equal_outputs(model, result)


@families
@pytest.mark.parametrize(("opset", "ir_version"), [(18, 8), (22, 10)])
def test_versions_and_what_describes_the_model_are_kept(family: str, opset: int, ir_version: int) -> None:
    model = FAMILIES[family]()
    model.opset_imports[""], model.ir_version = opset, ir_version
    model.producer_name, model.doc_string = "exporter", "a model"
    model.metadata_props["key"] = "value"
    result = fused(model)
    assert result.ir_version == ir_version
    assert {**model.opset_imports, "hina": 1} == {**result.opset_imports}
    assert (result.producer_name, result.doc_string) == ("exporter", "a model")
    assert result.metadata_props == {"key": "value"}
    for one, other in zip(
        (*model.graph.inputs, *model.graph.outputs), (*result.graph.inputs, *result.graph.outputs), strict=True
    ):
        assert (one.name, one.type, one.shape) == (other.name, other.type, other.shape)
    assert_equal_outputs(model, result)


@families
def test_what_the_router_says_survives_as_an_output(family: str) -> None:
    model = FAMILIES[family]()
    inner = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(inner[name] for name in ROUTER_VALUES.get(family, NAMES))
    assert_equal_outputs(model, fused(model))


def test_a_model_that_is_refused_keeps_the_names_of_its_tensors() -> None:
    """A Constant's tensor may have any name, or none; the working copy names it after its initializer."""
    model = FAMILIES["loop"]()
    node = ir.node("Constant", [], {"value": ir.tensor(np.array([1]), name="other")})
    node.outputs[0].name = "axis"
    model.graph.insert_before(model.graph[0], node)
    (squeeze, *_) = (n for n in model.graph if n.op_type == "Squeeze")
    squeeze.replace_input_with(1, node.outputs[0])
    model.graph.initializers["k"].const_value = ir.tensor(np.array([3]), name="k")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert fuse_model(model).refused
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
