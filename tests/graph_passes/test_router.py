"""The router recogniser on small graphs: every spelling gives its spec, and the spec routes as the graph does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from graph_passes import reference
from graph_passes.matchers import router
from graph_passes.matchers.views import NoMatch
from graph_passes.moe_spec import MoeSpec
from graph_passes.normalize import normalize
from tests.graphs import array_of, parse, relative_l2, run_original

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 8, 2, 50
RNG = np.random.default_rng(7)

CONSTANTS: dict[str, np.ndarray] = {
    "w_kn": RNG.standard_normal((HIDDEN, EXPERTS)).astype(np.float32) * 0.5,
    "w_nk": RNG.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) * 0.5,
    "w_half": (RNG.standard_normal((HIDDEN, EXPERTS)) * 0.5).astype(np.float16),
    "router_bias": RNG.standard_normal(EXPERTS).astype(np.float32),
    "bias": RNG.standard_normal(EXPERTS).astype(np.float32) * 0.2,
    "bias_of_1": np.array([0.2], np.float32),
    "bias_row": RNG.standard_normal((1, EXPERTS)).astype(np.float32) * 0.2,
    "k": np.array([TOP_K]),
    "one_i": np.array([1]),
    "four_i": np.array([4]),
    "last": np.array([-1]),
    "tokens_by_groups": np.array([-1, 4, 2]),
    "tokens_by_one_group": np.array([-1, 1, 8]),
    "tokens_by_experts": np.array([-1, EXPERTS]),
    "spread": np.array([1, 4, 2]),
    "spread_one": np.array([1, 1, 8]),
    "zero": np.float32(0.0),
    "one": np.float32(1.0),
    "minus_inf": np.float32(-math.inf),
    "scale": np.float32(2.5),
    "eps": np.float32(1e-6),
    "tiny": np.float32(1e-12),
    "far": np.float32(0.02),
    "half": np.float32(0.5),
    "three": np.float32(3.0),
    "third": np.float32(1.0 / 3.0),
    "minus_half": np.float32(-0.5),
    "axis_h": np.array([HIDDEN]),
}
LOGITS = "l = MatMul(x, w_kn)"
SOFTMAX_TOPK = f"{LOGITS} s = Softmax<axis = -1>(l) v, ids = TopK(s, k)"
SUM = "n = ReduceSum<keepdims = 1>(v, last)"
SIGMOID_GATHER = (
    f"{LOGITS} s = Sigmoid(l) c = Add(s, bias) u, ids = TopK<sorted = 0>(c, k) v = GatherElements<axis = 1>(s, ids)"
)


def group_mask(function: str, where: str, shape: str = "tokens_by_groups", spread: str = "spread", k: str = "k") -> str:
    """Text that masks `c` into `m`: `function` computes group scores `g` of `r`; `where` applies the mask `b`."""
    return (
        f"r = Reshape(c, {shape}) {function} u0, chosen = TopK<sorted = 0>(g, {k}) "
        "gs = Shape(g) zeros = Expand(zero, gs) cs = Shape(chosen) ones = ConstantOfShape<value = float[1] {1.0}>(cs) "
        "sc = ScatterElements<axis = 1>(zeros, chosen, ones) su = Unsqueeze(sc, last) "
        f"se = Expand(su, {spread}) sr = Reshape(se, tokens_by_experts) b = Cast<to = 9>(sr) {where}"
    )


TOP2_SUM = "t0, t1 = TopK(r, k) g = ReduceSum<keepdims = 0>(t0, last)"
MAX = "g = ReduceMax<keepdims = 0>(r, last)"
NOT_CHOSEN_TO_INF = "nb = Not(b) m = Where(nb, minus_inf, c)"


def sparsemixer() -> str:
    """Two rounds, as the modelling code of Phi-3.5-MoE exports."""

    def one(n: int, left: str) -> str:
        return (
            f"mx{n} = ReduceMax({left}, last) i{n} = ArgMax<axis = -1>({left}) cl{n} = Max(ab, mx{n}) "
            f"df{n} = Sub(mx{n}, l) d{n} = Div(df{n}, cl{n}) gt{n} = Greater(d{n}, far) "
            f"mk{n} = Where(gt{n}, minus_inf, {left}) p{n} = Softmax<axis = -1>(mk{n}) "
            f"w{n} = GatherElements<axis = -1>(p{n}, i{n}) "
        )

    fill = (
        "is = Shape(i1) f = ConstantOfShape<value = float[1] {-inf}>(is) left = ScatterElements<axis = -1>(l, i1, f) "
    )
    joined = "w = Concat<axis = -1>(w1, w2) ids = Concat<axis = -1>(i1, i2)"
    return f"{LOGITS} ab = Abs(l) {one(1, 'l')} {fill.replace('-inf', '-3.4e38')} {one(2, 'left')} {joined}"


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": (f"{SOFTMAX_TOPK} w = Identity(v)", {}),
    "softmax axis 1": (f"{LOGITS} s = Softmax<axis = 1>(l) w, ids = TopK<axis = 1>(s, k)", {}),
    "normalised by Div": (f"{SOFTMAX_TOPK} {SUM} w = Div(v, n)", {"norm_topk_prob": True}),
    "normalised by Reciprocal": (f"{SOFTMAX_TOPK} {SUM} i = Reciprocal(n) w = Mul(i, v)", {"norm_topk_prob": True}),
    "cast to the same type": (
        f"{LOGITS} s = Softmax(l) sc = Cast<to = 1>(s) v, ids = TopK(sc, k) {SUM} d = Div(v, n) w = Cast<to = 1>(d)",
        {"norm_topk_prob": True},
    ),
    "epsilon": (f"{SOFTMAX_TOPK} {SUM} e = Add(eps, n) w = Div(v, e)", {"norm_topk_prob": True, "norm_eps": 1e-6}),
    "floor by Clip": (
        f"{SOFTMAX_TOPK} {SUM} f = Clip(n, half) w = Div(v, f)",
        {"norm_topk_prob": True, "norm_floor": 0.5},
    ),
    "floor by Max": (
        f"{SOFTMAX_TOPK} {SUM} f = Max(n, half) w = Div(v, f)",
        {"norm_topk_prob": True, "norm_floor": 0.5},
    ),
    "2-norm": (
        f"{SOFTMAX_TOPK} n = ReduceL2<keepdims = 1>(v, last) w = Div(v, n)",
        {"norm_topk_prob": True, "norm_p": 2.0},
    ),
    "3-norm": (
        f"{SOFTMAX_TOPK} a = Abs(v) p = Pow(a, three) {SUM.replace('(v', '(p')} r = Pow(n, third) w = Div(v, r)",
        {"norm_topk_prob": True, "norm_p": 3.0},
    ),
    "divided by a number": (f"{SOFTMAX_TOPK} w = Div(v, half)", {"routed_scaling_factor": 2.0}),
    "scaled": (f"{SOFTMAX_TOPK} w = Mul(scale, v)", {"routed_scaling_factor": 2.5}),
    "Gemm, transB": ("l = Gemm<transB = 1>(x, w_nk) s = Softmax(l) w, ids = TopK(s, k)", {}),
    "Gemm with bias": ("l = Gemm<transB = 1>(x, w_nk, router_bias) s = Softmax(l) w, ids = TopK(s, k)", {}),
    "MatMul of a Transpose, and bias": (
        "t = Transpose<perm = [1, 0]>(w_nk) a = MatMul(x, t) l = Add(router_bias, a) "
        "s = Softmax(l) w, ids = TopK(s, k)",
        {},
    ),
    "float16 router weights": (
        "t = Cast<to = 1>(w_half) l = MatMul(x, t) s = Softmax(l) w, ids = TopK(s, k)",
        {},
    ),
    "softmax of the k": (
        f"{LOGITS} v, ids = TopK(l, k) w = Softmax<axis = 1>(v)",
        {"score_func": "softmax_topk"},
    ),
    "softmax of the k, gathered": (
        f"{LOGITS} u, ids = TopK(l, k) v = GatherElements<axis = 1>(l, ids) w = Softmax(v)",
        {"score_func": "softmax_topk"},
    ),
    "sigmoid of the k": (f"{LOGITS} v, ids = TopK(l, k) w = Sigmoid(v)", {"score_func": "sigmoid_topk"}),
    "selection bias": (f"{SIGMOID_GATHER} {SUM} w = Div(v, n)", {"score_func": "sigmoid", "norm_topk_prob": True}),
    "selection bias stored as a row": (
        f"{SIGMOID_GATHER.replace('bias', 'bias_row')} w = Identity(v)",
        {"score_func": "sigmoid"},
    ),
    "selection bias used for mixing": (
        f"{LOGITS} s = Sigmoid(l) c = Add(bias, s) w, ids = TopK(c, k)",
        {"score_func": "sigmoid", "mixing_source": "selection"},
    ),
    "groups, best two, -inf": (
        f"{LOGITS} s = Sigmoid(l) c = Add(s, bias) {group_mask(TOP2_SUM, NOT_CHOSEN_TO_INF)} "
        "u, ids = TopK(m, k) w = GatherElements<axis = 1>(s, ids)",
        {"score_func": "sigmoid", "n_group": 4, "topk_group": 2, "group_score_func": "top2_sum"},
    ),
    "groups, best one, zero": (
        f"{LOGITS} c = Softmax(l) {group_mask(MAX, 'm = Where(b, c, zero)')} w, ids = TopK(m, k)",
        {"n_group": 4, "topk_group": 2, "group_mask_value": 0.0, "mixing_source": "selection"},
    ),
    "groups whose size is inferred": (
        f"{LOGITS} rows = Shape<start = 0, end = 1>(x) by_groups = Concat<axis = 0>(rows, four_i, last) "
        f"c = Softmax(l) {group_mask(MAX, 'm = Where(b, c, zero)', 'by_groups')} w, ids = TopK(m, k)",
        {"n_group": 4, "topk_group": 2, "group_mask_value": 0.0, "mixing_source": "selection"},
    ),
    "one group is no group": (
        f"{LOGITS} s = Sigmoid(l) c = Add(s, bias) "
        f"{group_mask(TOP2_SUM, NOT_CHOSEN_TO_INF, 'tokens_by_one_group', 'spread_one', 'one_i')} "
        "u, ids = TopK(m, k) w = GatherElements<axis = 1>(s, ids)",
        {"score_func": "sigmoid"},
    ),
}


def route_of(text: str, **recognised: Any) -> tuple[router.Router, Any]:
    """Parse a router, recognise it, and return it with its model."""
    model = parse(f"(float[T, {HIDDEN}] x) => (float[T, 2] w, int64[T, 2] ids) {{ {text} }}", CONSTANTS)
    normalize(model)
    mixing, ids = model.graph.outputs
    return router.recognise(mixing, ids, model.graph.inputs[0], TOP_K), model


def dense(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mixing weights by expert `[T, E]`."""
    result = np.zeros((len(ids), EXPERTS))
    np.put_along_axis(result, ids, weights, -1)
    return result


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_gives_its_spec_and_routes_like_the_graph(name: str) -> None:
    text, expected = SPELLINGS[name]
    found, model = route_of(text)
    assert found.note == ""
    assert found.num_experts == EXPERTS
    spec = spec_of(found)
    assert spec == spec_of(router.Router({**expected, "router_input": "router_weight"}))
    x = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weights, ids = run_original(model, x)
    constants = {name: array_of(source).astype(np.float64) for name, source in found.constants.items()}
    logits = x @ constants["router_weight"].T + constants.get("router_bias", 0.0)
    want_ids, want_weights = reference.route(spec, logits, constants.get("e_score_correction_bias"))
    assert relative_l2(dense(ids, weights), dense(want_ids, want_weights)) < 1e-5


def spec_of(found: router.Router) -> MoeSpec:
    return MoeSpec(
        hidden_size=HIDDEN,
        intermediate_size=4,
        num_experts=EXPERTS,
        top_k=TOP_K,
        weight_inputs=("up_proj", "down_proj"),
        **found.fields,
    )


UNKNOWN = {
    "softmax over tokens": f"{LOGITS} s = Softmax<axis = 0>(l) w, ids = TopK(s, k)",
    "smallest": f"{LOGITS} s = Softmax(l) w, ids = TopK<largest = 0>(s, k)",
    "divided by the sum of other weights": f"{SIGMOID_GATHER} n = ReduceSum<keepdims = 1>(u, last) w = Div(v, n)",
    "weights of other ids": (
        f"{LOGITS} s = Softmax(l) a, ids = TopK(s, k) z, other = TopK<largest = 0>(s, k) "
        "w = GatherElements<axis = 1>(s, other)"
    ),
    "divided by another root of the sum": (
        f"{SOFTMAX_TOPK} p = Pow(v, three) t = ReduceSum<keepdims = 1>(p, last) n = Pow(t, half) w = Div(v, n)"
    ),
    "divided by the norm of other weights": (
        f"{SOFTMAX_TOPK} o = Neg(v) p = Pow(o, three) {SUM.replace('(v', '(p')} r = Pow(n, third) w = Div(v, r)"
    ),
    "a selection bias of 0 axes": f"{SIGMOID_GATHER.replace('bias', 'half')} w = Identity(v)",
    "negative floor": f"{SOFTMAX_TOPK} {SUM} f = Max(n, minus_half) w = Div(v, f)",
    "tanh scores": f"{LOGITS} s = Tanh(l) w, ids = TopK(s, k)",
    "softmax of experts within groups": (
        f"{LOGITS} g = Reshape(l, tokens_by_groups) p = Softmax<axis = -1>(g) s = Reshape(p, tokens_by_experts) "
        "w, ids = TopK(s, k)"
    ),
    "one selection bias for all experts": f"{SIGMOID_GATHER.replace('bias', 'bias_of_1')} w = Identity(v)",
    "scores scattered over other groups": (
        f"{LOGITS} s = Softmax(l) c = Sigmoid(l) {group_mask(MAX, 'm = Where(b, s, zero)')} w, ids = TopK(m, k)"
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_router_hands_over_ids_and_weights(name: str) -> None:
    found, model = route_of(UNKNOWN[name])
    mixing, ids = model.graph.outputs
    assert found.note
    assert found.num_experts is None
    assert found.fields == {"router_input": "topk_ids"}
    assert found.inputs == {"topk_ids": ids, "topk_weights": mixing}


def test_logits_of_other_tokens_are_handed_over() -> None:
    found, _ = route_of("y = Relu(x) l = MatMul(y, w_kn) s = Softmax(l) w, ids = TopK(s, k)")
    assert found.fields["router_input"] == "router_logits"
    assert found.inputs["router_logits"].name == "l"
    assert found.num_experts == EXPERTS


def test_logits_are_handed_over_with_one_number_per_expert() -> None:
    found, _ = route_of(
        "y = Relu(x) l = MatMul(y, w_kn) g = Reshape(l, tokens_by_groups) p = Sigmoid(g) "
        "s = Reshape(p, tokens_by_experts) w, ids = TopK(s, k)"
    )
    assert found.inputs["router_logits"].name == "l"


def test_ids_of_an_unknown_router_must_not_be_negative() -> None:
    with pytest.raises(NoMatch, match="may hold negative expert ids"):
        route_of(f"{LOGITS} s = Tanh(l) w, chosen = TopK(s, k) ids = Neg(chosen)")


@pytest.mark.parametrize(("step", "times"), [("Slice(i{0}, zero_i, k)", 5000), ("Concat<axis = 0>(i{0}, i{0})", 60)])
def test_ids_may_come_a_long_way(step: str, times: int) -> None:
    way = " ".join(f"i{n + 1} = {step.format(n)}" for n in range(times))
    chosen = f"{LOGITS} s = Tanh(l) w, i0 = TopK(s, k)"
    text = f"(float[T, {HIDDEN}] x) => (float[T, {TOP_K}] w, int64[U, {TOP_K}] i{times}) {{ {chosen} {way} }}"
    model = parse(text, {**CONSTANTS, "zero_i": np.array([0])})
    found = router.recognise(*model.graph.outputs, model.graph.inputs[0], TOP_K)
    assert found.inputs["topk_ids"] is model.graph.outputs[1]


def test_ids_are_as_many_as_top_k_says_whatever_their_shape_says() -> None:
    with pytest.raises(NoMatch, match="TopK chooses 4 experts, but 2 are used for each token"):
        route_of(f"{LOGITS} s = Tanh(l) w, ids = TopK(s, four_i)")


def test_sparsemixer_is_read_from_its_two_rounds() -> None:
    found, model = route_of(sparsemixer().replace("-3.4e38", "-inf"))
    assert found.note == ""
    assert found.fields == {
        "score_func": "sparsemixer",
        "sparsemixer_jitter_eps": 0.01,
        "router_input": "router_weight",
    }
    x = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weights, ids = run_original(model, x)
    want = reference.route(spec_of(found), x @ array_of(found.constants["router_weight"]).T.astype(np.float64))
    assert relative_l2(dense(ids, weights), dense(*want)) < 1e-5


def test_sparsemixer_with_a_negative_threshold_is_unknown() -> None:
    found, _ = route_of(sparsemixer().replace("-3.4e38", "-inf").replace("far", "minus_half"))
    assert "thresholds" in found.note


def test_sparsemixer_that_does_not_exclude_its_first_expert_is_unknown() -> None:
    found, _ = route_of(sparsemixer())
    assert "exclude" in found.note
