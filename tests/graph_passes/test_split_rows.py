"""The split_rows matcher on small graphs: what is fused, what is refused for what cause, and mutations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.graph_passes.test_grouped_mm import CONSTANTS as SHARED
from tests.graph_passes.test_grouped_mm import ROUTER, SILU, SPLIT, WEIGHTS, E, H, I, K, random
from tests.graphs import Parts, check_fused, check_match, find, only_miss, parse

CONSTANTS: dict[str, np.ndarray] = {
    **SHARED,
    "in_w": random(E, 2 * I, H),
    **{f"out_w{e}": random(H, I) for e in range(E)},
    "bias": random(2 * I),
    **{f"n{e}": np.int64(e) for e in range(5)},
    **{f"v{e}": np.array([e]) for e in range(5)},
    "zero_f": np.float32(0.0),
    "zero": np.array([0]),
    "e": np.array([E]),
    "h": np.array([H]),
    "fixed": np.array([12, H]),
    "sizes_of_12": np.array([5, 2, 1, 4]),
}

COUNTS = (
    "rows_of_x = Shape<start = 0, end = 1>(x) marks_shape = Concat<axis = 0>(rows_of_x, e) "
    "no_marks = Expand(zero_f, marks_shape) t_shape = Shape(t) "
    "one_each = ConstantOfShape<value = float[1] {1.0}>(t_shape) "
    "marks = ScatterElements<axis = 1>(no_marks, t, one_each) whole = Cast<to = 7>(marks) "
    "counts = ReduceSum<keepdims = 0>(whole, zero) "
    + " ".join(
        f"c{e}s = Slice(counts, v{e}, v{e + 1}, zero) c{e}v = Squeeze(c{e}s, zero) "
        f"c{e}l = Reshape(c{e}v, last) c{e}g = Gather<axis = 0>(c{e}l, n0) c{e} = Reshape(c{e}g, last)"
        for e in range(E)
    )
    + " sizes = Concat<axis = 0>(c0, c1, c2, c3)"
)
SORT = (
    "ids_shape = Shape(ids) length = Gather<axis = 0>(ids_shape, minus_one) length1 = Reshape(length, axis1) "
    "ascending, order = TopK<axis = 0, largest = 0>(ids, length1)"
)
ROWS = (
    "order_f = Cast<to = 1>(order) half = Div(order_f, two_f) positive = Abs(half) floor = Floor(positive) "
    "sign = Sign(half) signed = Mul(floor, sign) token = Cast<to = 7>(signed) token1 = Unsqueeze(token, last) "
    "r = GatherND(x, token1)"
)
ADD = (
    "weighted = Mul(o, wu) y_shape = Concat<axis = 0>(rows_of_x, h) empty = Expand(zero_f, y_shape) "
    "token_shape = Shape(token) all_shape = Concat<axis = 0>(token_shape, h) updates = Expand(weighted, all_shape) "
    'y = ScatterND<reduction = "add">(empty, token1, updates)'
)


def parts_of(name: str, rows: str) -> str:
    return f"{', '.join(f'{name}_x{e}' for e in range(E))} = Split<axis = 0>({rows}, sizes)"


def joined(name: str) -> str:
    return f"{name} = Concat<axis = 0>({', '.join(f'{name}_m{e}' for e in range(E))})"


PARTS: dict[str, str] = {
    "router": ROUTER,
    "counts": COUNTS,
    "sort": SORT,
    "rows": ROWS,
    "weights": WEIGHTS,
    "gate_up": " ".join(
        [
            parts_of("p", "r"),
            *(f"p_w{e} = Gather<axis = 0>(in_w, n{e}) p_m{e} = Gemm<transB = 1>(p_x{e}, p_w{e})" for e in range(E)),
            joined("p"),
        ]
    ),
    "activation": f"{SPLIT} {SILU}",
    "down": " ".join(
        [parts_of("o", "h"), *(f"o_m{e} = Gemm<transB = 1>(o_x{e}, out_w{e})" for e in range(E)), joined("o")]
    ).replace("(h,", "(act,"),
    "combine": ADD,
}
PARTS["activation"] = PARTS["activation"].replace("h = Mul", "act = Mul")


BLOCK = Parts(PARTS, CONSTANTS, H)
block, changed = BLOCK.block, BLOCK.changed

LAYOUTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as exported": ({}, {"weight_inputs": ("gate_up_proj", "down_proj"), "num_experts": E, "top_k": K}),
    "sizes as they are summed": (
        {"counts": PARTS["counts"].replace("counts = Reduce", "sizes = Reduce").split(" c0s =")[0]},
        {},
    ),
    "sizes by Split": (
        {
            "counts": PARTS["counts"].split(" c0s =")[0]
            + " c0, c1, c2, c3 = Split<axis = 0>(counts, singles) sizes = Concat<axis = 0>(c0, c1, c2, c3)"
        },
        {},
    ),
    "division of integers": (
        {"rows": "token = Div(order, two) token1 = Unsqueeze(token, last) r = GatherND(x, token1)"},
        {},
    ),
    "MatMul with [K, N] weights": (
        changed("gate_up", *((f"Gemm<transB = 1>(p_x{e}, p_w{e})", f"MatMul(p_x{e}, p_own{e})") for e in range(E))),
        {},
    ),
    "unknown router": (changed("router", ("Softmax(l)", "Tanh(l)")), {"router_input": "topk_ids"}),
    "router logits are an output too": ({"outputs": f"float[T, {H}] y, float[T, {E}] l"}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_matched(name: str) -> None:
    parts, expected = LAYOUTS[name]
    check_match(block(**parts), "split_rows", expected)


def test_it_is_proven_and_fused() -> None:
    check_fused(block(), "split_rows")


MISSES: dict[str, tuple[dict[str, str], str]] = {
    "the sizes of the trace": (
        {"counts": "rows_of_x = Shape<start = 0, end = 1>(x) sizes = Identity(sizes_of_12)"},
        "Split gives the experts fixed numbers of rows ([5, 2, 1, 4]): this export holds the choices of the input that "
        "it was traced with; export",
    ),
    "the sizes of the trace, and no reduction": (
        {
            "counts": "rows_of_x = Shape<start = 0, end = 1>(x) sizes = Identity(sizes_of_12)",
            **changed("combine", ('ScatterND<reduction = "add">', "ScatterND")),
        },
        "ScatterND without reduction overwrites the outputs of a token's experts",
    ),
    "no reduction": (
        changed("combine", ('ScatterND<reduction = "add">', "ScatterND")),
        "ScatterND without reduction overwrites the outputs of a token's experts",
    ),
    "an expert is missing from the Concat": (
        changed("gate_up", ("p_m1, p_m2, p_m3)", "p_m1, p_m2)")),
        "the products of 3 experts are joined, but 4 have rows",
    ),
    "two experts are swapped in the Concat": (
        changed("down", ("o_m1, o_m2", "o_m2, o_m1")),
        "the rows joined at place 1 are not those that Split cuts there",
    ),
    "a bias of one expert": (
        changed("gate_up", ("Gemm<transB = 1>(p_x3, p_w3)", "Gemm<transB = 1>(p_x3, p_w3, bias)")),
        "the product of expert 3 is not one with a matrix and no bias",
    ),
    "two sizes exchanged": (
        changed("counts", ("Concat<axis = 0>(c0, c1, c2, c3)", "Concat<axis = 0>(c0, c2, c1, c3)")),
        "does not join the 4 numbers of one list in their order",
    ),
    "sizes counted for other ids": (
        changed(
            "counts",
            ("(no_marks, t, one_each)", "(no_marks, t_other, one_each)"),
            ("no_marks = ", "w_other, t_other = TopK(l, k) no_marks = "),
        ),
        "the rows of each expert are counted in t_other, but sorted by ids",
    ),
    "sizes of marks that count double": (
        changed("counts", ("float[1] {1.0}", "float[1] {2.0}")),
        "the rows of each expert are not counted by ones scattered into 4 zeros",
    ),
    "a fixed number of tokens": (
        changed("combine", ("Expand(zero_f, y_shape)", "Expand(zero_f, fixed)")),
        "the export is valid only for the number of tokens that it was traced with",
    ),
    "added to another base": (
        changed("combine", ("empty = Expand(zero_f, y_shape)", "empty = Neg(x)")),
        "the outputs of the experts are not added to zeros",
    ),
    "added to the rows of other tokens": (
        changed("combine", ("(empty, token1, updates)", "(empty, order1, updates)")),
        "the outputs of the experts are not added to the tokens of their rows",
    ),
    "mixing weights that are not sorted": (
        {"weights": "wf = Reshape(w, last) wu = Unsqueeze(wf, last)"},
        "does not hold rows taken by number",
    ),
    "an inner value is a graph output": ({"outputs": f"float[T, {H}] y, float[S, {H}] o"}, "graph output"),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_wrong_is_a_miss_that_says_why(name: str) -> None:
    parts, reason = MISSES[name]
    model = block(**parts)
    miss = only_miss(model)
    assert reason in miss.reason
    assert miss.name in {node.name for node in model.graph}


def test_a_single_product_of_split_rows_is_no_block() -> None:
    parts = {name: text for name, text in PARTS.items() if name not in ("activation", "down", "combine", "weights")}
    nodes = " ".join(parts.values())
    assert find(parse(f"(float[T, {H}] x) => (float[S, {2 * I}] p) {{ {nodes} }}", CONSTANTS)) == []
