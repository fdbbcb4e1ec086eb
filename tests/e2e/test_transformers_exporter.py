"""Models and blocks exported by transformers' OnnxExporter, whose default experts are grouped_mm: fused, and right."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import hina_ort
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.pipeline import fuse_model
from models import blocks, language_models
from models.blocks import BLOCKS, HIDDEN, SHARED_SIZES, expected_spec
from models.language_models import LAYERS, sample
from tests.graphs import compare, copy_of, find, only_match, run_original

pytestmark = pytest.mark.dynamo

MODELS = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

TOKENS = ((1, 1), (2, 1), (1, 7), (3, 11))
"""Sequences and their lengths: 1, 2, 7 and 33 tokens."""


def exported(module: Any, sample: dict[str, Any], **settings: Any) -> ir.Model:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model, _ = OnnxExporter().export_program(module, sample, OnnxConfig(**{"dynamic": True, **settings}))
    return model


@functools.cache
def exported_model(architecture: str, experts: str = "grouped_mm") -> ir.Model:
    import torch

    model = language_models.build(architecture)
    model.set_experts_implementation(experts)
    inputs = {name: torch.from_numpy(array) for name, array in sample(2, 5).items()}
    return exported(model, {**inputs, "use_cache": False})


def block_export(architecture: str, dtype: str = "float32", **settings: Any) -> ir.Model:
    import torch

    block = blocks.build(architecture, experts="grouped_mm").to(getattr(torch, dtype))
    return exported(block, {"hidden_states": torch.randn(2, 3, HIDDEN, dtype=getattr(torch, dtype))}, **settings)


exported_block = functools.cache(block_export)


def run(model: ir.Model, feeds: dict[str, np.ndarray], options: ort.SessionOptions | None = None) -> list[np.ndarray]:
    names = {value.name for value in model.graph.inputs}
    return run_original(model, {name: array for name, array in feeds.items() if name in names}, options=options)


def slow_but(quick: set[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test that takes some seconds for each: all but the `quick` ones are left to `make test-all`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("architecture", slow_but({"qwen3_moe"}, MODELS))
def test_every_moe_layer_of_a_model_is_fused(architecture: str) -> None:
    source = exported_model(architecture)
    model = copy_of(source)
    report = fuse_model(model)
    assert report.refused == []
    assert [block.family for block in report.fused] == ["grouped_mm"] * LAYERS
    assert len({block.name for block in report.fused}) == len(report.fused)
    for block in report.fused:
        assert block.worst_relative_l2 <= 1e-5
        assert (block.spec.has_shared_expert, block.note) == (architecture in SHARED_SIZES, "")
    left = {node.op_type for node in model.graph}
    assert "HinaMoE" in left and not left & {"TopK", "CumSum", "ScatterElements"}
    for batch, length in TOKENS:
        feeds = sample(batch, length)
        (before,), (after,) = run(source, feeds), run(model, feeds, hina_ort.session_options())
        assert relative_l2(before, after) <= 1e-5, f"{batch} x {length} tokens"


@pytest.mark.parametrize("architecture", slow_but({"deepseek_v3", "gpt_oss", "phimoe", "qwen3_moe"}, sorted(BLOCKS)))
def test_a_block_of_every_architecture_is_fused(architecture: str) -> None:
    source = exported_block(architecture)
    match = only_match(copy_of(source))
    assert match.family == "grouped_mm"
    assert match.spec == expected_spec(architecture)
    assert set(match.constants) == set(BLOCKS[architecture].constants)
    model = copy_of(source)
    report = fuse_model(model)
    assert report.refused == []
    assert [(block.spec, block.note) for block in report.fused] == [(expected_spec(architecture, shared=True), "")]
    assert [node.op_type for node in model.graph] == ["HinaMoE"]
    for batch, length in TOKENS:
        rng = np.random.default_rng([batch, length])
        feeds = {"hidden_states": rng.standard_normal((batch, length, HIDDEN)).astype(np.float32)}
        (before,), (after,) = run(source, feeds), run(model, feeds, hina_ort.session_options())
        assert relative_l2(before, after) <= 1e-5, f"{batch} x {length} tokens"


@pytest.mark.parametrize("architecture", slow_but({"gpt_oss"}, ["deepseek_v3", "gpt_oss", "qwen3_moe"]))
def test_float16_blocks_are_matched(architecture: str) -> None:
    model = copy_of(exported_block(architecture, "float16"))
    match = only_match(model)
    assert match.hidden_states.dtype == match.output.dtype == ir.DataType.FLOAT16
    x = np.random.default_rng(33).standard_normal((3, 11, HIDDEN)).astype(np.float16)
    assert compare(model, match, x) <= float16_bound(match.spec.top_k)


@pytest.mark.parametrize(
    ("settings", "reason"), [({"dynamic": False}, "traced with"), ({"optimize": False}, "optimize=True")]
)
def test_an_export_with_other_settings_is_refused_with_its_cause(settings: dict[str, bool], reason: str) -> None:
    model = block_export("qwen3_moe", **settings)
    report = fuse_model(model)
    assert not report.applied
    (miss,) = report.refused
    assert reason in miss.reason


@pytest.mark.slow
def test_batched_mm_of_the_same_exporter_is_fused() -> None:
    """The experts that the exporter's own fusion for CUDA asks for."""
    report = fuse_model(copy_of(exported_model("qwen3_moe", "batched_mm")))
    assert report.refused == []
    assert [block.family for block in report.fused] == ["batched_mm"] * 2


SWAPS = {
    "experts": ("Concat", "do not start where those before it end"),
    "weights": ("Split", "are multiplied by the weights of expert"),
}


@pytest.mark.parametrize("what", SWAPS)
def test_two_experts_swapped_in_an_export_are_a_miss(what: str) -> None:
    model = copy_of(exported_block("qwen3_moe"))
    op_type, reason = SWAPS[what]
    if what == "experts":
        node = max((n for n in model.graph if n.op_type == op_type), key=lambda n: len(n.inputs))
        first, second = node.inputs[2], node.inputs[5]
        node.replace_input_with(2, second)
        node.replace_input_with(5, first)
    else:
        node = next(n for n in model.graph if n.op_type == op_type and n.inputs[0].is_initializer())
        first, second = node.outputs[2], node.outputs[5]
        users = [(first, list(first.uses()), second), (second, list(second.uses()), first)]
        for _, uses, other in users:
            for user, index in uses:
                user.replace_input_with(index, other)
    assert any(reason in miss.reason for miss in find(model) if not hasattr(miss, "spec"))


@pytest.mark.slow
def test_both_parts_of_a_generation_export_are_fused() -> None:
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    inputs = {name: torch.from_numpy(array) for name, array in sample(2, 5).items()}
    parts = OnnxExporter().export_for_generation(language_models.build("qwen3_moe"), inputs, OnnxConfig(dynamic=True))
    for name, part in parts.components.items():
        report = fuse_model(part.program)
        assert report.refused == [], name
        assert len(report.fused) == 2, name
