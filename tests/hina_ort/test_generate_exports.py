"""`hina-ort generate` on exported models: the tokens of transformers and of onnxruntime-genai."""

from __future__ import annotations

from pathlib import Path

import pytest

import hina_ort
from hina_ort.generation.command import run_generate
from hina_ort.generation.decoder import Decoder
from hina_ort.generation.loop import generate
from hina_ort.generation.sampling import Sampler
from tests.e2e.test_merged_decoders import merged  # noqa: F401  (a fixture)

NEW_TOKENS = 32


@pytest.mark.optimum
def test_the_tokens_and_the_text_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    from models.qwen3_moe.build import build, export

    layers, top_k = 2, 2
    checkpoint = build(tmp_path / "checkpoint", num_experts=8, num_experts_per_tok=top_k, num_hidden_layers=layers)
    export(checkpoint, tmp_path / "original")
    hina_ort.convert(tmp_path / "original", tmp_path / "fused")
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt in ("Experts are chosen anew for every token", "é日本語", "x"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
        wanted = wanted[: wanted.index(2)] if 2 in wanted else wanted  # the end of the text is not given out
        for name in ("original", "fused"):
            report = run_generate(tmp_path / name, prompt, max_new_tokens=NEW_TOKENS)
            assert report.made.tokens == wanted and len(wanted) > 8
            assert report.text == tokenizer.decode(wanted, skip_special_tokens=True)
    counted = run_generate(tmp_path / "fused", prompt, max_new_tokens=NEW_TOKENS, experts_stats=True)
    assert counted.experts is not None and counted.made.tokens == wanted
    read = ids.shape[1] + counted.made.decode_steps
    assert [sum(counts) for counts in counted.experts.counts] == [read * top_k] * layers


@pytest.mark.dynamo
@pytest.mark.parametrize("architecture", ["lfm2_moe", "qwen3_5_moe"])
def test_the_tokens_of_onnxruntime_genai(architecture: str) -> None:
    """Caches of convolutions and of a recurrence beside keys and values, which are added to in place where that is
    asked for, and positions of three axes."""
    from tests.e2e.test_genai import PROMPTS, converted
    from tests.e2e.test_genai import generate as genai

    source = converted(architecture, "fp32")[0] / "model.onnx"
    for prompt in PROMPTS:
        wanted = genai(source.parent, prompt)[0]
        for most in (0, len(prompt) + NEW_TOKENS):
            runs = Decoder(source, str(source), hina_ort.session_options(), most)
            keys = runs._cache["past_key_values.1.key"]
            tokens = generate(runs, prompt, Sampler(), most=NEW_TOKENS).tokens
            assert (runs._cache["past_key_values.1.key"].data_ptr() == keys.data_ptr()) == bool(most)
            same = tokens.index(2) if 2 in tokens else NEW_TOKENS  # there, the token that ends a text is never chosen
            assert same >= 12 and tokens[:same] == wanted[:same]


@pytest.mark.optimum
@pytest.mark.slow
def test_a_merged_decoder(merged: Path) -> None:  # noqa: F811
    import torch
    from transformers import Qwen3MoeForCausalLM

    prompt = [70, 80, 90]
    model = Qwen3MoeForCausalLM.from_pretrained(merged.parent / "checkpoint").eval()
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, 3:].tolist()
    made = generate(Decoder(merged, str(merged), hina_ort.session_options()), prompt, Sampler(), most=len(wanted))
    assert made.tokens == wanted
