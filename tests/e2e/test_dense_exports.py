"""Blocks that exporters write densely, all experts for all tokens: gpt_oss of optimum-onnx, and llama4."""

from __future__ import annotations

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
from models import blocks
from tests.graphs import run_original

TOKENS = ((1, 1), (2, 1), (1, 7), (3, 11))


LLAMA4: dict[str, Any] = {
    "weight_inputs": ("gate_up_proj", "down_proj", "shared_gate_proj", "shared_up_proj", "shared_down_proj"),
    "shared_intermediate_size": blocks.INTERMEDIATE,
    "score_func": "sigmoid_topk",
    "router_input": "router_weight",
    "apply_weights_to": "input",
    "num_experts": blocks.EXPERTS,
}
GPT_OSS: dict[str, Any] = {
    "weight_inputs": ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    "gate_up_interleaved": True,
    "activation_alpha": pytest.approx(1.702, rel=1e-3),  # rounded in float16
    "activation_beta": 1.0,
    "activation_limit": 7.0,
    "score_func": "softmax_topk",
    "router_input": "router_weight",
    "num_experts": 8,
    "top_k": 2,
}


@pytest.mark.dynamo
@pytest.mark.parametrize(("top_k", "dtype"), [(1, "float32"), (2, "float32"), (1, "float16")])
def test_llama4_of_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, dtype: str) -> None:
    settings = {"num_local_experts": blocks.EXPERTS, "num_experts_per_tok": top_k}
    monkeypatch.setitem(blocks.BLOCKS, "llama4", blocks.Block("Llama4TextMoe", "Llama4TextConfig", settings))
    blocks.export("llama4", tmp_path / "block.onnx", dtype)
    compare_fused(tmp_path / "block.onnx", {**LLAMA4, "top_k": top_k}, dtype)


def compare_fused(path: Path, expected: dict[str, Any], dtype: str = "float32") -> None:
    """Fuse the one block of the model and run both on batches other than that of the trace."""
    model = ir.load(path)
    report = fuse_model(model)
    assert report.refused == [] and len(report.fused) == 1
    spec = report.fused[0].spec
    bound = 2.0 * float16_bound(spec.top_k) if dtype == "float16" else 1e-5
    assert {name: getattr(spec, name) for name in expected} == expected
    for batch, length in TOKENS:
        x = np.random.default_rng(length).standard_normal((batch, length, blocks.HIDDEN)).astype(dtype)
        (before,) = run_original(path, x)
        (after,) = run_original(model, x, options=hina_ort.session_options())
        assert relative_l2(before, after) <= bound, f"{batch} x {length} tokens"


GPT_OSS_CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "sliding_window": 64,
}


def export_gpt_oss(folder: Path, dtype: str | None) -> Path:
    """A tiny random gpt_oss with biases that matter, exported by optimum-onnx."""
    import torch
    from optimum.exporters.onnx import main_export
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**GPT_OSS_CONFIG)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.25)
    model.to(torch.float16 if dtype == "fp16" else torch.float32).save_pretrained(folder / "checkpoint")
    task = "text-generation-with-past"
    main_export(str(folder / "checkpoint"), str(folder / "onnx"), task=task, dtype=dtype, do_validation=False)
    return folder / "onnx" / "model.onnx"


def decoder_inputs(session: ort.InferenceSession, batch: int, length: int, past: int) -> dict[str, np.ndarray]:
    """A step of `length` new ids for each sequence behind `past` cached tokens."""
    rng = np.random.default_rng([batch, length, past])
    feeds: dict[str, np.ndarray] = {}
    for item in session.get_inputs():
        if item.name == "input_ids":
            feeds[item.name] = rng.integers(0, 300, (batch, length))
        elif item.name == "attention_mask":
            feeds[item.name] = np.ones((batch, past + length), np.int64)
        elif item.name == "position_ids":
            feeds[item.name] = np.tile(np.arange(past, past + length), (batch, 1))
        else:
            shape = (batch, GPT_OSS_CONFIG["num_key_value_heads"], past, GPT_OSS_CONFIG["head_dim"])
            dtype = np.float16 if item.type == "tensor(float16)" else np.float32
            feeds[item.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


@pytest.mark.optimum
@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_gpt_oss_of_optimum(tmp_path: Path, dtype: str | None) -> None:
    source = export_gpt_oss(tmp_path, dtype)
    model = external_data.load(source)
    report = fuse_model(model)
    assert report.refused == []
    assert [block.name for block in report.fused] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    bound = float16_bound(2) if dtype else 1e-5
    for found in report.fused:
        assert found.family == "dense_experts" and found.worst_relative_l2 <= bound
        assert {name: getattr(found.spec, name) for name in GPT_OSS} == GPT_OSS
    assert not any(node.op_type in ("TopK", "ScatterElements", "Tile") for node in model.graph)
    external_data.save(model, tmp_path / "fused.onnx")
    original = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    fused = ort.InferenceSession(tmp_path / "fused.onnx", hina_ort.session_options(), ["CPUExecutionProvider"])
    names = [output.name for output in original.get_outputs()]
    for batch, length in TOKENS:
        for past in (0, 5):
            feeds = decoder_inputs(original, batch, length, past)
            for name, before, after in zip(names, original.run(names, feeds), fused.run(names, feeds), strict=True):
                assert relative_l2(before, after) <= (2.0 * bound if dtype else bound), f"{name}, {batch} x {length}"
