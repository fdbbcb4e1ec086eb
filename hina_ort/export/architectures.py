"""Which architectures can be exported, which cannot and why; the command's errors and docs/exporting.md read this."""

from __future__ import annotations

SUPPORTED: tuple[str, ...] = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "llama4_text",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
"""`model_type` of configurations whose exports are compared with transformers in tests/e2e."""

UNSUPPORTED: dict[str, str] = {
    "dbrx": "transformers computes its experts without its registry of experts implementations",
    "jamba": "its Mamba layers carry a state that is not exported",
    "lfm2_moe": "its convolutions carry a state that is not exported; the builder of onnxruntime-genai exports it",
    "minimax": "its lightning attention keeps a cache of its own, which is not exported",
    "nllb_moe": "it is an encoder with a decoder",
    "switch_transformers": "it is an encoder with a decoder",
}
"""Others that have experts, and why they cannot be exported."""

GENAI_TYPES: dict[str, str] = {
    "ernie4_5_moe": "ernie4_5",
    "glm4_moe": "llama",
    "gpt_oss": "gptoss",
    "granitemoe": "granite",
    "hunyuan_v1_moe": "hunyuandensev1",
    "minimax_m2": "llama",
    "mixtral": "mistral",
    "olmoe": "olmo",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen3",
    "dots1": "llama",
    "llama4_text": "llama",
}
"""The decoders of onnxruntime-genai that carry the states of an architecture: a key and a value of every layer."""


def objection(model_type: object) -> str:
    """Why a configuration of this `model_type` cannot be exported, as the end of a sentence; empty when it may."""
    if model_type in UNSUPPORTED:
        return f"{model_type} cannot be exported: {UNSUPPORTED[str(model_type)]}"
    return ""


def known() -> str:
    """The supported architectures in words."""
    return ", ".join(SUPPORTED)
