"""Models exported by optimum-onnx: fused, or refused for what they lack."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import hina_ort
from graph_passes import external_data
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.pipeline import fuse_model
from models.qwen3_moe import build as qwen3_moe

pytestmark = pytest.mark.optimum

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
TOKENS = ((1, 1), (2, 1), (1, 7), (3, 11))
"""Sequences and their lengths: 1, 2, 7 and 33 tokens."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def inputs(session: ort.InferenceSession, batch: int, length: int, past: int) -> dict[str, np.ndarray]:
    """Inputs of a step: `length` new ids for each sequence, and keys and values of `past` tokens before them."""
    rng = np.random.default_rng([batch, length, past])
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, 300, (batch, length)),
        "attention_mask": np.ones((batch, past + length), np.int64),
        "position_ids": np.tile(np.arange(past, past + length), (batch, 1)),
    }
    for item in session.get_inputs():
        if item.name.startswith("past_key_values"):
            dtype = np.float16 if item.type == "tensor(float16)" else np.float32
            shape = (batch, TINY["num_key_value_heads"], past, TINY["head_dim"])
            feeds[item.name] = rng.standard_normal(shape).astype(dtype)
    return {item.name: feeds[item.name] for item in session.get_inputs()}


def export(folder: Path, *, dtype: str | None = None, **overrides: Any) -> Path:
    checkpoint = qwen3_moe.build(
        folder / "checkpoint", dtype="float16" if dtype == "fp16" else "float32", **{**TINY, **overrides}
    )
    return qwen3_moe.export(checkpoint, folder / "onnx", dtype=dtype)


@pytest.mark.parametrize(("experts", "top_k", "dtype"), [(8, 2, None), (8, 2, "fp16"), (64, 8, None), (128, 8, None)])
def test_qwen3_moe_is_fused(tmp_path: Path, experts: int, top_k: int, dtype: str | None) -> None:
    source = export(tmp_path, dtype=dtype, num_experts=experts, num_experts_per_tok=top_k)
    model = external_data.load(source)
    report = fuse_model(model)
    assert report.refused == []
    assert len(report.fused) == TINY["num_hidden_layers"]
    bound = float16_bound(top_k) if dtype else 1e-5
    for block in report.fused:
        assert block.worst_relative_l2 <= bound
        assert (block.spec.num_experts, block.spec.top_k, block.spec.norm_topk_prob) == (experts, top_k, True)
    nodes = [node for node in model.graph if node.op_type == "HinaMoE"]
    assert len(nodes) == TINY["num_hidden_layers"]
    assert not any(node.op_type in ("NonZero", "OneHot", "TopK", "ScatterElements") for node in model.graph)
    assert report.nodes_after == sum(1 for _ in model.graph)
    # Each block of either model is within the bound of the exact result, independently of the others.
    tolerance = math.sqrt(2 * len(nodes)) * bound if dtype else bound
    compare_outputs(source, model, tmp_path / "fused.onnx", tolerance)


def compare_outputs(source: Path, model: ir.Model, target: Path, tolerance: float) -> None:
    """Run the exported model and the fused one, the op natively, on 1, 2, 7 and 33 tokens with and without a cache."""
    external_data.save(model, target)
    original = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    fused = ort.InferenceSession(target, hina_ort.session_options(), providers=["CPUExecutionProvider"])
    names = [output.name for output in original.get_outputs()]
    for batch, length in TOKENS:
        for past in (0, 5):
            feeds = inputs(original, batch, length, past)
            for name, expected, got in zip(names, original.run(names, feeds), fused.run(names, feeds), strict=True):
                difference = relative_l2(expected, got)
                assert difference <= tolerance, f"{name} of {batch} x {length} tokens after {past}: {difference:.2g}"


def test_dense_and_moe_layers(tmp_path: Path) -> None:
    model = external_data.load(export(tmp_path, mlp_only_layers=[0]))
    report = fuse_model(model)
    assert [block.name for block in report.fused] == ["model.layers.1.mlp"]
    assert report.refused == []


def test_default_model_matches_its_spec_file(tmp_path: Path) -> None:
    source = qwen3_moe.export(qwen3_moe.build(tmp_path / "checkpoint"), tmp_path / "onnx")
    report = fuse_model(external_data.load(source))
    expected = json.loads((Path(qwen3_moe.__file__).parent / "spec.json").read_text())
    assert [block.spec.to_dict() for block in report.fused] == [expected] * qwen3_moe.CONFIG["num_hidden_layers"]
    assert (source.parent / "tokenizer.json").is_file()


def test_deepseek_v3_without_all_experts_is_refused(tmp_path: Path) -> None:
    """optimum traces this loop with a short dummy input, and the experts which that does not reach are gone."""
    import torch
    from optimum.exporters.onnx import main_export
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = 64
    config = DeepseekV3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=experts,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).eval().save_pretrained(tmp_path / "checkpoint")
    main_export(str(tmp_path / "checkpoint"), str(tmp_path / "onnx"), task="text-generation", do_validation=False)
    model = external_data.load(tmp_path / "onnx" / "model.onnx")
    names = [node.name or "" for node in model.graph]
    exported = {e for e in range(experts) if any(f"/experts.{e}/" in name for name in names)}
    missing = sorted(set(range(experts)) - exported)
    assert missing, "this export holds every expert, so it shows nothing"
    before = [node.name for node in model.graph]
    report = fuse_model(model)
    assert not report.applied
    assert len(report.refused) == 1
    assert f"router width {experts} but experts {', '.join(map(str, missing))} are missing" in report.refused[0].reason
    assert [node.name for node in model.graph] == before


def torchscript_block(path: Path, module: str, block: str, config: str, tokens: int, **settings: Any) -> Path:
    """One MoE block, exported by torch's TorchScript exporter from a trace of `tokens` tokens."""
    import importlib

    import torch
    import transformers

    class Plain(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.inner(x)
            return result[0] if isinstance(result, tuple) else result

    torch.manual_seed(0)
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts_per_tok": 2}
    inner = getattr(source, block)(getattr(transformers, config)(**sizes, **settings)).eval()
    for parameter in inner.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    axes = {"x": {0: "batch", 1: "sequence"}, "y": {0: "batch", 1: "sequence"}}
    torch.onnx.export(
        Plain(inner), (torch.randn(1, tokens, 64),), path, dynamo=False, opset_version=18,
        input_names=["x"], output_names=["y"], dynamic_axes=axes,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("module", "block", "config", "settings"),
    [
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", {"num_experts": 8}),
        ("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig", {"num_local_experts": 8}),
        ("jamba", "JambaSparseMoeBlock", "JambaConfig", {"num_experts": 8}),
    ],
)
def test_complete_torchscript_blocks(
    tmp_path: Path, module: str, block: str, config: str, settings: dict[str, Any]
) -> None:
    """A trace of many tokens reaches every expert; then the export is complete and right."""
    path = torchscript_block(tmp_path / "block.onnx", module, block, config, 128, **settings)
    report = fuse_model(external_data.load(path))
    assert report.refused == []
    assert len(report.fused) == 1
    assert report.fused[0].worst_relative_l2 <= 1e-5


def test_torchscript_block_with_fixed_weights_is_refused(tmp_path: Path) -> None:
    """The loop over the experts that were hit: ids are computed, weights are those of the trace."""
    settings = {"num_local_experts": 8}
    path = torchscript_block(tmp_path / "b.onnx", "mixtral", "MixtralSparseMoeBlock", "MixtralConfig", 3, **settings)
    report = fuse_model(external_data.load(path))
    assert not report.applied
    assert "expert id is computed" in report.refused[0].reason
