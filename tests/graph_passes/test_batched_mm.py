"""The batched_mm matcher on small graphs: layouts, lookups, activations in every spelling, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.matchers import MoeMatch
from tests.graphs import compare, find, only_match, only_miss, parse

# 2I is H and E is k * 2 on purpose: no shape tells the layout.
H, I, E, K = 16, 8, 4, 2  # noqa: E741
RNG = np.random.default_rng(11)


def random(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.6).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    "router": random(H, E),
    "router_of_6": random(H, 6),
    "gate_up": random(E, 2 * I, H),
    "gate": random(E, I, H),
    "up": random(E, I, H),
    "down": random(E, H, I),
    "down_b_of_1": random(E, 1),
    "gate_up_b_of_5": random(5, 2 * I),
    "twelve_rows": np.array([12, H]),
    "six_tokens": np.array([6, K, H]),
    "experts": np.array(E),
    "from_the_end": np.array([-1, -2, -3, -4]),
    "other_order": np.array([2, 0, 3, 1]),
    "gate_up_kn": random(E, H, 2 * I),
    "down_kn": random(E, I, H),
    "gate_up_b": random(E, 2 * I),
    "down_b": random(E, H),
    "down_of_3": random(3, H, I),
    "k": np.array([K]),
    "last": np.array([-1]),
    "axis1": np.array([1]),
    "repeats": np.array([1, K, 1]),
    "repeats_2d": np.array([1, K]),
    "repeats_wrong": np.array([K, 1]),
    "by_h": np.array([-1, H]),
    "by_k": np.array([-1, K, H]),
    "by_one": np.array([-1, 1, H]),
    "ones": np.array([1, 1, 1]),
    "by_k_wrong": np.array([-1, H, K]),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i2": np.array([2]),
    "half_i": np.array([I]),
    "end": np.array([2**63 - 1]),
    "unequal": np.array([I - 1, I + 1]),
    "sizes": np.array([I, I]),
    "alpha": np.float32(1.702),
    "limit": np.float32(0.5),
    "minus_limit": np.float32(-0.5),
    "low": np.float32(-0.25),
    "one": np.float32(1.0),
    "half": np.float32(0.5),
    "two": np.float32(2.0),
    "three": np.float32(3.0),
    "sqrt2": np.float32(math.sqrt(2.0)),
    "sqrt_half": np.float32(math.sqrt(0.5)),
    "sqrt_2_pi": np.float32(math.sqrt(2.0 / math.pi)),
    "cubic": np.float32(0.044715),
}

ROUTER = "l = MatMul(x, router) s = Softmax(l) w, t = TopK(s, k) ids = Reshape(t, last) idx = Unsqueeze(ids, last)"
REPEAT = "x1 = Unsqueeze(x, axis1) xk = Expand(x1, repeats) r = Reshape(xk, by_h)"
COMBINE = (
    "wf = Reshape(w, last) wu = Unsqueeze(wf, last) weighted = Mul(o, wu) "
    "grouped = Reshape(weighted, by_k) y = ReduceSum<keepdims = 0>(grouped, axis1)"
)


def nk(name: str, source: str, weights: str) -> str:
    """Product with weights [N, K] on the left: `name` = source @ W[ids].T."""
    return (
        f"{name}_w = GatherND({weights}, idx) {name}_u = Unsqueeze({source}, last) "
        f"{name}_m = MatMul({name}_w, {name}_u) {name} = Squeeze({name}_m, last)"
    )


def kn(name: str, source: str, weights: str) -> str:
    """Product with weights [K, N] on the right: `name` = source @ W[ids]."""
    return (
        f"{name}_w = Gather<axis = 0>({weights}, ids) {name}_u = Unsqueeze({source}, axis1) "
        f"{name}_m = MatMul({name}_u, {name}_w) {name} = Squeeze({name}_m, axis1)"
    )


SPLIT = "g, u = Split<axis = 1, num_outputs = 2>(p)"
SILU = "sg = Sigmoid(g) a = Mul(g, sg)"
GATED = "h = Mul(a, u)"


def block(
    *,
    router: str = ROUTER,
    repeat: str = REPEAT,
    gate_up: str = nk("p", "r", "gate_up"),
    activation: str = f"{SPLIT} {SILU} {GATED}",
    down: str = nk("o", "h", "down"),
    combine: str = COMBINE,
    outputs: str = f"float[T, {H}] y",
    opset: int = 20,
) -> ir.Model:
    """A whole block; each part may be spelled otherwise."""
    nodes = " ".join((router, repeat, gate_up, activation, down, combine))
    return parse(f"(float[T, {H}] x) => ({outputs}) {{ {nodes} }}", CONSTANTS, opset=opset)


def check(model: ir.Model, **expected: Any) -> None:
    """One match, right to 1e-5, whose spec has the `expected` fields."""
    match = only_match(model)
    x = np.random.default_rng(5).standard_normal((23, H)).astype(np.float32)
    assert compare(model, match, x) < 1e-5
    assert {name: getattr(match.spec, name) for name in expected} == expected


SEPARATE = f"{nk('g', 'r', 'gate')} {nk('u', 'r', 'up')}"
UP_ONLY = nk("u", "r", "up")
STEP2 = "g = Slice(p, i0, end, axis1, i2) u = Slice(p, i1, end, axis1, i2)"
OAI = (
    "gc = Clip(g, , limit) uc = Clip(u, minus_limit, limit) gs = Mul(gc, alpha) sg = Sigmoid(gs) "
    "gl = Mul(gc, sg) u1 = Add(uc, one) h = Mul(u1, gl)"
)
BIASED_GATE_UP = f"{nk('p0', 'r', 'gate_up')} pb = GatherND(gate_up_b, idx) p = Add(pb, p0)"
BIASED_DOWN = f"{nk('o0', 'h', 'down')} ob = Gather<axis = 0>(down_b, ids) o = Add(o0, ob)"

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as exported": ({}, {"weight_inputs": ("gate_up_proj", "down_proj"), "num_experts": E, "top_k": K}),
    "[K, N]": ({"gate_up": kn("p", "r", "gate_up_kn"), "down": kn("o", "h", "down_kn")}, {}),
    "[K, N] behind a Transpose": (
        {
            "gate_up": nk("p", "r", "wt").replace(
                "p_w = GatherND(wt, idx)", "t0 = GatherND(gate_up_kn, idx) p_w = Transpose<perm = [0, 2, 1]>(t0)"
            )
        },
        {},
    ),
    "Tile": ({"repeat": "x1 = Unsqueeze(x, axis1) xk = Tile(x1, repeats) r = Reshape(xk, by_h)"}, {}),
    "Tile of rows": ({"repeat": "xk = Tile(x, repeats_2d) r = Reshape(xk, by_h)"}, {}),
    "two projections": (
        {"gate_up": SEPARATE, "activation": f"{SILU} {GATED}"},
        {"weight_inputs": ("gate_proj", "up_proj", "down_proj")},
    ),
    "no gate": (
        {"gate_up": UP_ONLY, "activation": "h = Relu(u)"},
        {"weight_inputs": ("up_proj", "down_proj"), "activation": "relu"},
    ),
    "biases": (
        {"gate_up": BIASED_GATE_UP, "down": BIASED_DOWN},
        {"weight_inputs": ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")},
    ),
    "up before gate": (
        {"activation": f"u, g = Split<axis = -1>(p, sizes) {SILU} {GATED}"},
        {"gate_up_order": "up_gate"},
    ),
    "Slices of halves": (
        {"activation": f"g = Slice(p, i0, half_i, axis1) u = Slice(p, half_i, end, axis1) {SILU} {GATED}"},
        {"gate_up_order": "gate_up", "gate_up_interleaved": False},
    ),
    "interleaved": (
        {"activation": f"{STEP2} {SILU} {GATED}"},
        {"gate_up_interleaved": True, "gate_up_order": "gate_up"},
    ),
    "interleaved, up first": (
        {"activation": f"{STEP2.replace('g =', 'v =').replace('u =', 'g =').replace('v =', 'u =')} {SILU} {GATED}"},
        {"gate_up_interleaved": True, "gate_up_order": "up_gate"},
    ),
    "router logits are an output too": ({"outputs": f"float[T, {H}] y, float[T, {E}] l"}, {}),
    "unknown router": (
        {"router": ROUTER.replace("Softmax(l)", "Tanh(l)")},
        {"router_input": "topk_ids"},
    ),
    "ids looked up in a constant": (
        {"router": ROUTER.replace("ids = Reshape(t,", "tn = Gather(other_order, t) ids = Reshape(tn,")},
        {"router_input": "topk_ids"},
    ),
    "one expert per token": (
        {
            "router": ROUTER.replace("TopK(s, k)", "TopK(s, i1)"),
            "repeat": "x1 = Unsqueeze(x, axis1) xk = Expand(x1, ones) r = Reshape(xk, by_h)",
            "combine": COMBINE.replace("by_k", "by_one"),
        },
        {"top_k": 1},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_matched(name: str) -> None:
    parts, expected = LAYOUTS[name]
    check(block(**parts), **expected)


ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": (f"{SPLIT} {SILU} {GATED}", {"activation": "silu", "activation_alpha": 1.0}),
    "silu, operands swapped": (f"{SPLIT} sg = Sigmoid(g) a = Mul(sg, g) h = Mul(u, a)", {"activation": "silu"}),
    "silu, other association": (f"{SPLIT} sg = Sigmoid(g) a = Mul(sg, u) h = Mul(g, a)", {"activation": "silu"}),
    "silu with alpha": (
        f"{SPLIT} ga = Mul(alpha, g) sg = Sigmoid(ga) a = Mul(g, sg) {GATED}",
        {"activation": "silu", "activation_alpha": 1.702},
    ),
    "QuickGelu": (
        f"{SPLIT} a = com.microsoft.QuickGelu<alpha = 1.702>(g) {GATED}",
        {"activation": "silu", "activation_alpha": 1.702},
    ),
    "swiglu of gpt-oss": (
        f"{STEP2} {OAI}",
        {"activation_alpha": 1.702, "activation_beta": 1.0, "activation_limit": 0.5, "gate_up_interleaved": True},
    ),
    "swiglu of gpt-oss by Min and Max": (
        f"{STEP2} {OAI}".replace("Clip(g, , limit)", "Min(g, limit)").replace(
            "uc = Clip(u, minus_limit, limit)", "um = Max(u, minus_limit) uc = Min(um, limit)"
        ),
        {"activation_limit": 0.5, "activation_beta": 1.0},
    ),
    "gelu": (f"{SPLIT} a = Gelu(g) {GATED}", {"activation": "gelu"}),
    "gelu by tanh": (f'{SPLIT} a = Gelu<approximate = "tanh">(g) {GATED}', {"activation": "gelu_tanh"}),
    "gelu of com.microsoft": (f"{SPLIT} a = com.microsoft.Gelu(g) {GATED}", {"activation": "gelu"}),
    "FastGelu": (f"{SPLIT} a = com.microsoft.FastGelu(g) {GATED}", {"activation": "gelu_tanh"}),
    "gelu spelled out": (
        f"{SPLIT} d = Div(g, sqrt2) e = Erf(d) e1 = Add(e, one) gh = Mul(half, g) a = Mul(gh, e1) {GATED}",
        {"activation": "gelu"},
    ),
    "gelu spelled otherwise": (
        f"{SPLIT} d = Mul(g, sqrt_half) e = Erf(d) e1 = Add(one, e) ge = Mul(g, e1) a = Mul(ge, half) {GATED}",
        {"activation": "gelu"},
    ),
    "gelu by tanh spelled out": (
        f"{SPLIT} c = Pow(g, three) cc = Mul(cubic, c) q = Add(g, cc) qs = Mul(q, sqrt_2_pi) e = Tanh(qs) "
        f"e1 = Add(e, one) gh = Mul(g, half) a = Mul(gh, e1) {GATED}",
        {"activation": "gelu_tanh"},
    ),
    "gelu by tanh spelled otherwise": (
        f"{SPLIT} gg = Mul(g, g) cc = Mul(cubic, gg) c1 = Add(cc, one) q = Mul(g, c1) qs = Mul(q, sqrt_2_pi) "
        f"e = Tanh(qs) e1 = Add(e, one) gh = Mul(g, half) a = Mul(gh, e1) {GATED}",
        {"activation": "gelu_tanh"},
    ),
    "relu": (f"{SPLIT} a = Relu(g) {GATED}", {"activation": "relu"}),
    "relu squared": (f"{SPLIT} rg = Relu(g) a = Pow(rg, two) {GATED}", {"activation": "relu2"}),
    "relu squared by Mul": (f"{SPLIT} rg = Relu(g) a = Mul(rg, rg) {GATED}", {"activation": "relu2"}),
    "no activation": (f"{SPLIT} h = Mul(g, u)", {"activation": "identity"}),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_matched(name: str) -> None:
    text, expected = ACTIVATIONS[name]
    check(block(activation=text), **expected)


def test_swish_of_opset_24_is_silu() -> None:
    match = only_match(block(activation=f"{SPLIT} a = Swish<alpha = 1.5>(g) {GATED}", opset=24))
    assert (match.spec.activation, match.spec.activation_alpha) == ("silu", 1.5)


MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "router of another width": ({"router": ROUTER.replace("router)", "router_of_6)")}, "scores 6 experts"),
    "an expert is missing from one weight": ({"down": nk("o", "h", "down_of_3")}, "different numbers of experts"),
    "copies of a token lie apart": (
        {"repeat": "r = Tile(x, repeats_wrong)"},
        "down projection",
    ),
    "not summed over the experts of a token": (
        {"combine": COMBINE.replace("by_k)", "by_k_wrong)").replace(", axis1)", ", last)")},
        "ReduceSum",
    ),
    "no mixing weights": (
        {"combine": "grouped = Reshape(o, by_k) y = ReduceSum<keepdims = 0>(grouped, axis1)"},
        "ReduceSum after the down projection",
    ),
    "something between bias and weights": (
        {"down": f"{nk('o0', 'h', 'down')} o = Tanh(o0)"},
        "Tanh after the down projection",
    ),
    "an inner value is a graph output": ({"outputs": f"float[T, {H}] y, float[S, {H}] o"}, "graph output"),
    "the bias is not the expert's": (
        {"down": f"{nk('o0', 'h', 'down')} other = Neg(ids) ob = Gather<axis = 0>(down_b, other) o = Add(o0, ob)"},
        "bias",
    ),
    "GLU without the value": ({"activation": f"{SPLIT} a = Sigmoid(g) h = Mul(a, u)"}, "projection"),
    "only the gate is limited": (
        {"activation": f"{SPLIT} gc = Clip(g, , limit) sg = Sigmoid(gc) a = Mul(gc, sg) {GATED}"},
        "limited",
    ),
    "limits that are not symmetric": (
        {"activation": f"{STEP2} {OAI}".replace("minus_limit", "low")},
        "limited",
    ),
    "limits that cross": (
        {
            "activation": f"{STEP2} {OAI}".replace(
                "uc = Clip(u, minus_limit, limit)", "uc = Clip(u, limit, minus_limit)"
            ).replace("gc = Clip(g, , limit)", "gc = Clip(g, , minus_limit)")
        },
        "limited",
    ),
    "both halves are the same": ({"activation": f"{SPLIT} sg = Sigmoid(g) a = Mul(g, sg) h = Mul(a, g)"}, "halves"),
    "the halves are unequal": ({"activation": f"g, u = Split<axis = 1>(p, unequal) {SILU} {GATED}"}, "equal halves"),
    "only a half is used": ({"activation": f"{SPLIT} h = Relu(u)"}, "part"),
    "a bias of one number per expert": (
        {"down": BIASED_DOWN.replace("down_b", "down_b_of_1")},
        f"down_proj_bias (down_b_of_1) is [{E}, 1], expected [{E}, {H}]",
    ),
    "a bias of more experts": (
        {"gate_up": BIASED_GATE_UP.replace("gate_up_b", "gate_up_b_of_5")},
        f"gate_up_proj_bias (gate_up_b_of_5) is [5, {2 * I}], expected [{E}, {2 * I}]",
    ),
    "a repeated token count that is fixed": (
        {"repeat": REPEAT.replace("by_h", "twelve_rows")},
        f"Reshape fixes the shape [12, {H}]",
    ),
    "a token count that is fixed before the sum": (
        {"combine": COMBINE.replace("by_k", "six_tokens")},
        f"Reshape fixes the shape [6, {K}, {H}]",
    ),
    "ids that count from the end": (
        {"router": ROUTER.replace("ids = Reshape(t,", "tn = Sub(t, experts) ids = Reshape(tn,")},
        "may hold negative expert ids",
    ),
    "ids looked up in a constant of negative ones": (
        {"router": ROUTER.replace("ids = Reshape(t,", "tn = Gather(from_the_end, t) ids = Reshape(tn,")},
        "may hold negative expert ids",
    ),
    "scaled": ({"activation": f"{SPLIT} {SILU} a2 = Mul(a, two) h = Mul(a2, u)"}, "scaled by 2"),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_no_moe_is_a_miss_that_says_why(name: str) -> None:
    parts, reason = MISSES[name]
    model = block(**parts)
    miss = only_miss(model)
    assert reason in miss.reason
    assert miss.name in {node.name for node in model.graph}


def test_embeddings_are_no_experts() -> None:
    text = f"(int64[T] i) => (float[T, {H}] y) {{ a = Gather(down_b, i) y = Relu(a) }}"
    assert find(parse(text, CONSTANTS)) == []


def test_two_blocks_are_two_matches() -> None:
    first, second = (ir.to_proto(block()) for _ in range(2))
    both = onnx.compose.merge_models(first, second, [("y", "x")], prefix2="b_")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(both))
    x = np.random.default_rng(5).standard_normal((23, H)).astype(np.float32)
    results = find(model)
    assert len(results) == 2
    for result in results:
        assert isinstance(result, MoeMatch)
        assert compare(model, result, x) < 1e-5


def one_token_each(after: str, shape: str) -> ir.Model:
    """The block on hidden states [T, 1, H] that are repeated as they are, with the nodes `after` it."""
    x = "x3 = Neg(x0) x = Squeeze(x3, axis1)"
    repeat = "xk = Expand(x3, repeats) r = Reshape(xk, by_h)"
    nodes = " ".join(
        (x, ROUTER, repeat, nk("p", "r", "gate_up"), f"{SPLIT} {SILU} {GATED}", nk("o", "h", "down"), COMBINE, after)
    )
    return parse(f"(float[T, 1, {H}] x0) => ({shape}) {{ {nodes} }}", CONSTANTS)


def test_tokens_may_be_repeated_along_an_axis_that_they_have() -> None:
    model = one_token_each("z = Unsqueeze(y, axis1)", f"float[T, 1, {H}] z")
    match = only_match(model)
    assert (match.hidden_states.name, match.output.name) == ("x3", "z")
    assert compare(model, match, np.random.default_rng(5).standard_normal((23, 1, H)).astype(np.float32)) < 1e-5


def test_tokens_that_keep_an_axis_which_the_output_lacks_are_a_miss() -> None:
    assert "has the shape and type of the tokens x3" in only_miss(one_token_each("", f"float[T, {H}] y")).reason
