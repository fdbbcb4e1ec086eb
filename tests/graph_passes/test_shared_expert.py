"""Shared experts: drawn into the node in every spelling, and left in the graph, unharmed, where they are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes import pipeline
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.matchers import MoeMatch
from graph_passes.matchers.shared_expert import draw_in
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.op_schema import OP_TYPE
from graph_passes.pipeline import FusedBlock, fuse_model
from graph_passes.quantize.formats import WeightFormat
from graph_passes.quantize.rewrite import WeightTypes, convert_weights
from graph_passes.unfuse import unfuse_model
from hina_ort.cli import app
from hina_ort.inspection import inspect_model
from tests.exports import dynamo_block
from tests.graphs import copy_of, parse, run_original
from tests.unrolled_graphs import Loop

H, S = 8, 5
RNG = np.random.default_rng(17)


def random(*shape: int) -> np.ndarray:
    return (0.5 * RNG.standard_normal(shape)).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    "sg": random(H, S),
    "su": random(H, S),
    "sd": random(S, H),
    "sgu": random(H, 2 * S),
    "sg_nk": random(S, H),
    "sg_b": random(S),
    "sd_b": random(H),
    "gate": random(H, 1),
    "gate_nk": random(1, H),
    "gate_b": random(1),
    "gates": random(H, H),
    "last_axis": np.array([-1]),
    "wide": random(H, S + 1),
    "two": np.float32(2.0),
    "twelve": np.array([12, H]),
}

MLP = "p = MatMul(x, sg) q = MatMul(x, su) z = Sigmoid(p) a = Mul(p, z) h = Mul(a, q) s = MatMul(h, sd)"
GATE = "gl = MatMul(x, gate) gs = Sigmoid(gl)"
PLAIN = ("gate_proj", "up_proj", "down_proj")


def model(after: str, inputs: str = "x", outputs: str = "y", **loop: Any) -> ir.Model:
    """A block of the tokens `x` whose output `r` meets what `after` computes."""
    block = Loop(result="r", **loop)

    def typed(names: str) -> str:
        return ", ".join(f"float[B, S, {S if name == 'h' else H}] {name}" for name in names.split())

    return parse(f"({typed(inputs)}) => ({typed(outputs)}) {{ {block.text()} {after} }}", block.arrays | CONSTANTS)


def fused(source: ir.Model) -> tuple[ir.Model, FusedBlock]:
    """The fused model and its one block; all outputs are those of `source`, at several token counts."""
    made = copy_of(source)
    report = fuse_model(made)
    assert report.refused == []
    (block,) = report.fused
    assert [node.op_type for node in made.graph].count(OP_TYPE) == 1
    assert_same(source, made)
    return made, block


def assert_same(source: ir.Model, made: ir.Model, bound: float = 1e-5) -> None:
    for batch, length in ((1, 1), (2, 1), (1, 7), (3, 11)):
        rng = np.random.default_rng(length)
        feeds = {str(v.name): rng.standard_normal((batch, length, H)).astype(np.float32) for v in source.graph.inputs}
        before = run_original(source, feeds)
        after = run_original(made, feeds, options=hina_ort.session_options())
        for old, new in zip(before, after, strict=True):
            assert relative_l2(old, new) <= bound, f"{batch} x {length} tokens"


def shared_fields(block: FusedBlock) -> tuple[str, ...]:
    return tuple(n.removeprefix("shared_") for n in block.spec.weight_inputs if n.startswith("shared_"))


SPELLINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": (f"{MLP} y = Add(r, s)", PLAIN),
    "the other order": (f"{MLP} y = Add(s, r)", PLAIN),
    "gated": (f"{MLP} {GATE} gated = Mul(gs, s) y = Add(r, gated)", (*PLAIN, "expert_gate")),
    "gated, the other order": (f"{MLP} {GATE} gated = Mul(s, gs) y = Add(gated, r)", (*PLAIN, "expert_gate")),
    "gate by Gemm on flat tokens": (
        f"{MLP} xf = Reshape(x, rows) gl = Gemm<transB = 1>(xf, gate_nk) gs = Sigmoid(gl) sf = Reshape(s, rows) "
        "gated = Mul(sf, gs) rf = Reshape(r, rows) yf = Add(rf, gated) xs = Shape(x) y = Reshape(yf, xs)",
        (*PLAIN, "expert_gate"),
    ),
    "GatedAdd": (f"{MLP} {GATE} y = com.microsoft.GatedAdd(r, s, gs)", (*PLAIN, "expert_gate")),
    "biases": (
        f"{MLP.replace('MatMul(x, sg)', 'Add(p0, sg_b)')} sb = Add(sd_b, s) y = Add(r, sb)".replace(
            "p = Add", "p0 = MatMul(x, sg) p = Add"
        ),
        (*PLAIN, "gate_proj_bias", "down_proj_bias"),
    ),
    "gate and up in one tensor": (
        "pq = MatMul(x, sgu) p, q = Split<axis = -1, num_outputs = 2>(pq) z = Sigmoid(p) a = Mul(p, z) h = Mul(a, q) "
        "s = MatMul(h, sd) y = Add(r, s)",
        ("gate_up_proj", "down_proj"),
    ),
    "up before gate, in one tensor": (
        "pq = MatMul(x, sgu) q, p = Split<axis = -1, num_outputs = 2>(pq) z = Sigmoid(p) a = Mul(p, z) h = Mul(a, q) "
        "s = MatMul(h, sd) y = Add(r, s)",
        ("gate_up_proj", "down_proj"),
    ),
    "no gate projection": (
        "q = MatMul(x, su) z = Sigmoid(q) h = Mul(q, z) s = MatMul(h, sd) y = Add(r, s)",
        ("up_proj", "down_proj"),
    ),
    "the routed output is scaled": (f"{MLP} scaled = Mul(two, r) y = Add(scaled, s)", PLAIN),
    "the routed output is scaled, between views": (
        f"{MLP} rf = Reshape(r, rows) sf = Reshape(s, rows) scaled = Mul(rf, two) yf = Add(scaled, sf) xs = Shape(x) "
        "y = Reshape(yf, xs)",
        PLAIN,
    ),
    "more is added afterwards": (f"{MLP} t = Add(r, s) y = Add(x, t)", PLAIN),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_shared_expert_is_drawn_in(name: str) -> None:
    after, fields = SPELLINGS[name]
    made, block = fused(model(after))
    assert (shared_fields(block), block.spec.shared_intermediate_size, block.note) == (fields, S, "")
    assert block.spec.routed_scaling_factor == (2.0 if "scaled" in name else 1.0)
    assert not {node.op_type for node in made.graph} & {"MatMul", "Gemm", "Sigmoid", "GatedAdd", "TopK"}
    assert block.bytes == sum(v.const_value.nbytes for v in weight_values(made))


def weight_values(made: ir.Model) -> list[ir.Value]:
    (node,) = (node for node in made.graph if is_hina_moe(node))
    return [value for values in weights_of(node).values() for value in values]


def test_a_shared_expert_stays_where_it_is_stored() -> None:
    stored = "p = Gemm<transB = 1>(xf, sg_nk) z = Sigmoid(p) h = Mul(p, z) s = MatMul(h, sd)"
    after = f"xf = Reshape(x, rows) {stored} rf = Reshape(r, rows) yf = Add(rf, s) xs = Shape(x) y = Reshape(yf, xs)"
    made, _ = fused(model(after))
    names = {value.name for value in weight_values(made)}
    assert "sg_nk" in names and "sg_nk" in made.graph.initializers
    assert "sd" not in made.graph.initializers  # [K, N]: transposed, and the original is gone


ADDED = f"{MLP} y = Add(r, s)"
GATED = f"{MLP} {GATE} gated = Mul(s, gs) y = Add(r, gated)"

LEFT_OUT: dict[str, tuple[str, dict[str, str], str]] = {
    "a residual": ("y = Add(r, x)", {}, ""),
    "the output itself": ("y = Add(r, r)", {}, ""),
    "a difference": (f"{MLP} y = Sub(r, s)", {}, ""),
    "other tokens": (ADDED.replace("(x,", "(other,"), {"inputs": "x other"}, ""),
    "one projection reads other tokens": (ADDED.replace("(x, su)", "(other, su)"), {"inputs": "x other"}, ""),
    "the gate reads other tokens": (GATED.replace("(x, gate)", "(other, gate)"), {"inputs": "x other"}, ""),
    "GatedAdd of the routed output": (f"{MLP} {GATE} y = com.microsoft.GatedAdd(s, r, gs)", {}, ""),
    "the routed output is an output too": (ADDED, {"outputs": "y r"}, ""),
    "tokens changed on the way": (f"n = Neg(x) {ADDED}".replace("(x, s", "(n, s"), {}, "does not read the tokens x"),
    "the gate reads changed tokens": (f"n = Neg(x) {GATED}".replace("(x, gate)", "(n, gate)"), {}, "does not read"),
    "an inner value is an output": (ADDED, {"outputs": "y h"}, "h is an output of the model"),
    "its output is an output": (ADDED, {"outputs": "y s"}, "s is an output of the model"),
    "an inner value is read by others": (
        f"{MLP} t = Add(r, s) v = ReduceMax(h) y = Add(t, v)",
        {},
        "h is read by ReduceMax",
    ),
    "its shape is read by others": (
        f"{MLP} t = Add(r, s) vs = Shape(h) v = Cast<to = 1>(vs) w = ReduceMax(v) y = Add(t, w)",
        {},
        "h is read by Shape",
    ),
    "scaled": (f"{MLP} scaled = Mul(s, two) y = Add(r, scaled)", {}, "multiplied by two, which is no sigmoid"),
    "the routed output is scaled by a tensor": (f"{MLP} scaled = Mul(r, sd_b) y = Add(scaled, s)", {}, ""),
    "gated by tanh": (GATED.replace("gs = Sigmoid", "gs = Tanh"), {}, "multiplied by"),
    "GatedAdd by tanh": (
        f"{MLP} {GATE} y = com.microsoft.GatedAdd(r, s, gs)".replace("gs = Sigmoid", "gs = Tanh"),
        {},
        "multiplied by gs, which is no sigmoid",
    ),
    "a gate with a bias": (
        GATED.replace("gs = Sigmoid(gl)", "gb = Add(gl, gate_b) gs = Sigmoid(gb)"),
        {},
        "its gate has a bias (gate_b)",
    ),
    "a gate for each feature": (
        GATED.replace("(x, gate)", "(x, gates)"),
        {},
        f"its gate (gates) is [{H}, {H}], expected [1, {H}]",
    ),
    "a gate by a vector": (
        GATED.replace("gl = MatMul(x, gate)", "gv = MatMul(x, sd_b) gl = Unsqueeze(gv, last_axis)"),
        {},
        "MatMul multiplies by the vector sd_b",
    ),
    "gated before the down projection": (
        f"{GATE} {ADDED}".replace("s = MatMul(h, sd)", "hg = Mul(h, gs) s = MatMul(hg, sd)"),
        {},
        "multiply the activation",
    ),
    "another activation": (ADDED.replace("z = Sigmoid(p) a = Mul(p, z)", "a = Relu(p)"), {}, "activation is relu"),
    "another alpha": (
        ADDED.replace("z = Sigmoid(p)", "p2 = Mul(p, two) z = Sigmoid(p2)"),
        {},
        "its activation_alpha is 2.0, that of the routed experts 1.0",
    ),
    "two projections and no activation": ("s0 = MatMul(x, sg) s = MatMul(s0, sd) y = Add(r, s)", {}, "identity"),
    "one projection": ("s = MatMul(x, gates) y = Add(r, s)", {}, "identity"),
    "weights that the graph computes": (
        f"sd2 = Mul(x, two) sd3 = ReduceMax(sd2) sd4 = Mul(sd, sd3) {ADDED.replace('(h, sd)', '(h, sd4)')}",
        {},
        "computed by the graph",
    ),
    "a token count that is fixed": (
        f"{MLP} s2 = Reshape(s, twelve) s3 = Reshape(s2, rows) rf = Reshape(r, rows) yf = Add(rf, s3) xs = Shape(x) "
        "y = Reshape(yf, xs)",
        {},
        f"fixes the shape [12, {H}]",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_no_shared_expert_is_left_in_the_graph(name: str) -> None:
    after, ends, note = LEFT_OUT[name]
    source = model(after, **ends)
    made = copy_of(source)
    report = fuse_model(made)
    assert report.refused == [] and [node.op_type for node in made.graph].count(OP_TYPE) == 1
    (block,) = report.fused
    assert not block.spec.has_shared_expert and shared_fields(block) == ()
    assert note in block.note and bool(note) == bool(block.note)
    if "fixed" not in name:
        assert_same(source, made)


def test_mixing_weights_that_the_graph_computes_are_not_scaled() -> None:
    block = Loop(result="r")
    router = block.text().replace("Softmax<axis=1>(logits)", "Tanh(logits)")
    text = f"{router} {MLP} scaled = Mul(r, two) y = Add(scaled, s)"
    source = parse(f"(float[B, S, {H}] x) => (float[B, S, {H}] y) {{ {text} }}", block.arrays | CONSTANTS)
    _, found = fused(source)
    assert found.spec.router_input == "topk_ids" and not found.spec.has_shared_expert
    assert "multiplied by 2, which weights that the graph computes cannot say" in found.note


def test_only_what_is_proven_is_drawn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A careless match falls back on the routed experts, and the reason is told."""

    def careless(match: MoeMatch) -> MoeMatch:
        found = draw_in(match)
        weights = {**found.weights, "shared_up_proj": found.weights["shared_gate_proj"]}
        return replace(found, weights=weights)

    monkeypatch.setattr(pipeline.shared_expert, "draw_in", careless)
    _, block = fused(model(ADDED))
    assert not block.spec.has_shared_expert
    assert "was not drawn in as a shared expert" in block.note and "relative L2 difference" in block.note


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_neither_part_hides_the_other(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """A wrong word about the small one of the two parts is seen, however large the other."""
    monkeypatch.setitem(CONSTANTS, "sd", CONSTANTS["sd"] * np.float32(factor))
    _, block = fused(model(ADDED))
    assert block.spec.has_shared_expert

    def careless(match: MoeMatch) -> MoeMatch:
        found = draw_in(match)
        if factor < 1.0:
            weights = {**found.weights, "shared_up_proj": found.weights["shared_gate_proj"]}
            return replace(found, weights=weights)
        assert found.routed_only is not None
        wrong = {"spec": replace(found.routed_only.spec, routed_scaling_factor=1.001)}
        return replace(found, routed_only=replace(found.routed_only, **wrong))

    monkeypatch.setattr(pipeline.shared_expert, "draw_in", careless)
    report = fuse_model(model(ADDED))
    if factor < 1.0:
        assert not report.fused[0].spec.has_shared_expert
    else:
        assert report.fused == [] and "relative L2 difference" in report.refused[0].reason


def test_layers_with_and_without_shared_experts() -> None:
    first, second = Loop(prefix="a_", result="ra"), Loop(prefix="b_", source="m", result="rb", seed=1)
    third = Loop(prefix="c_", source="n", result="y", seed=2)
    second.arrays |= CONSTANTS
    middle = ADDED.replace("y =", "m =").replace("(r,", "(ra,")
    last = f"{MLP} n = Add(s, rb)".replace("(x,", "(m,")
    for name in "pqzahs":
        last = (
            last.replace(f"{name} = ", f"{name}2 = ")
            .replace(f"({name},", f"({name}2,")
            .replace(f" {name})", f" {name}2)")
        )
        last = last.replace(f"({name})", f"({name}2)")
    text = f"{first.text()} {middle} {second.text()} {last} {third.text()}"
    arrays = first.arrays | second.arrays | third.arrays
    made = parse(f"(float[B, S, {H}] x) => (float[B, S, {H}] y) {{ {text} }}", arrays)
    source = copy_of(made)
    report = fuse_model(made)
    assert report.refused == []
    assert [block.spec.shared_intermediate_size for block in report.fused] == [S, S, 0]
    assert [node.op_type for node in made.graph] == [OP_TYPE] * 3
    assert_same(source, made)


def test_a_fused_shared_expert_is_left_alone_by_a_second_conversion() -> None:
    made, _ = fused(model(GATED))
    again = copy_of(made)
    report = fuse_model(again)
    assert (report.found, report.refused, report.applied) == ([], [], False)
    assert ir.to_proto(again).SerializeToString(deterministic=True) == ir.to_proto(made).SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("after", [ADDED, GATED], ids=["plain", "gated"])
def test_an_unfused_shared_expert_is_drawn_in_again(after: str) -> None:
    source = model(after)
    made, block = fused(source)
    unfuse_model(made)
    assert not any(is_hina_moe(node) for node in made.graph)
    assert_same(source, made)
    report = fuse_model(made)
    (again,) = report.fused
    assert again.note == "" and replace(again.spec, experts_stacked=block.spec.experts_stacked) == block.spec
    assert_same(source, made)


def test_weight_types_of_shared_experts() -> None:
    """`--shared-weights` has its say on what was drawn in, and on nothing else."""
    source = model(GATED)
    made, _ = fused(source)
    (change,) = convert_weights(made, WeightTypes(shared=ir.DataType.FLOAT16))
    assert set(change.projections) == {"shared_gate_proj", "shared_up_proj", "shared_down_proj"}
    assert_same(source, made, 1e-3)


def test_quantised_shared_experts_beside_plain_routed_ones() -> None:
    made, _ = fused(model(GATED))
    (change,) = convert_weights(made, WeightTypes(shared=WeightFormat("int8", 16)))
    spec = spec_of(change.node)
    assert set(spec.formats) == {"shared_gate_proj", "shared_up_proj", "shared_down_proj"}
    assert_same(model(GATED), made, 2e-2)


@pytest.mark.dynamo
@pytest.mark.parametrize("architecture", ["hunyuan_v1_moe", "qwen2_moe"])
def test_float16(architecture: str) -> None:
    source = ir.load(dynamo_block(architecture, "float16"))
    made = copy_of(source)
    (block,) = fuse_model(made).fused
    assert block.spec.has_shared_expert and block.note == ""
    x = np.random.default_rng(33).standard_normal((3, 11, block.spec.hidden_size)).astype(np.float16)
    (before,), (after,) = run_original(source, x), run_original(made, x, options=hina_ort.session_options())
    assert relative_l2(before, after) <= 2.0 * float16_bound(block.spec.top_k)


def nbits(name: str, source: str, n: int, k: int, level: int) -> str:
    """A MatMulNBits node of 4 bits; at level 4 its activations are rounded where ONNX Runtime can."""
    return (
        f"{name} = com.microsoft.MatMulNBits<N = {n}, K = {k}, bits = 4, block_size = 16, accuracy_level = {level}>"
        f"({source}, {name}_codes, {name}_scales)"
    )


def quantised(monkeypatch: pytest.MonkeyPatch, *levels: int) -> ir.Model:
    """A shared expert as onnxruntime-genai writes it, its gate too; `levels` of gate, up and down, and of that gate."""
    sizes = {"p": (S, H), "q": (S, H), "s": (H, S), "gl": (1, H)}
    for name, (n, _) in sizes.items():
        monkeypatch.setitem(CONSTANTS, f"{name}_codes", RNG.integers(0, 256, (n, 1, 8), np.uint8))
        monkeypatch.setitem(CONSTANTS, f"{name}_scales", RNG.uniform(0.05, 0.1, (n, 1)).astype(np.float32))
    p, q, s, gl = (
        nbits(name, "h" if name == "s" else "x", *sizes[name], level) for name, level in zip(sizes, levels, strict=True)
    )
    arithmetic = "z = Sigmoid(p) a = Mul(p, z) h = Mul(a, q)"
    return model(f"{p} {q} {arithmetic} {s} {gl} gs = Sigmoid(gl) y = com.microsoft.GatedAdd(r, s, gs)")


@pytest.mark.parametrize("levels", [(4, 4, 0, 4), (0, 0, 0, 4)])
def test_activations_that_are_rounded_otherwise_stay_so(monkeypatch: pytest.MonkeyPatch, levels: tuple[int]) -> None:
    source = quantised(monkeypatch, *levels)
    (block,) = fuse_model(source).fused
    assert not block.spec.has_shared_expert and "accuracy_level" in block.note


def test_quantised_weights_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the gate, which the node takes as floats."""
    source = quantised(monkeypatch, 4, 4, 4, 4)
    made = copy_of(source)
    report = fuse_model(made)
    assert report.refused == []
    (block,) = report.fused
    assert block.note == "" and block.spec.accuracy_level == 4
    assert block.spec.weight_formats == tuple(f"shared_{name}=int4:16" for name in PLAIN)
    names = {value.name for value in weight_values(made)}
    assert {"p_codes", "q_codes", "s_codes", "p_scales", "q_scales", "s_scales"} <= names
    assert set(made.graph.initializers) & {"gl_codes", "gl_scales"} == set()
    assert_same(source, made, 2e-2)


def test_a_shared_expert_in_the_files_of_a_model(tmp_path: Path) -> None:
    """Every tensor, also the smallest, lies in a data file."""
    ir.save(model(GATED), tmp_path / "model.onnx", external_data="model.data", size_threshold_bytes=0)
    (block,) = fuse_model(ir.load(tmp_path / "model.onnx")).fused
    assert block.spec.has_shared_expert and block.note == ""


@pytest.mark.dynamo
def test_a_graph_that_onnx_runtime_has_optimised(tmp_path: Path) -> None:
    """The gate is FusedGemm then, and the activation QuickGelu."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "model.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(dynamo_block("qwen2_moe"), options, ["CPUExecutionProvider"])
    made = ir.load(tmp_path / "model.onnx")
    assert {"FusedGemm", "QuickGelu"} <= {node.op_type for node in made.graph}
    (block,) = fuse_model(made).fused
    assert block.spec.has_shared_expert and block.note == ""
    assert [node.op_type for node in made.graph] == [OP_TYPE]


def test_conversion_of_a_file(tmp_path: Path) -> None:
    """`--shared-weights` reaches what was drawn in, the report tells what was left out, a second run does nothing."""
    ir.save(model(GATED), tmp_path / "gated.onnx")
    report = hina_ort.convert(tmp_path / "gated.onnx", tmp_path / "int8.onnx", shared_weights="int8", check=2)
    (node,) = report.weights
    assert [p.name for p in node.projections] == ["shared_gate_proj", "shared_up_proj", "shared_down_proj"]
    (told,) = report.to_dict()["fused"]
    assert told["spec"]["shared_intermediate_size"] == S and told["note"] == ""
    assert_same(model(GATED), ir.load(tmp_path / "int8.onnx"), 2e-2)
    again = hina_ort.convert(tmp_path / "int8.onnx", tmp_path / "again.onnx")
    assert (again.fused, again.already_fused, again.written) == ([], 1, None)

    ir.save(model(f"{MLP} scaled = Mul(s, two) y = Add(r, scaled)"), tmp_path / "scaled.onnx")
    (told,) = hina_ort.convert(tmp_path / "scaled.onnx", tmp_path / "routed.onnx").to_dict()["fused"]
    assert told["spec"]["shared_intermediate_size"] == 0 and "multiplied by two" in told["note"]
    (block,) = inspect_model(tmp_path / "scaled.onnx").to_dict()["blocks"]
    assert (block["state"], block["note"]) == ("recognised", told["note"])
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "scaled.onnx")], env={"COLUMNS": "300"}).stdout
    assert f"{block['node']}: {told['note']}" in shown
    (block,) = inspect_model(tmp_path / "int8.onnx").to_dict()["blocks"]
    assert (block["state"], block["note"]) == ("fused", "")
