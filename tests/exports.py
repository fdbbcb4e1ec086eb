"""Exported MoE blocks, made once per test run."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory(prefix="exports")


@functools.cache
def dynamo_block(architecture: str, dtype: str = "float32") -> Path:
    """The block of `architecture` (a key of models.blocks.BLOCKS), exported by torch.onnx; needs transformers 5."""
    from models import blocks

    path = Path(_FOLDER.name) / f"{architecture}.{dtype}.onnx"
    blocks.export(architecture, path, dtype)
    return path


@functools.cache
def torchscript_block(architecture: str, experts: str = "batched_mm", tokens: tuple[int, int] = (2, 3)) -> Path:
    """The block of `architecture`, traced with so many `tokens` and exported by torch.onnx without dynamo."""
    import torch

    from models import blocks

    torch.manual_seed(0)
    path = Path(_FOLDER.name) / f"{architecture}.{experts}.{tokens[0]}x{tokens[1]}.torchscript.onnx"
    blocks.export(architecture, path, experts=experts, dynamo=False, tokens=tokens)
    return path
