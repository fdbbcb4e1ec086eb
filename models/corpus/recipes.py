"""How one export is made: each recipe writes FOLDER/model.onnx and says what torch computes. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models import blocks, language_models

Arrays = dict[str, npt.NDArray[Any]]

TOKENS = ((1, 1), (2, 1), (1, 7), (3, 11), (4, 32))
"""Sequences and their lengths that are compared: all other than those traced with, the last reaches every expert."""


@dataclass(frozen=True)
class Export:
    """What torch computes from the inputs of the exported model, inputs to compare on, and the number of MoE layers.

    `sizes` are those of axes of cached values, by name; where none is given the cache is empty.
    """

    reference: Callable[[Arrays], npt.NDArray[Any]]
    inputs: list[Arrays]
    moe_layers: int
    sizes: dict[str, int] = field(default_factory=dict)


def block(architecture: str, folder: Path, **options: Any) -> Export:
    """One MoE block by torch.onnx.export; `options` are those of `models.blocks.export`."""
    return _block(blocks.export(architecture, folder / "model.onnx", **options))


def language_model(architecture: str, folder: Path, **options: Any) -> Export:
    """A language model by torch.onnx.export; `options` are those of `models.language_models.export`."""
    return _language_model(language_models.export(architecture, folder / "model.onnx", **options))


def transformers(architecture: str, folder: Path, experts: str = "grouped_mm", **options: Any) -> Export:
    """By transformers' own OnnxExporter, a language model where there is one, else a block.

    `experts` is how it computes them; `options` are those of its OnnxConfig.
    """
    import torch
    from onnx_ir import save
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    whole = architecture in language_models.MODELS
    if whole:
        model = language_models.build(architecture)
        model.set_experts_implementation(experts)
        inputs = {name: torch.from_numpy(array) for name, array in language_models.sample(2, 5).items()}
        inputs["use_cache"] = False
    else:
        model = blocks.build(architecture, experts=experts)
        inputs = {"hidden_states": torch.randn(2, 3, blocks.HIDDEN)}
    exported, _ = OnnxExporter().export_program(model, inputs, OnnxConfig(**{"dynamic": True, **options}))
    save(exported, folder / "model.onnx")
    return _language_model(model) if whole else _block(model)


def optimum(architecture: str, folder: Path, dtype: str | None = None) -> Export:
    """A language model by optimum-onnx, task text-generation-with-past."""
    import torch
    from optimum.exporters.onnx import main_export

    model = language_models.build(architecture).to(torch.float16 if dtype == "fp16" else torch.float32)
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    main_export(str(checkpoint), str(folder), task="text-generation-with-past", dtype=dtype, do_validation=False)
    return _language_model(model)


def genai(architecture: str, folder: Path, precision: str, options: Sequence[str] = ()) -> Export:
    """A language model by the builder of onnxruntime-genai, for the CPU; arguments as for `models.genai.export`."""
    from models import genai as builder

    model = language_models.build_qwen3_5() if architecture == "qwen3_5_moe" else language_models.build(architecture)
    builder.export(builder.save(model, folder / "checkpoint"), folder, precision, *options)
    config = model.config.get_text_config()
    sizes = {"kv_cache_dim": config.head_dim, "past_sliding_length": getattr(config, "sliding_window", None) or 0}
    return replace(_language_model(model), sizes=sizes)


def _block(module: Any) -> Export:
    import torch

    def reference(inputs: Arrays) -> npt.NDArray[Any]:
        with torch.no_grad():
            output: npt.NDArray[Any] = module(torch.from_numpy(inputs["hidden_states"])).numpy()
        return output

    inputs: list[Arrays] = [
        {"hidden_states": np.random.default_rng([9, *shape]).standard_normal((*shape, blocks.HIDDEN), np.float32)}
        for shape in TOKENS
    ]
    return Export(reference, inputs, 1)


def _language_model(model: Any) -> Export:
    import torch

    def reference(inputs: Arrays) -> npt.NDArray[Any]:
        with torch.no_grad():
            tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
            logits: npt.NDArray[Any] = model(**tensors, use_cache=False).logits.numpy()
        return logits

    inputs: list[Arrays] = [dict(language_models.sample(*shape)) for shape in TOKENS]
    return Export(reference, inputs, language_models.LAYERS)
