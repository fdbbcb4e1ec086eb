"""The matcher of com.microsoft::MoE and QMoE nodes: every attribute, weights on the same bytes, proofs and refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes import contrib_moe, cut
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.matchers import MoeMatch
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE
from graph_passes.pipeline import fuse_model
from graph_passes.probe import probe
from tests.graphs import copy_of, only_match, only_miss, parse, run_original
from tests.tensors import numpy_type

# 2I is H on purpose: no shape tells the layout of fc1 of a node with halves.
H, I, E, K = 64, 32, 8, 2  # noqa: E741

RANDOM = np.random.default_rng(31)
ALPHA = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.75}
OAI = {"activation": "silu", "activation_alpha": 1.702, "activation_beta": 1.0, "activation_limit": 0.75}
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1}
HALVES = {"activation_type": "swiglu", "swiglu_fusion": 2}
SEPARATE = {"activation_type": "swiglu", "swiglu_fusion": 0}
NORM = {"normalize_routing_weights": 1}
ORDER = {
    "MoE": ("fc1", "fc1_b", "fc2", "fc2_b", "fc3", "fc3_b"),
    "QMoE": (
        *("fc1", "fc1_s", "fc1_b", "fc2", "fc2_s", "fc2_b", "fc3", "fc3_s", "fc3_b", "fc1_z", "fc2_z", "fc3_z"),
        "weights",
    ),
}
ROUTER = "l = MatMul(x, router)"
Arrays = dict[str, np.ndarray]


def numbers(*shape: int) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * 0.3).astype(np.float32)


ROUTER_WEIGHT = (RANDOM.standard_normal((H, E)) * 0.5).astype(np.float32)
CONSTANTS: Arrays = {
    "router": ROUTER_WEIGHT,
    "router_b": numbers(E),
    "correction": numbers(E),
    "correction_of_one": numbers(1),
    "last": np.array([-1]),
    "by_h": np.array([-1, H]),
}


def sizes_of(attributes: Mapping[str, Any], fc3: bool = False) -> dict[str, tuple[int, int]]:
    """[N, K] of each projection."""
    double = attributes.get("activation_type") == "swiglu" and not fc3
    return {"fc1": (2 * I if double else I, H), "fc2": (H, I)} | ({"fc3": (I, H)} if fc3 else {})


def floats(attributes: Mapping[str, Any], *, fc3: bool = False, bias: bool = True) -> Arrays:
    """Weights of a MoE node."""
    made: Arrays = {}
    for name, (n, k) in sizes_of(attributes, fc3).items():
        made[name] = numbers(E, n, k)
        if bias:
            made[f"{name}_b"] = numbers(E, n)
    return made


def codes(attributes: Mapping[str, Any], *, fc3: bool = False, zero_points: bool = False) -> Arrays:
    """Weights of a QMoE node: bits and block as its attributes say."""
    bits, block = attributes.get("expert_weight_bits", 4), attributes.get("block_size", 0)
    made: Arrays = {}
    for name, (n, k) in sizes_of(attributes, fc3).items():
        blocks = k // block if block else 1
        rows = (n, blocks) if block else (n,)
        made[name] = RANDOM.integers(0, 256, (E, n, k * bits // 8), np.uint8)
        made[f"{name}_s"] = (RANDOM.uniform(0.5, 1.5, (E, *rows)) * 0.5 / 2.0**bits).astype(np.float32)
        made[f"{name}_b"] = numbers(E, n)
        if zero_points:
            packed = (n, (blocks + 1) // 2) if bits == 4 else rows
            made[f"{name}_z"] = RANDOM.integers(100, 150, (E, *packed), np.uint8)
    return made


def model_of(
    op: str,
    attributes: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    *,
    router: str = ROUTER,
    logits: str = "l",
    mixing: str = "",
    shape: str = f"T, {H}",
    inputs: str = "",
    after: str = "",
    dtype: str = "float",
) -> ir.Model:
    """One node behind a router; `mixing` is its input router_weights, and `after` makes y of its output m if given."""
    names = [mixing if name == "weights" else name if name in weights else "" for name in ORDER[op]]
    while names and not names[-1]:
        names.pop()
    words = {"k": K, **attributes}
    text = ", ".join(f'{n} = "{v}"' if isinstance(v, str) else f"{n} = {v}" for n, v in words.items())
    constants = {**CONSTANTS, **weights}
    if dtype != "float":
        narrow = numpy_type(dtype)
        constants = {
            name: array.astype(narrow) if array.dtype == np.float32 else array for name, array in constants.items()
        }
    return parse(
        f"({dtype}[{shape}] x{inputs}) => ({dtype}[{shape}] y) "
        f"{{ {router} {'m' if after else 'y'} = com.microsoft.{op}<{text}>(x, {logits}, {', '.join(names)}) {after} }}",
        constants,
    )


def tokens(count: int = 23, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, H)).astype(np.float32)


def check(model: ir.Model, rtol: float = 1e-6, **expected: Any) -> MoeMatch:
    """One match with the `expected` spec fields, proven within `rtol`."""
    match = only_match(model)
    assert {name: getattr(match.spec, name) for name in expected} == expected
    result = probe(model, match, rtol)
    assert result.ok, result.reason
    return match


def fused(model: ir.Model) -> tuple[ir.Model, ir.Node]:
    """A copy of the model with its one block fused, and the node."""
    copy = copy_of(model)
    report = fuse_model(copy)
    assert len(report.fused) == 1, report.refused
    (node,) = [node for node in copy.graph if node.domain == DOMAIN]
    assert node.op_type == OP_TYPE
    return copy, node


def run_fused(model: ir.Model, feeds: np.ndarray | Arrays) -> np.ndarray:
    return run_original(fused(model)[0], feeds, options=hina_ort.session_options())[0]


# --- MoE ---

PLAIN = {
    "gate_up_order": "gate_up",
    "tie_break": "highest",
    "nonfinite_router": "zero",
    "router_input": "router_weight",
}
GATED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
MOE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "relu by default": (
        {},
        {"activation": "relu", "weight_inputs": ("up_proj", "down_proj", "up_proj_bias", "down_proj_bias")},
    ),
    "gelu is the tanh form": ({"activation_type": "gelu"}, {"activation": "gelu_tanh"}),
    "silu": ({"activation_type": "silu"}, {"activation": "silu", "activation_alpha": 1.0}),
    "silu has no alpha": ({"activation_type": "silu", **ALPHA}, {"activation": "silu", "activation_alpha": 1.0}),
    "identity": ({"activation_type": "identity"}, {"activation": "identity"}),
    "swiglu": (SWIGLU, {"activation": "silu", "weight_inputs": GATED, "gate_up_interleaved": True}),
    "swiglu of gpt-oss": ({**SWIGLU, **ALPHA}, OAI),
    "use_sparse_mixer is ignored": ({**SWIGLU, "use_sparse_mixer": 1}, {"score_func": "softmax"}),
    "one expert": ({**SWIGLU, "k": 1}, {"top_k": 1}),
    "all experts": ({**SWIGLU, "k": E}, {"top_k": E}),
    "swiglu in halves": (
        HALVES,
        {"weight_inputs": GATED, "gate_up_interleaved": False, "nonfinite_router": "propagate"},
    ),
    "swiglu in halves of gpt-oss": ({**HALVES, **ALPHA}, {**OAI, "nonfinite_router": "propagate"}),
}


@pytest.mark.parametrize("normalised", [0, 1])
@pytest.mark.parametrize("name", MOE)
def test_moe(name: str, normalised: int) -> None:
    attributes, expected = MOE[name]
    attributes = {**attributes, "normalize_routing_weights": normalised}
    model = model_of("MoE", attributes, floats(attributes))
    match = check(model, **{**PLAIN, "norm_topk_prob": bool(normalised), **expected})
    assert match.family == "moe_op"
    assert match.spec.weight_formats == ()
    if contrib_moe.runs_on_cpu(next(node for node in model.graph if node.op_type == "MoE")):
        assert relative_l2(run_original(model, tokens())[0], run_fused(model, tokens())) < 1e-5


@pytest.mark.parametrize("activation", [{"activation_type": "silu"}, SEPARATE, {**SEPARATE, **ALPHA, **NORM}])
@pytest.mark.parametrize("bias", [True, False])
def test_moe_with_separate_gate_and_up(activation: dict[str, Any], bias: bool) -> None:
    weights = floats(activation, fc3=True, bias=bias)
    names = ("gate_proj", "up_proj", "down_proj")
    expected = names + (tuple(f"{name}_bias" for name in names) if bias else ())
    match = check(model_of("MoE", activation, weights), weight_inputs=expected, activation="silu")
    assert match.weights["gate_proj"][0].value.name == "fc1"
    assert match.weights["up_proj"][0].value.name == "fc3"


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", [SWIGLU, HALVES])
def test_types_of_16_bits(layout: dict[str, Any], dtype: str, op: str) -> None:
    """A block in bfloat16 is proven in float32."""
    attributes = {**layout, **NORM} | ({"expert_weight_bits": 8, "block_size": 16} if op == "QMoE" else {})
    weights = codes(attributes, zero_points=True) if op == "QMoE" else floats(attributes)
    check(model_of(op, attributes, weights, dtype=dtype), float16_bound(K) if dtype == "float16" else 2e-6)


# --- QMoE ---

QMOE: dict[str, dict[str, Any]] = {
    "int4 by row": {"expert_weight_bits": 4},
    "int4 in blocks": {"expert_weight_bits": 4, "block_size": 16},
    "int4 in blocks as long as fc2's rows": {"expert_weight_bits": 4, "block_size": 32},
    "int4 by default": {"block_size": 16},
    "int4 on int8 activations": {"block_size": 16, "accuracy_level": 4},
    "int8 by row": {"expert_weight_bits": 8},
    "int8 in blocks": {"expert_weight_bits": 8, "block_size": 16},
    "int8 in blocks as long as fc2's rows": {"expert_weight_bits": 8, "block_size": 32},
}


def format_of(attributes: Mapping[str, Any]) -> str:
    block = attributes.get("block_size", 0)
    return f"int{attributes.get('expert_weight_bits', 4)}" + (f":{block}" if block else "")


def int8_activations(attributes: Mapping[str, Any]) -> float:
    """Relative L2 error that rounding activations to int8 leaves in the output of a node on constant weights.

    A value of a block is off by at most half a step, by step / sqrt(12) in the mean square, of max / 127, and the
    largest value of a block is at most sqrt(block) times its root mean square. Gate, up and down each see that once.
    """
    block = attributes.get("block_size", 0)
    rounded = attributes.get("expert_weight_bits") == 8 or attributes.get("accuracy_level") == 4
    return 3.0 * math.sqrt(block) / (127.0 * math.sqrt(12.0)) if block and rounded else 1e-5


def takes_zero_points(attributes: Mapping[str, Any]) -> bool:
    """Whether no byte holds the zero points of two rows, which is refused."""
    return attributes.get("expert_weight_bits", 4) == 8 or attributes.get("block_size", 0) == 16


@pytest.mark.parametrize("activation", [{**SWIGLU, **ALPHA}, {"activation_type": "relu"}], ids=["swiglu", "relu"])
@pytest.mark.parametrize(
    ("name", "zero_points"),
    [(name, zeros) for name in QMOE for zeros in (False, True) if not zeros or takes_zero_points(QMOE[name])],
)
def test_qmoe(name: str, activation: dict[str, Any], zero_points: bool) -> None:
    attributes = {**activation, **NORM, **QMOE[name]}
    model = model_of("QMoE", attributes, codes(attributes, zero_points=zero_points))
    match = check(model, score_func="softmax_topk", norm_topk_prob=False, tie_break="highest")
    assert set(match.spec.formats) == set(match.spec.projections)
    assert {str(form) for form in match.spec.formats.values()} == {format_of(attributes)}
    assert match.spec.accuracy_level == attributes.get("accuracy_level", 0)
    assert ("down_proj_zero_points" in match.spec.weight_inputs) is zero_points
    assert relative_l2(run_original(model, tokens())[0], run_fused(model, tokens())) <= int8_activations(attributes)


@pytest.mark.parametrize("name", QMOE)
def test_quantised_weights_stay_the_same_bytes(name: str) -> None:
    attributes = {**SWIGLU, **QMOE[name]}
    weights = codes(attributes, zero_points=attributes.get("expert_weight_bits") == 8)
    _, node = fused(model_of("QMoE", attributes, weights))
    names = [value.name for value in node.inputs[len(INPUTS) :] if value is not None]
    assert sorted(map(str, names)) == sorted(weights)


@pytest.mark.parametrize("extra", [{"expert_weight_bits": 8}, {"accuracy_level": 4}])
def test_the_proof_sees_no_int8_activations_however_small_the_weights_are(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes = {**SWIGLU, **NORM, "block_size": 16, **extra}
    model = model_of("QMoE", attributes, codes(attributes))
    monkeypatch.setattr(cut, "EXTERNAL_BYTES", 1 << 30)
    check(model)
    (rounded,), exact = run_original(model, tokens()), contrib_moe.evaluator(model)({"x": tokens()})
    assert 1e-3 < relative_l2(exact, rounded) <= int8_activations(attributes)


@pytest.mark.parametrize("extra", [{"use_sparse_mixer": 1}, {"normalize_routing_weights": 0}])
def test_qmoe_takes_the_softmax_of_the_k_best_whatever_it_says(extra: dict[str, Any]) -> None:
    attributes = {**SWIGLU, **NORM, "block_size": 16, **extra}
    model = model_of("QMoE", attributes, codes(attributes))
    match = check(model, score_func="softmax_topk")
    assert relative_l2(run_original(model, tokens())[0], run_fused(model, tokens())) < 1e-5
    unnormalised = replace(match, spec=replace(match.spec, score_func="softmax"))
    assert not probe(model, unnormalised).ok


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("layout", [HALVES, {**SEPARATE, **ALPHA}, {"activation_type": "silu"}])
def test_qmoe_without_a_cpu_kernel(layout: dict[str, Any], block: int, bits: int) -> None:
    attributes = {**layout, **NORM, "expert_weight_bits": bits} | ({"block_size": block} if block else {})
    weights = codes(attributes, fc3=layout is not HALVES, zero_points=block > 0)
    check(model_of("QMoE", attributes, weights), norm_topk_prob=True, score_func="softmax")


SIGMOID = "m = Sigmoid(l)"
APART: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sigmoid and a correction": (f"{ROUTER} {SIGMOID} p = Add(m, correction)", "p", {"score_func": "sigmoid"}),
    "the correction first": (f"{ROUTER} {SIGMOID} p = Add(correction, m)", "p", {"score_func": "sigmoid"}),
    "softmax and a correction": (f"{ROUTER} m = Softmax(l) p = Add(m, correction)", "p", {"score_func": "softmax"}),
    "no correction": (f"{ROUTER} {SIGMOID}", "m", {"score_func": "sigmoid"}),
}


@pytest.mark.parametrize("normalised", [0, 1])
@pytest.mark.parametrize("name", APART)
def test_qmoe_that_selects_by_other_scores_than_it_mixes(name: str, normalised: int) -> None:
    router, logits, expected = APART[name]
    attributes = {**SWIGLU, "block_size": 16, "normalize_routing_weights": normalised}
    model = model_of("QMoE", attributes, codes(attributes), router=router, logits=logits, mixing="m")
    match = check(model, norm_topk_prob=bool(normalised), **expected)
    assert ("e_score_correction_bias" in match.constants) is (logits == "p")
    assert relative_l2(run_original(model, tokens())[0], run_fused(model, tokens())) < 1e-5


# --- the router, the ends ---

ROUTERS: dict[str, tuple[str, str, set[str]]] = {
    "MatMul": (ROUTER, "l", {"router_weight"}),
    "MatMul and Add": ("l0 = MatMul(x, router) l = Add(l0, router_b)", "l", {"router_weight", "router_bias"}),
    "Gemm": ("l = Gemm(x, router, router_b)", "l", {"router_weight", "router_bias"}),
    "other scores": ("l0 = MatMul(x, router) l = Tanh(l0)", "l", set()),
    "other tokens": ("x2 = Tanh(x) l = MatMul(x2, router)", "l", set()),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_projection_of_the_router_is_drawn_in(name: str) -> None:
    router, logits, constants = ROUTERS[name]
    attributes = {**SWIGLU, **NORM}
    model = model_of("MoE", attributes, floats(attributes), router=router, logits=logits)
    match = check(model)
    assert set(match.constants) == constants
    assert set(match.inputs) == (set() if constants else {"router_logits"})
    assert relative_l2(run_original(model, tokens())[0], run_fused(model, tokens())) < 1e-5


def test_sequences_and_logits_of_flat_tokens() -> None:
    attributes = {**SWIGLU, **NORM}
    router = f"f = Reshape(x, by_h) {ROUTER.replace('x', 'f')}"
    model = model_of("MoE", attributes, floats(attributes), router=router, shape=f"B, S, {H}")
    match = check(model, router_input="router_weight")
    assert match.hidden_states.name == "x"
    x = tokens(24).reshape(4, 6, H)
    assert relative_l2(run_original(model, x)[0], run_fused(model, x)) < 1e-5


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_ties_and_rows_that_are_no_numbers(op: str) -> None:
    attributes = {**SWIGLU, **NORM, "block_size": 16} if op == "QMoE" else {**SWIGLU, **NORM}
    weights = codes(attributes) if op == "QMoE" else floats(attributes)
    model = model_of(op, attributes, weights, router="", inputs=f", float[T, {E}] l")
    check(model, router_input="router_logits")
    logits = RANDOM.standard_normal((8, E)).astype(np.float32)
    logits[1] = 0.0
    logits[2] = np.repeat([1.0, -1.0], E // 2)
    logits[3], logits[4], logits[5, 2] = np.nan, -np.inf, np.inf
    feeds = {"x": tokens(8), "l": logits}
    before, after = run_original(model, feeds)[0], run_fused(model, feeds)
    assert relative_l2(before, after) < 1e-5
    assert not after[3:6].any()


LFM2 = (
    "l0 = MatMul(x, router) lr = Reshape(l0, by_e) n = Neg(lr) e = Exp(n) e1 = Add(e, one) s = Reciprocal(e1) "
    "c = Add(s, correction) v, i = TopK(c, two) w = GatherElements<axis = 1>(s, i) "
    "t = ReduceSum(w, last) te = Add(t, eps) q0 = Div(t, te) wc = Clip(w, tiny) wl = Log(wc) sh = Shape(s) "
    "low = ConstantOfShape<value = float[1] {-10000.0}>(sh) l = ScatterElements<axis = 1>(low, i, wl)"
)
QWEN = "l0 = MatMul(x, router) l = Reshape(l0, by_e)"
GENAI: dict[str, tuple[str, str, str]] = {
    "lfm2_moe": (
        LFM2,
        "xs = Shape(x) bs = Slice(xs, zero, last) b1 = Concat<axis = 0>(bs, ones) q = Reshape(q0, b1) y = Mul(m, q)",
        "router_logits",
    ),
    "qwen3_5_moe": (
        QWEN,
        "a = MatMul(x, shared) g0 = MatMul(x, shared_gate) g = Sigmoid(g0) b = Mul(a, g) y = Add(m, b)",
        "router_weight",
    ),
}


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
@pytest.mark.parametrize("name", GENAI)
def test_graphs_as_onnxruntime_genai_builds_them(name: str, op: str) -> None:
    """Sequences, and logits of flat tokens; lfm2's are scattered into a fill, and its router stays in the graph."""
    router, after, router_input = GENAI[name]
    attributes = {**SWIGLU, **NORM, "activation_alpha": 1.0, "activation_beta": 0.0}
    if op == "QMoE":
        attributes |= {"expert_weight_bits": 4, "block_size": 32}
    weights = codes(attributes) if op == "QMoE" else floats(attributes)
    weights |= {key: np.zeros_like(array) for key, array in weights.items() if key.endswith("_b")}
    weights |= {"by_e": np.array([-1, E]), "two": np.array([K]), "zero": np.array([0]), "ones": np.array([1])}
    weights |= {"one": np.float32(1.0), "eps": np.float32(1e-6), "tiny": np.float32(1e-30)}
    weights |= {"shared": numbers(H, H), "shared_gate": numbers(H, 1)}
    model = model_of(op, attributes, weights, router=router, after=after, shape=f"B, S, {H}")
    next(node for node in model.graph if node.op_type == op).name = f"/model/layers.0/moe/{op}"
    match = check(model, router_input=router_input)
    assert match.name == "model.layers.0.moe"
    assert (match.hidden_states.name, match.output.name) == ("x", "m")
    x = tokens(24).reshape(4, 6, H)
    assert relative_l2(run_original(model, x)[0], run_fused(model, x)) < 1e-5


# --- the oracle of nodes without a CPU kernel ---


def interleaved(weights: Arrays) -> Arrays:
    """Weights for a node with interleaved rows from those of one with separate gate and up, or with halves."""
    made = {name: array for name, array in weights.items() if not name.startswith(("fc1", "fc3"))}
    for name, array in weights.items():
        if name.startswith("fc1"):
            up = weights.get(name.replace("fc1", "fc3"))
            gate, up = (array[:, :I], array[:, I:]) if up is None else (array, up)
            made[name] = np.stack([gate, up], axis=2).reshape(E, 2 * I, *array.shape[2:])
    return made


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
@pytest.mark.parametrize("layout", [HALVES, {**HALVES, **ALPHA}, {**SEPARATE, **ALPHA}, {"activation_type": "silu"}])
def test_the_oracle_agrees_with_the_cpu_kernel_on_the_same_weights_interleaved(layout: dict[str, Any], op: str) -> None:
    attributes = {**layout, **NORM} | ({"block_size": 16} if op == "QMoE" else {})
    fc3 = layout.get("swiglu_fusion", 0) == 0
    weights = codes(attributes, fc3=fc3, zero_points=True) if op == "QMoE" else floats(attributes, fc3=fc3)
    oracle = contrib_moe.evaluator(model_of(op, attributes, weights))
    kernel = model_of(op, {**attributes, **SWIGLU}, interleaved(weights))
    assert relative_l2(run_original(kernel, tokens())[0], oracle({"x": tokens()})) < 1e-6


@pytest.mark.parametrize("attributes", [SWIGLU, {**SWIGLU, **ALPHA, **NORM, "k": 3}])
def test_the_oracle_agrees_with_the_cpu_kernel(attributes: dict[str, Any]) -> None:
    model = model_of("MoE", attributes, floats(attributes))
    result = contrib_moe.evaluator(model)({"x": tokens()})
    assert relative_l2(run_original(model, tokens())[0], result) < 1e-6


# --- what the probe and the matcher refuse ---


def swapped(match: MoeMatch, one: str, other: str) -> MoeMatch:
    weights = dict(match.weights)
    weights[one], weights[other] = weights[other], weights[one]
    return replace(match, weights=weights)


WRONG: dict[str, dict[str, Any]] = {
    "halves": {"gate_up_interleaved": False},
    "up first": {"gate_up_order": "up_gate"},
    "other limit": {"activation_limit": 0.8},
    "other alpha": {"activation_alpha": 1.7},
    "no beta": {"activation_beta": 0.0},
    "normalised otherwise": {"norm_topk_prob": False, "score_func": "softmax"},
    "scaled": {"routed_scaling_factor": 1.001},
}


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_the_probe_sees_a_wrong_reading(fields: dict[str, Any], op: str) -> None:
    attributes = {**SWIGLU, **ALPHA, **NORM} | ({"block_size": 16, "accuracy_level": 4} if op == "QMoE" else {})
    model = model_of(op, attributes, codes(attributes) if op == "QMoE" else floats(attributes))
    match = only_match(model)
    assert probe(model, match).ok
    result = probe(model, replace(match, spec=replace(match.spec, **fields)))
    assert "does not compute what it seems to" in result.reason


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_the_probe_sees_gate_and_up_swapped_without_a_cpu_kernel(op: str) -> None:
    attributes = {**SEPARATE, **NORM} | ({"block_size": 16} if op == "QMoE" else {})
    model = model_of(op, attributes, codes(attributes, fc3=True) if op == "QMoE" else floats(attributes, fc3=True))
    result = probe(model, swapped(only_match(model), "gate_proj", "up_proj"))
    assert "does not compute what it seems to" in result.reason


@pytest.mark.parametrize("bits", [4, 8])
def test_the_probe_sees_that_zero_points_are_left_out(bits: int) -> None:
    attributes = {**SWIGLU, **NORM, "block_size": 16, "expert_weight_bits": bits}
    model = model_of("QMoE", attributes, codes(attributes, zero_points=True))
    match = only_match(model)
    assert probe(model, match).ok
    left = tuple(name for name in match.spec.weight_inputs if name != "down_proj_zero_points")
    without = replace(match, spec=replace(match.spec, weight_inputs=left))
    assert "does not compute what it seems to" in probe(model, without).reason


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "unknown activation": ("MoE", {"activation_type": "geglu", "swiglu_fusion": 1}, {}, "activation_type is geglu"),
    "unknown attribute": ("MoE", {**SWIGLU, "new_meaning": 1}, {}, "attribute new_meaning of MoE is 1"),
    "negative limit": ("MoE", {**SWIGLU, "swiglu_limit": -0.5}, {}, "swiglu_limit is -0.5, expected 0 or more"),
    "limit after activation": ("MoE", {**SWIGLU, "swiglu_limit_after_activation": 1}, {}, "limit_after_activation"),
    "swiglu without FC3": ("MoE", SEPARATE, {}, "swiglu_fusion is 0 without FC3"),
    "interleaved with FC3": ("MoE", SWIGLU, {"fc3": True}, "swiglu_fusion is 1 with FC3"),
    "relu with FC3": ("MoE", {"activation_type": "relu"}, {"fc3": True}, "FC3 with activation_type relu"),
    "silu with alpha and FC3": (
        *("MoE", {"activation_type": "silu", "activation_alpha": 1.702}, {"fc3": True}),
        "FC3 with activation_type silu and activation_alpha",
    ),
    "fusion without swiglu": ("MoE", {"activation_type": "silu", "swiglu_fusion": 1}, {}, "expected swiglu"),
    "sparse mixer in halves": ("MoE", {**HALVES, "use_sparse_mixer": 1}, {}, "use_sparse_mixer=1"),
    "QMoE in halves, not normalised": ("QMoE", {**HALVES, "block_size": 16}, {}, "normalize_routing_weights=0"),
    "more than all experts": ("MoE", {**SWIGLU, "k": E + 1}, {}, "top_k is 9"),
    "2 bits": ("QMoE", {**SWIGLU, "expert_weight_bits": 2}, {}, "expert_weight_bits is 2"),
    "two widths": ("QMoE", {**SWIGLU, "fc2_expert_weight_bits": 8}, {}, "fc2_expert_weight_bits of QMoE is 8"),
    "packed for CUDA": ("QMoE", {**SWIGLU, "weights_prepacked": 1}, {}, "weights_prepacked of QMoE is 1"),
    "fp4": ("QMoE", {**SWIGLU, "quant_type": "fp4"}, {}, "quant_type of QMoE is 'fp4'"),
    "strange block": ("QMoE", {**SWIGLU, "block_size": 8}, {}, "block is 8"),
    "zero points by row": ("QMoE", {**SWIGLU}, {"zero_points": True}, "two rows in a byte"),
    "accuracy level": ("QMoE", {**SWIGLU, "block_size": 16, "accuracy_level": 7}, {}, "accuracy_level is 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    op, attributes, options, reason = REFUSED[name]
    weights = codes(attributes, **options) if op == "QMoE" else floats(attributes, **options)
    assert reason in only_miss(model_of(op, attributes, weights)).reason


def changed(op: str = "MoE", attributes: Mapping[str, Any] | None = None, **arrays: np.ndarray) -> ir.Model:
    attributes = {**SWIGLU, **NORM, **({"block_size": 16} if op == "QMoE" else {}), **(attributes or {})}
    return model_of(op, attributes, {**(codes(attributes) if op == "QMoE" else floats(attributes)), **arrays})


SHAPES: dict[str, tuple[str, Arrays, str]] = {
    "fewer experts": ("MoE", {"fc1": numbers(E - 1, 2 * I, H)}, "fc1_experts_weights is [7, 64, 64]"),
    "transposed": ("MoE", {"fc2": numbers(E, I, H)}, "its input has 64 columns"),
    "bias of one": ("MoE", {"fc2_b": numbers(E, 1)}, "fc2_experts_bias is [8, 1], expected [8, 64]"),
    "scales of rows": ("QMoE", {"fc1_s": numbers(E, 2 * I)}, "fc1_scales is [8, 64], expected [8, 64, 4]"),
    "more zero points": (
        *("QMoE", {"fc1_z": np.zeros((E, 2 * I, 3), np.uint8)}),
        "fc1_zero_points is [8, 64, 3], expected [8, 64, 2]",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_refused_shapes(name: str) -> None:
    op, arrays, reason = SHAPES[name]
    assert reason in only_miss(changed(op, **arrays)).reason


def test_a_router_of_another_width_is_refused() -> None:
    assert "the router scores 6 experts, but the weights hold 8" in only_miss(changed(router=numbers(H, 6))).reason


def test_weights_that_the_graph_computes_are_refused() -> None:
    model = model_of("MoE", SWIGLU, floats(SWIGLU), router=f"{ROUTER} fc2b = Tanh(fc2)")
    node = next(node for node in model.graph if node.op_type == "MoE")
    node.replace_input_with(4, next(node for node in model.graph if node.op_type == "Tanh").outputs[0])
    assert "fc2_experts_weights (fc2b) is computed by the graph" in only_miss(model).reason


@pytest.mark.parametrize(
    ("router", "logits", "reason"),
    [
        (f"{ROUTER} m = Tanh(l) p = Add(m, correction)", "p", "neither Sigmoid nor Softmax"),
        (f"{ROUTER} m = Softmax<axis = 0>(l) p = Add(m, correction)", "p", "neither Sigmoid nor Softmax"),
        (f"{ROUTER} {SIGMOID} p = Add(m, l)", "p", "constant bias of 8"),
        (f"{ROUTER} {SIGMOID} p = Add(m, correction_of_one)", "p", "constant bias of 8"),
        (f"{ROUTER} {SIGMOID} p = Mul(m, correction)", "p", "constant bias of 8"),
        (f"{ROUTER} {SIGMOID}", "l", "constant bias of 8"),
    ],
)
def test_unknown_router_weights_are_refused(router: str, logits: str, reason: str) -> None:
    attributes = {**SWIGLU, "block_size": 16}
    model = model_of("QMoE", attributes, codes(attributes), router=router, logits=logits, mixing="m")
    assert reason in only_miss(model).reason
