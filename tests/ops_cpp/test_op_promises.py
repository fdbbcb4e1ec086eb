"""What HinaMoE promises beyond being right: the same bits whatever threads and batch, ties, bad rows, odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from graph_passes.op_schema import FLOAT_TYPES, INDEX_TYPES
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.tensors import ONNX_TYPES, misaligned, numpy_type

NAN, INF = np.nan, np.inf


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def qwen3(**fields: Any) -> Node:
    """A node with all the usual parts: softmax router inside, renormalised, odd sizes, shared expert."""
    options = {name: fields.pop(name) for name in ("activation_type", "types") if name in fields}
    spec = make_spec(
        **{
            "hidden_size": 60,
            "intermediate_size": 33,
            "num_experts": 16,
            "top_k": 4,
            "norm_topk_prob": True,
            "shared_intermediate_size": 20,
            **fields,
        }
    )
    return harness.random_node(spec, np.random.default_rng(1), **options)


def logits_node(experts: int, top_k: int, **fields: Any) -> Node:
    """A node that is handed its logits, so that a test says exactly what the router sees."""
    spec = make_spec(num_experts=experts, top_k=top_k, router_input="router_logits", **fields)
    return harness.random_node(spec, np.random.default_rng(2))


def with_logits(node: Node, logits: Any) -> Tensors:
    rows = np.asarray(logits, np.float32)
    hidden = np.random.default_rng(3).standard_normal((len(rows), node.spec.hidden_size)).astype(np.float32)
    return {"hidden_states": hidden, "router_logits": rows}


# The same bits


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("sizes", [(60, 33), (544, 48)], ids=str)
def test_threads_and_repetition_change_no_bit(activation_type: str, sizes: tuple[int, int]) -> None:
    node = qwen3(activation_type=activation_type, hidden_size=sizes[0], intermediate_size=sizes[1])
    model = harness.make_model(node)
    sessions = [harness.make_session(model, threads) for threads in (1, 2, 4)]
    for tokens in (1, 2, 7, 64, 200):
        feeds = harness.random_feeds(node, np.random.default_rng(tokens), (tokens,))
        first = harness.run(sessions[0], feeds)["output"]
        harness.assert_close(node, first, harness.expected(node, feeds)[0])
        for session in sessions:
            for _ in range(5):
                assert same_bits(harness.run(session, feeds)["output"], first)


@pytest.mark.parametrize("weight_type", FLOAT_TYPES)
@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("mlp", ["split", "fused", "plain"])
def test_a_token_does_not_depend_on_its_batch(weight_type: str, activation_type: str, mlp: str) -> None:
    names = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "shared_gate_proj", "shared_up_proj")
    node = qwen3(
        activation_type=activation_type,
        types=dict.fromkeys((*names, "shared_down_proj"), weight_type),
        mlp=mlp,
        shared_mlp="plain" if mlp == "plain" else "split",
    )
    session = harness.make_session(harness.make_model(node), threads=2)
    feeds = harness.random_feeds(node, np.random.default_rng(4), (70,))
    whole = harness.run(session, feeds)["output"]
    rng = np.random.default_rng(5)
    subsets = [np.array([row]) for row in range(70)]
    subsets += [rng.permutation(70)[:count] for count in (2, 3, 5, 8, 13, 16, 17, 33, 64, 70)]
    for rows in subsets:
        part = harness.run(session, {"hidden_states": feeds["hidden_states"][rows]})["output"]
        assert same_bits(part, whole[rows]), f"rows {rows.tolist()}"


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("apply_weights_to", ["output", "input"])
def test_each_expert_may_have_its_own_type(apply_weights_to: str, activation_type: str) -> None:
    """Types of one field differ from expert to expert; a token has several of them."""
    fields = {"experts_stacked": False, "activation_type": activation_type, "apply_weights_to": apply_weights_to}
    for first in range(3):
        node = qwen3(**fields, types={"router_weight": "float32"})
        weights: dict[str, Any] = dict(node.weights)
        for place, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            kinds = [numpy_type(FLOAT_TYPES[(first + place + e) % 3]) for e in range(16)]
            weights[name] = [node.weights[name][e].astype(kind) for e, kind in enumerate(kinds)]
        node.weights = weights
        for tokens in (1, 40):
            harness.check(node, harness.random_feeds(node, np.random.default_rng(25), (tokens,)), threads=2)


def test_optional_output_changes_nothing() -> None:
    node = qwen3()
    feeds = harness.random_feeds(node, np.random.default_rng(6), (9,))
    alone = harness.run(harness.make_session(harness.make_model(node)), feeds)
    both = harness.run(harness.make_session(harness.make_model(node, tokens_per_expert=True)), feeds)
    assert list(alone) == ["output"]
    assert same_bits(both["output"], alone["output"])
    assert both["tokens_per_expert"].dtype == np.int64
    np.testing.assert_array_equal(both["tokens_per_expert"], harness.expected(node, feeds)[1])


def test_layouts_of_the_same_weights_agree() -> None:
    fused = qwen3(mlp="fused", shared_intermediate_size=0)
    feeds = harness.random_feeds(fused, np.random.default_rng(7), (11,))
    want = harness.check(fused, feeds)["output"]
    half = fused.spec.intermediate_size
    gate, up = fused.weights["gate_up_proj"][:, :half], fused.weights["gate_up_proj"][:, half:]
    rest = {"down_proj": fused.weights["down_proj"]}
    spellings: list[tuple[dict[str, Any], Tensors]] = [
        ({"mlp": "split"}, {"gate_proj": gate, "up_proj": up}),
        ({"mlp": "split", "experts_stacked": False}, {"gate_proj": gate, "up_proj": up}),
        ({"mlp": "fused", "experts_stacked": False}, {"gate_up_proj": fused.weights["gate_up_proj"]}),
        ({"mlp": "fused", "gate_up_order": "up_gate"}, {"gate_up_proj": np.concatenate([up, gate], 1)}),
        (
            {"mlp": "fused", "gate_up_interleaved": True},
            {"gate_up_proj": np.stack([gate, up], 2).reshape(fused.weights["gate_up_proj"].shape)},
        ),
        (
            {"mlp": "fused", "gate_up_interleaved": True, "gate_up_order": "up_gate"},
            {"gate_up_proj": np.stack([up, gate], 2).reshape(fused.weights["gate_up_proj"].shape)},
        ),
    ]
    for fields, weights in spellings:
        node = qwen3(shared_intermediate_size=0, **fields)
        node.constants, node.weights = fused.constants, {**weights, **rest}
        assert same_bits(harness.run(harness.make_session(harness.make_model(node)), feeds)["output"], want), fields


# Ties

BOUNDARY = [[3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("tie_break", ["lowest", "highest"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "softmax_topk", "sigmoid_topk"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 4), (60, 8), (64, 8), (33, 33)])
def test_all_equal_logits(experts: int, top_k: int, score_func: str, tie_break: str) -> None:
    node = logits_node(experts, top_k, score_func=score_func, tie_break=tie_break)
    counts = harness.check(node, with_logits(node, np.full((5, experts), 0.25)))["tokens_per_expert"]
    chosen = range(top_k) if tie_break == "lowest" else range(experts - top_k, experts)
    np.testing.assert_array_equal(np.nonzero(counts)[0], chosen)


@pytest.mark.parametrize("tie_break", ["lowest", "highest"])
def test_zero_router_weight_makes_ties(tie_break: str) -> None:
    node = qwen3(tie_break=tie_break)
    node.constants["router_weight"][:] = 0.0
    feeds = {"hidden_states": np.random.default_rng(8).standard_normal((3, 60)).astype(np.float32)}
    counts = harness.check(node, feeds)["tokens_per_expert"]
    np.testing.assert_array_equal(np.nonzero(counts)[0], range(4) if tie_break == "lowest" else range(12, 16))


@pytest.mark.parametrize(
    ("tie_break", "chosen"), [("lowest", [{0, 1, 2, 4}, {0, 1, 2, 3}]), ("highest", [{0, 4, 5, 7}, {2, 5, 6, 7}])]
)
def test_boundary_ties(tie_break: str, chosen: list[set[int]]) -> None:
    node = logits_node(8, 4, tie_break=tie_break)
    for row, ids in zip(BOUNDARY, chosen, strict=True):
        counts = harness.check(node, with_logits(node, [row]))["tokens_per_expert"]
        assert set(np.nonzero(counts)[0].tolist()) == ids


@pytest.mark.parametrize("tie_break", ["lowest", "highest"])
@pytest.mark.parametrize("experts", [16, 33, 60, 64])
def test_ties_across_vector_lanes(experts: int, tie_break: str) -> None:
    """Equal logits in any two places, the rest below; and few distinct values, so that most rows tie somewhere."""
    pairs = [(a, b) for a in range(0, experts, 3) for b in range(a + 1, experts, 5)]
    rows = np.full((len(pairs), experts), -1.0)
    for row, pair in zip(rows, pairs, strict=True):
        row[list(pair)] = 1.0
    for top_k in (1, 2):
        node = logits_node(experts, top_k, tie_break=tie_break)
        harness.check(node, with_logits(node, rows))
        counts = harness.check(node, with_logits(node, rows[:1]))["tokens_per_expert"]
        assert counts[pairs[0][0 if tie_break == "lowest" else 1]] == 1
    few = np.random.default_rng(9).integers(0, 4, (100, experts))
    node = logits_node(experts, 5, tie_break=tie_break)
    harness.check(node, with_logits(node, few))


@pytest.mark.parametrize("tie_break", ["lowest", "highest"])
@pytest.mark.parametrize("group_score_func", ["max", "top2_sum"])
@pytest.mark.parametrize("group_mask_value", [-INF, 0.0])
def test_ties_between_groups(group_mask_value: float, group_score_func: str, tie_break: str) -> None:
    """Equal groups; and k larger than the chosen groups hold, so that masked experts tie with each other."""
    fields = {"n_group": 4, "group_score_func": group_score_func, "group_mask_value": group_mask_value}
    for topk_group, top_k in ((1, 2), (2, 8), (1, 6), (3, 13)):
        node = logits_node(16, top_k, score_func="sigmoid", topk_group=topk_group, tie_break=tie_break, **fields)
        harness.check(node, with_logits(node, np.full((3, 16), 0.5)))
        harness.check(node, with_logits(node, np.random.default_rng(10).integers(0, 3, (20, 16))))


# Bad router rows

BAD_ROWS = {
    "nan": lambda row: np.where(np.arange(row.size) == 3, NAN, row),
    "all nan": lambda row: np.full(row.size, NAN),
    "+inf": lambda row: np.where(np.arange(row.size) == 5, INF, row),
    "two +inf": lambda row: np.where(np.isin(np.arange(row.size), [2, 6]), INF, row),
    "some -inf": lambda row: np.where(np.arange(row.size) % 2 == 0, -INF, row),
    "all but one -inf": lambda row: np.where(np.arange(row.size) == 4, row, -INF),
    "all -inf": lambda row: np.full(row.size, -INF),
    "nan and inf": lambda row: np.where(np.arange(row.size) == 1, NAN, np.where(np.arange(row.size) == 2, INF, row)),
    "huge": lambda row: row * 1e38,
}
POISON = ("nan", "all nan", "+inf", "two +inf", "all -inf", "nan and inf")
"""Rows that standard softmax turns into NaN."""


@pytest.mark.parametrize("nonfinite_router", ["propagate", "zero"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer"])
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_row_among_good_ones(bad: str, score_func: str, nonfinite_router: str) -> None:
    node = logits_node(8, 2, score_func=score_func, nonfinite_router=nonfinite_router)
    good = harness.random_feeds(node, np.random.default_rng(11), (7,))
    feeds = {name: value.copy() for name, value in good.items()}
    with np.errstate(over="ignore"):
        feeds["router_logits"][4] = BAD_ROWS[bad](good["router_logits"][4])
    neighbours = [0, 1, 2, 3, 5, 6]
    for threads in (1, 2):
        session = harness.make_session(harness.make_model(node, tokens_per_expert=True), threads)
        want = harness.run(session, good)["output"]
        outputs = harness.run(session, feeds)
        assert same_bits(outputs["output"][neighbours], want[neighbours])
        output, counts = harness.expected(node, feeds)
        harness.assert_close(node, outputs["output"], output)
        np.testing.assert_array_equal(outputs["tokens_per_expert"], counts)
        if bad in POISON and score_func == "softmax":
            row = outputs["output"][4]
            assert np.isnan(row).all() if nonfinite_router == "propagate" else (row == 0.0).all()


@pytest.mark.parametrize("nonfinite_router", ["propagate", "zero"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bad_hidden_state_stays_in_its_row(value: float, nonfinite_router: str) -> None:
    node = qwen3(nonfinite_router=nonfinite_router)
    good = harness.random_feeds(node, np.random.default_rng(12), (9,))
    feeds = {"hidden_states": good["hidden_states"].copy()}
    feeds["hidden_states"][2, 7] = value
    session = harness.make_session(harness.make_model(node), threads=2)
    want, got = harness.run(session, good)["output"], harness.run(session, feeds)["output"]
    neighbours = [row for row in range(9) if row != 2]
    assert same_bits(got[neighbours], want[neighbours])
    assert np.isnan(got[2]).all()


def test_groups_with_a_bad_row() -> None:
    node = logits_node(16, 4, score_func="sigmoid", n_group=4, topk_group=2, group_score_func="top2_sum")
    good = harness.random_feeds(node, np.random.default_rng(13), (3,))
    session = harness.make_session(harness.make_model(node))
    want = harness.run(session, good)["output"]
    for value in (NAN, INF, -INF):
        for place in (slice(0, 1), slice(0, 4), slice(5, 12), slice(None)):
            feeds = {name: tensor.copy() for name, tensor in good.items()}
            feeds["router_logits"][1, place] = value
            got = harness.run(session, feeds)["output"]
            assert same_bits(got[[0, 2]], want[[0, 2]])
            harness.assert_close(node, got, harness.expected(node, feeds)[0])


# Sizes


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("router_input", ["router_weight", "router_logits", "topk_ids"])
def test_no_tokens(router_input: str, activation_type: str) -> None:
    node = qwen3(router_input=router_input, activation_type=activation_type)
    for leading in ((0,), (2, 0), (0, 3)):
        feeds = harness.random_feeds(node, np.random.default_rng(14), leading)
        model = harness.make_model(node, leading=["B", "S"][: len(leading)], tokens_per_expert=True)
        outputs = harness.run(harness.make_session(model, threads=2), feeds)
        assert outputs["output"].shape == (*leading, 60)
        np.testing.assert_array_equal(outputs["tokens_per_expert"], np.zeros(16, np.int64))


@pytest.mark.parametrize("router_input", ["router_weight", "router_logits", "topk_ids"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (8, 8), (60, 60), (64, 1), (3, 2)])
def test_every_k(experts: int, top_k: int, router_input: str) -> None:
    node = qwen3(num_experts=experts, top_k=top_k, router_input=router_input)
    for tokens in (1, 5):
        harness.check(node, harness.random_feeds(node, np.random.default_rng(15), (tokens,)), threads=2)


@pytest.mark.parametrize("hidden", [1, 33, 48, 60, 544])
@pytest.mark.parametrize("intermediate", [1, 33, 48, 60, 544])
def test_every_size(hidden: int, intermediate: int) -> None:
    for mlp in ("split", "fused", "plain"):
        node = qwen3(hidden_size=hidden, intermediate_size=intermediate, mlp=mlp, shared_intermediate_size=0)
        harness.check(node, harness.random_feeds(node, np.random.default_rng(16), (6,)), threads=2)


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_all_tokens_on_one_expert(tokens: int) -> None:
    node = qwen3(top_k=1, num_experts=8, router_input="topk_ids")
    feeds = harness.random_feeds(node, np.random.default_rng(17), (tokens,))
    feeds["topk_ids"][:] = 5
    counts = harness.check(node, feeds, threads=4)["tokens_per_expert"]
    np.testing.assert_array_equal(counts, [0, 0, 0, 0, 0, tokens, 0, 0])


def test_idle_experts_are_never_read() -> None:
    node = qwen3(num_experts=8, router_input="topk_ids", experts_stacked=False)
    feeds = harness.random_feeds(node, np.random.default_rng(18), (20,))
    feeds["topk_ids"] = np.tile(np.array([1, 3, 4, 6]), (20, 1))
    for name in ("gate_proj", "up_proj", "down_proj"):
        node.weights[name][[0, 2, 5, 7]] = NAN
    harness.check(node, feeds, threads=2)


# Shapes


@pytest.mark.parametrize("router_input", ["router_weight", "router_logits", "topk_ids"])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 3, 4)], ids=str)
def test_every_rank(leading: tuple[int, ...], router_input: str) -> None:
    node = qwen3(router_input=router_input)
    feeds = harness.random_feeds(node, np.random.default_rng(19), leading)
    output = harness.check(node, feeds, leading=[f"d{axis}" for axis in range(len(leading))])["output"]
    assert output.shape == (*leading, 60)
    flat = {name: value.reshape(-1, value.shape[-1]) for name, value in feeds.items()}
    assert same_bits(harness.check(node, flat)["output"].reshape(output.shape), output)


@pytest.mark.parametrize("router_input", ["router_weight", "router_logits", "topk_ids"])
@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
def test_inputs_at_odd_addresses(activation_type: str, router_input: str) -> None:
    spec = make_spec(num_experts=16, top_k=4, router_input=router_input)
    node = harness.random_node(spec, np.random.default_rng(3), activation_type=activation_type)
    feeds = harness.random_feeds(node, np.random.default_rng(4), (7,))
    session = harness.make_session(harness.make_model(node))
    want = harness.run(session, feeds)["output"]
    moved = {name: misaligned(value) for name, value in feeds.items()}
    assert all(value.ctypes.data % value.itemsize for value in moved.values())
    assert same_bits(harness.run(session, moved)["output"], want)


@pytest.mark.parametrize("router_input", ["router_logits", "topk_ids"])
def test_router_inputs_may_be_flat(router_input: str) -> None:
    """Exported graphs often flatten the tokens for the router only; what counts is the number of tokens."""
    node = qwen3(router_input=router_input)
    feeds = harness.random_feeds(node, np.random.default_rng(24), (2, 3))
    model = harness.make_model(node, leading=["B", "S"])
    for value_info in model.graph.input[1:]:
        del value_info.type.tensor_type.shape.dim[0]
    flat = {name: value if name == "hidden_states" else value.reshape(6, -1) for name, value in feeds.items()}
    output = harness.run(harness.make_session(model), flat)["output"]
    harness.assert_close(node, output, harness.expected(node, feeds)[0])


def test_symbolic_dimensions_are_kept() -> None:
    node = qwen3()
    for leading in (["B", "S"], ["tokens"], [2, "S"], ["a", "b", "c"], [4, 5], []):
        for tokens_per_expert in (False, True):
            model = harness.make_model(node, leading=leading, tokens_per_expert=tokens_per_expert)
            assert harness.make_session(model).get_outputs()[0].shape == [*leading, 60]


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
def test_the_next_node_knows_the_type(activation_type: str) -> None:
    """The output goes on into a standard node, and nothing but type inference says what it is."""
    node = qwen3(router_input="router_logits", activation_type=activation_type)
    router_type = "float32" if activation_type != "float32" else "float16"
    model = harness.make_model(node, router_type=router_type)
    model.graph.node.append(helper.make_node("Cast", ["output"], ["cast"], to=ONNX_TYPES["float32"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("cast", ONNX_TYPES["float32"], None))
    feeds = harness.random_feeds(node, np.random.default_rng(23), (5,), router_type=router_type)
    session = harness.make_session(model)
    assert session.get_outputs()[0].shape == ["T", 60]
    got = harness.run(session, feeds)["cast"].astype(numpy_type(activation_type))
    harness.assert_close(node, got, harness.expected(node, feeds)[0])


# Ids from the graph


@pytest.mark.parametrize(
    ("index_type", "value"),
    [(kind, value) for kind in INDEX_TYPES for value in (-1, 8, 9, np.iinfo(kind).max, np.iinfo(kind).min)]
    + [("int64", 2**32), ("int64", -(2**32))],
)
def test_id_out_of_range_is_an_error(index_type: str, value: int) -> None:
    node = qwen3(num_experts=8, router_input="topk_ids")
    session = harness.make_session(harness.make_model(node, index_type=index_type), threads=2)
    good = harness.random_feeds(node, np.random.default_rng(20), (6,), index_type=index_type)
    want = harness.run(session, good)["output"]
    bad = {name: tensor.copy() for name, tensor in good.items()}
    bad["topk_ids"][3, 1] = value
    with pytest.raises(Exception, match="topk_ids") as caught:
        harness.run(session, bad)
    message = str(caught.value)
    assert type(caught.value).__name__ == "InvalidArgument", type(caught.value)
    assert str(value) in message and "0..7" in message.replace("[0, 7]", "0..7"), message
    assert same_bits(harness.run(session, good)["output"], want), "the session must work on after an error"


def test_duplicate_ids_count_twice() -> None:
    node = qwen3(num_experts=8, router_input="topk_ids")
    feeds = harness.random_feeds(node, np.random.default_rng(21), (6,))
    feeds["topk_ids"][:3] = [[1, 1, 2, 2], [5, 5, 5, 5], [0, 7, 0, 7]]
    for threads in (1, 2, 4):
        counts = harness.check(node, feeds, threads=threads)["tokens_per_expert"]
        assert counts.sum() == 24
    same = make_spec(hidden_size=60, num_experts=8, top_k=1, router_input="topk_ids", shared_intermediate_size=20)
    single = Node(same, weights=node.weights)
    five = {name: value[1:2] for name, value in feeds.items()}
    once = {"hidden_states": five["hidden_states"], "topk_ids": np.array([[5]])}
    once["topk_weights"] = five["topk_weights"].sum(-1, keepdims=True, dtype=np.float32)
    np.testing.assert_allclose(harness.check(node, five)["output"], harness.check(single, once)["output"], rtol=1e-5)


@pytest.mark.parametrize("apply_weights_to", ["output", "input"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_mixing_weight_stays_in_its_row(value: float, activation: str, apply_weights_to: str) -> None:
    node = qwen3(num_experts=8, router_input="topk_ids", apply_weights_to=apply_weights_to, activation=activation)
    feeds = harness.random_feeds(node, np.random.default_rng(22), (4,))
    feeds["topk_weights"][1, 2] = value
    feeds["topk_weights"][3, 0] = 0.0
    harness.check(node, feeds, threads=2)


def test_input_weighting_multiplies_before_the_projection() -> None:
    """A product out of the float32 range if the weight came after the projection, or before it in another order."""
    spec = make_spec(router_input="topk_ids", apply_weights_to="input")
    node = harness.random_node(spec, np.random.default_rng(1))
    feeds = harness.random_feeds(node, np.random.default_rng(23), (3,))
    feeds["hidden_states"][1] *= np.float32(3e37)
    feeds["topk_weights"][1] = np.float32(1e-37)
    harness.check(node, feeds)
