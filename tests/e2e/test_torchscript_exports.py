"""TorchScript exports of blocks: right ones are fused, wrong ones are refused with their cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.op_schema import DOMAIN, OP_TYPE
from graph_passes.pipeline import FusionReport, fuse_model
from models import blocks
from tests.exports import dynamo_block, torchscript_block
from tests.graphs import copy_of, run_original

TOKENS = ((1, 1), (2, 1), (1, 7), (3, 11))
"""Sequences and their lengths, none of them those of a trace."""


def some_slow(quick: list[str], slow: list[str]) -> list[Any]:
    """Parameters, of which the second list is left to the slow tests."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng([batch, length]).standard_normal((batch, length, blocks.HIDDEN)).astype(np.float32)


def fused_and_equal(model: ir.Model) -> FusionReport:
    """Fuse the one block of the model; it must compute what it computed before."""
    fused = copy_of(model)
    report = fuse_model(fused)
    assert report.refused == []
    assert len(report.fused) == 1
    assert [n.op_type for n in fused.graph if n.domain == DOMAIN] == [OP_TYPE]
    for shape in TOKENS:
        (before,) = run_original(model, tokens(*shape))
        (after,) = run_original(fused, tokens(*shape), options=hina_ort.session_options())
        assert relative_l2(before, after) <= 1e-5, shape
    return report


def reason_of_refusal(model: ir.Model) -> str:
    """Why the one block of the model is refused; the model must be left as it was."""
    before = [(node.op_type, node.outputs[0].name) for node in model.graph]
    report = fuse_model(model)
    assert not report.applied and report.found == []
    assert [(node.op_type, node.outputs[0].name) for node in model.graph] == before
    (miss,) = report.refused
    return miss.reason


@pytest.mark.dynamo
@pytest.mark.parametrize("architecture", sorted(blocks.BLOCKS))
def test_batched_mm_of_transformers_5(architecture: str) -> None:
    (found,) = fused_and_equal(ir.load(torchscript_block(architecture))).fused
    assert (found.name, found.family) == ("block", "batched_mm")
    expected = blocks.expected_spec(architecture, shared=True)
    # dynamo drops an epsilon of 1e-20, which no float32 sum shows
    assert replace(found.spec, norm_eps=0.0 if found.spec.norm_eps == 1e-20 else found.spec.norm_eps) == expected


@pytest.mark.dynamo
def test_dense_block_of_llama4() -> None:
    (found,) = fused_and_equal(ir.load(torchscript_block("llama4"))).fused
    assert found.family == "dense_experts"
    assert (found.spec.score_func, found.spec.apply_weights_to) == ("sigmoid_topk", "input")


@pytest.mark.dynamo
def test_an_unknown_router_is_left_in_the_graph() -> None:
    """inkling mixes the routed experts with the shared one by a softmax of log-sigmoids."""
    (found,) = fused_and_equal(ir.load(torchscript_block("inkling"))).fused
    assert (found.family, found.spec.router_input) == ("batched_mm", "topk_ids")


Change = Callable[[ir.Model], None]


def node_at(model: ir.Model, op_type: str, number: int) -> ir.Node:
    return [node for node in model.graph if node.op_type == op_type][number]


def with_input(op_type: str, number: int, index: int, array: np.ndarray) -> Change:
    """Let an input of the `number`th node of a type be a constant."""

    def change(model: ir.Model) -> None:
        value = ir.Value(name="mutant", const_value=ir.Tensor(array, name="mutant"))
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        model.graph.register_initializer(value)
        node_at(model, op_type, number).replace_input_with(index, value)

    return change


def baked_tokens(model: ir.Model) -> None:
    """As if the number of tokens that the experts' outputs are reshaped to were that of the trace."""
    with_input("Reshape", -2, 1, np.array([6, blocks.TOP_K, blocks.HIDDEN]))(model)


def tokens_in_turn(model: ir.Model) -> None:
    """Lay the tokens behind each other k times, instead of each k times in a row."""
    tile = node_at(model, "Tile", 0)
    (inner,) = (v for v in (tile.inputs[0],) if v is not None)
    producer = inner.producer()
    assert producer is not None and producer.op_type == "Unsqueeze"
    tile.replace_input_with(0, producer.inputs[0])
    with_input("Tile", 0, 1, np.array([blocks.TOP_K, 1]))(model)


def other_experts_for_down(model: ir.Model) -> None:
    """Gather the down projections by ids that are not those of the gate and up projections."""
    first, second = [n for n in model.graph if n.op_type == "Gather" and len(n.inputs[0].shape or ()) == 3][:2]
    ids = first.inputs[1]
    assert ids is not None
    turned = ir.Node("", "Neg", [ids], name="turned")
    assert second.graph is not None
    second.graph.insert_before(second, turned)
    second.replace_input_with(1, turned.outputs[0])


def softmax_over_tokens(model: ir.Model) -> None:
    node_at(model, "Softmax", 0).attributes["axis"] = ir.AttrInt64("axis", 0)


MUTATIONS: dict[str, Change] = {
    "a baked number of tokens": baked_tokens,
    "tokens in turn": tokens_in_turn,
    "down projections of other experts": other_experts_for_down,
    "the same half twice": with_input("Slice", -1, 1, np.array([0])),
    "the smallest scores": lambda model: node_at(model, "TopK", 0).attributes.update(
        {"largest": ir.AttrInt64("largest", 0)}
    ),
    "a sum over the tokens": with_input("ReduceSum", -1, 1, np.array([0])),
}


@pytest.mark.dynamo
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_export_is_refused_or_computes_the_same(name: str) -> None:
    model = ir.load(torchscript_block("qwen3_moe"))
    MUTATIONS[name](model)
    changed = copy_of(model)
    report = fuse_model(changed)
    if not report.applied:
        assert report.refused and all(miss.reason for miss in report.refused)
        return
    for shape in TOKENS:
        (before,) = run_original(model, tokens(*shape))
        (after,) = run_original(changed, tokens(*shape), options=hina_ort.session_options())
        assert relative_l2(before, after) <= 1e-5, shape


@pytest.mark.dynamo
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3_moe", "the number of experts that the traced input reached, {}, is fixed in this graph"),
        ("gpt_oss", "the number of experts that the traced input reached, {}, is fixed in this graph"),
        ("nllb_moe", "the weights are fixed: this export holds only the {} experts that the traced input reached"),
        ("switch_transformers", "each expert takes a limited number of tokens"),
        ("jetmoe", "ScatterElements without reduction overwrites the outputs of a token's experts"),
    ],
)
def test_loops_of_transformers_5_are_refused(architecture: str, reason: str) -> None:
    said = reason_of_refusal(ir.load(torchscript_block(architecture, experts="eager")))
    first, _, rest = reason.partition("{}")
    assert first in said and rest in said


RIGHT_LOOPS = some_slow(["deepseek_v2", "deepseek_v3", "olmoe", "phimoe"], ["dots1", "flex_olmo", "glm4_moe", "jamba"])
"""Architectures of transformers 4 whose loop over experts is exported in full when every expert is reached."""


@pytest.mark.optimum
@pytest.mark.parametrize("architecture", RIGHT_LOOPS)
def test_loops_of_transformers_4_that_reach_all_experts(architecture: str) -> None:
    (found,) = fused_and_equal(ir.load(torchscript_block(architecture, tokens=(4, 64)))).fused
    assert found.family == ("sliced_rows" if architecture == "deepseek_v2" else "unrolled_loop")
    assert (found.spec.num_experts, found.spec.top_k) == (blocks.EXPERTS, blocks.TOP_K)
    if architecture == "deepseek_v3":
        assert found.spec.group_mask_value == 0.0  # -inf in transformers 5


@pytest.mark.optimum
@pytest.mark.parametrize(
    "architecture", some_slow(["deepseek_v2", "deepseek_v3", "phimoe"], ["dots1", "glm4_moe", "jamba"])
)
def test_loops_of_transformers_4_that_drop_experts(architecture: str) -> None:
    reason = reason_of_refusal(ir.load(torchscript_block(architecture, tokens=(1, 2))))
    assert f"router width {blocks.EXPERTS} but experts " in reason
    assert " are missing: this export dropped experts" in reason


@pytest.mark.optimum
@pytest.mark.parametrize(
    "architecture", some_slow(["mixtral"], ["ernie4_5_moe", "hunyuan_v1_moe", "minimax", "qwen2_moe", "qwen3_moe"])
)
def test_loops_of_transformers_4_over_computed_experts(architecture: str) -> None:
    for shape in ((1, 1), (4, 32)):  # with all experts reached, the count of them is fixed still
        reason = reason_of_refusal(ir.load(torchscript_block(architecture, tokens=shape)))
        assert "the expert id is computed while the graph runs, but the weights are fixed" in reason
        assert "batched_mm" in reason


@pytest.mark.optimum
@pytest.mark.parametrize("architecture", ["llama4", "qwen3_vl_moe"])
def test_dense_blocks_of_transformers_4(architecture: str) -> None:
    (found,) = fused_and_equal(ir.load(torchscript_block(architecture))).fused
    assert found.family == "dense_experts"


@pytest.mark.optimum
@pytest.mark.parametrize(("p", "fields"), [(1, (True, 1.0)), (2, (True, 2.0)), (3, (True, 3.0)), (None, (False, 1.0))])
def test_the_norm_of_dbrx(p: int | None, fields: tuple[bool, float], monkeypatch: pytest.MonkeyPatch) -> None:
    row = blocks.row("dbrx")
    config = {**row.settings["ffn_config"], "moe_normalize_expert_weights": p}
    config.pop("hidden_size", None)
    monkeypatch.setitem(blocks.OTHERS, "dbrx", replace(row, settings={**row.settings, "ffn_config": config}))
    path = torchscript_block.__wrapped__("dbrx", tokens=(4, 64))
    (found,) = fused_and_equal(ir.load(path)).fused
    assert (found.spec.norm_topk_prob, found.spec.norm_p) == fields


@pytest.mark.optimum
@pytest.mark.parametrize("architecture", some_slow(["granitemoe"], ["granitemoehybrid", "jetmoe"]))
def test_fixed_splits_and_a_scatter_that_does_not_add(architecture: str) -> None:
    reason = reason_of_refusal(ir.load(torchscript_block(architecture, tokens=(4, 32))))
    assert "Split gives the experts fixed numbers of rows" in reason
    assert "ScatterElements without reduction overwrites the outputs of a token's experts" in reason


@pytest.mark.dynamo
def test_dynamo_exports_of_jetmoe() -> None:
    """transformers 5 computes its experts as transformers 4 does those of granitemoe."""
    (found,) = fused_and_equal(ir.load(dynamo_block("jetmoe"))).fused
    assert (found.name, found.family) == ("block", "split_rows")


@pytest.mark.optimum
@pytest.mark.parametrize(
    ("architecture", "family"),
    [("olmoe", "unrolled_loop"), ("granitemoe", "split_rows"), ("jetmoe", "split_rows"), ("llama4", "dense_experts")],
)
def test_dynamo_exports_of_transformers_4(architecture: str, family: str, tmp_path: Path) -> None:
    blocks.export(architecture, tmp_path / "block.onnx", experts="eager")
    (found,) = fused_and_equal(ir.load(tmp_path / "block.onnx")).fused
    assert (found.name, found.family) == ("block", family)
