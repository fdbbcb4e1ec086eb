"""Folders of onnxruntime-genai, made by its builder from tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save(model: Any, checkpoint: Path, *, mtp: bool = False) -> Path:
    """Save `model` with a tokenizer, as the builder reads it; return the folder.

    `mtp` adds a head for multi-token prediction with random weights, as the checkpoints of Qwen3.5-MoE have one.
    """
    from models.qwen3_moe.build import byte_tokenizer

    model.save_pretrained(checkpoint)
    byte_tokenizer().save_pretrained(checkpoint)
    if mtp:
        _add_mtp(model, checkpoint)
    return checkpoint


def export(checkpoint: Path, folder: Path, precision: str, *options: str) -> Path:
    """Run the builder for CPU; return `folder`. `precision` is "fp32" or "int4", `options` are its KEY=VALUE pairs."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    arguments = ("", str(checkpoint), str(folder), precision, "cpu", str(folder / "cache"))
    create_model(*arguments, **parse_extra_options(*arguments, list(options)))
    return folder


def _add_mtp(model: Any, checkpoint: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path, config_path = checkpoint / "model.safetensors", checkpoint / "config.json"
    config = json.loads(config_path.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    config_path.write_text(json.dumps(config))
    hidden = config["text_config"]["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    head = {f"layers.0.{name}": value for name, value in model.model.language_model.layers[-1].state_dict().items()}
    head["fc.weight"] = torch.empty(hidden, 2 * hidden)
    head |= {f"{name}.weight": torch.empty(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    drawn = {f"mtp.{name}": torch.randn(value.shape, generator=generator) * 0.15 for name, value in head.items()}
    save_file({**load_file(path), **drawn}, path, metadata={"format": "pt"})
