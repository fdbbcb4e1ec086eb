"""Models that the builder of onnxruntime-genai made generate the same tokens in onnxruntime-genai after conversion."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from hina_ort.conversion import ConversionReport

pytestmark = pytest.mark.dynamo

_FOLDER = tempfile.TemporaryDirectory(prefix="genai")
NEW_TOKENS = 32
PROMPTS = [[72], [20, 30, 40, 50], *(np.random.default_rng(n).integers(3, 120, n).tolist() for n in (17, 60))]
BOUND = 1e-5
ROUNDED = 1 / 127
"""The builder lets MatMulNBits round activations to int8 (accuracy_level 4), unless told otherwise. A number near the
edge of two codes may then fall to either side when float32 sums are taken in another order, a step of 1/127 apart."""


@functools.cache
def folder(architecture: str, precision: str, *options: str) -> Path:
    """The folder that the builder writes for a tiny model of `architecture`; "mtp" is a Qwen3.5-MoE with that head."""
    from models import genai, language_models

    home = Path(_FOLDER.name)
    lfm2 = architecture == "lfm2_moe"
    model = language_models.build(architecture) if lfm2 else language_models.build_qwen3_5()
    checkpoint = genai.save(model, home / architecture, mtp=architecture == "mtp")
    return genai.export(checkpoint, home / "-".join((architecture, precision, *options)), precision, *options)


@functools.cache
def converted(architecture: str, precision: str, *options: str) -> tuple[Path, ConversionReport]:
    source = folder(architecture, precision, *options)
    target = source.with_name(f"{source.name}-fused")
    return target, hina_ort.convert(source, target, genai=True)


def generate(path: Path, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after `prompt`, and the logits `[tokens, vocabulary]` that each was chosen by."""
    import onnxruntime_genai as og

    model = og.Model(str(path))
    parameters = og.GeneratorParams(model)
    length = len(prompt) + NEW_TOKENS
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    logits = []
    while not generator.is_done():
        logits.append(generator.get_output("logits")[0, -1].copy())
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(prompt) :]], np.array(logits)


def ops(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


@pytest.mark.parametrize(
    ("precision", "options", "bound"),
    [("fp32", (), BOUND), ("int4", ("accuracy_level=0",), BOUND), ("int4", (), ROUNDED)],
)
@pytest.mark.parametrize("architecture", ["lfm2_moe", "qwen3_5_moe"])
def test_the_same_tokens(architecture: str, precision: str, options: tuple[str, ...], bound: float) -> None:
    from models.language_models import LAYERS

    source, (target, report) = folder(architecture, precision, *options), converted(architecture, precision, *options)
    before, after = ops(source / "model.onnx"), ops(target / "model.onnx")
    name = "QMoE" if precision == "int4" else "MoE"
    assert before[name] == len(report.fused) == after["HinaMoE"] == LAYERS
    assert after[name] == 0 and report.refused == []
    for block in report.fused:
        assert ("down_proj" in block.spec.formats) == (precision == "int4")
    for prompt in PROMPTS:
        (tokens, logits), (new_tokens, new_logits) = generate(source, prompt), generate(target, prompt)
        assert len(set(tokens)) > 3
        assert new_tokens == tokens
        known = np.abs(logits) < 1e30  # the end of the sequence is forbidden before the last token
        assert relative_l2(logits[known], new_logits[known]) <= bound
        best = np.sort(logits, axis=-1)
        margin = float(np.min(best[:, -1] - best[:, -2]))
        assert bound == ROUNDED or margin > 100 * float(np.max(np.abs(logits - new_logits))), "a near tie"


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_shared_expert_is_drawn_in_where_it_rounds_as_the_routed_ones(precision: str) -> None:
    """QMoE takes activations as floats, and MatMulNBits rounds them by default: one node cannot do both."""
    _, report = converted("qwen3_5_moe", precision)
    assert [block.spec.has_shared_expert for block in report.fused] == [precision == "fp32"] * 2
    assert all(("accuracy_level" in block.note) == (precision == "int4") for block in report.fused)


def test_without_the_option_the_library_is_missing(tmp_path: Path) -> None:
    """What --genai is for, and that the report asks for it."""
    report = hina_ort.convert(folder("lfm2_moe", "fp32"), tmp_path / "fused")
    assert any("--genai" in line for line in report.genai)
    with pytest.raises(RuntimeError, match="HinaMoE"):
        generate(tmp_path / "fused", PROMPTS[0])


def test_a_decoder_with_another_name(tmp_path: Path) -> None:
    from models import genai

    folder("lfm2_moe", "fp32")
    source = genai.export(Path(_FOLDER.name) / "lfm2_moe", tmp_path / "named", "fp32", "filename=decoder.onnx")
    report = hina_ort.convert(source, tmp_path / "fused", genai=True)
    assert report.written and ops(tmp_path / "fused" / "decoder.onnx")["HinaMoE"] == 2
    assert generate(tmp_path / "fused", PROMPTS[1])[0] == generate(source, PROMPTS[1])[0]


def test_a_converted_folder_is_converted_again(tmp_path: Path) -> None:
    source, _ = converted("lfm2_moe", "fp32")
    report = hina_ort.convert(source, tmp_path / "int8", weights="int8", genai=True)
    assert report.written and report.already_fused == 2
    assert (tmp_path / "int8" / "genai_config.json").read_bytes() == (source / "genai_config.json").read_bytes()
    assert len(generate(tmp_path / "int8", PROMPTS[1])[0]) == NEW_TOKENS


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_head_that_shares_weights_with_the_decoder(tmp_path: Path, precision: str) -> None:
    """The head reads the embedding in the data file of the decoder, whose places are other ones after conversion."""
    source, (target, report) = folder("mtp", precision), converted("mtp", precision)
    assert "mtp.onnx was copied, and not converted" in report.genai
    stored = onnx.load(target / "mtp.onnx", load_external_data=False).graph.initializer
    shared = {t.name for t in stored if any(entry.value == "model.onnx.data" for entry in t.external_data)}
    assert "model.embed_tokens.weight" in shared
    # onnxruntime-genai 0.18 does not load shared_initializers on CPU: the original is run without.
    plain = shutil.copytree(source, tmp_path / "plain")
    config = json.loads((plain / "genai_config.json").read_text())
    for section in ("decoder", "mtp"):
        assert config["model"][section].pop("shared_initializers")
    (plain / "genai_config.json").write_text(json.dumps(config))
    assert generate(target, PROMPTS[2])[0] == generate(plain, PROMPTS[2])[0]
    rng = np.random.default_rng(0)
    feeds = {
        "input_ids": rng.integers(3, 120, (1, 5)),
        "hidden_states": rng.standard_normal((1, 5, 64)).astype(np.float32),
        "attention_mask": np.ones((1, 5), np.int64),
        "position_ids": np.tile(np.arange(5), (3, 1, 1)),
        **{f"past_key_values.0.{kind}": np.zeros((1, 2, 0, 32), np.float32) for kind in ("key", "value")},
    }
    results = []
    for path in (source, target):
        session = onnxruntime.InferenceSession(str(path / "mtp.onnx"), providers=["CPUExecutionProvider"])
        results.append(session.run(["logits"], {i.name: feeds[i.name] for i in session.get_inputs()})[0])
    assert np.array_equal(*results)
