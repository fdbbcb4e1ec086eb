"""Weights are read where they lie: a session adds no copy of them to the process's memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from graph_passes.op_schema import FLOAT_TYPES, PROJECTIONS
from tests import node as harness
from tests.node import Node, make_spec
from tests.ops_cpp.scenarios import scenario
from tests.tensors import ONNX_TYPES, make_external, save_external

GIB = 1 << 30
MIB = 1 << 20


def sparse_layer(folder: Path, experts: int, weight_type: str) -> tuple[Node, list[TensorProto]]:
    """A layer in a data file with holes: the first, a middle and the last expert are random, the others zeros.

    The node's tensors are maps of the file, so that the reference reads no more of it than the op does.
    """
    quantised = weight_type not in FLOAT_TYPES
    spec = make_spec(
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=experts,
        top_k=3,
        router_input="topk_ids",
        formats=dict.fromkeys(PROJECTIONS, weight_type) if quantised else {},
        zero_points=True,
        accuracy_level=4,
    )
    types = {} if quantised else dict.fromkeys(PROJECTIONS, weight_type)
    filled = harness.random_node(replace(spec, num_experts=3), np.random.default_rng(1), types=types)
    node, tensors, end = Node(spec), [], 0
    for name, values in filled.weights.items():
        kind, shape = ONNX_TYPES[values.dtype.name], (experts, *values.shape[1:])
        tensor = TensorProto(name=name, data_type=kind, dims=shape)
        size = values[0].nbytes * experts
        make_external(tensor, "weights.bin", end, size)
        tensors.append(tensor)
        (folder / "weights.bin").touch()
        os.truncate(folder / "weights.bin", end + size)
        node.weights[name] = np.memmap(folder / "weights.bin", values.dtype, "r+", end, shape)
        node.weights[name][[0, experts // 2, experts - 1]] = values
        end += size
    return node, tensors


@pytest.mark.parametrize(
    ("weight_type", "experts", "gib"),
    [
        ("float32", 64, 2),
        pytest.param("bfloat16", 256, 4, marks=pytest.mark.slow),
        pytest.param("int4:32", 800, 4, marks=pytest.mark.slow),
    ],
)
def test_experts_stay_mapped(weight_type: str, experts: int, gib: int, tmp_path: Path) -> None:
    node, tensors = sparse_layer(tmp_path, experts, weight_type)
    assert (tmp_path / "weights.bin").stat().st_size >= gib * GIB
    model, feeds = tmp_path / "model.onnx", harness.random_feeds(node, np.random.default_rng(2), (5,))
    model.write_bytes(harness.make_model(node, initializers=tensors).SerializeToString())
    feeds["topk_ids"] = np.tile(np.array([0, experts // 2, experts - 1]), (5, 1))
    np.savez(tmp_path / "feeds.npz", **feeds)
    found = scenario("anonymous_memory", model, tmp_path / "feeds.npz", tmp_path / "output.npy")
    harness.assert_right(node, feeds, {"output": np.load(tmp_path / "output.npy")})
    (tmp_path / "weights.bin").unlink()
    assert found["made"] - found["before"] < 100 * MIB, found
    assert found["run"] - found["before"] < 100 * MIB, found


def test_memory_of_a_long_prompt_is_bounded(tmp_path: Path) -> None:
    """All intermediate values of these tokens are 1.2 GiB; they are computed in pieces of at most 128 MiB."""
    tokens = 20000
    spec = make_spec(hidden_size=16, intermediate_size=2048, num_experts=8, top_k=8)
    assert 4 * tokens * spec.top_k * spec.intermediate_size > 1.2 * GIB
    node = harness.random_node(spec, np.random.default_rng(4))
    model = tmp_path / "model.onnx"
    model.write_bytes(harness.make_model(node).SerializeToString())
    found = scenario("many_tokens", model, tokens)
    assert found["same"]
    # The arena of the session rounds what it takes up to powers of two.
    assert found["run"] - found["made"] < 300 * MIB, found


@pytest.mark.parametrize(
    ("word", "accuracy_level", "bytes_of_value"), [("", 0, 4), ("int4:32", 0, 4), ("int4:32", 4, 1 + 8 / 32)]
)
def test_memory_of_one_call_is_what_it_must_be(
    word: str, accuracy_level: int, bytes_of_value: float, tmp_path: Path
) -> None:
    """A prompt of 4096 tokens: what FC1 leaves, quantised inputs, and the output; the rest is at most 32 MiB.

    A value of float32 takes four bytes; an int8 code takes one, and scale and sum of its unit four each. The rest is
    logits and plan, 0.3 KiB a token, and for each of eight workers two blocks of at most 512 KiB of prepared weights
    with as much again for what they are made of.
    """
    tokens, hidden, intermediate, top_k = 4096, 256, 768, 8
    formats = dict.fromkeys(PROJECTIONS, word) if word else {}
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts": 16, "top_k": top_k}
    spec = make_spec(**sizes, formats=formats, accuracy_level=accuracy_level)
    node = harness.random_node(spec, np.random.default_rng(5))
    model = tmp_path / "model.onnx"
    model.write_bytes(harness.make_model(node).SerializeToString())
    found = scenario("many_tokens", model, tokens)
    assert found["same"]
    inputs = hidden * bytes_of_value if accuracy_level == 4 else 0.0
    needed = tokens * (top_k * intermediate * bytes_of_value + inputs + 4 * hidden)
    assert found["run"] - found["made"] < needed + 32 * MIB, (found, needed / MIB)


@pytest.mark.parametrize("place", [(4096, 0), (1, 0), (64, 1), (64, 2)], ids=["pages", "packed", "odd", "half"])
@pytest.mark.parametrize("weight_type", FLOAT_TYPES)
@pytest.mark.parametrize("experts_stacked", [True, False], ids=["stacked", "per expert"])
def test_external_data_gives_the_same_bits(
    experts_stacked: bool, weight_type: str, place: tuple[int, int], tmp_path: Path
) -> None:
    """Wherever the tensors lie in the file: a writer may pack them, so that float32 starts at an odd address."""
    spec = make_spec(experts_stacked=experts_stacked, bias=True, shared_intermediate_size=20, shared_expert_gate=True)
    types = dict.fromkeys(("gate_proj", "down_proj_bias", "shared_down_proj"), weight_type)
    node = harness.random_node(spec, np.random.default_rng(2), types=types, router_bias=True)
    feeds = harness.random_feeds(node, np.random.default_rng(3), (9,))
    model = harness.make_model(node)
    want = harness.run(harness.make_session(model), feeds)["output"]
    harness.assert_close(node, want, harness.expected(node, feeds)[0])
    alignment, offset = place
    save_external(model, tmp_path / "model.onnx", alignment=alignment, offset=offset)
    got = harness.run(harness.make_session(tmp_path / "model.onnx"), feeds)["output"]
    assert got.tobytes() == want.tobytes()
