"""Tiny random language models of transformers, one per architecture: whole models for the exporters that take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.blocks import EXPERTS, TOP_K, settings

VOCABULARY, LAYERS = 320, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": TOP_K,
    "num_local_experts": EXPERTS,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_ONE_DENSE = {"first_k_dense_replace": 1, "num_hidden_layers": LAYERS + 1}

MODELS: dict[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, **_ONE_DENSE},
    "deepseek_v3": {**_LATENT, **_ONE_DENSE},
    "dots1": _ONE_DENSE,
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_layer_end_index": LAYERS - 1},
    "flex_olmo": {},
    "glm4_moe": _ONE_DENSE,
    "gpt_oss": {"sliding_window": 64},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["attention"] * LAYERS, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {},
    "lfm2_moe": {
        "num_dense_layers": 1,
        "num_hidden_layers": LAYERS + 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
}
"""What each architecture needs beside the common sizes and the settings of its block; all have `LAYERS` MoE layers."""

_QWEN3_5 = {
    "text_config": {
        **settings("qwen3_5_moe"),
        **_COMMON,
        "layer_types": ["linear_attention", "full_attention"],
        # The builder takes the first projection onto VOCABULARY rows for the head, so that no other may have as many.
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 316,
    "video_token_id": 317,
    "vision_start_token_id": 318,
    "vision_end_token_id": 319,
}


def build_qwen3_5(seed: int = 0) -> Any:
    """Build a Qwen3.5-MoE with text and vision part, the form that the builder of onnxruntime-genai takes."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    return _random(Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**_QWEN3_5)), seed)


def build_llama4(seed: int = 0, **changes: Any) -> Any:
    """Build a Llama-4 with text and vision part; `changes` are settings of the text part."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    sides = ("hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim")
    vision = {**dict.fromkeys(sides, 32), "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    text = {**settings("llama4"), **_COMMON, **changes}
    config = Llama4Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    return _random(Llama4ForConditionalGeneration(config), seed)


def build(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """Build the model in evaluation mode; no two layers and no two experts are alike.

    `changes` are settings of the configuration that replace those of the tables here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = _QWEN3_5["text_config"] if architecture == "qwen3_5_moe_text" else MODELS.get(architecture, {})
    tables = {**settings(architecture.removesuffix("_text")), **_COMMON, **own}
    config = AutoConfig.for_model(architecture, **{**tables, **changes})
    torch.manual_seed(seed)
    return _random(AutoModelForCausalLM.from_config(config), seed)


def _random(model: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


def logits_of(model: Any) -> Any:
    """A torch module that takes input_ids and attention_mask and gives the logits, without a cache."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    return Logits().eval()


def export(architecture: str, path: Path, *, experts: str = "batched_mm", dynamo: bool = True) -> Any:
    """Export the model with torch.onnx, without a cache, into the file `path`; return the model.

    `experts` is how transformers 5 computes them; `dynamo` chooses between torch's two exporters.
    """
    import torch

    model = build(architecture)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(experts)
    inputs = {name: torch.from_numpy(array) for name, array in sample(2, 5).items()}
    axes: dict[str, Any] = {
        "dynamic_axes": {name: {0: "batch", 1: "sequence"} for name in (*inputs, "logits")},
        "opset_version": 18,
    }
    if dynamo:
        batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
        axes = {"dynamic_shapes": {name: {0: batch, 1: sequence} for name in inputs}}
    torch.onnx.export(
        logits_of(model),
        tuple(inputs.values()),
        path,
        dynamo=dynamo,
        input_names=list(inputs),
        output_names=["logits"],
        external_data=False,
        verbose=False,
        **axes,
    )
    return model


def sample(batch: int, length: int) -> dict[str, npt.NDArray[np.int64]]:
    """Random token ids `[batch, length]` and their attention mask."""
    ids = np.random.default_rng([batch, length]).integers(3, 300, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
