"""The demo's model with bfloat16 experts generates the same tokens in tiles as with AVX2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hina_ort
from tests.ops_cpp.amx.environment import AMX_KIND, amx_environment, needs_amx
from tests.ops_cpp.amx.programs import run

pytestmark = [pytest.mark.optimum, needs_amx, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with fewer layers and experts, converted with bfloat16 experts."""
    from models.qwen3_moe.build import build, export

    home = tmp_path_factory.mktemp("qwen3_moe")
    checkpoint = build(home / "checkpoint", num_experts=8, num_experts_per_tok=2, num_hidden_layers=2)
    export(checkpoint, home / "original")
    report = hina_ort.convert(home / "original", home / "fused", weights="bf16")
    assert len(report.fused) == 2
    return home / "fused"


def generated(folder: str) -> list[int]:
    """Prompts of 60 tokens and of one, with what comes after them: experts get one token, or more than a tile takes."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    model = ORTModelForCausalLM.from_pretrained(folder, session_options=hina_ort.session_options())
    tokens: list[int] = []
    for ids in (torch.arange(40, 100)[None], torch.tensor([[70]])):
        tokens += model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0].tolist()
    return tokens


@pytest.mark.parametrize("kind", [AMX_KIND, pytest.param("emulated", marks=pytest.mark.slow)])
def test_tiles_generate_the_tokens_of_avx2(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, sys; from tests.e2e.test_amx_generation import generated;"
        "print(json.dumps(generated(sys.argv[1])))"
    )
    amx = {"HINA_ISA": "amx", "HINA_AMX_FROM": "1", "HINA_VERBOSE": "1"} | amx_environment(kind)
    done = run(sys.executable, "-c", script, str(folder), env=amx)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("down tile_bf16x2_") == 2, done.stderr
    monkeypatch.setenv("HINA_ISA", "avx2")
    tokens = generated(str(folder))
    assert json.loads(done.stdout.splitlines()[-1]) == tokens
    assert len(tokens) == 60 + 16 + 1 + 16
