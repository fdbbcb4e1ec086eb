"""What `hina-ort inspect` says about a model's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import hina_ort
from hina_ort.bench import machine
from hina_ort.bench.machine import Limits
from hina_ort.cli import app
from hina_ort.inspection import inspect_model
from hina_ort.memory_plan import MemoryPlan
from tests import node as harness
from tests.hina_ort import decoders, tiny

LAYERS = 2
EXPERTS = LAYERS * 4 * 3 * tiny.EXPERTS * tiny.HIDDEN * tiny.INTERMEDIATE
EMBEDDING = 4 * tiny.VOCABULARY * tiny.HIDDEN


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("fused", [True, False])
def test_a_token_reads_its_experts_a_row_of_the_embedding_and_the_rest(
    exported: Path, tmp_path: Path, fused: bool
) -> None:
    if fused:
        hina_ort.convert(exported, tmp_path / "fused")
    found = inspect_model(tmp_path / "fused" if fused else exported)
    plan = found.memory
    assert (plan.expert_bytes, plan.shared_expert_bytes) == (EXPERTS, 0)
    assert plan.weight_bytes == found.weight_bytes == EXPERTS + plan.dense_bytes
    saved = EMBEDDING - EMBEDDING // tiny.VOCABULARY
    assert plan.decode_bytes_per_token == EXPERTS * tiny.TOP_K // tiny.EXPERTS + plan.dense_bytes - saved
    assert (plan.cache_bytes_per_token, plan.state_bytes, plan.context) == (0, 0, None)


def test_a_refused_block_counts_as_dense(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "mixed.onnx", unknown_layers=(1,))
    assert inspect_model(path).memory.expert_bytes == EXPERTS // 2


def test_shared_experts_are_read_by_every_token(tmp_path: Path) -> None:
    spec = harness.make_spec(num_experts=4, top_k=1, hidden_size=32, intermediate_size=16, shared_intermediate_size=24)
    model = harness.make_model(harness.random_node(spec, np.random.default_rng(0)), leading=["B", "S"])
    path = tmp_path / "node.onnx"
    onnx.save(model, path)
    plan = inspect_model(path).memory
    assert plan.expert_bytes == 4 * 4 * 3 * 32 * 16
    assert plan.shared_expert_bytes == 4 * 3 * 32 * 24
    assert plan.decode_bytes_per_token == plan.expert_bytes // 4 + plan.shared_expert_bytes + plan.dense_bytes
    assert "of shared experts" in inspect(str(path))


def test_an_embedding_that_is_the_head_too_is_read_whole(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.ones((6, 4), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Transpose", ["table"], ["head"]),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 6])
    model = helper.make_model(helper.make_graph(nodes, "tied", [ids], [logits], [table]), ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    assert inspect_model(tmp_path).memory.decode_bytes_per_token == 6 * 4 * 4


def test_the_cache_of_a_token_and_of_a_text(tmp_path: Path) -> None:
    folder = decoders.save_decoder(tmp_path / "decoder", state=True, max_position_embeddings=4096)
    plan = inspect_model(folder).memory
    assert (plan.cache_bytes_per_token, plan.state_bytes, plan.context) == (32, 32, 4096)
    assert "cache of a sequence: 32 B per token, and 32 B whatever its length; 128.0 KiB for 4096 tokens" in inspect(
        str(folder)
    )
    model = onnx.load(folder / "model.onnx")
    cache = next(value for value in model.graph.input if value.name == "past_key_values.0.key")
    cache.type.tensor_type.shape.dim[2].dim_param = "kv_cache_dim"  # as the builder of onnxruntime-genai writes it
    onnx.save(model, folder / "model.onnx")
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"head_size": decoders.WIDTH}}}))
    (folder / "config.json").write_text("{")
    plan = inspect_model(folder).memory
    assert (plan.cache_bytes_per_token, plan.state_bytes, plan.context) == (32, 32, None)


PLAN = MemoryPlan(
    expert_bytes=6 << 30,
    shared_expert_bytes=0,
    dense_bytes=2 << 30,
    decode_bytes_per_token=1 << 30,
    cache_bytes_per_token=1 << 20,
    state_bytes=0,
    context=2048,
    available_bytes=None,
)


@pytest.mark.parametrize(
    ("gibibytes", "words"),
    [
        (None, ""),
        (10, ""),
        (9, "the cache of a text of 2048 tokens takes 2.0 GiB, and 1.0 GiB of memory are left beside the weights: keep "
            "texts below 1024 tokens"),
        (7, "the weights take 8.0 GiB, and 7.0 GiB of memory are available"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(gibibytes: int | None, words: str) -> None:
    plan = replace(PLAN, available_bytes=None if gibibytes is None else gibibytes << 30)
    assert bool(plan.warnings) == bool(words) and words in "".join(plan.warnings)


def test_warnings_and_the_ceiling_are_shown(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def measured(path: Path, threads: int) -> Limits:
        read.append(path.stat().st_size)
        return Limits(2e9, 1.0, None, 1.0)

    monkeypatch.setattr(machine, "measure_limits", measured)
    text = inspect(str(exported))
    assert "at most on this machine: --measure" in text and "are available" not in text and not read
    monkeypatch.setattr(machine, "available_memory", lambda: 4096)
    found = json.loads(inspect(str(exported), "--json", "--measure"))["memory"]
    assert read == [1024]
    ceiling = 2e9 / found["decode_bytes_per_token"]
    assert found["ceiling_tokens_per_second"] == pytest.approx(ceiling)
    assert (found["available_bytes"], len(found["warnings"])) == (4096, 1)
    text = inspect(str(exported), "--measure")
    assert f"reads 2.0 GB/s: at most {ceiling:.1f} tokens/s" in text and "a ceiling, not a prediction" in text
    assert "warning the weights take" in text and "4.0 KiB of memory are available" in text


def test_the_memory_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)
    plan = inspect_model(tiny.save_model(tmp_path / "model.onnx"), measure=True).memory
    assert plan.read_bytes_per_second is not None and plan.read_bytes_per_second > 1e8
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--explain", "x", "--measure"])
    assert result.exit_code == 2 and "--explain and --measure do not go together" in result.stderr
