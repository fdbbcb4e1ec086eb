"""A converted folder in optimum's ORTModelForCausalLM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hina_ort

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.optimum, pytest.mark.timeout(600)]


def test_a_converted_folder_generates_the_same_tokens(tmp_path: Path) -> None:
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    from models.qwen3_moe.build import build, export

    checkpoint = build(tmp_path / "checkpoint", num_experts=8, num_experts_per_tok=2, num_hidden_layers=2)
    export(checkpoint, tmp_path / "original")
    report = hina_ort.convert(tmp_path / "original", tmp_path / "fused", check=3)
    assert len(report.fused) == 2 and not report.refused
    assert all(check.sizes["past_sequence_length"] for check in report.checks)
    assert (tmp_path / "fused" / "tokenizer.json").read_bytes() == (
        tmp_path / "original" / "tokenizer.json"
    ).read_bytes()
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = []
    for name in ("original", "fused"):
        model = ORTModelForCausalLM.from_pretrained(tmp_path / name, session_options=hina_ort.session_options())
        tokens.append(model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False).numpy())
    assert tokens[0].shape == (1, 12)
    np.testing.assert_array_equal(*tokens)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert "Once upon a time" in done.stdout
