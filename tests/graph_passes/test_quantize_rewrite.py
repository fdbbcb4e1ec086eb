"""Weights of HinaMoE nodes as another type: which tensors come, stay and go, and how much memory it takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import external_data
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import FIELDS
from graph_passes.op_schema import INPUTS
from graph_passes.pipeline import fuse_model
from graph_passes.quantize import tensors
from graph_passes.quantize.formats import WeightFormat
from graph_passes.quantize.rewrite import NodeChange, WeightTypes, convert_weights
from graph_passes.quantize.rtn import CHUNK, WeightError, quantise
from tests.node import Node, make_model, make_spec, random_node
from tests.unrolled_graphs import Loop, model_of

INT4, INT8, MXFP4 = WeightFormat("int4", 32), WeightFormat("int8"), WeightFormat("mxfp4", 32)
SHARED: dict[str, Any] = {"shared_intermediate_size": 20, "shared_bias": True, "shared_expert_gate": True}


def node_of(seed: int = 0, activation_type: str = "float32", **fields: Any) -> Node:
    return random_node(make_spec(**fields), np.random.default_rng(seed), activation_type=activation_type)


def ir_model(node: Node) -> ir.Model:
    return ir.from_proto(make_model(node))


def hina_node(model: ir.Model) -> ir.Node:
    (node,) = (node for node in model.graph if is_hina_moe(node))
    return node


def arrays(node: ir.Node) -> dict[str, np.ndarray]:
    """The weights of a node by field: [E, ...], as the reference has them."""
    found = {}
    for name, values in weights_of(node).items():
        each = [value.const_value.numpy() for value in values if value.const_value is not None]
        found[name] = each[0] if len(each) == 1 else np.stack(each)
    return found


def converted(node: Node, **types: Any) -> tuple[ir.Model, NodeChange]:
    model = ir_model(node)
    (change,) = convert_weights(model, WeightTypes(**types))
    assert change.node is hina_node(model)
    return model, change


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("target", [INT4, INT8, MXFP4, WeightFormat("int4"), WeightFormat("int8", 16)], ids=str)
@pytest.mark.parametrize("stacked", [True, False])
def test_projections_become_codes_scales_and_zero_points(stacked: bool, target: WeightFormat, symmetric: bool) -> None:
    node = node_of(mlp="fused", bias=True, experts_stacked=stacked, **SHARED)
    _, change = converted(node, routed=target, symmetric=symmetric)
    spec, found = spec_of(change.node), arrays(change.node)
    projections = ("gate_up_proj", "down_proj")
    parts = ("", "_scales") if symmetric or target == MXFP4 else ("", "_scales", "_zero_points")
    fields = [n + part for n in node.spec.weight_inputs for part in (parts if n in projections else ("",))]
    assert spec == replace(
        node.spec,
        weight_inputs=tuple(fields),
        weight_formats=tuple(f"{name}={target}" for name in projections),
    )
    for name, weights in node.weights.items():
        if name not in projections:
            np.testing.assert_array_equal(found[name], weights)
            continue
        for expert, w in enumerate(weights):
            want = quantise(w, target, symmetric=symmetric, scale_type=found[f"{name}_scales"].dtype)
            for part, array in zip(parts, want.parts, strict=True):
                np.testing.assert_array_equal(found[name + part][expert], array)
                assert array.shape == spec.field_shape(name + part)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
@pytest.mark.parametrize("before", ["float32", "float16", "bfloat16"])
def test_projections_are_cast_and_the_rest_becomes_float32(before: str, dtype: ir.DataType) -> None:
    node = node_of(bias=True, activation_type=before, **SHARED)
    _, change = converted(node, routed=dtype, shared=None)
    found = arrays(change.node)
    assert spec_of(change.node) == node.spec
    for name, weights in node.weights.items():
        projection = name in node.spec.projections
        kept = projection and FIELDS[name].shared
        want = weights.astype(weights.dtype if kept else dtype.numpy() if projection else np.float32)
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name].astype(np.float32), want.astype(np.float32))
    router = change.node.inputs[1]
    assert router is not None and router.dtype == ir.DataType.FLOAT
    assert set(change.projections) == (set() if before == dtype.numpy().name else {"gate_proj", "up_proj", "down_proj"})
    for name, conversion in change.projections.items():
        exact = np.array_equal(found[name].astype(np.float32), node.weights[name].astype(np.float32))
        assert conversion.relative_l2 is not None and (conversion.relative_l2 == 0) == exact


def test_shared_experts_may_have_another_type() -> None:
    node = node_of(activation_type="bfloat16", **SHARED)
    _, change = converted(node, shared=INT8, accuracy_level=4)
    spec = spec_of(change.node)
    assert set(spec.formats) == {"shared_gate_proj", "shared_up_proj", "shared_down_proj"}
    assert spec.formats["shared_up_proj"] == INT8 and spec.accuracy_level == 4
    found = arrays(change.node)
    assert found["shared_up_proj"].shape == (20, 48) and found["up_proj"].dtype == ml_dtypes.bfloat16
    assert found["shared_up_proj_bias"].dtype == ml_dtypes.bfloat16, "nothing was asked for the routed experts"


def test_scales_are_float32_where_float16_has_no_normal_number() -> None:
    node = node_of()
    node.weights["up_proj"][3] *= np.float32(1e-6)
    _, change = converted(node, routed=INT4)
    types = {name: array.dtype.name for name, array in arrays(change.node).items() if name.endswith("_scales")}
    assert types == {"gate_proj_scales": "float16", "up_proj_scales": "float32", "down_proj_scales": "float16"}


def test_the_report_says_types_bytes_and_errors(tmp_path: Path) -> None:
    node = node_of(num_experts=4)
    model, change = converted(node, routed=INT8)
    down = change.projections["down_proj"]
    assert (down.before, down.after) == ("float32", "int8")
    assert down.bytes_before == 4 * 48 * 33 * 4
    assert down.bytes_after == 4 * 48 * (33 + 2 + 1)  # codes, a float16 scale and a zero point for each row
    assert down.relative_l2 is None
    external_data.save(model, tmp_path / "model.onnx")
    values = np.stack([INT8.dequantise(*quantise(w, INT8).parts, *w.shape) for w in node.weights["down_proj"]])
    error = np.linalg.norm(values - node.weights["down_proj"]) / np.linalg.norm(node.weights["down_proj"])
    assert down.relative_l2 == pytest.approx(error, rel=1e-2)  # scales are float16 here, float32 there


def test_nothing_is_changed_where_all_is_as_asked_for() -> None:
    node = node_of()
    model, _ = converted(node, routed=INT4, accuracy_level=4)
    before = [value.name for value in hina_node(model).inputs if value is not None]
    (change,) = convert_weights(model, WeightTypes(routed=INT4))
    assert [value.name for value in change.node.inputs if value is not None] == before
    assert not change.projections and change.accuracy_level_before == change.accuracy_level == 4
    (change,) = convert_weights(model, WeightTypes(accuracy_level=0))
    assert (change.accuracy_level_before, change.accuracy_level) == (4, 0)
    assert spec_of(change.node).accuracy_level == 0


def test_floats_have_no_accuracy_level() -> None:
    _, change = converted(node_of(), accuracy_level=4)
    assert change.accuracy_level == spec_of(change.node).accuracy_level == 0


def test_old_weights_go_unless_something_else_reads_them() -> None:
    node = node_of()
    model = ir_model(node)
    kept = model.graph.initializers["up_proj"]
    reader = ir.Node("", "Identity", [kept], num_outputs=1)
    model.graph.append(reader)
    convert_weights(model, WeightTypes(routed=INT4))
    left = set(model.graph.initializers.values())
    assert left == {value for value in hina_node(model).inputs if value is not None and value.is_initializer()} | {kept}


def test_nodes_that_share_weights_share_the_new_ones() -> None:
    model = ir_model(node_of())
    node = hina_node(model)
    twin = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values(), num_outputs=1, name="twin")
    model.graph.append(twin)
    one, other = convert_weights(model, WeightTypes(routed=INT4))
    assert one.node.inputs == other.node.inputs and one.node is not other.node
    assert len(model.graph.initializers) == 1 + 3 * 3


def test_outputs_and_names_of_the_node_stay() -> None:
    model = ir_model(node_of())
    before = hina_node(model)
    name, output = before.name, before.outputs[0].name
    (change,) = convert_weights(model, WeightTypes(routed=INT4))
    assert change.node.name == name
    assert [value.name for value in model.graph.outputs] == [output]
    assert model.graph.outputs[0].producer() is change.node


def test_weights_stored_kn_are_converted_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    model = model_of(loop)
    assert fuse_model(model).applied
    monkeypatch.setattr("graph_passes.fuse_moe.StackedExperts.numpy", lambda _: pytest.fail("all experts at once"))
    (change,) = convert_weights(model, WeightTypes(routed=INT8))
    monkeypatch.undo()
    found = arrays(change.node)
    for name, each in (("gate_proj", loop.gate), ("up_proj", loop.up), ("down_proj", loop.down)):
        for expert, w in enumerate(each):
            codes = quantise(w, INT8, scale_type=np.float16).parts[0]
            np.testing.assert_array_equal(found[name][expert], codes)


def test_each_matrix_is_quantised_once_and_progress_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, stages = [], []
    monkeypatch.setattr(tensors, "quantise", lambda *a, **k: calls.append(a) or quantise(*a, **k))
    model = ir_model(node_of(num_experts=4))
    convert_weights(model, WeightTypes(routed=INT4), lambda *stage: stages.append(stage))
    assert stages == [("measuring weights", done, 12) for done in range(1, 13)] and not calls
    external_data.save(model, tmp_path / "model.onnx")
    assert len(calls) == 12
    assert stages[12:] == [("quantising", done, 12) for done in range(1, 13)]


def test_saving_holds_one_field_in_its_new_form_and_few_matrices_of_the_old(tmp_path: Path) -> None:
    """Beside the new field: two float32 matrices (one read, one let go), and what is computed from a chunk.

    A chunk makes float32 arrays of its size for its rows, their columns, values and a temporary, and float64 ones for
    two sums: 32 bytes a weight; doubled, because smaller ones are not counted.
    """
    experts, size = 24, 512
    node = node_of(hidden_size=size, intermediate_size=size, num_experts=experts)
    source = tmp_path / "source.onnx"
    external_data.save(ir_model(node), source)
    del node
    model = external_data.load(source)
    matrix, field = 4 * size * size, experts * size * size // 2 * 5 // 4  # codes, and at most a quarter of that more
    tracemalloc.start()
    try:
        convert_weights(model, WeightTypes(routed=INT4))
        external_data.save(model, tmp_path / "quantised.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    bound = field + 2 * matrix + 64 * CHUNK
    assert peak < bound < experts * matrix / 2


def status(name: str) -> int:
    """A size of this process in bytes, as Linux counts it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_the_source_is_not_mapped_for_long(tmp_path: Path) -> None:
    """Pages of a mapped file that were read count as memory in use: they may be half of an old field at most.

    A new field comes on top: half a byte a weight, and a float16 scale for 32.
    """
    experts, size = 48, 768
    source, weights = tmp_path / "source.onnx", experts * size * size
    sizes = {"hidden_size": size, "intermediate_size": size, "num_experts": experts}
    external_data.save(ir_model(node_of(**sizes, mlp="plain", activation_type="float16")), source)
    model = external_data.load(source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    convert_weights(model, WeightTypes(routed=INT4, symmetric=True))
    external_data.save(model, tmp_path / "quantised.onnx")
    assert status("VmHWM") - before < weights * (2 / 2 + 1 / 2 + 2 / 32)


def test_the_saved_model_is_aligned_and_read_back(tmp_path: Path) -> None:
    node = node_of(hidden_size=64, intermediate_size=64)
    model, change = converted(node, routed=INT4)
    want = arrays(change.node)
    external_data.save(model, tmp_path / "model.onnx")
    again = external_data.load(tmp_path / "model.onnx")
    found = hina_node(again)
    assert spec_of(found) == spec_of(change.node)
    for name, values in weights_of(found).items():
        (value,) = values
        np.testing.assert_array_equal(value.const_value.numpy(), want[name])  # type: ignore[union-attr]
        if isinstance(value.const_value, ir.ExternalTensor):
            assert value.const_value.offset % external_data.ALIGNMENT == 0  # type: ignore[operator]
    assert isinstance(again.graph.initializers["up_proj.int4_32"].const_value, ir.ExternalTensor)


def test_weights_that_are_quantised_already_are_left_alone_or_refused() -> None:
    model, _ = converted(node_of(), routed=INT4)
    for types in (WeightTypes(routed=INT8), WeightTypes(routed=ir.DataType.FLOAT)):
        with pytest.raises(
            WeightError, match=r"gate_proj of moe is quantised already, as int4:32; convert the original"
        ):
            convert_weights(model, types)
    (change,) = convert_weights(model, WeightTypes(shared=INT8))
    assert not change.projections


@pytest.mark.parametrize("stacked", [True, False])
def test_nan_is_named_and_the_model_is_unchanged(stacked: bool) -> None:
    node = node_of(experts_stacked=stacked)
    node.weights["down_proj"][5, 7, 2] = np.nan
    model = ir_model(node)
    names = list(model.graph.initializers)
    where = "down_proj, expert 5," if stacked else r"down_proj\.5"
    for target in (INT4, INT8, MXFP4):
        with pytest.raises(WeightError, match=f"the weights {where} cannot be converted: it holds NaN"):
            convert_weights(model, WeightTypes(routed=target))
        assert list(model.graph.initializers) == names


@pytest.mark.parametrize(("dtype", "bad"), [(ir.DataType.FLOAT16, 1e5), (ir.DataType.BFLOAT16, 3.4e38)])
def test_a_weight_beyond_the_range_is_named_and_the_model_is_unchanged(dtype: ir.DataType, bad: float) -> None:
    node = node_of()
    node.weights["down_proj"][5, 7, 2] = bad
    model = ir_model(node)
    names = list(model.graph.initializers)
    with pytest.raises(
        WeightError, match=r"the weights down_proj, expert 5, cannot be converted: it holds .*too large"
    ):
        convert_weights(model, WeightTypes(routed=dtype))
    assert list(model.graph.initializers) == names
    convert_weights(model, WeightTypes(routed=ir.DataType.FLOAT))


def test_weights_with_zero_points_do_not_become_symmetric() -> None:
    model, _ = converted(node_of(), routed=INT4)
    with pytest.raises(WeightError, match="gate_proj of moe is quantised already, as int4:32 with zero points"):
        convert_weights(model, WeightTypes(routed=INT4, symmetric=True))
    model, _ = converted(node_of(), routed=INT4, symmetric=True)
    for symmetric in (True, False):
        (change,) = convert_weights(model, WeightTypes(routed=INT4, symmetric=symmetric))
        assert not change.projections


def test_more_weights_than_the_node_names_are_an_error() -> None:
    model = ir_model(node_of())
    node = hina_node(model)
    surplus = model.graph.initializers["up_proj"]
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, surplus)
    with pytest.raises(ValueError, match="it has weights that its weight_inputs do not name, the first is up_proj"):
        weights_of(node)


def test_nodes_that_are_not_valid_are_named() -> None:
    node = node_of()
    model = ir_model(node)
    hina_node(model).attributes["top_k"] = ir.AttrInt64("top_k", 99)
    with pytest.raises(WeightError, match="the HinaMoE node moe is not valid: top_k is 99"):
        convert_weights(model, WeightTypes(routed=INT4))
    for change, words in (
        (lambda w: w.astype(np.int8), "has type int8"),
        (lambda w: w[..., :-1], r"is \(8, 48, 32\), expected \[8, 48, 33\]"),
        (lambda w: w[0, 0], r"its down_proj has the shape \[33\]"),
    ):
        broken = replace(node, weights=node.weights | {"down_proj": change(node.weights["down_proj"])})
        with pytest.raises(WeightError, match=f"moe is not valid: .*{words}"):
            convert_weights(ir_model(broken), WeightTypes(routed=INT4))


def test_constant_inputs_of_the_router_become_float32() -> None:
    spec = make_spec(score_func="sigmoid")
    node = random_node(
        spec, np.random.default_rng(0), activation_type="float16", router_bias=True, correction_bias=True
    )
    _, change = converted(node, routed=INT4)
    for item, value in zip(INPUTS, change.node.inputs, strict=False):
        if item.constant:
            assert value is not None and value.dtype == ir.DataType.FLOAT
            np.testing.assert_array_equal(value.const_value.numpy(), node.constants[item.name])  # type: ignore[union-attr]
    hidden = change.node.inputs[0]
    assert hidden is not None and hidden.dtype == ir.DataType.FLOAT16
