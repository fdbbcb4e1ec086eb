"""Decoders that optimum merges into one model: an If whose branches, with and without past, share their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from models.qwen3_moe import build as qwen3_moe

pytestmark = [pytest.mark.optimum, pytest.mark.slow]

TINY = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from optimum.exporters.onnx import model_configs  # noqa: F401  (registers the exporters)
    from optimum.exporters.onnx.convert import export
    from optimum.exporters.tasks import TasksManager
    from optimum.onnx import merge_decoders
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("merged")
    model = AutoModelForCausalLM.from_pretrained(qwen3_moe.build(folder / "checkpoint", **TINY)).eval()
    make = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task="text-generation-with-past", library_name="transformers"
    )
    paths = {False: folder / "decoder_model.onnx", True: folder / "decoder_with_past_model.onnx"}
    for past, path in paths.items():
        export(model, make(model.config, use_past=True, use_past_in_inputs=past), path, opset=18)
    merge_decoders(*(str(path) for path in paths.values()), save_path=str(folder / "decoder_model_merged.onnx"))
    return folder / "decoder_model_merged.onnx"


def feeds(*, past: int) -> dict[str, Any]:
    rng = np.random.default_rng(past)
    values = rng.standard_normal((2, TINY["num_key_value_heads"], past, TINY["head_dim"])).astype(np.float32)
    length = 1 if past else 7
    return {
        "input_ids": rng.integers(0, 300, (2, length)),
        "attention_mask": np.ones((2, past + length), np.int64),
        "position_ids": np.tile(np.arange(past, past + length), (2, 1)),
        "past_key_values.0.key": values,
        "past_key_values.0.value": values[::-1].copy(),
        "use_cache_branch": np.array([past > 0]),
    }


def _place(tensor: onnx.TensorProto) -> tuple[str, ...]:
    return tuple(entry.value for entry in tensor.external_data)


def test_both_branches_are_fused_and_share_their_weights(merged: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    report = hina_ort.convert(merged, target)
    assert len(report.fused) == 2 and report.refused == []
    (choice,) = onnx.load(target, load_external_data=False).graph.node
    held = [{_place(t) for t in a.g.initializer if t.external_data} for a in choice.attribute]
    assert held[0] == held[1] and len(held[0]) == 3
    assert report.bytes_after is not None and report.bytes_after < report.bytes_before
    before = ort.InferenceSession(merged)
    after = ort.InferenceSession(target, hina_ort.session_options())
    for past in (0, 5):
        expected, found = before.run(None, feeds(past=past)), after.run(None, feeds(past=past))
        for one, other in zip(expected, found, strict=True):
            assert relative_l2(one.astype(np.float64), other.astype(np.float64)) < 1e-5
