"""The probe accepts what is right, and catches every kind of wrong reading."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import reference, steering
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.cut import Cut, CutError
from graph_passes.matchers import MoeMatch, WeightSource
from graph_passes.normalize import normalize
from graph_passes.probe import probe
from graph_passes.steering import Unreachable, steer
from tests.graphs import only_match, parse
from tests.unrolled_graphs import Loop, model_of


def swapped(match: MoeMatch) -> MoeMatch:
    weights = dict(match.weights)
    weights["gate_proj"], weights["up_proj"] = weights["up_proj"], weights["gate_proj"]
    return replace(match, weights=weights)


def rotated(match: MoeMatch) -> MoeMatch:
    gates = match.weights["gate_proj"]
    return replace(match, weights={**match.weights, "gate_proj": (*gates[1:], gates[0])})


def last_expert_doubled(match: MoeMatch) -> MoeMatch:
    down = match.weights["down_proj"]
    return replace(match, weights={**match.weights, "down_proj": (*down[:-1], down[0])})


def transposed(match: MoeMatch) -> MoeMatch:
    gates = tuple(replace(source, transpose=not source.transpose) for source in match.weights["gate_proj"])
    return replace(match, weights={**match.weights, "gate_proj": gates})


def with_spec(**fields: object) -> Callable[[MoeMatch], MoeMatch]:
    return lambda match: replace(match, spec=replace(match.spec, **fields))


WRONG = {
    "gate and up swapped": swapped,
    "experts rotated": rotated,
    "one expert wrong": last_expert_doubled,
    "square weight transposed": transposed,
    "not normalised": with_spec(norm_topk_prob=False),
    "norm with eps": with_spec(norm_eps=1e-3),
    "scaled": with_spec(routed_scaling_factor=1.001),
    "sigmoid router": with_spec(score_func="sigmoid"),
    "one expert too few": with_spec(top_k=1),
    "one expert too many": with_spec(top_k=3),
    "other activation": with_spec(activation="gelu"),
    "other alpha": with_spec(activation_alpha=1.01),
    "limited": with_spec(activation_limit=1.0),
    "weights the input": with_spec(apply_weights_to="input"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_refused(wrong: str) -> None:
    model = model_of(Loop(inter=8))
    match = only_match(model)
    assert probe(model, match).ok
    result = probe(model, WRONG[wrong](match))
    assert not result.ok
    assert "does not compute what it seems to" in result.reason
    assert result.worst_relative_l2 > 1e-4


def claim(loop: Loop, text: str, arrays: dict[str, np.ndarray], **values: str) -> tuple[ir.Model, MoeMatch]:
    """The model of `text` (nodes from x to y), and the match of `loop` as a careless matcher might claim it there.

    `values` name other graph values for `hidden_states`, `output` and, replacing the router, `router_logits`.
    """
    match = only_match(model_of(loop))
    model = parse(f"(float[B, S, {loop.hidden}] x) => (float[D, T, {loop.hidden}] y) {{\n{text}\n}}", arrays)
    normalize(model)
    found = {v.name: v for node in model.graph for v in node.outputs} | dict(model.graph.initializers)
    found["x"] = model.graph.inputs[0]
    weights = {
        name: tuple(replace(source, value=found[source.value.name]) for source in sources)
        for name, sources in match.weights.items()
    }
    constants = {name: replace(s, value=found[s.value.name]) for name, s in match.constants.items()}
    match = replace(match, hidden_states=found["x"], output=found["y"], weights=weights, constants=constants)
    if logits := values.get("router_logits"):
        spec = replace(match.spec, router_input="router_logits")
        match = replace(match, spec=spec, inputs={"router_logits": found[logits]}, constants={})
    return model, match


def test_fixed_token_count_fails_on_other_counts() -> None:
    """A matcher may overlook it, the probe does not."""
    loop = Loop()
    text = loop.text().replace("y = Reshape(acc3, shape)", "fixed = Reshape(acc3, one)\ny = Reshape(fixed, shape)")
    result = probe(*claim(loop, text, {**loop.arrays, "one": np.array([7, 8])}))
    assert not result.ok
    assert "the block fails on 1 tokens" in result.reason


@pytest.mark.parametrize("width", [4, 64])
def test_batches_of_several_sequences_are_run(width: int) -> None:
    """The output lies [1, T, H] whatever the batch: right for one sequence only. 64 experts need over 33 tokens."""
    loop = Loop(width=width, top_k=1)
    text = loop.text().replace(f"y = Reshape(acc{width - 1}, shape)", f"y = Reshape(acc{width - 1}, one)")
    model, match = claim(loop, text, {**loop.arrays, "one": np.array([1, -1, 8])})
    result = probe(model, match)
    assert not result.ok
    assert "its output is [1, " in result.reason and "for hidden states [3, " in result.reason


def test_logits_of_another_width_are_refused() -> None:
    """A softmax over groups of two is no softmax over four; its input is no router_logits [T, 4]."""
    loop = Loop()
    text = loop.text().replace("MatMul(flat, router)", "MatMul(flat, router)\ngrouped = Reshape(logits, pairs)")
    text = text.replace("Softmax<axis=1>(logits)", "Softmax<axis=-1>(grouped)").replace("probs =", "probs2 =")
    text = text.replace("values, ids", "probs = Reshape(probs2, four)\nvalues, ids")
    arrays = {**loop.arrays, "pairs": np.array([-1, 2, 2]), "four": np.array([-1, 4])}
    model, match = claim(loop, text, arrays, router_logits="grouped")
    result = probe(model, match)
    assert not result.ok
    assert re.search(r"grouped is \[.*, 2, 2\], and would be read as \[1, 1, 4\]", result.reason), result.reason


def test_whatever_goes_wrong_is_a_result() -> None:
    model = model_of(Loop())
    match = only_match(model)
    result = probe(model, replace(match, weights={**match.weights, "gate_proj": ()}))
    assert not result.ok
    assert result.reason.startswith("the block cannot be checked: IndexError")


def test_a_block_that_reads_more_than_its_inputs_is_refused() -> None:
    loop = Loop()
    model = parse(
        "(float[B, S, 8] x, float[T, 8] more) => (float[B, S, 8] y) {\n"
        + loop.text().replace("y = Reshape(acc3, shape)", "sum = Add(acc3, more)\ny = Reshape(sum, shape)")
        + "\n}",
        loop.arrays,
    )
    # The sum behind the loop is no part of a match; claim that it is.
    match = only_match(model)
    output = next(v for node in model.graph for v in node.outputs if v.name == "y")
    result = probe(model, replace(match, hidden_states=model.graph.inputs[0], output=output))
    assert not result.ok
    assert "it reads more, which has no place" in result.reason


def test_shapes_may_come_from_outside_the_block() -> None:
    """Batch and length are read off the token ids, as whole-model exports do."""
    loop = Loop(source="h")
    text = loop.text().replace(
        "shape = Shape(h)",
        "ids_shape = Shape(tokens)\nwide = Shape<start=2>(h)\nshape = Concat<axis=0>(ids_shape, wide)",
    )
    model = parse(
        "(int64[B, S] tokens) => (float[B, S, 8] y) {\nh = Gather(table, tokens)\n" + text + "\n}",
        {**loop.arrays, "table": np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)},
    )
    result = probe(model, only_match(model))
    assert result.ok, result.reason


def test_the_number_of_tokens_may_be_that_of_rows_of_another_layer() -> None:
    """transformers' exporter takes the sizes of a layer from the one before, where they are equal."""
    loop = Loop(source="h")
    text = loop.text().replace("flat_shape = Shape(flat)", "flat_shape = Shape(before)")
    layer = "h0 = Gather(table, tokens)\nrows0 = Reshape(h0, rows)\nbefore = Relu(rows0)\nh = Neg(h0)\n"
    model = parse(
        "(int64[B, S] tokens) => (float[B, S, 8] y) {\n" + layer + text + "\n}",
        {**loop.arrays, "table": np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)},
    )
    result = probe(model, only_match(model))
    assert result.ok, result.reason


def test_explicit_ids_reach_every_expert() -> None:
    loop = Loop(width=7, top_k=3)
    text = loop.text().replace("mixing = Div(values, total)", "mixing0 = Div(values, total)\nmixing = Sin(mixing0)")
    model = parse("(float[B, S, 8] x) => (float[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    match = only_match(model)
    assert match.spec.router_input == "topk_ids"
    assert probe(model, match).ok
    assert not probe(model, last_expert_doubled(match)).ok
    inputs = steer(match, ir.DataType.FLOAT, np.random.default_rng(0))
    last = inputs.router["topk_ids"][inputs.batches[-1]]
    assert set(last.ravel()) == set(range(7))
    assert all(len(set(row)) == 3 for row in inputs.router["topk_ids"])


@pytest.mark.parametrize(("width", "top_k"), [(4, 2), (1, 1), (60, 4), (128, 8), (200, 1)])
def test_inputs_reach_every_expert_by_a_clear_margin(width: int, top_k: int) -> None:
    match = only_match(model_of(Loop(width=width, top_k=top_k)))
    inputs = steer(match, ir.DataType.FLOAT, np.random.default_rng(0))
    sizes = [batch.stop - batch.start for batch in inputs.batches]
    assert sizes[:3] == [1, 2, 7] and sizes[3] >= max(33, math.ceil(width / top_k))
    router = inputs.constants["router_weight"].astype(np.float64)
    logits = inputs.hidden.astype(np.float64) @ router.T
    ids, mixing = reference.route(match.spec, logits)
    visible = mixing >= 0.1 * mixing.max(-1, keepdims=True)
    last = inputs.batches[-1]
    assert set(ids[last][visible[last]]) == set(range(width))
    ranked = np.sort(logits, -1)[:, ::-1]
    if top_k < width:
        assert (ranked[:, top_k - 1] - ranked[:, top_k]).min() > 1e-5


def test_a_router_that_shuns_an_expert_is_replaced() -> None:
    """Expert 2 is never chosen: its scores lie between those of experts 0 and 1."""
    loop = Loop(top_k=1)
    loop.router[2] = 0.5 * (loop.router[0] + loop.router[1])
    loop.arrays["router"] = loop.router.T.copy()
    model = model_of(loop)
    match = only_match(model)
    inputs = steer(match, ir.DataType.FLOAT, np.random.default_rng(0))
    assert match.constants["router_weight"].value in inputs.overrides
    assert probe(model, match).ok
    wrong = {**match.weights, "up_proj": tuple(match.weights["up_proj"][e] for e in (0, 1, 1, 3))}
    assert not probe(model, replace(match, weights=wrong)).ok


def test_a_block_that_gives_no_finite_number_proves_nothing() -> None:
    model = model_of(Loop())
    match = only_match(model)
    for source in match.weights["down_proj"]:
        array = np.full(source.stored.shape.numpy(), np.nan, np.float32)
        source.value.const_value = ir.Tensor(array, name=source.value.name)
    result = probe(model, swapped(match))
    assert not result.ok
    assert "nothing that the block computes is finite" in result.reason


def test_unreachable_experts_are_named() -> None:
    match = only_match(model_of(Loop()))
    spec = replace(match.spec, norm_floor=1e-30, routed_scaling_factor=math.nan)
    with pytest.raises(Unreachable, match="experts 0, 1, 2, 3"):
        steer(replace(match, spec=spec), ir.DataType.FLOAT, np.random.default_rng(0))


def test_cut_runs_with_replaced_weights() -> None:
    model = model_of(Loop())
    match = only_match(model)
    router = match.constants["router_weight"].value
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    cut = Cut(model, match)
    plain = cut.run({match.hidden_states: x}, 6)
    other = cut.run({match.hidden_states: x, router: -router.const_value.numpy()}, 6)
    assert plain.shape == (3, 2, 8)
    assert not np.allclose(plain, other)


def test_cut_names_what_onnx_runtime_dislikes() -> None:
    model = model_of(Loop())
    match = only_match(model)
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "NoSuchOp"
    with pytest.raises(CutError, match=r"ONNX Runtime does not load it: .*NoSuchOp"):
        Cut(model, match)


@pytest.mark.parametrize("top_k", [2, 8])
def test_float16_has_its_own_bound(top_k: int) -> None:
    loop = Loop(inter=8, width=2 * top_k, top_k=top_k)
    for name, array in loop.arrays.items():
        if array.dtype == np.float32:
            loop.arrays[name] = array.astype(np.float16)
    loop.arrays["half_zero"] = np.zeros((), np.float16)
    text = loop.text().replace("ConstantOfShape(", "Expand(half_zero, ")
    model = parse("(float16[B, S, 8] x) => (float16[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    match = only_match(model)
    result = probe(model, match)
    assert result.ok, result.reason
    assert 1e-5 < result.worst_relative_l2 < float16_bound(top_k) < 10 * 2.0**-11
    assert not probe(model, last_expert_doubled(match)).ok
    assert not probe(model, swapped(match)).ok
    for wrong in ({"routed_scaling_factor": 1.003}, {"norm_eps": 3e-3}, {"activation_alpha": 1.01}):
        assert not probe(model, with_spec(**wrong)(match)).ok, wrong


def bfloat16_model(loop: Loop) -> ir.Model:
    for name, array in loop.arrays.items():
        if array.dtype == np.float32:
            loop.arrays[name] = array.astype(ml_dtypes.bfloat16)
    loop.arrays["half_zero"] = np.zeros((), ml_dtypes.bfloat16)
    text = loop.text().replace("ConstantOfShape(", "Expand(half_zero, ")
    text = text.replace("probs = Softmax<axis=1>(logits)", "wide = Cast<to=1>(logits)\nprobs = Softmax<axis=1>(wide)")
    text = text.replace(
        "mixing = Div(values, total)", "wide_mixing = Div(values, total)\nmixing = Cast<to=16>(wide_mixing)"
    )
    tokens = f"bfloat16[B, S, {loop.hidden}]"
    return parse(f"({tokens} x) => ({tokens} y) {{\n{text}\n}}", loop.arrays)


@pytest.mark.parametrize(("weights", "hidden"), [("right", 8), ("gemm", 64), ("gather", 64)])
def test_bfloat16_runs_in_float32(weights: str, hidden: int) -> None:
    """ONNX Runtime has no bfloat16 TopK or MatMul on CPU; what the block computes can be shown all the same."""
    model = bfloat16_model(Loop(inter=8, hidden=hidden, weights=weights))
    match = only_match(model)
    result = probe(model, match)
    assert result.ok, result.reason
    assert result.worst_relative_l2 < 1e-5
    assert not probe(model, last_expert_doubled(match)).ok


def test_bfloat16_weights_are_not_widened_as_a_whole() -> None:
    loop = Loop(width=24, hidden=128, inter=1024)
    model = bfloat16_model(loop)
    match = only_match(model)
    sources = [source for sources in match.weights.values() for source in sources]
    for source in sources:
        source.value.const_value = ir.Tensor(source.stored.numpy())
    stored = sum(source.nbytes for source in sources)
    tracemalloc.start()
    result = probe(model, match)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.ok, result.reason
    assert peak < stored


def test_runs_are_small_where_they_copy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with stacked experts multiplies a copy of them for each token."""
    model = model_of(Loop(width=20, top_k=1, weights="gather", hidden=64, inter=96))
    match = only_match(model)
    whole = {name: (WeightSource(sources[0].value, transpose=True),) for name, sources in match.weights.items()}
    stacked = replace(match, weights=whole)
    monkeypatch.setattr(steering, "GATHER_BYTES", 5 * 3 * 64 * 96 * 4)
    inputs = steer(stacked, ir.DataType.FLOAT, np.random.default_rng(0))
    sizes = [batch.stop - batch.start for batch in inputs.batches]
    assert sizes[:3] == [1, 2, 3] and set(sizes[3:]) == {3} and sum(sizes[3:]) >= 33
    assert probe(model, stacked).ok
    down = whole["down_proj"][0].stored.numpy()
    wrong = ir.Value(name="wrong", const_value=ir.tensor(np.concatenate([down[:-1], down[:1]]), name="wrong"))
    claimed = {**whole, "down_proj": (WeightSource(wrong, transpose=True),)}
    assert not probe(model, replace(match, weights=claimed)).ok


def test_relative_l2() -> None:
    assert relative_l2(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.5 / math.hypot(3.0, 4.5))
    assert relative_l2(np.zeros(2), np.array([3.0, 4.0])) == math.inf
    assert relative_l2(np.ones(1), np.array([np.nan])) == math.inf


def test_a_stacked_tensor_is_indexed() -> None:
    """Experts picked from one tensor by constant ids, and that tensor given as a whole, are the same."""
    loop = Loop(weights="gather", hidden=64, inter=96)
    model = model_of(loop)
    match = only_match(model)
    sources = match.weights["gate_proj"]
    assert len({id(source.value) for source in sources}) == 1
    assert [source.index for source in sources] == list(range(4))
    assert probe(model, match).ok
    whole = WeightSource(sources[0].value, transpose=True)
    assert probe(model, replace(match, weights={**match.weights, "gate_proj": (whole,)})).ok
