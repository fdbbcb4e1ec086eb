"""The grouped_mm matcher on small graphs: layouts, spellings of the sorting, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.matchers import MoeMatch
from tests.graphs import Parts, check_fused, check_match, compare, find, only_miss, parse

# 2I is H and E is k * 2 on purpose: no shape tells the layout.
H, I, E, K = 16, 8, 4, 2  # noqa: E741
RNG = np.random.default_rng(17)


def random(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.6).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    "router": random(H, E),
    "router_of_6": random(H, 6),
    "gate_up": random(E, H, 2 * I),
    "gate_up_nk": random(E, 2 * I, H),
    "gate": random(E, H, I),
    "up": random(E, H, I),
    "down": random(E, I, H),
    "gate_up_b": random(E, 2 * I),
    "down_b": random(E, H),
    "down_of_5": random(5, I, H),
    **{f"p_own{e}": random(H, 2 * I) for e in range(E)},
    "zeros": np.zeros(E, np.float32),
    "zeros_of_5": np.zeros(5, np.float32),
    "half_zeros": np.zeros(E, np.float16),
    "ones_of_12": np.ones(12, np.float32),
    "zeros_of_12": np.zeros(12, np.int64),
    "nothing": np.int64(0),
    "one": np.int64(1),
    "two": np.int64(K),
    "three": np.int64(3),
    "twelve": np.int64(12),
    "twelve_ids": np.array([12]),
    "minus_one": np.int64(-1),
    "true": np.array(True),
    "largest_id": np.int64(E - 1),
    "bin": np.float32((E - 1) / E),
    "wide_bin": np.float32(E / (E - 1)),
    "one_f": np.float32(1.0),
    "two_f": np.float32(2.0),
    "one_h": np.float16(1.0),
    "k": np.array([K]),
    "last": np.array([-1]),
    "axis0": np.array([0]),
    "axis1": np.array([1]),
    "by_k": np.array([-1, K, H]),
    "by_twelve": np.array([6, K, H]),
    "singles": np.ones(E, np.int64),
    "thrice_two": np.array([2, 1, 1, 0]),
}

ROUTER = "l = MatMul(x, router) s = Softmax(l) w, t = TopK(s, k) ids = Reshape(t, last)"
SORT = (
    "ids_shape = Shape(ids) length = Gather<axis = 0>(ids_shape, minus_one) length1 = Reshape(length, axis1) "
    "ascending, order = TopK<largest = 0>(ids, length1)"
)
ROWS = (
    "negative = Less(order, nothing) differ = Equal(negative, true) rest = Mod(order, two) uneven = Cast<to = 9>(rest) "
    "both = And(differ, uneven) offset = Cast<to = 7>(both) quotient = Div(order, two) token = Sub(quotient, offset) "
    "token1 = Unsqueeze(token, last) r = GatherND(x, token1)"
)
WEIGHTS = "wf = Reshape(w, last) order1 = Unsqueeze(order, last) ws = GatherND(wf, order1) wu = Unsqueeze(ws, last)"
HISTOGRAM = (
    "idf = Cast<to = 1>(ascending) scaled = Div(idf, bin) whole = Cast<to = 7>(scaled) "
    "bins = Clip(whole, nothing, largest_id) bins_shape = Shape(bins) ones = Expand(one_f, bins_shape) "
    'counts = ScatterElements<axis = 0, reduction = "add">(zeros, bins, ones) narrow = Cast<to = 6>(counts) '
    "sums = CumSum(narrow, nothing) cut = Cast<to = 7>(sums) e0, e1, e2, e3 = Split<num_outputs = 4>(cut)"
)


def grouped(name: str, rows: str, weights: str = "", end: str = "e") -> str:
    """`name` = the run of each expert of `rows` @ its entry of `weights` (else of the initializers `name`_own0 ...)."""
    split = f"{', '.join(f'{name}_s{e}' for e in range(E))} = Split<num_outputs = {E}>({weights})" if weights else ""
    lines = [split]
    for e in range(E):
        start = f"{name}_z{e - 1}" if e else "nothing"
        matrix = f"{name}_w{e} = Squeeze({name}_s{e}, axis0)" if weights else ""
        lines.append(
            f"{name}_z{e} = Squeeze({end}{e}, axis0) {name}_run{e} = Range({start}, {name}_z{e}, one) "
            f"{name}_x{e} = Gather<axis = 0>({rows}, {name}_run{e}) {matrix} "
            f"{name}_m{e} = MatMul({name}_x{e}, {f'{name}_w{e}' if weights else f'{name}_own{e}'})"
        )
    return " ".join([*lines, f"{name} = Concat<axis = 0>({', '.join(f'{name}_m{e}' for e in range(E))})"])


SPLIT = "g, u = Split<axis = 1, num_outputs = 2>(p)"
SILU = "sg = Sigmoid(g) a = Mul(g, sg) h = Mul(a, u)"
INVERSE = (
    "order_shape = Shape(order) empty = Expand(nothing, order_shape) "
    "count = Range(nothing, length, one) inverse = ScatterND(empty, order1, count) inverse1 = Unsqueeze(inverse, last)"
)
COMBINE = (
    "weighted = Mul(o, wu) back = GatherND(weighted, inverse1) "
    "tokens = Reshape(back, by_k) y = ReduceSum<keepdims = 0>(tokens, axis1)"
)

PARTS: dict[str, str] = {
    "router": ROUTER,
    "sort": SORT,
    "rows": ROWS,
    "weights": WEIGHTS,
    "histogram": HISTOGRAM,
    "gate_up": grouped("p", "r", "gate_up"),
    "activation": f"{SPLIT} {SILU}",
    "down": grouped("o", "h", "down"),
    "inverse": INVERSE,
    "combine": COMBINE,
}


BLOCK = Parts(PARTS, CONSTANTS, H)
block, changed = BLOCK.block, BLOCK.changed

SIMPLE_BINS = changed(
    "histogram",
    ("idf = Cast<to = 1>(ascending) scaled = Div(idf, bin) whole = Cast<to = 7>(scaled) ", ""),
    ("Clip(whole, nothing, largest_id)", "Add(ascending, nothing)"),
)
BIASED = {
    **changed("gate_up", ("p = Concat", "p0 = Concat")),
    **changed("down", ("o = Concat", "o0 = Concat")),
}
BIASED["gate_up"] += " asc1 = Unsqueeze(ascending, last) pb = GatherND(gate_up_b, asc1) p = Add(p0, pb)"
BIASED["down"] += " ob = Gather<axis = 0>(down_b, ascending) o = Add(ob, o0)"

LAYOUTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as exported": ({}, {"weight_inputs": ("gate_up_proj", "down_proj"), "num_experts": E, "top_k": K}),
    "[N, K] behind a Transpose": (
        {"gate_up": "gt = Transpose<perm = [0, 2, 1]>(gate_up_nk) " + grouped("p", "r", "gt")},
        {},
    ),
    "one tensor per expert": ({"gate_up": grouped("p", "r")}, {}),
    "two projections": (
        {"gate_up": f"{grouped('g', 'r', 'gate')} {grouped('u', 'r', 'up')}", "activation": SILU},
        {"weight_inputs": ("gate_proj", "up_proj", "down_proj")},
    ),
    "no gate": (
        {"gate_up": grouped("u", "r", "up"), "activation": "h = Relu(u)"},
        {"weight_inputs": ("up_proj", "down_proj"), "activation": "relu"},
    ),
    "biases": (BIASED, {"weight_inputs": ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")}),
    "division spelled plainly": ({"rows": "token = Div(order, two) r = Gather<axis = 0>(x, token)"}, {}),
    "histogram of the ids themselves": (SIMPLE_BINS, {}),
    "histogram of the ids before they are sorted": (changed("histogram", ("(ascending)", "(ids)")), {}),
    "sizes of Split": (changed("histogram", ("Split<num_outputs = 4>(cut)", "Split(cut, singles)")), {}),
    "fills by ConstantOfShape": (
        changed("inverse", ("Expand(nothing, order_shape)", "ConstantOfShape<value = int64[1] {0}>(ids_shape)")),
        {},
    ),
    "length by Squeeze": (changed("sort", ("Gather<axis = 0>(ids_shape, minus_one)", "Squeeze(ids_shape)")), {}),
    "unknown router": (changed("router", ("Softmax(l)", "Tanh(l)")), {"router_input": "topk_ids"}),
    "router logits are an output too": ({"outputs": f"float[T, {H}] y, float[T, {E}] l"}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_matched(name: str) -> None:
    parts, expected = LAYOUTS[name]
    check_match(block(**parts), "grouped_mm", expected)


def test_it_is_proven_and_fused() -> None:
    check_fused(block(), "grouped_mm")


OTHER_IDS = "t2 = Cast<to = 7>(l) ids2 = Reshape(t2, last) "
FEW = "one_off = Sub(order, one) "

MISSES: dict[str, tuple[dict[str, str], str]] = {
    "an expert is missing from the Concat": (
        changed("gate_up", ("p_m1, p_m2, p_m3)", "p_m1, p_m2)")),
        "the products of 3 experts are joined, but 4 have rows",
    ),
    "an inner expert is missing from the Concat": (
        changed("down", ("o_m0, o_m1, o_m2", "o_m0, o_m2")),
        "the products of 3 experts are joined, but 4 have rows",
    ),
    "two experts are swapped in the Concat": (
        changed("down", ("o_m1, o_m2", "o_m2, o_m1")),
        "the rows of expert 1 do not start where those before it end",
    ),
    "an expert is joined twice": (
        changed("down", ("o_m1, o_m2", "o_m1, o_m1")),
        "the rows of expert 2 do not start where those before it end",
    ),
    "two experts have each other's weights": (
        changed("gate_up", ("MatMul(p_x1, p_w1)", "MatMul(p_x1, p_w2)"), ("MatMul(p_x2, p_w2)", "MatMul(p_x2, p_w1)")),
        "the rows of expert 1 are multiplied by the weights of expert 2",
    ),
    "two experts have each other's rows": (
        changed(
            "gate_up",
            ("Range(p_z0, p_z1,", "Range(p_z1, p_z2,"),
            ("Range(p_z1, p_z2, one) p_x2", "Range(p_z0, p_z1, one) p_x2"),
        ),
        "the rows of expert 1 do not start where those before it end",
    ),
    "an expert has the weights of another layer": (
        {
            "gate_up": "q0, q1, q2, q3 = Split<num_outputs = 4>(gate_up_nk) "
            + PARTS["gate_up"].replace("Squeeze(p_s2", "Squeeze(q2")
        },
        "expert 0 has weights of gate_up, but expert 2 those of gate_up_nk",
    ),
    "weights of more experts": (
        {
            "down": grouped("o", "h", "down_of_5").replace(
                "o_s3 = Split<num_outputs = 4>", "o_s3, o_s4 = Split<num_outputs = 5>"
            )
        },
        "down_of_5 holds 5 experts, but 4 are used",
    ),
    "the rows of an expert are those before the activation": (
        changed("down", ("Gather<axis = 0>(h, o_run2)", "Gather<axis = 0>(u, o_run2)")),
        "experts 0 and 2 read different rows",
    ),
    "the last run does not end": (
        changed("gate_up", ("Range(p_z2, p_z3,", "Range(p_z2, length,")),
        "the end of the rows of expert 3 is not one entry of a list of ends",
    ),
    "runs of two rows": (
        changed("gate_up", ("p_run1 = Range(p_z0, p_z1, one)", "p_run1 = Range(p_z0, p_z1, two)")),
        "expert 1 does not read a run of the rows",
    ),
    "a histogram over other ids": (
        {"histogram": OTHER_IDS + PARTS["histogram"].replace("(ascending)", "(ids2)")},
        "counted in l, but sorted by ids",
    ),
    "another histogram for the down projection": (
        {
            "histogram": f"{PARTS['histogram']} sums2 = CumSum(counts, nothing) cut2 = Cast<to = 7>(sums2) "
            "f0, f1, f2, f3 = Split<num_outputs = 4>(cut2)",
            "down": grouped("o", "h", "down", end="f"),
        },
        "the rows are cut at cut here, but at cut2 later",
    ),
    "bins that are too wide": (changed("histogram", ("Div(idf, bin)", "Div(idf, wide_bin)")), "for another expert"),
    "bins without the last": (
        changed("histogram", ("Clip(whole, nothing, largest_id)", "Clip(whole, nothing, two)")),
        "for another expert",
    ),
    "a histogram of 5 bins": (
        changed(
            "histogram",
            ("(zeros,", "(zeros_of_5,"),
            ("e2, e3 = Split<num_outputs = 4>", "e2, e3, e4 = Split<num_outputs = 5>"),
        ),
        "the products of 4 experts are joined, but 5 have rows",
    ),
    "a histogram that overwrites": (changed("histogram", (', reduction = "add"', "")), "ScatterElements that adds"),
    "a histogram of twos": (changed("histogram", ("one_f,", "two_f,")), "counted by ones"),
    "a histogram in float16": (
        changed("histogram", ("(zeros,", "(half_zeros,"), ("one_f,", "one_h,")),
        "zeros of 32 bits or more",
    ),
    "ends without the last": (
        changed("histogram", ("CumSum(", "CumSum<exclusive = 1>(")),
        "CumSum is exclusive",
    ),
    "ends from behind": (changed("histogram", ("CumSum(", "CumSum<reverse = 1>(")), "or reversed"),
    "ends that are not added up": (changed("histogram", ("CumSum(narrow, nothing)", "Neg(narrow)")), "not a CumSum"),
    "the largest ids first": (changed("sort", ("<largest = 0>", "")), "in ascending order"),
    "ids that are not sorted": (changed("sort", ("largest = 0", "largest = 0, sorted = 0")), "in ascending order"),
    "rows of another token": (changed("rows", ("Div(order, two)", "Div(order, three)")), "has 3 rows, but 2 outputs"),
    "rows of the token before": (
        {"rows": FEW + PARTS["rows"].replace("Div(order", "Div(one_off")},
        "not order // top_k",
    ),
    "rows in the order of the tokens": (changed("rows", ("order,", "ids,")), "does not sort a list of expert ids"),
    "mixing weights in another order": (
        changed("weights", ("GatherND(wf, order1)", "Gather<axis = 0>(wf, token)")),
        "the mixing weights are sorted by token, the rows by order",
    ),
    "outputs left sorted": (
        changed("combine", ("GatherND(weighted, inverse1)", "Neg(weighted)")),
        "Neg after the down",
    ),
    "outputs permuted once more": (
        changed("combine", ("GatherND(weighted, inverse1)", "GatherND(weighted, order1)")),
        "not put back by an inverse permutation",
    ),
    "an inverse of another permutation": (
        changed("inverse", ("ScatterND(empty, order1,", "ScatterND(empty, token1,")),
        "put back by another permutation than order",
    ),
    "an inverse that starts at 1": (
        {
            "inverse": "more = Add(length, one) "
            + PARTS["inverse"].replace("Range(nothing, length,", "Range(one, more,")
        },
        "not made of the numbers 0, 1, 2",
    ),
    "an inverse that adds": (
        changed("inverse", ("ScatterND(", 'ScatterND<reduction = "add">(')),
        "not put back by an inverse permutation",
    ),
    "biases in the order of the tokens": (
        {**BIASED, "down": BIASED["down"].replace("(down_b, ascending)", "(down_b, ids)")},
        "not a bias taken by the sorted ids",
    ),
    "a fixed number of ids to sort": (
        changed("sort", ("(ids, length1)", "(ids, twelve_ids)")),
        "a fixed number of ids",
    ),
    "a fixed number of ids to count": (
        changed("histogram", ("ones = Expand(one_f, bins_shape)", "ones = Identity(ones_of_12)")),
        "ones_of_12 has a fixed length",
    ),
    "a fixed number of rows to put back": (
        changed("inverse", ("length,", "twelve,")),
        "Range ends at the fixed number 12",
    ),
    "an inverse of fixed length": (
        changed("inverse", ("ScatterND(empty,", "ScatterND(zeros_of_12,")),
        "as long as the permutation",
    ),
    "a fixed number of tokens to sum": (changed("combine", ("by_k", "by_twelve")), f"fixes the shape [6, {K}, {H}]"),
    "router of another width": (changed("router", ("router)", "router_of_6)")), "scores 6 experts"),
    "an unknown router of another width": (
        changed("router", ("router)", "router_of_6)"), ("Softmax(l)", "Tanh(l)")),
        f"may hold ids above {E - 1}",
    ),
    "a bias inside a run": (
        changed("down", ("o_m1 = MatMul(o_x1, o_w1)", "o_n1 = MatMul(o_x1, o_w1) o_m1 = Add(o_n1, one_f)")),
        "expected MatMul of a run of rows (Gather of a Range) for expert 1",
    ),
    "weights that are computed": (
        changed("down", ("MatMul(o_x3, o_w3)", "MatMul(o_x3, o_v3)"), ("o_x3 = ", "o_v3 = Neg(o_s3) o_x3 = ")),
        "the weights of expert 3 are computed",
    ),
    "no activation of the experts": (
        {"activation": "h = Neg(p)", "down": "o = Identity(h)"},
        "found only this one",
    ),
    "an inner value is a graph output": ({"outputs": f"float[T, {H}] y, float[S, {H}] o"}, "graph output"),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_no_moe_is_a_miss_that_says_why(name: str) -> None:
    parts, reason = MISSES[name]
    model = block(**parts)
    miss = only_miss(model)
    assert reason in miss.reason
    assert miss.name in {node.name for node in model.graph}


def test_two_blocks_are_two_matches() -> None:
    first, second = (ir.to_proto(block()) for _ in range(2))
    both = onnx.compose.merge_models(first, second, [("y", "x")], prefix2="b_")
    del both.graph.value_info[:]  # both blocks have the same names for the axes that they compute
    model = ir.from_proto(onnx.shape_inference.infer_shapes(both))
    x = np.random.default_rng(5).standard_normal((23, H)).astype(np.float32)
    results = find(model)
    assert len(results) == 2
    for result in results:
        assert isinstance(result, MoeMatch)
        assert compare(model, result, x) < 1e-5


def test_joined_products_of_fixed_rows_are_no_experts() -> None:
    nodes = "a = Gather(x, k) b = MatMul(a, p_own0) y = Concat<axis = 0>(b, b)"
    text = f"(float[4, {H}] x) => (float[S, {2 * I}] y) {{ {nodes} }}"
    assert find(parse(text, CONSTANTS)) == []
