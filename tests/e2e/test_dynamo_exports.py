"""Blocks of transformers 5 exported by torch.onnx (dynamo, batched_mm): each is matched, and the match is right."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.op_schema import DOMAIN, OP_TYPE
from graph_passes.pipeline import fuse_model
from models.blocks import BLOCKS, HIDDEN, expected_spec
from tests.exports import dynamo_block
from tests.graphs import compare, find, only_match, run_original

pytestmark = pytest.mark.dynamo

every_architecture = pytest.mark.parametrize("architecture", sorted(BLOCKS))
TOKEN_COUNTS = {1: (1, 1), 2: (2, 1), 7: (1, 7), 33: (3, 11)}


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((*TOKEN_COUNTS[count], HIDDEN)).astype(np.float32)


@every_architecture
def test_the_spec_is_that_of_the_architecture(architecture: str) -> None:
    match = only_match(ir.load(dynamo_block(architecture)))
    assert match.spec == expected_spec(architecture)
    assert set(match.constants) == set(BLOCKS[architecture].constants)
    assert match.family == "batched_mm"
    assert match.inputs == {}


@every_architecture
def test_the_match_computes_what_the_export_computes(architecture: str) -> None:
    model = ir.load(dynamo_block(architecture))
    match = only_match(model)
    for count in TOKEN_COUNTS:
        assert compare(model, match, tokens(count)) <= 1e-5, f"{count} tokens"


@every_architecture
def test_normalising_changes_no_result(architecture: str) -> None:
    path = dynamo_block(architecture)
    model = ir.load(path)
    find(model)
    for count in TOKEN_COUNTS:
        (before,), (after,) = run_original(path, tokens(count)), run_original(model, tokens(count))
        assert relative_l2(before, after) <= 1e-7


@every_architecture
def test_the_fused_model_computes_what_the_export_computes(architecture: str) -> None:
    path = dynamo_block(architecture)
    model = ir.load(path)
    report = fuse_model(model)
    assert report.refused == []
    assert [(block.spec, block.note) for block in report.fused] == [(expected_spec(architecture, shared=True), "")]
    assert [(node.domain, node.op_type) for node in model.graph] == [(DOMAIN, OP_TYPE)]
    for count in TOKEN_COUNTS:
        (before,) = run_original(path, tokens(count))
        (after,) = run_original(model, tokens(count), options=hina_ort.session_options())
        assert relative_l2(before, after) <= 1e-5, f"{count} tokens"


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gpt_oss", "phimoe", "qwen3_moe"])
def test_float16_blocks_are_matched(architecture: str) -> None:
    model = ir.load(dynamo_block(architecture, "float16"))
    match = only_match(model)
    assert match.hidden_states.dtype == match.output.dtype == ir.DataType.FLOAT16
    assert compare(model, match, tokens(33).astype(np.float16)) <= float16_bound(match.spec.top_k)


def test_weights_are_read_where_they_lie_unless_they_are_stored_transposed() -> None:
    for architecture, in_place in {"qwen3_moe": True, "gpt_oss": False, "aria": False}.items():
        match = only_match(ir.load(dynamo_block(architecture)))
        for name in ("gate_up_proj", "down_proj"):
            (source,) = match.weights[name]
            assert source.in_place is in_place, architecture
