"""The sliced_rows matcher on small graphs: what is fused, and what is refused for what cause."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.graph_passes.test_grouped_mm import CONSTANTS as SHARED
from tests.graph_passes.test_grouped_mm import ROUTER, SORT, E, H, I, K, random
from tests.graphs import Parts, check_fused, check_match, find, only_miss, parse

CONSTANTS: dict[str, np.ndarray] = {
    **SHARED,
    **{f"{name}{e}": random(H, I) for name in ("gate_w", "up_w") for e in range(E)},
    **{f"down_w{e}": random(I, H) for e in range(E)},
    "wide": random(H, I + 1),
    "bias": random(I),
    "zero": np.array([0]),
    "four": np.array([E]),
    "unit": np.array([1]),
    "two_steps": np.array([2]),
    "fixed_end": np.array([3]),
    "one_i": np.int64(1),
    "zero_i": np.int64(0),
    "last_axis": np.array([-1]),
}


def run(e: int, start: str, end: str) -> str:
    """The rows of expert `e`, and its MLP."""
    return (
        f"x{e} = Slice(r, {start}, {end}, zero, unit) g{e} = MatMul(x{e}, gate_w{e}) sg{e} = Sigmoid(g{e}) "
        f"a{e} = Mul(g{e}, sg{e}) u{e} = MatMul(x{e}, up_w{e}) p{e} = Mul(a{e}, u{e}) o{e} = MatMul(p{e}, down_w{e})"
    )


PARTS: dict[str, str] = {
    "router": ROUTER,
    "counts": (
        "t_shape = Shape(t) rows_of_t = Gather<axis = 0>(t_shape, zero_i) rows_l = Unsqueeze(rows_of_t, zero) "
        "marks_shape = Concat<axis = 0>(rows_l, four) no_marks = ConstantOfShape<value = int64[1] {0}>(marks_shape) "
        "ones = Expand(one_i, t_shape) marks = ScatterElements<axis = 1>(no_marks, t, ones) "
        "counts = ReduceSum<keepdims = 0>(marks, zero) s0, s1, s2, s3 = Split<axis = 0>(counts, singles) "
        + " ".join(f"c{e} = Squeeze(s{e}, zero)" for e in range(E))
    ),
    "sort": SORT,
    "rows": "token = Div(order, two) r = Gather<axis = 0>(x, token)",
    "ends": (
        "e0 = Unsqueeze(c0, zero) n1 = Add(c0, c1) e1 = Unsqueeze(n1, zero) n2 = Add(n1, c2) e2 = Unsqueeze(n2, zero) "
        "n3 = Add(n2, c3) e3 = Unsqueeze(n3, zero)"
    ),
    "experts": " ".join(run(e, f"e{e - 1}" if e else "zero", f"e{e}") for e in range(E)),
    "join": "joined = Concat<axis = 0>(o0, o1, o2, o3)",
    "place": (
        "joined_shape = Shape(joined) empty = ConstantOfShape<value = float[1] {0.0}>(joined_shape) "
        "order1 = Unsqueeze(order, last) placed = ScatterND(empty, order1, joined)"
    ),
    "combine": (
        "by_token = Reshape(placed, by_k) w1 = Unsqueeze(w, last_axis) weighted = Mul(by_token, w1) "
        "y = ReduceSum<keepdims = 0>(weighted, axis1)"
    ),
}


BLOCK = Parts(PARTS, CONSTANTS, H)
block, changed = BLOCK.block, BLOCK.changed

LAYOUTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as exported": (
        {},
        {"weight_inputs": ("gate_proj", "up_proj", "down_proj"), "num_experts": E, "top_k": K, "activation": "silu"},
    ),
    "rows by GatherND": (
        {"rows": "token = Div(order, two) token1 = Unsqueeze(token, last) r = GatherND(x, token1)"},
        {},
    ),
    "two experts have each other's weights": (
        changed("experts", ("x1, gate_w1", "x1, gate_w9"), ("gate_w2", "gate_w1"), ("gate_w9", "gate_w2")),
        {},
    ),
    "unknown router": (changed("router", ("Softmax(l)", "Tanh(l)")), {"router_input": "topk_ids"}),
    "router logits are an output too": ({"outputs": f"float[T, {H}] y, float[T, {E}] l"}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_matched(name: str) -> None:
    parts, expected = LAYOUTS[name]
    check_match(block(**parts), "sliced_rows", expected)


def test_it_is_proven_and_fused() -> None:
    check_fused(block(), "sliced_rows")


def without(expert: int) -> dict[str, str]:
    """As a trace leaves out an expert that its input does not reach: the next one starts where that would have."""
    rest = [e for e in range(E) if e != expert]
    ends = "e0 = Unsqueeze(c0, zero) " if expert else "e1 = Unsqueeze(c1, zero) "
    for before, e in pairwise(rest):
        first = f"c{before}" if before == rest[0] else f"n{before}"
        ends += f"n{e} = Add({first}, c{e}) e{e} = Unsqueeze(n{e}, zero) "
    starts = ["zero", *(f"e{e}" for e in rest)]
    return {
        "ends": ends,
        "experts": " ".join(run(e, start, f"e{e}") for e, start in zip(rest, starts, strict=False)),
        "join": f"joined = Concat<axis = 0>({', '.join(f'o{e}' for e in rest)})",
    }


MISSES: dict[str, tuple[dict[str, str], str]] = {
    "the last expert was not reached": (without(3), "router width 4 but expert 3 is missing"),
    "the first expert was not reached": (without(0), "router width 4 but expert 0 is missing"),
    "an inner expert was not reached": (without(2), "router width 4 but expert 2 is missing"),
    "two experts are joined in another order": (
        changed("join", ("o1, o2", "o2, o1")),
        "the rows of an expert do not start where those before it end",
    ),
    "a run ends elsewhere": (
        changed("experts", ("Slice(r, e1, e2,", "Slice(r, e1, e1,")),
        "the rows of an expert do not end where its number of rows says",
    ),
    "every second row": (changed("experts", ("e2, zero, unit)", "e2, zero, two_steps)")), "does not cut a run"),
    "an expert with another activation": (
        changed("experts", ("sg2 = Sigmoid(g2) a2 = Mul(g2, sg2)", "a2 = Relu(g2)")),
        "expert 2 computes something else than expert 0",
    ),
    "a bias of one expert": (
        changed("experts", ("u2 = MatMul(x2, up_w2)", "v2 = MatMul(x2, up_w2) u2 = Add(v2, bias)")),
        "up_proj of an expert is not a matrix without bias",
    ),
    "gate and up of different runs": (
        changed("experts", ("u2 = MatMul(x2,", "u2 = MatMul(x1,")),
        "do not read one slice of the rows",
    ),
    "counts of other ids": (
        changed(
            "counts",
            ("(no_marks, t, ones)", "(no_marks, t_other, ones)"),
            ("ones = Expand", "w_other, t_other = TopK(l, k) ones = Expand"),
        ),
        "the rows of each expert are counted in t_other, but sorted by ids",
    ),
    "placed by another permutation": (
        changed("place", ("Unsqueeze(order, last)", "Unsqueeze(token, last)")),
        "the outputs are put back by another permutation than order",
    ),
    "placed by addition": (
        changed("place", ("ScatterND(", 'ScatterND<reduction = "add">(')),
        "ScatterND does not put the outputs of the experts to their places",
    ),
    "not weighted": (
        changed("combine", ("Mul(by_token, w1)", "Identity(by_token)")),
        "expected a ScatterND of the rows",
    ),
    "a sum over the tokens": (changed("combine", ("(weighted, axis1)", "(weighted, zero)")), "runs over axes [0]"),
    "a fixed number of tokens": (
        changed("combine", ("Reshape(placed, by_k)", "Reshape(placed, by_twelve)")),
        "valid only for the number of tokens that it was traced with",
    ),
    "an inner value is a graph output": ({"outputs": f"float[T, {H}] y, float[S, {H}] joined"}, "graph output"),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_wrong_is_a_miss_that_says_why(name: str) -> None:
    parts, reason = MISSES[name]
    model = block(**parts)
    miss = only_miss(model)
    assert reason in miss.reason
    assert miss.name in {node.name for node in model.graph}


def test_joined_slices_of_other_rows_are_no_experts() -> None:
    nodes = "s = Shape<start = 0, end = 1>(x) a = Slice(x, zero, s, zero) b = MatMul(a, gate_w0) "
    nodes += "y = Concat<axis = 0>(b, b)"
    assert find(parse(f"(float[T, {H}] x) => (float[S, {I}] y) {{ {nodes} }}", CONSTANTS)) == []
