"""One MoE block per architecture of transformers 5, tiny and random: the inputs of the fusion tests.

`BLOCKS` is the table: which class, which settings, and the MoeSpec fields by which the block differs from the
common sizes (hidden 64, intermediate 32, 8 experts, 2 per token, softmax router, stacked gate_up_proj). The spec
columns are written down from the modelling code of each architecture, not read off an export.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graph_passes.moe_spec import MoeSpec

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 32, 8, 2

_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
}
_SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True}
_GROUPED = {**_SHARED, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_UNGROUPED = {**_SHARED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
_GROUPED_SPEC = {
    "score_func": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "group_score_func": "top2_sum",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_UNGROUPED_SPEC = {"score_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.5}
_GPT_OSS_WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class Block:
    """One architecture: block class, config class, settings, and the spec fields and router constants to expect."""

    block: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[str, ...] = ("router_weight",)


_BIASED = ("router_weight", "e_score_correction_bias")

BLOCKS: dict[str, Block] = {
    "aria": Block(
        "AriaTextMoELayer",
        "AriaTextConfig",
        {"moe_num_experts": EXPERTS, "moe_topk": TOP_K, "moe_num_shared_experts": 1},
        {"score_func": "softmax_topk"},
    ),
    "bailing_hybrid": Block("BailingHybridMoE", "BailingHybridConfig", _GROUPED, _GROUPED_SPEC, _BIASED),
    "cohere2_moe": Block(
        "Cohere2MoeSparseMoeBlock",
        "Cohere2MoeConfig",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "num_shared_experts": 0},
        {"score_func": "sigmoid_topk", "norm_topk_prob": True},
    ),
    "deepseek_v2": Block(
        "DeepseekV2Moe",
        "DeepseekV2Config",
        {**_GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        {
            "n_group": 4,
            "topk_group": 2,
            "group_mask_value": 0.0,
            "mixing_source": "selection",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": Block("DeepseekV3MoE", "DeepseekV3Config", _GROUPED, _GROUPED_SPEC, _BIASED),
    "dots1": Block(
        "Dots1MoE",
        "Dots1Config",
        _UNGROUPED,
        _UNGROUPED_SPEC,
        _BIASED,
    ),
    "ernie4_5_moe": Block(
        "Ernie4_5_MoeSparseMoeBlock",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_num_shared_experts": 2},
        {"norm_topk_prob": True, "norm_floor": 1e-12},
        _BIASED,
    ),
    "flex_olmo": Block("FlexOlmoSparseMoeBlock", "FlexOlmoConfig", {"norm_topk_prob": False}),
    "glm4_moe": Block(
        "Glm4MoeMoE",
        "Glm4MoeConfig",
        _UNGROUPED,
        _UNGROUPED_SPEC,
        _BIASED,
    ),
    "gpt_oss": Block(
        "GptOssMLP",
        "GptOssConfig",
        {},
        {
            "score_func": "softmax_topk",
            "weight_inputs": _GPT_OSS_WEIGHTS,
            "gate_up_interleaved": True,
            "activation_alpha": 1.702,
            "activation_beta": 1.0,
            "activation_limit": 7.0,
        },
        ("router_weight", "router_bias"),
    ),
    "granitemoe": Block("GraniteMoeMoE", "GraniteMoeConfig", {}, {"score_func": "softmax_topk"}),
    "granitemoehybrid": Block("GraniteMoeHybridMoE", "GraniteMoeHybridConfig", {}, {"score_func": "softmax_topk"}),
    "hunyuan_v1_moe": Block("HunYuanMoEV1Moe", "HunYuanMoEV1Config", {"moe_topk": TOP_K}, {"norm_topk_prob": True}),
    "jamba": Block("JambaSparseMoeBlock", "JambaConfig"),
    "lfm2_moe": Block(
        "Lfm2MoeSparseMoeBlock",
        "Lfm2MoeConfig",
        {"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.25},
        {"score_func": "sigmoid", "norm_topk_prob": True, "norm_eps": 1e-6, "routed_scaling_factor": 1.25},
        _BIASED,
    ),
    "minimax": Block("MiniMaxSparseMoeBlock", "MiniMaxConfig", {}, {"norm_topk_prob": True}),
    "minimax_m2": Block(
        "MiniMaxM2SparseMoeBlock",
        "MiniMaxM2Config",
        {},
        {"score_func": "sigmoid", "norm_topk_prob": True},
        _BIASED,
    ),
    "mixtral": Block("MixtralSparseMoeBlock", "MixtralConfig", {}, {"norm_topk_prob": True}),
    "nemotron_h": Block(
        "NemotronHMoE",
        "NemotronHConfig",
        {**_GROUPED, "moe_shared_expert_intermediate_size": 48},
        {**_GROUPED_SPEC, "weight_inputs": ("up_proj", "down_proj"), "activation": "relu2"},
        _BIASED,
    ),
    "olmoe": Block("OlmoeSparseMoeBlock", "OlmoeConfig", {"norm_topk_prob": False}),
    "phimoe": Block(
        "PhimoeSparseMoeBlock",
        "PhimoeConfig",
        {"num_local_experts": EXPERTS, "router_jitter_noise": 0.02},
        {"score_func": "sparsemixer", "sparsemixer_jitter_eps": 0.02},
    ),
    "qwen2_moe": Block(
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        {"norm_topk_prob": False, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5_moe": Block(
        "Qwen3_5MoeSparseMoeBlock",
        "Qwen3_5MoeTextConfig",
        {"shared_expert_intermediate_size": 48},
        {"norm_topk_prob": True},
    ),
    "qwen3_moe": Block("Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {"norm_topk_prob": True}, {"norm_topk_prob": True}),
    "qwen3_next": Block(
        "Qwen3NextSparseMoeBlock",
        "Qwen3NextConfig",
        {"norm_topk_prob": True, "shared_expert_intermediate_size": 48},
        {"norm_topk_prob": True},
    ),
}


def expected_spec(architecture: str) -> MoeSpec:
    """The MoeSpec that fusing the block of `architecture` must give."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoeSpec(**{**sizes, "weight_inputs": ("gate_up_proj", "down_proj"), **BLOCKS[architecture].spec})


def build(architecture: str, seed: int = 0) -> Any:
    """Build the block as a torch module `[B, S, H] -> [B, S, H]` with random weights, biases and buffers."""
    import torch

    row = BLOCKS[architecture]
    base = f"transformers.models.{architecture}"
    config = getattr(importlib.import_module(f"{base}.configuration_{architecture}"), row.config)(
        **{**_SIZES, **row.settings}
    )
    config._experts_implementation = "batched_mm"
    block = getattr(importlib.import_module(f"{base}.modeling_{architecture}"), row.block)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.25)

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden_states: Any) -> Any:
            result = self.block(hidden_states)
            return result[0] if isinstance(result, tuple) else result

    return FirstOutput().eval()


def export(architecture: str, path: Path, dtype: str = "float32") -> None:
    """Export the block with torch.onnx (dynamo), batch and sequence dynamic, into the file `path`.

    `dtype` ("float32", "float16") is that of weights and activations.
    """
    import torch

    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    torch.onnx.export(
        build(architecture).to(getattr(torch, dtype)),
        (torch.randn(2, 3, HIDDEN, dtype=getattr(torch, dtype)),),
        path,
        dynamo=True,
        dynamic_shapes={"hidden_states": {0: batch, 1: sequence}},
        input_names=["hidden_states"],
        output_names=["output"],
        external_data=False,
        verbose=False,
    )
