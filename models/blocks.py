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
    "num_local_experts": EXPERTS,
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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the block's constructor takes beside the configuration."""


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

OTHERS: dict[str, Block] = {
    "dbrx": Block(
        "DbrxFFN",
        "DbrxConfig",
        {
            "d_model": HIDDEN,
            "ffn_config": {
                "ffn_hidden_size": INTERMEDIATE,
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
                "ffn_act_fn": {"name": "silu"},
            },
        },
    ),
    "glm4v_moe": Block("Glm4vMoeTextMoE", "Glm4vMoeTextConfig", _UNGROUPED),
    "granitemoeshared": Block("GraniteMoeSharedMoE", "GraniteMoeSharedConfig"),
    "jetmoe": Block("JetMoeMoE", "JetMoeConfig"),
    "llama4": Block("Llama4TextMoe", "Llama4TextConfig"),
    "longcat_flash": Block(
        "LongcatFlashMoE",
        "LongcatFlashConfig",
        {"n_routed_experts": EXPERTS, "expert_ffn_hidden_size": INTERMEDIATE, "zero_expert_num": 4, "moe_topk": TOP_K},
    ),
    "nllb_moe": Block(
        "NllbMoeSparseMLP",
        "NllbMoeConfig",
        {"d_model": HIDDEN, "encoder_ffn_dim": INTERMEDIATE, "expert_capacity": 64},
        arguments={"ffn_dim": INTERMEDIATE},
    ),
    "switch_transformers": Block(
        "SwitchTransformersSparseMLP", "SwitchTransformersConfig", {"d_model": HIDDEN, "d_ff": INTERMEDIATE}
    ),
}
"""Blocks that have no batched_mm form of their own, or that are near copies of a row of `BLOCKS`."""

_ANY: dict[str, Any] = {
    **_UNGROUPED,
    "first_k_dense_replace": 0,
    "moe_k": TOP_K,
    "moe_num_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_shared_expert_intermediate_size": 48,
    "moe_topk": TOP_K,
    "num_experts_per_token": TOP_K,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 48,
}
"""The names that newer architectures give to the same settings; each reads its own."""

OTHERS["muse_spark"] = Block("MuseSparkMoE", "MuseSparkTextConfig", {**_ANY, "moe_hidden_size": HIDDEN})
OTHERS |= {
    architecture: Block(block, config, _ANY)
    for architecture, block, config in (
        ("afmoe", "AfmoeSparseMoeBlock", "AfmoeConfig"),
        ("axk1", "AXK1MoE", "AXK1Config"),
        ("axk2", "AXK2MoE", "AXK2Config"),
        ("beam", "BeamMoE", "BeamConfig"),
        ("deepseek_ocr2", "DeepseekOcr2TextMoe", "DeepseekOcr2TextConfig"),
        ("deepseek_v32", "DeepseekV32MoE", "DeepseekV32Config"),
        ("dots3_note", "Dots3NoteTextMoE", "Dots3NoteTextConfig"),
        ("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeConfig"),
        ("flint", "FlintSparseMoeBlock", "FlintConfig"),
        ("glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteConfig"),
        ("glm5_next", "Glm5NextTextMoE", "Glm5NextTextConfig"),
        ("glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaConfig"),
        ("granitemoe_swa", "GraniteMoeSWAMoE", "GraniteMoeSWAConfig"),
        ("hy_v3", "HYV3MoE", "HYV3Config"),
        ("hy_v4", "HYV4MoE", "HYV4Config"),
        ("inkling", "InklingMoE", "InklingTextConfig"),
        ("kimi_linear", "KimiLinearMoE", "KimiLinearConfig"),
        ("kolibri1", "Kolibri1SparseMoeBlock", "Kolibri1Config"),
        ("laguna", "LagunaSparseMoeBlock", "LagunaConfig"),
        ("lara_mini", "LaraMiniSparseMoeBlock", "LaraMiniConfig"),
        ("mellum", "MellumSparseMoeBlock", "MellumConfig"),
        ("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashConfig"),
        ("minimax_m3_vl", "MiniMaxM3VLSparseMoeBlock", "MiniMaxM3VLTextConfig"),
        ("mistral4", "Mistral4MoE", "Mistral4Config"),
        ("mistral_large4", "MistralLarge4TextMoE", "MistralLarge4TextConfig"),
        ("openai_privacy_filter", "OpenAIPrivacyFilterMLP", "OpenAIPrivacyFilterConfig"),
        ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3OmniMoeTextConfig"),
        ("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeTextConfig"),
        ("qwen4_exp", "Qwen4ExpTextSparseMoeBlock", "Qwen4ExpTextConfig"),
        ("solar_open", "SolarOpenMoE", "SolarOpenConfig"),
        ("unlimited_ocr", "UnlimitedOcrTextMoe", "UnlimitedOcrTextConfig"),
    )
}


SHARED_SIZES = {
    "aria": INTERMEDIATE,
    "bailing_hybrid": INTERMEDIATE,
    "deepseek_v2": INTERMEDIATE,
    "deepseek_v3": INTERMEDIATE,
    "dots1": INTERMEDIATE,
    "ernie4_5_moe": 2 * INTERMEDIATE,
    "glm4_moe": INTERMEDIATE,
    "hunyuan_v1_moe": INTERMEDIATE,
    "nemotron_h": 48,
    "qwen2_moe": 48,
    "qwen3_5_moe": 48,
    "qwen3_next": 48,
}
"""The intermediate size of the shared expert, where a block has one."""

GATED_SHARED_EXPERTS = ("qwen2_moe", "qwen3_5_moe", "qwen3_next")


def expected_spec(architecture: str, shared: bool = False) -> MoeSpec:
    """The MoeSpec that fusing the block of `architecture` must give, with its shared expert or without."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K}
    fields = {**sizes, "weight_inputs": ("gate_up_proj", "down_proj"), **BLOCKS[architecture].spec}
    if shared and architecture in SHARED_SIZES:
        names = [f"shared_{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        names = names[1:] if "up_proj" in fields["weight_inputs"] else names
        names += ["shared_expert_gate"] * (architecture in GATED_SHARED_EXPERTS)
        fields["weight_inputs"] = (*fields["weight_inputs"], *names)
        fields["shared_intermediate_size"] = SHARED_SIZES[architecture]
    return MoeSpec(**fields)


def row(architecture: str) -> Block:
    """The row of `architecture`, of whichever table."""
    return BLOCKS[architecture] if architecture in BLOCKS else OTHERS[architecture]


def settings(architecture: str) -> dict[str, Any]:
    """The configuration of the tiny block: the common sizes, and what the architecture needs beside them."""
    return {**_SIZES, **row(architecture).settings}


def build(architecture: str, seed: int = 0, experts: str = "batched_mm") -> Any:
    """Build the block as a torch module `[B, S, H] -> [B, S, H]` with random weights, biases and buffers.

    `experts` is how transformers 5 computes them: batched_mm, grouped_mm or eager; transformers 4 has no choice.
    """
    import torch

    base, made = f"transformers.models.{architecture}", row(architecture)
    config = getattr(importlib.import_module(f"{base}.configuration_{architecture}"), made.config)(
        **settings(architecture)
    )
    config._experts_implementation = experts
    modelling = importlib.import_module(f"{base}.modeling_{architecture}")
    name = next(name for name in dir(modelling) if name.lower() == made.block.lower())  # DeepseekV2Moe, ...MoE
    block = getattr(modelling, name)(config, **made.arguments).eval()
    randomise(block, seed)

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden_states: Any) -> Any:
            result = self.block(hidden_states)
            return result[0] if isinstance(result, tuple) else result

    return FirstOutput().eval()


def randomise(module: Any, seed: int = 0) -> None:
    """Give every floating-point parameter and buffer of a torch module random values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.25)


def export(
    architecture: str,
    path: Path,
    dtype: str = "float32",
    *,
    experts: str = "batched_mm",
    dynamo: bool = True,
    tokens: tuple[int, int] = (2, 3),
) -> Any:
    """Export the block with torch.onnx, batch and sequence dynamic, into the file `path`; return the torch module.

    `dtype` ("float32", "float16") is that of weights and activations; `dynamo` chooses between torch's two exporters;
    `tokens` are the sequences, and the tokens of each, that it is traced with.
    """
    import torch

    axes: dict[str, Any] = {"dynamic_axes": {"hidden_states": {0: "batch", 1: "sequence"}}, "opset_version": 18}
    if dynamo:
        batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
        axes = {"dynamic_shapes": {"hidden_states": {0: batch, 1: sequence}}}
    module = build(architecture, experts=experts).to(getattr(torch, dtype))
    torch.onnx.export(
        module,
        (torch.randn(*tokens, HIDDEN, dtype=getattr(torch, dtype)),),
        path,
        dynamo=dynamo,
        input_names=["hidden_states"],
        output_names=["output"],
        external_data=False,
        verbose=False,
        **axes,
    )
    return module
