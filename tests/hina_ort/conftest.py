from __future__ import annotations

from pathlib import Path

import pytest

from tests.hina_ort import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with two MoE layers that can both be fused."""
    return tiny.save_model(tmp_path / "model.onnx")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An exporter's output folder: a model with its weights beside it, tokenizer and configuration."""
    folder = tmp_path / "exported"
    folder.mkdir()
    tiny.save_model(folder / "model.onnx", external=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder
