"""MoeMatch -> HinaMoE node: where weights come from, what stays, what goes."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.fuse_moe import check, fuse
from graph_passes.matchers import MoeMatch, WeightSource
from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import INPUTS
from graph_passes.pipeline import fuse_model
from tests.graphs import only_match
from tests.unrolled_graphs import Loop, model_of


def weights_of(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[len(INPUTS) :] if value is not None]


def array(value: ir.Value | None) -> np.ndarray:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def fused(loop: Loop, **options: str) -> tuple[ir.Model, MoeMatch, ir.Node]:
    model = model_of(loop, **options)
    match = only_match(model)
    return model, match, fuse(model, match)


def test_weights_stored_kn_become_one_stacked_tensor() -> None:
    loop = Loop()
    model, _, node = fused(loop)
    assert node.attributes.get_int("experts_stacked", 1) == 1
    gate, up, down = weights_of(node)
    for value, tensors in ((gate, loop.gate), (up, loop.up), (down, loop.down)):
        assert isinstance(value.const_value, ir.LazyTensor)
        np.testing.assert_array_equal(array(value), np.stack(tensors))
        assert list(value.shape) == [4, *tensors[0].shape]
    np.testing.assert_array_equal(array(node.inputs[1]), loop.router)
    # The old weights are gone: nothing but the node's own initializers is left.
    assert set(model.graph.initializers.values()) <= {v for v in node.inputs if v} | shape_constants(model)


def shape_constants(model: ir.Model) -> set[ir.Value]:
    return {v for v in model.graph.initializers.values() if v.const_value is not None and v.const_value.size < 8}


def test_weights_stored_nk_are_referenced_where_they_lie() -> None:
    model = model_of(Loop(weights="gemm", scatter_add=True, bias=True))
    match = only_match(model)
    sources = [source.value for name in match.spec.weight_inputs for source in match.weights[name]]
    node = fuse(model, match)
    assert node.attributes.get_int("experts_stacked", 1) == 0
    assert weights_of(node) == sources
    assert len(sources) == 4 * 4


def test_one_expert_layout_decides_for_all_fields() -> None:
    """gate and up lie [N, K] per expert, down lies [K, N]: the node has one layout, so everything is stacked."""
    loop = Loop(weights="gemm")
    model = model_of(loop)
    match = only_match(model)
    for e, source in enumerate(match.weights["down_proj"]):
        source.value.const_value = ir.Tensor(loop.down[e].T.copy(), name=source.value.name)
    down = tuple(WeightSource(source.value, transpose=True) for source in match.weights["down_proj"])
    node = fuse(model, replace(match, weights={**match.weights, "down_proj": down}))
    assert node.attributes.get_int("experts_stacked", 1) == 1
    gate, _, stacked_down = weights_of(node)
    np.testing.assert_array_equal(array(gate), np.stack(loop.gate))
    np.testing.assert_array_equal(array(stacked_down), np.stack(loop.down))


def test_slices_of_one_stacked_tensor_are_that_tensor() -> None:
    loop = Loop(weights="gemm")
    model = model_of(loop)
    match = only_match(model)
    weights = {}
    for name, tensors in (("gate_proj", loop.gate), ("up_proj", loop.up), ("down_proj", loop.down)):
        whole = ir.Value(name=f"all_{name}", const_value=ir.Tensor(np.stack(tensors), name=f"all_{name}"))
        model.graph.register_initializer(whole)
        weights[name] = tuple(WeightSource(whole, index=e) for e in range(4))
    node = fuse(model, replace(match, weights=weights))
    assert [value.name for value in weights_of(node)] == ["all_gate_proj", "all_up_proj", "all_down_proj"]


def test_names_in_use_are_avoided() -> None:
    """The block is called as its first node, and every name that the fuser would take is taken."""
    _, _, node = fused(Loop())
    created = [value.name for value in node.inputs if value is not None and value.name != "x"]
    assert created
    before = "\n".join(f"clash{i} = Identity(x)" for i in range(len(created)))
    after = "\n".join(f"kept{i} = Identity(clash{i})" for i in range(len(created)))
    outputs = ", ".join(["float[B, S, 8] y", *(f"float[B, S, 8] kept{i}" for i in range(len(created)))])
    model = model_of(Loop(), before=before, after=after, outputs=outputs)
    match = only_match(model)
    match = replace(match, name=created[0].removesuffix(".router_weight"))
    for index, name in enumerate(created):
        holder = ir.Value(name=name, const_value=ir.tensor(np.zeros(1, np.float32), name=name))
        model.graph.register_initializer(holder)
        user = ir.Node("", "Identity", [holder], num_outputs=1, name=f"user{index}")
        user.outputs[0].name = f"used{index}"
        user.outputs[0].type, user.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
        model.graph.append(user)
        model.graph.outputs.append(user.outputs[0])
    node = fuse(model, match)
    names = [v.name for n in model.graph for v in n.outputs] + list(model.graph.initializers) + ["x"]
    assert len(names) == len(set(names))
    assert not {value.name for value in node.inputs if value is not None and value.name != "x"} & set(created)


def test_output_keeps_name_type_and_shape() -> None:
    model, _, node = fused(Loop(), after="z = Neg(y)", outputs="float[B, S, 8] y, float[B, S, 8] z")
    output = node.outputs[0]
    assert (output.name, output.dtype) == ("y", ir.DataType.FLOAT)
    assert [str(d) for d in output.shape] == ["B", "S", "8"]
    assert model.graph.outputs[0] is output
    assert [n.op_type for n in model.graph] == ["HinaMoE", "Neg"]
    assert model.opset_imports["hina"] == 1
    assert node.inputs[0] is model.graph.inputs[0]


def test_router_logits_that_are_an_output_survive() -> None:
    model, _, node = fused(Loop(), outputs="float[B, S, 8] y, float[T, 4] logits")
    assert [n.op_type for n in model.graph] == ["Reshape", "MatMul", "HinaMoE"]
    assert model.graph.outputs[1].name == "logits"
    np.testing.assert_array_equal(array(node.inputs[1]), Loop().router)


def test_fusing_twice_changes_nothing() -> None:
    model = model_of(Loop())
    assert fuse_model(model).applied
    once = ir.to_proto(model).SerializeToString(deterministic=True)
    again = fuse_model(model)
    assert (again.found, again.refused, again.applied) == ([], [], False)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == once


@pytest.mark.parametrize("change", [{"num_experts": 5}, {"intermediate_size": 7}])
def test_a_spec_that_contradicts_the_weights_leaves_the_model_alone(change: dict[str, int]) -> None:
    model = model_of(Loop())
    match = only_match(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    spec: MoeSpec = replace(match.spec, **change)
    with pytest.raises(ValueError, match=r"router_weight|gate_proj"):
        fuse(model, replace(match, spec=spec))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def bytes_at_peak(value: ir.Value) -> int:
    """Bytes allocated at once while the tensor of `value` is computed."""
    tracemalloc.start()
    array(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_a_transposed_tensor_is_copied_once() -> None:
    _, match, node = fused(Loop(hidden=256, inter=6, width=256, top_k=2))
    source = match.constants["router_weight"]
    assert source.transpose
    source.value.const_value = ir.Tensor(source.stored.numpy())
    size = 4 * 256 * 256
    assert size < bytes_at_peak(node.inputs[1]) < 1.5 * size


def double(match: MoeMatch, name: str) -> WeightSource:
    tensor = match.weights[name][0].stored.numpy().astype(np.float64)
    return WeightSource(ir.Value(name="wide", const_value=ir.tensor(tensor, name="wide")), transpose=True)


@pytest.mark.parametrize("what", ["hidden_states", "a weight", "every weight", "a constant", "ids"])
def test_types_the_op_does_not_know_are_refused(what: str) -> None:
    model = model_of(Loop())
    match = only_match(model)
    check(match)
    gates = match.weights["gate_proj"]
    changes: dict[str, dict[str, object]] = {
        "hidden_states": {"hidden_states": ir.Value(name="x64", type=ir.TensorType(ir.DataType.DOUBLE))},
        "a weight": {"weights": {**match.weights, "gate_proj": (*gates[:-1], double(match, "gate_proj"))}},
        "every weight": {"weights": {**match.weights, "gate_proj": (double(match, "gate_proj"),) * 4}},
        "a constant": {"constants": {"router_weight": double(match, "gate_proj")}},
        "ids": {"inputs": {"topk_ids": ir.Value(name="bits", type=ir.TensorType(ir.DataType.UINT8))}},
    }
    with pytest.raises(
        ValueError, match=r"\((x64|wide|bits)\) has type (float64|uint8), HinaMoE takes (float32|int64), "
    ):
        check(replace(match, **changes[what]))


def test_experts_may_differ_in_type_unless_they_are_stacked() -> None:
    for weights, scatter_add in (("gemm", True), ("right", False)):
        model = model_of(Loop(weights=weights, scatter_add=scatter_add))
        match = only_match(model)
        half = match.weights["up_proj"][1].value
        assert half.const_value is not None
        half.const_value = ir.tensor(half.const_value.numpy().astype(np.float16), name=half.name)
        if weights == "gemm":
            types = [value.const_value.dtype for value in weights_of(fuse(model, match)) if value.const_value]
            assert types.count(ir.DataType.FLOAT16) == 1
        else:
            with pytest.raises(ValueError, match="the experts' up_proj have types FLOAT and FLOAT16"):
                check(match)


@pytest.mark.parametrize("field", ["activation_alpha", "routed_scaling_factor"])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_numbers_that_are_not_finite_are_refused(field: str, number: float) -> None:
    match = only_match(model_of(Loop()))
    with pytest.raises(ValueError, match=f"{field} is {number} in the graph, HinaMoE takes finite numbers"):
        check(replace(match, spec=replace(match.spec, **{field: number})))


def test_sizes_are_checked_before_anything_else() -> None:
    match = only_match(model_of(Loop(bias=True)))
    check(match)
    for name, rows in (("down_proj_bias", 1), ("down_proj", 9)):
        value = ir.Value(name="odd", const_value=ir.tensor(np.zeros((rows, 6), np.float32), name="odd"))
        sources = (*match.weights[name][:-1], WeightSource(value))
        with pytest.raises(ValueError, match=rf"{name} \(odd\) is \[{rows}, 6\], expected \[8"):
            check(replace(match, weights={**match.weights, name: sources}))
    three = match.weights["up_proj"][:3]
    with pytest.raises(ValueError, match="up_proj has 3 tensors for 4 experts"):
        check(replace(match, weights={**match.weights, "up_proj": three}))
    one = ir.Value(name="odd", const_value=ir.tensor(np.zeros(1, np.float32), name="odd"))
    with pytest.raises(ValueError, match=r"e_score_correction_bias \(odd\) is \[1\], expected \[4\]"):
        check(replace(match, constants={**match.constants, "e_score_correction_bias": WeightSource(one)}))
