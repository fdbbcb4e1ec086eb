"""What is exported: the exporters, how each is called, and the architectures each supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.blocks import BLOCKS, OTHERS
from models.language_models import MODELS

DYNAMO, OPTIMUM = ".venv", ".venv-optimum"

_ADDED_IN_5 = {"bailing_hybrid", "cohere2_moe", "lfm2_moe", "minimax_m2", "nemotron_h", "qwen3_5_moe"}
_OTHERS_IN_4 = {"dbrx", "glm4v_moe", "granitemoeshared", "jetmoe", "llama4", "longcat_flash", "qwen3_omni_moe"}
_OTHERS_IN_4 |= {"qwen3_vl_moe", "switch_transformers"}
_BLOCKS_4 = tuple(sorted({*BLOCKS, *_OTHERS_IN_4} - _ADDED_IN_5))
_BLOCKS_5 = tuple(sorted({*BLOCKS, *OTHERS}))
_MODELS_5 = tuple(sorted(MODELS))
_MODELS_4 = tuple(sorted({*MODELS} - _ADDED_IN_5))
_EAGER = ("gpt_oss", "llama4", "mixtral", "qwen3_moe")
_OPTIMUM = ("deepseek_v3", "gpt_oss", "qwen3_moe")


@dataclass(frozen=True)
class Exporter:
    """One way to export.

    Fields: a title for readers, the folder of its environment, the function of `recipes` with its settings, the
    architectures, the type of weights and activations, and whether ONNX Runtime's CPU provider runs what it makes.
    """

    title: str
    environment: str
    recipe: str
    architectures: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    runs_on_cpu: bool = True


EXPORTERS: dict[str, Exporter] = {
    "optimum": Exporter("optimum-onnx", OPTIMUM, "optimum", _OPTIMUM),
    "optimum-fp16": Exporter("optimum-onnx, float16", OPTIMUM, "optimum", _OPTIMUM, {"dtype": "fp16"}, "float16"),
    "torchscript-4": Exporter(
        "TorchScript, transformers 4.57, blocks traced with 6 tokens", OPTIMUM, "block", _BLOCKS_4, {"dynamo": False}
    ),
    "torchscript-4-128": Exporter(
        "TorchScript, transformers 4.57, blocks traced with 128 tokens",
        OPTIMUM,
        "block",
        _BLOCKS_4,
        {"dynamo": False, "tokens": (4, 32)},
    ),
    "torchscript-4-models": Exporter(
        "TorchScript, transformers 4.57, models", OPTIMUM, "language_model", _MODELS_4, {"dynamo": False}
    ),
    "dynamo-4": Exporter("dynamo, transformers 4.57, blocks", OPTIMUM, "block", _BLOCKS_4),
    "dynamo-4-models": Exporter("dynamo, transformers 4.57, models", OPTIMUM, "language_model", _MODELS_4),
    "torchscript-5": Exporter(
        "TorchScript, transformers 5.24, batched_mm, blocks", DYNAMO, "block", _BLOCKS_5, {"dynamo": False}
    ),
    "torchscript-5-models": Exporter(
        "TorchScript, transformers 5.24, batched_mm, models", DYNAMO, "language_model", _MODELS_5, {"dynamo": False}
    ),
    "torchscript-5-eager": Exporter(
        "TorchScript, transformers 5.24, eager, blocks",
        DYNAMO,
        "block",
        _BLOCKS_5,
        {"dynamo": False, "experts": "eager"},
    ),
    "dynamo-5": Exporter("dynamo, transformers 5.24, batched_mm, blocks", DYNAMO, "block", _BLOCKS_5),
    "dynamo-5-models": Exporter("dynamo, transformers 5.24, batched_mm, models", DYNAMO, "language_model", _MODELS_5),
    "dynamo-5-eager": Exporter(
        "dynamo, transformers 5.24, eager, blocks", DYNAMO, "block", _EAGER, {"experts": "eager"}
    ),
    "transformers": Exporter("transformers 5.24, OnnxExporter", DYNAMO, "transformers", _BLOCKS_5),
    "transformers-cuda": Exporter(
        "transformers 5.24, OnnxExporter, ort_fusions=cuda",
        DYNAMO,
        "transformers",
        _MODELS_5,
        {"ort_fusions": "cuda"},
        runs_on_cpu=False,
    ),
    "genai": Exporter(
        "onnxruntime-genai 0.18 builder, fp32",
        DYNAMO,
        "genai",
        ("gpt_oss", "granitemoehybrid", "lfm2_moe", "qwen3_5_moe"),
        {"precision": "fp32"},
    ),
    "genai-int4": Exporter(
        "onnxruntime-genai 0.18 builder, int4",
        DYNAMO,
        "genai",
        ("granitemoehybrid", "lfm2_moe", "qwen3_5_moe"),
        # Activations in float, so that a difference shows: the default rounds them to int8, and a hair decides how.
        {"precision": "int4", "options": ["accuracy_level=1"]},
        dtype="int4",
    ),
}
