"""Experts with quantised weights: read as they lie, in every format that HinaMoE has, else refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.pipeline import FusionReport, fuse_model
from graph_passes.reference import values_of
from tests.dense_graphs import GPT_OSS, block
from tests.families import tokens
from tests.graph_passes import test_batched_mm, test_grouped_mm
from tests.graphs import array_of, copy_of, only_match, only_miss, run_original
from tests.quantised_graphs import Dequantised, NBits, initializer, with_dequantised, with_nbits
from tests.unrolled_graphs import Loop, model_of

H, I = 40, 24  # noqa: E741  (I is the name of the schema)
"""Three blocks of 16, an odd number, and a last block that is not full."""

X = np.random.default_rng(1).standard_normal((2, 9, H)).astype(np.float32)
PROJECTIONS = ("gate", "up", "down")


def is_expert(name: str) -> bool:
    return name.startswith(PROJECTIONS)


def expert_names(projections: tuple[str, ...] = PROJECTIONS) -> list[str]:
    return [f"{name}{e}" for name in projections for e in range(4)]


def loop(**settings: Any) -> ir.Model:
    return model_of(Loop(hidden=H, inter=I, **settings))


def nbits_loop(how: NBits | Callable[[str], NBits | None], **settings: Any) -> ir.Model:
    choose = how if callable(how) else lambda name: how if is_expert(name) else None
    return with_nbits(loop(**settings), choose)


def exactly(model: ir.Model, x: np.ndarray = X) -> np.ndarray:
    """What the graph means: where ONNX Runtime fuses DequantizeLinear it rounds the activations to int8."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return run_original(model, x, options=options)[0]


def fused(model: ir.Model) -> tuple[ir.Model, FusionReport]:
    work = copy_of(model)
    report = fuse_model(work)
    assert report.refused == []
    assert len(report.fused) == 1
    return work, report


def check_fused(model: ir.Model, bound: float = 1e-5, x: np.ndarray = X) -> tuple[ir.Node, FusionReport]:
    """Fuse, and compare with what the graph computes; gives the node."""
    work, report = fused(model)
    (node,) = [node for node in work.graph if node.op_type == "HinaMoE"]
    (after,) = run_original(work, x, options=hina_ort.session_options())
    assert relative_l2(exactly(model, x), after) <= bound
    return node, report


def input_names(node: ir.Node) -> set[str]:
    return {str(value.name) for value in node.inputs if value is not None}


FORMATS = [
    NBits(4, 16),
    NBits(4, 32, "packed"),
    NBits(4, 16, "packed"),
    NBits(4, 16, "float"),
    NBits(4, 128, "packed"),
    NBits(4, 256),
    NBits(8, 16),
    NBits(8, 64, "packed"),
    NBits(8, 16, "packed"),
]


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_matmul_nbits_is_read_where_it_lies(how: NBits) -> None:
    model = nbits_loop(how)
    stored = {name for name in model.graph.initializers if is_expert(name) and "." in name}
    node, report = check_fused(model)
    assert {name for name in input_names(node) if is_expert(name)} == stored
    spec = report.fused[0].spec
    assert spec.weight_formats == tuple(f"{name}_proj=int{how.bits}:{how.block}" for name in PROJECTIONS)
    assert ("gate_proj_zero_points" in spec.weight_inputs) is bool(how.zero_points)
    assert node.attributes.get_int("experts_stacked", 1) == 0


def test_the_bytes_stay_in_their_file(tmp_path: Path) -> None:
    source = with_nbits(
        model_of(Loop(hidden=128, inter=64)), lambda n: NBits(4, 32, "packed") if is_expert(n) else None
    )
    external_data.save(source, tmp_path / "source.onnx")
    model = external_data.load(tmp_path / "source.onnx")
    assert len(fuse_model(model).fused) == 1
    external_data.save(model, tmp_path / "fused.onnx")
    saved = external_data.load(tmp_path / "fused.onnx")
    (node,) = [node for node in saved.graph if node.op_type == "HinaMoE"]
    codes = [v for v in node.inputs if v is not None and str(v.name).endswith(".Q")]
    assert len(codes) == 12
    for value in codes:
        assert isinstance(value.const_value, ir.ExternalTensor)
        assert value.const_value.location == "source.onnx.data"


def test_the_levels_of_accuracy_are_kept() -> None:
    def level(gate: int, down: int) -> int:
        def how(name: str) -> NBits | None:
            number = down if name.startswith("down") else gate
            return NBits(accuracy_level=number) if is_expert(name) else None

        return only_match(nbits_loop(how)).spec.accuracy_level

    assert level(4, 4) == 4
    assert level(1, 1) == 1
    # Where one projection wants float activations, all get them.
    assert level(4, 0) == 0
    assert level(1, 4) == 1


def test_accuracy_level_4_rounds_as_matmul_nbits_does() -> None:
    model = nbits_loop(NBits(4, 32, accuracy_level=4))
    work, _ = fused(model)
    (before,), (after,) = run_original(model, X), run_original(work, X, options=hina_ort.session_options())
    assert relative_l2(before, after) <= 1e-5
    assert relative_l2(exactly(nbits_loop(NBits(4, 32))), after) > 1e-4  # the rounding of int8


def test_the_bias_of_matmul_nbits() -> None:
    _, report = check_fused(nbits_loop(NBits(bias=True)))
    assert report.fused[0].spec.weight_inputs[-3:] == ("gate_proj_bias", "up_proj_bias", "down_proj_bias")


def test_projections_may_differ() -> None:
    def how(name: str) -> NBits | None:
        return {"gate": NBits(4, 16), "down": NBits(8, 32, "packed")}.get(name[:-1])

    _, report = check_fused(nbits_loop(how))
    assert report.fused[0].spec.weight_formats == ("gate_proj=int4:16", "down_proj=int8:32")


def test_a_quantised_router_stays_in_the_graph() -> None:
    model = nbits_loop(lambda name: NBits(8, 16) if is_expert(name) or name == "router" else None)
    match = only_match(model)
    assert set(match.inputs) == {"router_logits"}
    check_fused(model)


def test_float16() -> None:
    text = ir.to_proto(loop())
    for tensor in text.graph.initializer:
        if tensor.data_type == 1:
            half = np.frombuffer(tensor.raw_data, np.float32).astype(np.float16)
            tensor.raw_data, tensor.data_type = half.tobytes(), 10
    for value in (*text.graph.input, *text.graph.output, *text.graph.value_info):
        if value.type.tensor_type.elem_type == 1:
            value.type.tensor_type.elem_type = 10
    model = ir.from_proto(text)
    for node in model.graph:
        if node.op_type == "ConstantOfShape":
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(np.zeros(1, np.float16)))
    model = with_nbits(model, lambda name: NBits(4, 16, "packed", scale_type="float16") if is_expert(name) else None)
    node, _ = check_fused(model, float16_bound(2), X.astype(np.float16))
    assert "gate0.scales" in input_names(node)


def one_other(name: str, other: NBits | None) -> Callable[[str], NBits | None]:
    return lambda n: (other if n == name else NBits(4, 16)) if is_expert(n) else None


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (one_other("up2", NBits(4, 32)), "up_proj is int4:32 in expert 2, but int4:16 in expert 0"),
        (one_other("up2", NBits(8, 16)), "up_proj is int8:16 in expert 2, but int4:16 in expert 0"),
        (one_other("down1", None), "down_proj is float in expert 1, but int4:16 in expert 0"),
        (one_other("gate0", None), "gate_proj is int4:16 in expert 1, but float in expert 0"),
        (one_other("gate3", NBits(4, 16, "packed")), "gate_proj is int4:16 with zero points in expert 3"),
        (one_other("gate3", NBits(4, 16, bias=True)), "gate_proj_bias, and expert 0 "),
    ],
    ids=["block", "bits", "float", "float_first", "zero_points", "bias"],
)
def test_experts_in_different_formats_are_refused(how: Callable[[str], NBits | None], reason: str) -> None:
    assert reason in only_miss(nbits_loop(how)).reason


def refusal(change: Callable[[ir.Model, ir.Node], None], how: NBits | None = None) -> str:
    """Why a loop whose gate of expert 1 is changed is refused."""
    model = nbits_loop(how or NBits())
    (node,) = [node for node in model.graph if node.op_type == "MatMulNBits" and node.inputs[1].name == "gate1.Q"]
    change(model, node)
    report = fuse_model(model)
    assert report.fused == []
    (miss,) = report.refused
    return miss.reason


def put(index: int, array: np.ndarray) -> Callable[[ir.Model, ir.Node], None]:
    def change(model: ir.Model, node: ir.Node) -> None:
        value = initializer("other", array)
        model.graph.register_initializer(value)
        node.replace_input_with(index, value)

    return change


def say(**numbers: int) -> Callable[[ir.Model, ir.Node], None]:
    return lambda _, node: node.attributes.update({n: ir.AttrInt64(n, number) for n, number in numbers.items()})


def compute(index: int) -> Callable[[ir.Model, ir.Node], None]:
    def change(model: ir.Model, node: ir.Node) -> None:
        absolute = ir.Node("", "Abs", [node.inputs[index]])
        model.graph.insert_before(node, absolute)
        node.replace_input_with(index, absolute.outputs[0])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(4, np.arange(48, dtype=np.int32)), "quantise without act_order"),
        (say(bits=2), "MatMulNBits has 2 bits"),
        (say(block_size=8), "in blocks of 8; HinaMoE takes 4 or 8 bits in blocks of 16, 32"),
        (say(block_size=32), "expected"),
        (say(K=48, N=I - 4), "experts of different sizes"),
        (put(2, np.ones(7, np.float32)), "other is [7], expected"),
        (put(3, np.zeros(7, np.uint8)), "other is [7], expected"),
        (compute(1), "the weights of MatMulNBits"),
        (compute(2), "the scales of MatMulNBits"),
    ],
)
def test_what_hinamoe_cannot_say_is_refused(change: Callable[[ir.Model, ir.Node], None], reason: str) -> None:
    assert reason in refusal(change)


def test_float_zero_points_of_8_bits_are_refused() -> None:
    reason = refusal(put(3, np.full(3 * I, 100.0, np.float32)), NBits(8, 16, "packed"))
    assert "of 8-bit codes" in reason


def change_bytes(model: ir.Model, name: str, new: np.ndarray) -> None:
    old = model.graph.initializers[name]
    old.const_value = ir.Tensor(new.astype(old.dtype.numpy()).reshape(old.shape.numpy()), name=name)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: ("gate1.scales", 3.0 * a["gate1.scales"]),
        lambda a: ("gate1.scales", a["gate2.scales"]),
        lambda a: ("down0.zeros", a["down3.zeros"]),
        lambda a: ("up2.Q", a["up2.Q"] >> 4 | a["up2.Q"] << 4),
        lambda a: ("up2.Q", a["up0.Q"]),
    ],
    ids=["scale", "scales_of_another", "zeros_of_another", "nibbles", "codes_of_another"],
)
def test_other_weights_are_another_model(change: Callable[[dict[str, np.ndarray]], tuple[str, np.ndarray]]) -> None:
    model = nbits_loop(NBits(4, 16, "packed"))
    before = exactly(model)
    arrays = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    change_bytes(model, *change(arrays))
    assert relative_l2(before, exactly(model)) > 1e-3
    check_fused(model)


def test_experts_that_share_codes_stay_apart() -> None:
    """The same tensors for two experts are the same tensors in the node, each in its place."""
    model = nbits_loop(NBits(4, 16))
    nodes = {node.inputs[1].name: node for node in model.graph if node.op_type == "MatMulNBits"}
    for index in (1, 2):
        nodes["gate1.Q"].replace_input_with(index, nodes["gate3.Q"].inputs[index])
    check_fused(model)


def test_the_quantiser_of_onnx_runtime(caplog: pytest.LogCaptureFixture) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantiser = MatMulNBitsQuantizer(ir.to_proto(loop()), bits=4, block_size=32, nodes_to_exclude=[])
    quantiser.process()
    _, report = check_fused(ir.from_proto(quantiser.model.model))
    assert report.fused[0].spec.weight_formats[0] == "gate_proj=int4:32"


DEQUANTISED = [
    Dequantised("int8"),
    Dequantised("uint8"),
    Dequantised("uint8", zero_points=True),
    Dequantised("int8", axis=1, zero_points=True),
    Dequantised("uint8", axis=1),
    Dequantised("int8", axis=0, block=16),
    Dequantised("uint8", axis=0, block=32, zero_points=True),
    Dequantised("int8", axis=0, block=64),  # one block is a whole row
    Dequantised("int8", axis=1, zero_points=True, domain="com.microsoft"),
    Dequantised("int4", axis=1),
    Dequantised("int4", axis=1, zero_points=True),
    Dequantised("uint4"),
    Dequantised("uint4", axis=0, block=16),
    Dequantised("uint4", axis=0, block=16, zero_points=True),
    Dequantised("int4", axis=0, block=16, zero_points=True),
    Dequantised("int4", axis=0, block=32),
]


@pytest.mark.parametrize("how", DEQUANTISED, ids=str)
def test_dequantize_linear(how: Dequantised) -> None:
    _, report = check_fused(with_dequantised(loop(), expert_names(), how))
    spec = report.fused[0].spec
    row = f"int{8 if how.dtype.endswith('8') else 4}"
    assert spec.weight_formats[0] == f"gate_proj={row}" + (f":{how.block}" if how.block in (16, 32) else "")


def test_dequantize_linear_in_front_of_rows() -> None:
    """Weights stored `[N, K]`, used by Gemm: int8 codes are read where they lie."""
    model = with_dequantised(loop(weights="gemm"), expert_names(), Dequantised("int8", axis=0))
    match = only_match(model)
    assert match.weights["gate_proj"][2].value.name == "gate2.0"
    assert match.weights["gate_proj"][2].in_place
    np.testing.assert_array_equal(
        values_of(match.spec, {name: array_of(s[2]) for name, s in match.weights.items()}, "gate_proj", None),
        dequantised(model, "gate2"),
    )
    check_fused(with_dequantised(loop(weights="gemm"), expert_names(), Dequantised("int4", axis=1, block=16)))
    check_fused(with_dequantised(loop(weights="left"), expert_names(), Dequantised("uint8", axis=0, zero_points=True)))


def dequantised(model: ir.Model, name: str) -> np.ndarray:
    codes, scales = (model.graph.initializers[f"{name}.{i}"].const_value.numpy() for i in (0, 1))
    return codes.astype(np.float64) * scales[:, None]


@pytest.mark.parametrize(
    "how",
    [
        Dequantised("int8"),
        Dequantised("int8", axis=2, zero_points=True),
        Dequantised("int8", axis=0),
        Dequantised("uint4", axis=1, block=16, zero_points=True),
        Dequantised("int4", axis=1, block=16),
    ],
    ids=str,
)
def test_stacked_experts(how: Dequantised) -> None:
    model = with_dequantised(block(GPT_OSS), ("gate_up", "down"), how)
    x = np.random.default_rng(3).standard_normal((2, 5, 16)).astype(np.float32)
    check_fused(model, x=x)


@pytest.mark.parametrize("family", [test_batched_mm, test_grouped_mm], ids=["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("how", [Dequantised("int8", axis=0), Dequantised("uint4", zero_points=True)], ids=str)
def test_stacked_experts_of_transformers(how: Dequantised, family: ModuleType) -> None:
    model = with_dequantised(family.block(), ("gate_up", "down"), how)
    check_fused(model, x=tokens(model, 2, 5))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (Dequantised("int8", axis=0), "one for each input feature"),
        (Dequantised("int8", axis=0, block=8), "have blocks of 8, HinaMoE takes 16"),
        (Dequantised("int8", axis=1, block=8), "expected one for each block of a row"),
        (Dequantised("int16", axis=1), "are int16; HinaMoE takes 8 or 4 bits"),
    ],
    ids=str,
)
def test_what_formats_cannot_say_is_refused(how: Dequantised, reason: str) -> None:
    assert reason in only_miss(with_dequantised(loop(), expert_names(), how)).reason


def test_one_dequantised_projection_of_one_expert() -> None:
    model = with_dequantised(loop(), ["up1"], Dequantised())
    assert "up_proj is int8 in expert 1, but float in expert 0" in only_miss(model).reason


def test_a_quantised_bias_is_refused() -> None:
    model = with_dequantised(loop(bias=True), [f"bias{e}" for e in range(4)], Dequantised())
    assert "down_proj_bias is quantised" in only_miss(model).reason


@pytest.mark.parametrize("after", [False, True])
def test_quantised_activations_are_refused(after: bool) -> None:
    model = with_dequantised(loop(), expert_names(), Dequantised())
    down = next(node for node in model.graph if node.outputs[0].name == "e1_d")
    scale, zero = initializer("s", np.float32([0.1])[0]), initializer("z", np.int8([0])[0])
    for value in (scale, zero):
        model.graph.register_initializer(value)
    value = down.outputs[0] if after else down.inputs[0]
    to = ir.Node("", "QuantizeLinear", [value, scale, zero])
    back = ir.Node("", "DequantizeLinear", [to.outputs[0], scale, zero])
    (model.graph.insert_after if after else model.graph.insert_before)(down, [to, back])
    for node, place in list(value.uses()):
        if node is not to and (after or node is down):
            node.replace_input_with(place, back.outputs[0])
    miss = only_miss(model)
    assert "QuantizeLinear quantises the inputs of the experts" in miss.reason


def test_dynamic_quantisation_is_refused(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    ir.save(loop(), tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "quantised.onnx")
    assert "quantises the inputs of the experts" in only_miss(ir.load(tmp_path / "quantised.onnx")).reason
