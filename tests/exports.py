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
