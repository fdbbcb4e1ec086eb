"""Blocks in local functions: fused once, in the function, when they are proven for every call; else call by call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import relative_l2
from graph_passes.moe_node import is_hina_moe
from graph_passes.normalize import normalize
from graph_passes.pipeline import FusionReport, fuse_model
from graph_passes.quantize.rtn import WeightError
from graph_passes.unfuse import UnfuseError, unfuse_model
from hina_ort.inspection import explain_node, inspect_model
from hina_ort.unfusing import unfuse
from tests.bodies import inside_if
from tests.families import FAMILIES, tokens
from tests.graphs import copy_of, run_original
from tests.unrolled_graphs import Loop, model_of

Weights = list[onnx.TensorProto]


def called(blocks: Sequence[ir.Model], *, as_inputs: bool, opset: int = 20) -> ir.Model:
    """The first of `blocks` as a function that is called for each of them, one call behind the other.

    The initializers are inputs of the function, those of each block for its call, or constants of it.
    """
    first = ir.to_proto(blocks[0])
    x, y = first.graph.input[0].name, first.graph.output[0].name
    names = [tensor.name for tensor in first.graph.initializer]
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in first.graph.initializer]
    imports = [helper.make_opsetid(o.domain, opset if o.domain == "" else o.version) for o in first.opset_import]
    function = helper.make_function(
        "local",
        "Block",
        [x, *(names if as_inputs else [])],
        [y],
        [*([] if as_inputs else constants), *first.graph.node],
        imports,
    )
    nodes, tensors = [], []
    for index, block in enumerate(blocks):
        arguments = [f"value{index}"]
        for tensor in ir.to_proto(block).graph.initializer if as_inputs else ():
            tensor.name = f"call{index}.{tensor.name}"
            tensors.append(tensor)
            arguments.append(tensor.name)
        nodes.append(helper.make_node("Block", arguments, [f"value{index + 1}"], name=f"call{index}", domain="local"))
    infos = [onnx.ValueInfoProto.FromString(first.graph.input[0].SerializeToString()) for _ in range(len(blocks) + 1)]
    for index, info in enumerate(infos):
        info.name = f"value{index}"
    graph = helper.make_graph(nodes, "main", infos[:1], infos[-1:], tensors, value_info=infos[1:-1])
    model_imports = [*first.opset_import, helper.make_opsetid("local", 1)]
    made = helper.make_model(graph, opset_imports=model_imports, ir_version=10, functions=[function])
    onnx.checker.check_model(made)
    return ir.from_proto(made)


def check(model: ir.Model, like: ir.Model) -> tuple[ir.Model, FusionReport]:
    """The model, fused, and the report; it gives what it gave before."""
    result = copy_of(model)
    report = fuse_model(result)
    assert report.applied and report.refused == []
    for length in (1, 9):
        x = tokens(like, 2, length)
        (expected,) = run_original(model, x)
        (found,) = run_original(result, x, options=hina_ort.session_options())
        assert relative_l2(expected.astype(np.float64), found.astype(np.float64)) <= 1e-5
    return result, report


def in_function(model: ir.Model) -> list[ir.Node]:
    """The HinaMoE nodes of the model's one function, which is called as before; none are in the main graph."""
    (function,) = model.functions.values()
    assert {node.op_type for node in model.graph} == {"Block"}
    assert function.opset_imports["hina"] == model.opset_imports["hina"] == 1
    return [node for node in function.all_nodes() if is_hina_moe(node)]


@pytest.mark.parametrize("as_inputs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_is_fused_once(family: str, as_inputs: bool) -> None:
    block = FAMILIES[family]()
    result, report = check(called([block, block], as_inputs=as_inputs), block)
    assert len(in_function(result)) == len(report.fused) == 1


def test_every_call_has_its_own_weights() -> None:
    """Stored [K, N]: each call hands over tensors that were made of its own weights, and the old ones are gone."""
    blocks = [model_of(Loop(seed=seed)) for seed in range(3)]
    result, _ = check(called(blocks, as_inputs=True), blocks[0])
    (node,) = in_function(result)
    calls = list(result.graph)
    assert len({id(call.inputs[-1]) for call in calls}) == 3
    assert {value.name for call in calls for value in call.inputs[1:]} == set(result.graph.initializers)
    assert [value for value in node.inputs if value is not None and value.producer() is not None] == []


def test_calls_that_share_weights_go_on_sharing_them() -> None:
    block = model_of(Loop())
    model = called([block, block], as_inputs=True)
    first, second = model.graph
    for index, value in enumerate(first.inputs[1:], 1):
        second.replace_input_with(index, value)
    result, _ = check(model, block)
    first, second = result.graph
    assert first.inputs[1:] == second.inputs[1:]


def test_weights_in_place_stay_where_they_are() -> None:
    block = model_of(Loop(scatter_add=True, weights="gemm"))
    model = called([block], as_inputs=True)
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    fuse_model(model)
    (call,) = model.graph
    kept = {v.name for v in call.inputs if v is not None and v.name in tensors and v.const_value is tensors[v.name]}
    assert {f"call0.{name}{e}" for name in ("gate", "up", "down") for e in range(4)} <= kept


def test_one_call_that_cannot_be_proven_keeps_the_function_from_being_fused() -> None:
    """The second call takes k = 3 but hands over indices for k = 2."""
    block = model_of(Loop())
    other = model_of(Loop())
    other.graph.initializers["k"].const_value = ir.Tensor(np.array([3]), name="k")
    model = called([block, other], as_inputs=True)
    before = ir.to_proto(model)
    report = fuse_model(model)
    assert len(report.found) == 1 and len(report.refused) == 1 and not report.applied
    assert ir.to_proto(model) == before
    partly = copy_of(model)
    assert len(fuse_model(partly, partial=True).fused) == 1
    x = tokens(block, 2, 5)
    (expected,), (found,) = run_original(model, x), run_original(partly, x, options=hina_ort.session_options())
    assert relative_l2(expected, found) <= 1e-5


def test_calls_with_other_numbers_of_experts_are_fused_one_by_one() -> None:
    """k is an argument: the calls mean different nodes, so the function is inlined."""
    block, other = model_of(Loop()), model_of(Loop(top_k=3))
    result, report = check(called([block, other], as_inputs=True), block)
    assert len(report.fused) == 2 and not result.functions
    assert sum(is_hina_moe(node) for node in result.graph) == 2


@pytest.mark.parametrize(("opset", "ir_version"), [(20, 8), (21, 10), (22, 9)])
def test_a_function_may_have_another_opset(opset: int, ir_version: int) -> None:
    block = model_of(Loop())
    model = called([block, block], as_inputs=True)
    model.opset_imports[""], model.ir_version = opset, ir_version
    result, report = check(model, block)
    assert len(report.fused) == 1 and len(in_function(result)) == 1
    (function,) = result.functions.values()
    assert (function.opset_imports[""], result.opset_imports[""], result.ir_version) == (20, opset, ir_version)


def test_a_weight_that_a_call_computes_is_refused() -> None:
    block = model_of(Loop())
    model = called([block], as_inputs=True)
    (call,) = model.graph
    index = next(i for i, value in enumerate(call.inputs) if value is not None and value.name == "call0.gate1")
    negative = ir.node("Neg", [call.inputs[index]])
    negative.outputs[0].name = "negative"
    model.graph.insert_before(call, negative)
    call.replace_input_with(index, negative.outputs[0])
    report = fuse_model(model)
    assert report.found == [] and len(report.refused) == 1


def test_functions_within_functions() -> None:
    """Each call of Layer calls Block: Layer is fused once, Block is gone."""
    block = model_of(Loop())
    proto = ir.to_proto(called([block], as_inputs=False))
    inner = helper.make_node("Block", ["a"], ["b"], domain="local")
    add = helper.make_node("Add", ["a", "b"], ["c"])
    layer = helper.make_function("local", "Layer", ["a"], ["c"], [inner, add], proto.opset_import)
    proto.functions.append(layer)
    del proto.graph.node[:]
    proto.graph.node.append(helper.make_node("Layer", ["value0"], ["middle"], domain="local"))
    proto.graph.node.append(helper.make_node("Layer", ["middle"], ["value1"], domain="local"))
    result, report = check(ir.from_proto(proto), block)
    assert len(report.fused) == 1 and [function.name for function in result.functions.values()] == ["Layer"]
    (function,) = result.functions.values()
    assert sorted(node.op_type for node in function if node.op_type != "Constant") == ["Add", "HinaMoE"]


def called_in_a_body(block: ir.Model) -> ir.Model:
    """`block` as a function that is called in a branch of an If."""
    proto = ir.to_proto(called([block], as_inputs=True))
    functions = list(proto.functions)
    del proto.functions[:]
    outer = ir.to_proto(inside_if(ir.from_proto(proto), weights_outside=True))
    outer.functions.extend(functions)
    return ir.from_proto(outer)


def test_a_call_in_a_body_is_inlined() -> None:
    block = model_of(Loop(hidden=32, inter=24))
    model = called_in_a_body(block)
    copy = copy_of(model)
    assert len(fuse_model(copy).fused) == 1 and not copy.functions
    x = tokens(block, 2, 5)
    for first in (True, False):
        feeds = {"value0": x, "value1_first": np.array(first)}
        (expected,) = run_original(model, feeds)
        (found,) = run_original(copy, feeds, options=hina_ort.session_options())
        assert relative_l2(expected, found) <= 1e-5


def test_converting_twice_changes_nothing(tmp_path: Path) -> None:
    block = model_of(Loop())
    external_data.save(called([block, block], as_inputs=True), tmp_path / "model.onnx")
    assert hina_ort.convert(tmp_path / "model.onnx", tmp_path / "first.onnx", check=2).written
    report = hina_ort.convert(tmp_path / "first.onnx", tmp_path / "second.onnx")
    assert (report.written, report.proven, report.already_fused) == (None, [], 1)
    model = external_data.load(tmp_path / "first.onnx")
    before = ir.to_proto(model)
    assert not fuse_model(model).applied
    assert ir.to_proto(model) == before


def test_reports_know_the_blocks_of_functions(tmp_path: Path) -> None:
    block = model_of(Loop())
    external_data.save(called([block, block], as_inputs=True), tmp_path / "model.onnx")
    report = hina_ort.convert(tmp_path / "model.onnx", tmp_path / "fused.onnx", html=tmp_path / "page.html")
    assert len(report.fused) == 1 and "NonZero_13" in (tmp_path / "page.html").read_text()
    assert sum(layer.bytes_fused for layer in report.layers) > 2 * report.fused[0].bytes
    assert sum(layer.bytes_left for layer in report.layers) == 0
    states = [[b.state for b in inspect_model(tmp_path / f"{name}.onnx").blocks] for name in ("model", "fused")]
    assert states == [["recognised"] * 2, ["fused"] * 2]


def test_weights_of_every_call_may_be_quantised(tmp_path: Path) -> None:
    blocks = [model_of(Loop(hidden=32, inter=32, seed=seed)) for seed in range(2)]
    model = called(blocks, as_inputs=True)
    external_data.save(model, tmp_path / "model.onnx")
    report = hina_ort.convert(tmp_path / "model.onnx", tmp_path / "int8.onnx", weights="int8")
    assert len(report.weights) == 2
    x = tokens(blocks[0], 2, 9)
    (expected,) = run_original(model, x)
    session = ort.InferenceSession(tmp_path / "int8.onnx", hina_ort.session_options())
    (found,) = session.run(None, {"value0": x})
    assert relative_l2(expected.astype(np.float64), found.astype(np.float64)) < 0.03


CONFLICT = "the function Block imports opset 20 of ai.onnx and the model 21, so it cannot be inlined; export the model"


def of_another_opset(model: ir.Model) -> ir.Model:
    """The model with a later opset than that of its functions."""
    model.opset_imports[""] = 21
    return model


@pytest.mark.parametrize("as_inputs", [False, True])
def test_a_fused_function_is_inspected_quantised_and_unfused(tmp_path: Path, as_inputs: bool) -> None:
    """Weights that are constants of the function become initializers, where these look for them."""
    block = model_of(Loop(hidden=32, inter=32))
    original = called([block, block], as_inputs=as_inputs)
    external_data.save(original, tmp_path / "model.onnx")
    converted = hina_ort.convert(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    assert [found.state for found in inspect_model(tmp_path / "fused.onnx").blocks] == ["fused"] * 2
    assert [place.state for place in explain_node(tmp_path / "fused.onnx", "HinaMoE").places] == ["fused"]
    x = tokens(block, 2, 5)
    (expected,) = run_original(original, x)
    for source in ("model", "fused"):
        target = tmp_path / f"{source}8.onnx"
        assert len(hina_ort.convert(tmp_path / f"{source}.onnx", target, weights="int8").weights) == 2
        (found,) = ort.InferenceSession(target, hina_ort.session_options()).run(None, {"value0": x})
        assert relative_l2(expected.astype(np.float64), found.astype(np.float64)) < 0.03
    unfused = unfuse(tmp_path / "fused.onnx", tmp_path / "unfused.onnx")
    assert len(unfused.unfused) == 2 and unfused.nodes_before == converted.nodes_after
    assert not external_data.load(tmp_path / "unfused.onnx").functions
    (found,) = ort.InferenceSession(tmp_path / "unfused.onnx").run(None, {"value0": x})
    assert relative_l2(expected, found) <= 1e-5


def test_calls_share_the_constants_of_their_function(tmp_path: Path) -> None:
    """Also when it is inlined: the file does not grow with the number of calls."""
    block = model_of(Loop(hidden=32, inter=32))
    once, thrice = called([block], as_inputs=False), called([block] * 3, as_inputs=False)
    external_data.save(thrice, tmp_path / "model.onnx")
    report = hina_ort.convert(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    assert sum(layer.bytes_fused for layer in report.layers) < 1.1 * report.fused[0].bytes
    unfused = external_data.load(tmp_path / "fused.onnx")
    assert len(unfuse_model(unfused)) == 3
    tensors = [value.const_value for value in unfused.graph.initializers.values()]
    assert sum(tensor.nbytes for tensor in tensors if tensor is not None) < 1.1 * report.fused[0].bytes
    for model in (once, thrice):
        normalize(model)
    assert len(thrice.graph.initializers) == len(once.graph.initializers)


@pytest.mark.parametrize("as_inputs", [False, True])
def test_a_fused_function_of_another_opset_is_not_inlined(tmp_path: Path, as_inputs: bool) -> None:
    block = model_of(Loop(hidden=32, inter=32))
    external_data.save(of_another_opset(called([block, block], as_inputs=as_inputs)), tmp_path / "model.onnx")
    report = hina_ort.convert(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    assert len(report.fused) == 1 and sum(layer.bytes_fused for layer in report.layers) > 0
    assert [found.state for found in inspect_model(tmp_path / "fused.onnx").blocks] == ["fused"] * 2
    assert [place.state for place in explain_node(tmp_path / "fused.onnx", "HinaMoE").places] == ["fused"]
    model = external_data.load(tmp_path / "fused.onnx")
    before = ir.to_proto(model)
    with pytest.raises(UnfuseError, match=CONFLICT):
        unfuse_model(model)
    assert ir.to_proto(model) == before
    for source in ("model", "fused"):
        with pytest.raises(WeightError, match=CONFLICT):
            hina_ort.convert(tmp_path / f"{source}.onnx", tmp_path / "int8.onnx", weights="int8")
    assert not (tmp_path / "int8.onnx").exists()


def test_blocks_of_a_function_of_another_opset_are_recognised(tmp_path: Path) -> None:
    block = model_of(Loop())
    external_data.save(of_another_opset(called([block, block], as_inputs=True)), tmp_path / "model.onnx")
    found = inspect_model(tmp_path / "model.onnx").blocks
    assert [block.state for block in found] == ["recognised"] * 2
    places = explain_node(tmp_path / "model.onnx", found[0].node).places
    assert [place.proof is not None and place.proof.proven for place in places] == [True] * 2


def test_a_call_of_another_opset_in_a_body_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = of_another_opset(called_in_a_body(model_of(Loop(hidden=32, inter=24))))
    before = ir.to_proto(model)
    report = fuse_model(model)
    (miss,) = report.refused
    assert miss.reason.startswith(CONFLICT) and miss.name == "call0" and ir.to_proto(model) == before
    external_data.save(model, tmp_path / "model.onnx")
    page = tmp_path / "page.html"
    assert hina_ort.convert(tmp_path / "model.onnx", tmp_path / "fused.onnx", html=page).written is None
    assert "cannot be inlined" in page.read_text()
    (found,) = inspect_model(tmp_path / "model.onnx").blocks
    assert (found.state, found.node, found.reason) == ("refused", "call0", miss.reason)
    assert [place.reason for place in explain_node(tmp_path / "model.onnx", "call0").places] == [miss.reason]


def test_calls_of_another_opset_that_differ_are_refused_with_the_reason() -> None:
    """The second hands over indices for another k than it takes, so that the function is not fused as a whole."""
    block, other = model_of(Loop()), model_of(Loop())
    other.graph.initializers["k"].const_value = ir.Tensor(np.array([3]), name="k")
    report = fuse_model(of_another_opset(called([block, other], as_inputs=True)))
    assert [miss.name for miss in report.refused] == ["call0", "call1"]
    assert [miss.reason.startswith(CONFLICT) for miss in report.refused] == [True, False]


def test_a_conflict_keeps_no_other_function_from_being_inlined() -> None:
    """Nor is a function inlined into one of another opset that calls it."""
    proto = ir.to_proto(called([model_of(Loop())] * 2, as_inputs=True))
    imports = [helper.make_opsetid("", 19), helper.make_opsetid("local", 1)]
    old = helper.make_function(
        "local", "Old", ["x"], ["y"], [helper.make_node("New", ["x"], ["y"], domain="local")], imports
    )
    new = helper.make_function(
        "local", "New", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], proto.opset_import
    )
    proto.functions.extend([old, new])
    proto.graph.node[0].output[0] = "block"
    proto.graph.node.insert(0, helper.make_node("Old", ["value0"], ["old"], domain="local"))
    proto.graph.node.insert(2, helper.make_node("Add", ["block", "old"], ["value1"]))
    proto.graph.value_info[0].name = "value1"
    model = ir.from_proto(proto)
    normalize(model)
    assert {function.name for function in model.functions.values()} == {"Old", "New"}
    assert [node.op_type for node in model.functions[("local", "Old", "")]] == ["New"]
