"""The matcher of experts that are computed densely: every spelling of the pattern, refusals, mutants."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import fuse_model
from tests.dense_graphs import GPT_OSS, LLAMA4, E, H, K, block, swapped
from tests.graph_mutants import mutants
from tests.graphs import compare, find, only_match, only_miss, run_original


def check(model: ir.Model, **expected: Any) -> None:
    """One match, right to 1e-5 on several batches, whose spec has the `expected` fields, and which can be fused."""
    match = only_match(model)
    assert match.family == "dense_experts"
    for batch, length in ((1, 1), (1, 7), (3, 11)):
        x = np.random.default_rng(length).standard_normal((batch, length, H)).astype(np.float32)
        assert compare(model, match, x) <= 1e-5
    assert {name: getattr(match.spec, name) for name in expected} == expected
    report = fuse_model(model)
    assert not report.refused and len(report.fused) == 1
    assert not any(node.op_type in ("MatMul", "ScatterElements", "Tile") for node in model.graph)


GPT_OSS_SPEC: dict[str, Any] = {
    "weight_inputs": ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    "gate_up_interleaved": True,
    "activation_alpha": 1.702,
    "activation_beta": 1.0,
    "activation_limit": 0.5,
    "score_func": "softmax_topk",
    "router_input": "router_weight",
    "apply_weights_to": "output",
    "top_k": K,
    "num_experts": E,
}
LLAMA4_SPEC: dict[str, Any] = {
    "weight_inputs": ("gate_up_proj", "down_proj"),
    "gate_up_interleaved": False,
    "gate_up_order": "gate_up",
    "score_func": "sigmoid_topk",
    "router_input": "router_weight",
    "apply_weights_to": "input",
    "top_k": K,
    "num_experts": E,
}

SILU = "g, u = Split<axis = 2, num_outputs = 2>(p) sg = Sigmoid(g) gl = Mul(g, sg) a = Mul(gl, u)"
BATCHED = "xs = Shape(x) z = Reshape(y, xs)"
FLAT_WEIGH = {
    "copies": "tt = Tile(t, copies) r = Reshape(tt, experts_first)",
    "weigh": "st = Transpose(sc) s4 = Unsqueeze(st, last) ow = Mul(s4, o)",
    "after": BATCHED,
}
"""Without the batch: scores [E, T, 1] times [E, T, H]."""

FORMS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, Any]]] = {
    "gpt_oss": (GPT_OSS, {}, GPT_OSS_SPEC),
    "gpt_oss with biases that are not folded": (
        GPT_OSS,
        {"gate_up": "p0 = MatMul(r, gate_up) pb = Unsqueeze(gate_up_b, i1) p = Add(pb, p0)"},
        GPT_OSS_SPEC,
    ),
    "gpt_oss without biases, halves": (
        GPT_OSS,
        {"gate_up": "p = MatMul(r, gate_up)", "activation": SILU, "down": "o = MatMul(a, down)"},
        {"weight_inputs": ("gate_up_proj", "down_proj"), "activation": "silu", "gate_up_interleaved": False},
    ),
    "up before gate": (
        GPT_OSS,
        {"activation": SILU.replace("g, u", "u, g")},
        {"gate_up_order": "up_gate", "gate_up_interleaved": False},
    ),
    "two projections": (
        GPT_OSS,
        {
            "gate_up": "g = MatMul(r, gate) u = MatMul(r, up)",
            "activation": "sg = Sigmoid(g) gl = Mul(g, sg) a = Mul(gl, u)",
        },
        {"weight_inputs": ("gate_proj", "up_proj", "down_proj", "down_proj_bias")},
    ),
    "no gate": (
        GPT_OSS,
        {"gate_up": "p = MatMul(r, up)", "activation": "a = Relu(p)"},
        {"weight_inputs": ("up_proj", "down_proj", "down_proj_bias"), "activation": "relu"},
    ),
    "weights [N, K] behind a Transpose": (
        GPT_OSS,
        {"gate_up": "wt = Transpose<perm = [0, 2, 1]>(gate_up_nk) p0 = MatMul(r, wt) p = Add(p0, gate_up_b3)"},
        GPT_OSS_SPEC,
    ),
    "scores of the tokens in a row": (GPT_OSS, FLAT_WEIGH, GPT_OSS_SPEC),
    "copies by Expand": (
        GPT_OSS,
        {**FLAT_WEIGH, "copies": "tu = Unsqueeze(t, i0) r = Expand(tu, copies_3d)"},
        GPT_OSS_SPEC,
    ),
    "copies by MatMul itself": (
        GPT_OSS,
        {**FLAT_WEIGH, "copies": "r = Unsqueeze(t, i0)"},
        GPT_OSS_SPEC,
    ),
    "softmax over all experts, normalised": (
        GPT_OSS,
        {
            "router": "l = Gemm<transB = 1>(t, router) s = Softmax<axis = -1>(l) w0, ids = TopK(s, k) "
            "n = ReduceSum(w0, last) w = Div(w0, n)"
        },
        {"score_func": "softmax", "norm_topk_prob": True},
    ),
    "softmax of logits scattered into -inf": (
        GPT_OSS,
        {
            "scatter": "ls = Shape(l) fill = Expand(minus_inf, ls) raw = ScatterElements<axis = 1>(fill, ids, w0) "
            "sc = Softmax<axis = 1>(raw)"
        },
        GPT_OSS_SPEC,
    ),
    "an unknown router stays": (
        GPT_OSS,
        {"router": "l = Gemm<transB = 1>(t, router) w0, ids = TopK(l, k) w = Tanh(w0)"},
        {"router_input": "topk_ids"},
    ),
    "llama4": (LLAMA4, {}, LLAMA4_SPEC),
    "llama4, operands swapped": (LLAMA4, swapped(LLAMA4, "copies", ("Mul(tt, sr)", "Mul(sr, tt)")), LLAMA4_SPEC),
    "llama4 in three axes": (
        LLAMA4,
        {
            "copies": "tt = Tile(t, copies) t3 = Reshape(tt, experts_first) su = Unsqueeze(sc, last) "
            "st = Transpose<perm = [1, 0, 2]>(su) r = Mul(t3, st)",
            "down": "o = MatMul(a, down)",
        },
        LLAMA4_SPEC,
    ),
    "llama4 with logits of another projection": (
        LLAMA4,
        swapped(LLAMA4, "router", ("Gemm<transB = 1>(t,", "Gemm<transB = 1>(tn,"), ("l =", "tn = Neg(t) l =")),
        {"router_input": "router_logits", "score_func": "sigmoid_topk", "apply_weights_to": "input"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_matched_and_fused(name: str) -> None:
    form, parts, expected = FORMS[name]
    check(block(form, **parts), **expected)


def test_a_shared_expert_stays_in_the_graph() -> None:
    model = block(LLAMA4)
    fuse_model(model)
    assert sorted(node.op_type for node in model.graph) == ["Add", "HinaMoE", "Reshape", "Tanh"]


NOT_FUSED: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "a router of another width": (
        GPT_OSS,
        {**FLAT_WEIGH, **swapped(GPT_OSS, "router", ("(t, router, router_b)", "(t, router_of_6)"))},
        "scores 6 experts, but the weights hold 4",
    ),
    "a router of another width, copies as many": (
        GPT_OSS,
        swapped(GPT_OSS, "router", ("(t, router, router_b)", "(t, router_of_6)")),
        "Tile by [6, 1] does not lay",
    ),
    "an expert missing from one weight": (GPT_OSS, {"down": "o = MatMul(a, down_of_3)"}, "4 and 3 experts"),
    "experts chosen without TopK": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("(fill, ids,", "(fill, others,"), ("sc =", "others = Abs(ids) sc =")),
        "not those of a TopK",
    ),
    "TopK over the tokens": (
        GPT_OSS,
        swapped(GPT_OSS, "router", ("TopK(l, k)", "TopK<axis = 0>(l, k)")),
        "TopK does not run over the last axis",
    ),
    "llama4 with the logits of another TopK": (
        LLAMA4,
        swapped(LLAMA4, "router", ("w0, ids = TopK", "l2 = Neg(l) w0, i9 = TopK(l2, k) w9, ids = TopK")),
        "of the TopK that chose the experts",
    ),
    "llama4 with the smallest logits": (
        LLAMA4,
        swapped(LLAMA4, "router", ("TopK<axis = 1>", "TopK<axis = 1, largest = 0>")),
        "not the largest",
    ),
    "scores written over ones": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("ConstantOfShape(ls)", "Expand(one, ls)")),
        "are not 0 before the scatter",
    ),
    "sigmoid of logits scattered into zeros": (
        LLAMA4,
        swapped(LLAMA4, "scatter", ("minus_inf", "zero")),
        "are not -inf before the scatter",
    ),
    "scores scattered over the tokens": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("axis = 1", "axis = 0")),
        "does not scatter over the experts",
    ),
    "scores combined by max": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("axis = 1", 'axis = 1, reduction = "max"')),
        "by max",
    ),
    "scores of a fixed number of tokens": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("ScatterElements<axis = 1>(fill", "ScatterElements<axis = 1>(fixed_scores")),
        "number of tokens whose scores are scattered is fixed",
    ),
    "scores of a fixed shape": (
        GPT_OSS,
        swapped(GPT_OSS, "scatter", ("ConstantOfShape(ls)", "ConstantOfShape(fixed_shape)")),
        "number of tokens whose scores are scattered is fixed",
    ),
    "tokens fixed before the experts": (
        LLAMA4,
        swapped(LLAMA4, "copies", ("experts_first", "six_tokens")),
        f"Reshape fixes the shape [{E}, 6, {H}]",
    ),
    "tokens fixed after the experts": (
        LLAMA4,
        swapped(LLAMA4, "down", ("experts_first", "six_tokens")),
        f"Reshape fixes the shape [{E}, 6, {H}]",
    ),
    "copies of a token beside each other": (
        LLAMA4,
        swapped(LLAMA4, "copies", ("Tile(te, copies)", "Tile(te, copies_apart)")),
        "does not lay a copy of all tokens for each of 4 experts",
    ),
    "twice as many copies": (
        GPT_OSS,
        {**FLAT_WEIGH, "copies": "tt = Tile(t, twice) r = Reshape(tt, experts_first)", "after": "z = Neg(y)"},
        "does not lay a copy of all tokens for each of 4 experts",
    ),
    "scores of the experts not turned": (
        GPT_OSS,
        swapped(GPT_OSS, "weigh", ("st = Transpose<perm = [1, 0]>(sc)", ""), ("(st,", "(sc,")),
        "is not a transposed",
    ),
    "summed over the tokens": (
        GPT_OSS,
        {"sum": "y = ReduceSum<keepdims = 0>(ow, i1)"},
        "ReduceSum over axes (1,) does not sum",
    ),
    "summed over hidden": (
        GPT_OSS,
        {"sum": "y0 = ReduceSum(ow, last) y = ReduceSum<keepdims = 0>(y0, i0)"},
        "ReduceSum over axes (-1,) does not sum",
    ),
    "weighted twice": (
        LLAMA4,
        {"weigh": "s3 = Unsqueeze(st, last) o3 = Mul(o, s3)", "sum": "y = ReduceSum<keepdims = 0>(o3, i0)"},
        "twice multiplied by scores",
    ),
    "llama4 with a bias": (
        LLAMA4,
        {"gate_up": "p0 = MatMul(r, gate_up) p = Add(p0, gate_up_b3)"},
        "experts that have biases",
    ),
    "a bias of the tokens": (
        GPT_OSS,
        {"down": "o0 = MatMul(a, down) o = Add(o0, down_b_of_tokens)"},
        "not a stored bias",
    ),
    "something behind the down projection": (
        GPT_OSS,
        {"down": "o0 = MatMul(a, down) o = Tanh(o0)"},
        "Tanh after the down projection",
    ),
    "an unknown activation": (
        GPT_OSS,
        {"activation": "g, u = Split<axis = 2, num_outputs = 2>(p) gl = Softplus(g) a = Mul(gl, u)"},
        "two projections, or the two halves of one",
    ),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_no_such_block_is_a_miss_that_says_why(name: str) -> None:
    form, parts, reason = NOT_FUSED[name]
    model = block(form, **parts)
    miss = only_miss(model)
    assert reason in miss.reason
    assert miss.name in {node.name for node in model.graph}


@pytest.mark.parametrize(
    "parts",
    [{"weigh": "ow = Abs(o)"}, {"weigh": "sl = Transpose(l) s4 = Unsqueeze(sl, last) ow = Mul(o, s4)"}],
    ids=["no router", "no TopK"],
)
def test_products_that_no_topk_meets_are_no_place(parts: dict[str, str]) -> None:
    assert find(block(GPT_OSS, **{**FLAT_WEIGH, **parts})) == []


@pytest.mark.parametrize(
    ("form", "after"),
    [
        (GPT_OSS, "z = Add(x, y)"),
        (LLAMA4, "sh = Tanh(t) ys = Add(sh, y) xs = Shape(x) yr = Reshape(ys, xs) z = Add(x, yr)"),
    ],
    ids=["gpt_oss", "llama4"],
)
def test_two_layers_are_two_matches(form: dict[str, str], after: str) -> None:
    """The products and the TopK of the first layer lie before those of the second, but in no place of it."""
    first, second = (ir.to_proto(block(form, after=after, shape="[B, S, H]")) for _ in range(2))
    model = ir.from_proto(onnx.compose.merge_models(first, second, [("z", "x")], prefix2="b_"))
    x = np.random.default_rng(6).standard_normal((2, 5, H)).astype(np.float32)
    (before,) = run_original(model, x)
    report = fuse_model(model)
    assert [len(report.fused), len(report.refused)] == [2, 0]
    (result,) = run_original(model, x, options=hina_ort.session_options())
    assert relative_l2(before, result) <= 1e-5


def runs(model: ir.Model, x: np.ndarray) -> np.ndarray | None:
    """The output of the model, None when ONNX Runtime does not load or run it."""
    try:
        return run_original(model, x, options=hina_ort.session_options())[0]
    except Exception:  # ONNX Runtime has no base class for its errors
        return None


@pytest.mark.parametrize(
    "form", [pytest.param(GPT_OSS, id="gpt_oss", marks=pytest.mark.slow), pytest.param(LLAMA4, id="llama4")]
)
def test_a_mutant_is_refused_or_computes_the_same(form: dict[str, str]) -> None:
    x = np.random.default_rng(8).standard_normal((2, 5, H)).astype(np.float32)
    fused = refused = 0
    for what, model in mutants(lambda: block(form)):
        before = runs(model, x)
        if before is None:
            continue
        if not fuse_model(model).applied:
            refused += 1
            continue
        fused += 1
        after = runs(model, x)
        assert after is not None and relative_l2(before, after) <= 1e-5, what
    assert fused >= 5 and refused >= 10, (fused, refused)
