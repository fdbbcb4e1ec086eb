"""Loops over experts that an exporter has unrolled: recognised in every spelling, refused when incomplete."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.probe import probe
from tests.graphs import array_of, compare, find, only_match, only_miss, parse, replaced
from tests.unrolled_graphs import Loop, model_of, rewritten

SPELLINGS: dict[str, dict[str, Any]] = {
    "one_hot": {},
    "token_first": {"slot_first": False},
    "scatter_add": {"scatter_add": True},
    "scatter_add_gemm": {"scatter_add": True, "weights": "gemm"},
    "weights_left": {"weights": "left"},
    "weights_transposed": {"weights": "transpose"},
    "weights_gathered": {"weights": "gather"},
    # Too large to be folded into one constant per expert.
    "large_weights_gathered": {"weights": "gather", "hidden": 64, "inter": 96},
    "bias_add": {"bias": True},
    "bias_gemm": {"bias": True, "weights": "gemm"},
    "one_expert": {"width": 1, "top_k": 1},
    "every_expert": {"top_k": 4},
    "square": {"inter": 8},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_block(spelling: str) -> None:
    loop = Loop(**SPELLINGS[spelling])
    model = model_of(loop)
    match = only_match(model)
    spec = match.spec
    assert (spec.num_experts, spec.top_k) == (loop.width, loop.top_k)
    assert (spec.hidden_size, spec.intermediate_size) == (loop.hidden, loop.inter)
    assert (spec.score_func, spec.norm_topk_prob, spec.activation) == ("softmax", True, "silu")
    assert (match.hidden_states.name, match.output.name) == ("x", "y")
    for name, tensors in (("gate_proj", loop.gate), ("up_proj", loop.up), ("down_proj", loop.down)):
        for source, tensor in zip(match.weights[name], tensors, strict=True):
            np.testing.assert_array_equal(array_of(source), tensor)
    assert ("down_proj_bias" in spec.weight_inputs) is loop.bias
    result = probe(model, match)
    assert result.ok, result.reason
    assert result.worst_relative_l2 < 1e-5


def test_tokens_may_be_moved_by_transposes_of_unit_axes() -> None:
    """As torch dynamo writes `hidden_states[None, token]` of the loops of transformers 4."""
    loop = Loop(scatter_add=True, weights="gemm")
    text = loop.text().replace(
        "flat_shape =", "one = Unsqueeze(flat, axis0)\nx1 = Transpose<perm=[1, 0, 2]>(one)\nflat_shape ="
    )
    for e in range(loop.width):
        moved = f"e{e}_x1 = GatherND(x1, e{e}_at)\ne{e}_x2 = Transpose<perm=[1, 0, 2]>(e{e}_x1)\n"
        text = replaced(text, (f"e{e}_x = GatherND(flat, e{e}_at)", f"{moved}e{e}_x = Reshape(e{e}_x2, rows)"))
    model = parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    result = probe(model, only_match(model))
    assert result.ok, result.reason


def test_order_of_the_branches_is_free() -> None:
    loop = Loop(experts=[2, 0, 3, 1])
    model = model_of(loop)
    match = only_match(model)
    np.testing.assert_array_equal(array_of(match.weights["gate_proj"][2]), loop.gate[2])
    assert probe(model, match).ok


@pytest.mark.parametrize(
    ("experts", "named"),
    [([0, 1, 3], "expert 2 is missing"), ([0, 1, 2], "expert 3 is missing"), ([1], "experts 0, 2, 3 are missing")],
)
def test_missing_experts_are_named(experts: list[int], named: str) -> None:
    miss = only_miss(model_of(Loop(experts=experts)))
    assert f"router width 4 but {named}" in miss.reason


@pytest.mark.parametrize(("field", "op"), [("fixed_expand", "Expand"), ("fixed_reshape", "Reshape")])
def test_fixed_token_count_in_one_branch_is_refused(field: str, op: str) -> None:
    miss = only_miss(model_of(Loop(**{field: 2})))
    assert miss.name.startswith(op)
    assert "fixes the shape [7, 8]" in miss.reason


def test_computed_expert_id_is_refused() -> None:
    miss = only_miss(model_of(Loop(computed_id=1)))
    assert miss.name.startswith("NonZero")
    assert "expert id is computed while the graph runs, but the weights are fixed" in miss.reason


def test_an_expert_that_hands_on_its_tokens_is_refused() -> None:
    """As the zero-computation experts of longcat_flash do."""
    loop = Loop()
    text = replaced(loop.text(), ("e2_out0 = Mul(e2_d, ", "e2_out0 = Mul(e2_x, "))
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays))
    assert "expert 2 hands on its tokens as they are" in miss.reason


def test_experts_of_limited_capacity_are_refused() -> None:
    loop = Loop()
    limited = (
        "counts = CumSum(hot, last_i)\nwithin = LessOrEqual(counts, k_scalar)\nkept = Cast<to=7>(within)\n"
        "some = Mul(hot, kept)\nmask = Transpose<perm=[2, 1, 0]>(some)"
    )
    text = loop.text().replace("mask = Transpose<perm=[2, 1, 0]>(hot)", limited)
    arrays = {**loop.arrays, "last_i": np.array(0)}
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", arrays))
    assert "each expert takes a limited number of tokens" in miss.reason


def test_experts_of_different_sizes_are_refused() -> None:
    miss = only_miss(model_of(Loop(wide_expert=2)))
    assert "gate_proj of expert 2 is [7, 8], of expert 0 [6, 8]" in miss.reason


def test_an_expert_that_is_not_added_is_refused() -> None:
    miss = only_miss(model_of(Loop(unadded=1), after="z = Identity(e1_d)", outputs="float[B, S, 8] y, float[N, 8] z"))
    assert "tokens of expert 1 are scattered 0 times" in miss.reason


@pytest.mark.parametrize(
    ("branch", "addend", "reason"),
    [
        ("acc0 = Add(acc, e0_scattered)", "acc0 = Add(flat, e0_scattered)", "x is added to the experts' outputs"),
        ("acc1 = Add(acc0, ", "acc01 = Add(acc0, flat)\nacc1 = Add(acc01, ", "go into 2 sums, expected one"),
    ],
)
def test_an_addend_inside_the_loop_is_refused(branch: str, addend: str, reason: str) -> None:
    loop = Loop()
    assert branch in loop.text()
    text = loop.text().replace(branch, addend)
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays))
    assert reason in miss.reason


def test_a_scatter_that_overwrites_is_refused() -> None:
    loop = Loop()
    text = loop.text().replace("ScatterElements<axis=0>(e2_zeros,", "ScatterElements<axis=0>(acc1,")
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays))
    assert miss.name.startswith("ScatterElements")
    assert "overwrites values other than zeros" in miss.reason


def test_weights_and_ids_must_belong_together() -> None:
    """Expert 1 weighs its output by the slot-th weight of another token order: not a mixture any more."""
    loop = Loop()
    text = loop.text().replace("e1_index = Add(e1_slot, e1_base)", "e1_index = Add(e1_token, e1_base)")
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays))
    assert "mixing weight" in miss.reason


def test_unknown_router_keeps_its_nodes() -> None:
    """A router that HinaMoE has no words for stays in the graph and hands ids and weights over."""
    loop = Loop()
    text = loop.text().replace("mixing = Div(values, total)", "mixing0 = Div(values, total)\nmixing = Sin(mixing0)")
    model = parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    match = only_match(model)
    assert match.spec.router_input == "topk_ids"
    assert set(match.inputs) == {"topk_ids", "topk_weights"}
    result = probe(model, match)
    assert result.ok, result.reason


def test_other_uses_of_nonzero_are_left_alone() -> None:
    text = "(float[B, S, 8] x) => (int64[2, N] y) { a = Greater(x, zero)\n b = Squeeze(a, axis)\n y = NonZero(b) }"
    arrays = {"zero": np.zeros((), np.float32), "axis": np.array([0])}
    assert find(parse(text, arrays)) == []


def changed(*changes: tuple[str, str], inputs: str = "float[B, S, 8] x", **arrays: np.ndarray) -> ir.Model:
    """The block of `Loop()` with lines of its text replaced, and more constants."""
    return rewritten(Loop(), *changes, inputs=inputs, **arrays)


@pytest.mark.parametrize("axes", ["B, S", "?, ?"])
def test_the_ends_have_one_shape_even_where_axes_have_no_names(axes: str) -> None:
    """x is [S, B, H] inside the block and [B, S, H] outside: only the tokens in between are alike."""
    model = changed(
        ("flat = Reshape(x, rows)", "xt = Transpose<perm=[1, 0, 2]>(x)\nflat = Reshape(xt, rows)"),
        inputs=f"float[{axes}, 8] x",
    )
    match = only_match(model)
    assert (match.hidden_states.name, match.output.name) == ("flat", "acc3")
    assert compare(model, match, np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)) < 1e-5


def test_axes_without_names_may_be_proven_by_the_reshape() -> None:
    match = only_match(changed(inputs="float[?, ?, 8] x"))
    assert (match.hidden_states.name, match.output.name) == ("x", "y")


def test_an_output_of_more_rows_than_tokens_is_refused() -> None:
    model = changed(
        ("flat = Reshape(x, rows)", "all = Reshape(x, rows)\nflat = Slice(all, first, end, first)"),
        ("flat_shape = Shape(flat)", "flat_shape = Shape(all)"),
        first=np.array([0]),
        end=np.array([64]),
    )
    assert "shape and type of the tokens flat" in only_miss(model).reason


def test_a_router_that_sees_fewer_tokens_is_refused() -> None:
    model = changed(
        ("logits = MatMul(flat, router)", "every = MatMul(flat, router)\nlogits = Slice(every, first, end, first)"),
        first=np.array([0]),
        end=np.array([64]),
    )
    assert "logits, read as router_logits, has one row for each token of flat" in only_miss(model).reason


GROUPED = (
    "logits = MatMul(flat, router)",
    "other = Relu(flat)\nungrouped = MatMul(other, router)\nlogits = Reshape(ungrouped, by_groups)",
)
GROUPS = {"by_groups": np.array([-1, 2, 2]), "by_experts": np.array([-1, 4])}


def test_logits_are_those_of_all_experts() -> None:
    """The scores are computed from a view of the logits [T, 2, 2]: the op gets what lies behind it."""
    model = changed(
        GROUPED,
        ("probs = Softmax<axis=1>(logits)", "grouped = Sigmoid(logits)\nprobs = Reshape(grouped, by_experts)"),
        **GROUPS,
    )
    match = only_match(model)
    assert match.inputs["router_logits"].name == "ungrouped"
    assert compare(model, match, np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)) < 1e-5


def test_a_softmax_within_groups_is_no_known_router() -> None:
    model = changed(
        GROUPED,
        ("probs = Softmax<axis=1>(logits)", "grouped = Softmax<axis=-1>(logits)\nprobs = Reshape(grouped, by_experts)"),
        **GROUPS,
    )
    match = only_match(model)
    assert match.spec.router_input == "topk_ids"
    assert compare(model, match, np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)) < 1e-5


def test_a_squeeze_of_unknown_axes_is_refused() -> None:
    """Without axes it drops the token axis of a single token as well."""
    model = changed(
        ("e1_row = Gather<axis=0>(mask, id1)", "e1_kept = Gather<axis=0>(mask, id1s)\ne1_row = Squeeze(e1_kept)"),
        id1s=np.array([1]),
    )
    miss = only_miss(model)
    assert miss.name.startswith("NonZero")
    assert "Squeeze" in miss.reason


def test_a_squeeze_of_the_expert_axis_is_seen_through() -> None:
    model = changed(
        (
            "e1_row = Gather<axis=0>(mask, id1)",
            "e1_kept = Gather<axis=0>(mask, id1s)\ne1_row = Squeeze(e1_kept, axis0)",
        ),
        id1s=np.array([1]),
    )
    assert probe(model, only_match(model)).ok


def test_tokens_that_are_transposed_before_the_lookup_are_refused() -> None:
    loop = Loop(scatter_add=True, width=8, hidden=8)
    text = loop.text().replace(
        "e1_x = GatherND(flat,", "flat_t = Transpose<perm=[1, 0]>(flat)\ne1_x = GatherND(flat_t,"
    )
    miss = only_miss(parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays))
    assert "another input than expert 0" in miss.reason
