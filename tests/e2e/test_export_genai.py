"""Exported checkpoints in onnxruntime-genai: the same text as transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models import checkpoints
from models.language_models import VOCABULARY
from tests import decoders

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

PROMPT, NEW = [5, 17, 33, 80, 9, 61], 24


def supported() -> list[str]:
    from hina_ort.export.architectures import GENAI_TYPES

    return sorted(set(checkpoints.CHANGES) & set(GENAI_TYPES))


@pytest.mark.parametrize("architecture", supported())
def test_the_same_text(architecture: str, tmp_path: Path) -> None:
    import onnxruntime_genai as og

    from hina_ort.export.command import export

    source = checkpoints.build(architecture, tmp_path / "checkpoint")
    assert export(source, tmp_path / "out").genai
    model = og.Model(str(tmp_path / "out"))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPT) + NEW, min_length=len(PROMPT) + NEW, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array(PROMPT, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    text = [int(token) for token in generator.get_sequence(0)[len(PROMPT) :]]
    ids = np.array([PROMPT])
    expected = decoders.greedy(decoders.TorchDecoder(checkpoints.reference(source)), ids, np.ones_like(ids), NEW)
    assert len(set(text)) > 3 and max(text) < VOCABULARY
    assert text == expected[0].tolist()


def test_latent_caches_are_not_for_genai(tmp_path: Path) -> None:
    """Keys and values of Multi-head Latent Attention have sizes of their own, which genai cannot make."""
    from hina_ort.export.command import export

    assert not export(checkpoints.build("deepseek_v3", tmp_path / "checkpoint"), tmp_path / "out").genai
    assert not (tmp_path / "out" / "genai_config.json").exists()
