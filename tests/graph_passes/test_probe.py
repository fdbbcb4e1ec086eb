"""The probe accepts what is right, and catches every kind of wrong reading."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import reference
from graph_passes.cut import Cut, CutError
from graph_passes.matchers import MoeMatch, WeightSource
from graph_passes.normalize import normalize
from graph_passes.probe import probe, relative_l2
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


def test_fixed_token_count_fails_on_other_counts() -> None:
    """A matcher may overlook it, the probe does not."""
    model = model_of(Loop())
    match = only_match(model)
    block = parse(
        "(float[B, S, 8] x) => (float[B, S, 8] y) {\n"
        + Loop().text().replace("y = Reshape(acc3, shape)", "fixed = Reshape(acc3, one)\ny = Reshape(fixed, shape)")
        + "\n}",
        {**Loop().arrays, "one": np.array([7, 8])},
    )
    normalize(block)
    values = {v.name: v for node in block.graph for v in node.outputs} | dict(block.graph.initializers)
    weights = {
        name: tuple(replace(source, value=values[source.value.name]) for source in sources)
        for name, sources in match.weights.items()
    }
    constants = {name: replace(s, value=values[s.value.name]) for name, s in match.constants.items()}
    fixed = replace(
        match, hidden_states=block.graph.inputs[0], output=values["y"], weights=weights, constants=constants
    )
    result = probe(block, fixed)
    assert not result.ok
    assert "the block fails on 1 tokens" in result.reason


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
    assert "depends on more" in result.reason


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


def test_float16_has_its_own_bound() -> None:
    loop = Loop(inter=8)
    for name, array in loop.arrays.items():
        if array.dtype == np.float32:
            loop.arrays[name] = array.astype(np.float16)
    loop.arrays["half_zero"] = np.zeros((), np.float16)
    text = loop.text().replace("ConstantOfShape(", "Expand(half_zero, ")
    model = parse("(float16[B, S, 8] x) => (float16[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    match = only_match(model)
    result = probe(model, match)
    assert result.ok, result.reason
    assert 1e-5 < result.worst_relative_l2 < 10 * 2.0**-11
    assert not probe(model, last_expert_doubled(match)).ok
    assert not probe(model, swapped(match)).ok


def test_bfloat16_runs_in_float32() -> None:
    """ONNX Runtime has no bfloat16 TopK or MatMul on CPU; what the block computes can be shown all the same."""
    loop = Loop(inter=8)
    for name, array in loop.arrays.items():
        if array.dtype == np.float32:
            loop.arrays[name] = array.astype(ml_dtypes.bfloat16)
    loop.arrays["half_zero"] = np.zeros((), ml_dtypes.bfloat16)
    text = loop.text().replace("ConstantOfShape(", "Expand(half_zero, ")
    text = text.replace("probs = Softmax<axis=1>(logits)", "wide = Cast<to=1>(logits)\nprobs = Softmax<axis=1>(wide)")
    text = text.replace(
        "mixing = Div(values, total)", "wide_mixing = Div(values, total)\nmixing = Cast<to=16>(wide_mixing)"
    )
    model = parse("(bfloat16[B, S, 8] x) => (bfloat16[B, S, 8] y) {\n" + text + "\n}", loop.arrays)
    match = only_match(model)
    result = probe(model, match)
    assert result.ok, result.reason
    assert result.worst_relative_l2 < 1e-5
    assert not probe(model, last_expert_doubled(match)).ok


def test_relative_l2() -> None:
    assert relative_l2(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(0.5 / math.hypot(3.0, 4.5))
    assert relative_l2(np.array([3.0, 4.0]), np.zeros(2)) == 5.0
    assert relative_l2(np.array([np.nan]), np.ones(1)) == math.inf


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
