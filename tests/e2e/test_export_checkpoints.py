"""Checkpoints of every listed architecture, exported: the same logits and texts as transformers in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.testing import assert_array_equal

import hina_ort
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.op_schema import INPUTS
from hina_ort.generation.decoder import Decoder
from models import checkpoints
from models.language_models import LAYERS, VOCABULARY
from tests import decoders

pytestmark = pytest.mark.dynamo

QUICK = ("qwen3_moe", "gpt_oss")
TRANSPOSED = ("gpt_oss_bfloat16", "llama4", "llama4_text")
"""Their checkpoints hold the experts as [in, out]: the op reads a transposed copy."""
CLOSE = 1e-4
NAMES = {
    "gpt_oss": "mlp.experts.gate_up_proj_blocks",
    "gpt_oss_bfloat16": "mlp.experts.gate_up_proj",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "llama4": "feed_forward.experts.gate_up_proj",
    "llama4_text": "feed_forward.experts.gate_up_proj",
    "minimax_m2": "block_sparse_moe.experts.0.w1.weight",
    "mixtral": "block_sparse_moe.experts.0.w1.weight",
    "phimoe": "block_sparse_moe.experts.0.w1.weight",
    "qwen3_5_moe": "mlp.experts.gate_up_proj",
}
"""What the checkpoints on the hub call the first projection of an expert; others mlp.experts.0.gate_proj.weight."""


@dataclass
class Exported:
    """A checkpoint and what `export` made of it."""

    architecture: str
    checkpoint: Path
    folder: Path

    @cached_property
    def expected(self) -> Any:
        return decoders.TorchDecoder(checkpoints.reference(self.checkpoint))

    @cached_property
    def decoder(self) -> decoders.OnnxDecoder:
        return decoders.OnnxDecoder(self.folder)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in checkpoints.CHANGES],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    from hina_ort.export.command import export

    home = tmp_path_factory.mktemp(request.param)
    checkpoint = checkpoints.build(request.param, home / "checkpoint")
    export(checkpoint, home / "onnx")
    return Exported(request.param, checkpoint, home / "onnx")


@pytest.mark.parametrize("lengths", [[1], [5], [40], [5, 40, 1], [1, 1, 1]], ids=str)
def test_logits(exported: Exported, lengths: list[int]) -> None:
    ids, mask = decoders.padded(lengths, VOCABULARY)
    expected = decoders.read(exported.expected, ids, mask, [max(lengths)])
    assert decoders.distance(decoders.read(exported.decoder, ids, mask, [max(lengths)]), expected, mask) <= CLOSE


@pytest.mark.parametrize(("lengths", "pieces"), [([40], [33, 1, 5, 1]), ([40, 29, 38], [35, 1, 1, 3])], ids=str)
def test_logits_with_a_cache(exported: Exported, lengths: list[int], pieces: list[int]) -> None:
    ids, mask = decoders.padded(lengths, VOCABULARY)
    expected = decoders.read(exported.expected, ids, mask, pieces)
    assert decoders.distance(decoders.read(exported.decoder, ids, mask, pieces), expected, mask) <= CLOSE


def test_greedy_text(exported: Exported) -> None:
    ids, mask = decoders.padded([5], VOCABULARY)
    expected = decoders.greedy(exported.expected, ids, mask, 64)
    assert len(set(expected[0].tolist())) > 5  # it does not repeat one token
    assert_array_equal(decoders.greedy(exported.decoder, ids, mask, 64), expected)


def test_generate_reads_it(exported: Exported) -> None:
    path = exported.folder / "model.onnx"
    decoder = Decoder(path, str(path), hina_ort.session_options())
    ids, mask = decoders.padded([9], VOCABULARY)
    expected = decoders.read(exported.expected, ids, mask, [9])[0, 6:]
    logits = [decoder.read(ids[0, :7].tolist())[0], *(decoder.read([token])[0] for token in ids[0, 7:].tolist())]
    assert decoders.distance(np.stack(logits), expected, np.ones(3)) <= CLOSE


def test_names_are_those_of_the_hub(exported: Exported) -> None:
    name = NAMES.get(exported.architecture, "mlp.experts.0.gate_proj.weight")
    assert any(found.endswith(f"{LAYERS - 1}.{name}") for found in checkpoints.tensor_files(exported.checkpoint))


def test_experts_stay_in_the_checkpoint(exported: Exported) -> None:
    model = ir.load(exported.folder / "model.onnx")
    nodes = [node for node in all_nodes(model) if is_hina_moe(node)]
    assert len(nodes) == LAYERS
    tensors = [
        value.const_value
        for node in nodes
        for value in node.inputs[len(INPUTS) :]
        if value is not None and "bias" not in str(value.name)
    ]
    files = {Path(t.location).name for t in tensors if isinstance(t, ir.ExternalTensor)}
    shards = sorted(exported.checkpoint.glob("*.safetensors"))
    if exported.architecture in TRANSPOSED:
        pytest.skip("the experts of this architecture are transposed")
    assert files <= {path.name for path in shards}
    assert all((exported.folder / path.name).samefile(path) for path in shards if path.name in files)
    own = {path.name for path in exported.folder.iterdir()} - {path.name for path in exported.checkpoint.iterdir()}
    written = sum((exported.folder / name).stat().st_size for name in own if name.endswith(".data"))
    dense = [v.const_value for v in model.graph.initializers.values()]
    unread = sum(t.nbytes for t in dense if isinstance(t, ir.ExternalTensor) and t.location not in files)
    assert 0 < written <= unread * 1.1 + 65536


def test_inputs_and_outputs_have_the_names_of_optimum(exported: Exported) -> None:
    inputs = [item.name for item in exported.decoder.session.get_inputs()]
    outputs = [item.name for item in exported.decoder.session.get_outputs()]
    assert inputs[:3] == ["input_ids", "attention_mask", "position_ids"] and outputs[0] == "logits"
    states = inputs[3:]
    assert outputs[1:] == [decoders.present(name) for name in states]
    first = {name.rsplit(".", 1)[1] for name in states}
    assert first <= {"key", "value", "conv", "recurrent"} and {"key", "value"} <= first
