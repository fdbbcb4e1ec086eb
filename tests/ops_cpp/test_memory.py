"""Weights are read where they lie: a session adds no copy of them to the process's memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from graph_passes.op_schema import FLOAT_TYPES
from tests import node as harness
from tests.node import make_spec
from tests.ops_cpp.scenarios import scenario

GIB = 1 << 30
MIB = 1 << 20
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 1408, 64, 6


def test_two_gib_of_experts_stay_mapped(tmp_path: Path) -> None:
    """The data file is sparse, hence all zeros: each expert gives its bias, and the mixing weights add up to one."""
    spec = make_spec(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        bias=True,
        norm_topk_prob=True,
    )
    small = {"router_weight": np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN)).astype(np.float32)}
    for name in ("gate_proj_bias", "up_proj_bias", "down_proj_bias"):
        small[name] = np.full((EXPERTS, *spec.field_shape(name)), 0.0, np.float32)
    small["down_proj_bias"] += np.arange(HIDDEN, dtype=np.float32)
    names = [name for name in spec.weight_inputs if name not in small]
    model = tmp_path / "model.onnx"
    initializers, end = [], 0
    for name in ("router_weight", *spec.weight_inputs):
        if name in names:
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=(EXPERTS, *spec.field_shape(name)))
            size = 4 * int(np.prod(tensor.dims))
            harness.make_external(tensor, "weights.bin", end, size)
            end += size
        else:
            tensor = harness.make_tensor(name, small[name])
        initializers.append(tensor)
    assert end >= 2 * GIB
    inputs = ["hidden_states", "router_weight", "", "", "", "", "", *spec.weight_inputs]
    node = helper.make_node("HinaMoE", inputs, ["output"], domain="hina", **spec.attributes())
    graph = helper.make_graph(
        [node],
        "moe",
        [helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, ["T", HIDDEN])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("hina", 1)]
    model.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    data = tmp_path / "weights.bin"
    data.touch()
    os.truncate(data, end)
    found = scenario("anonymous_memory", model)
    data.unlink()
    np.testing.assert_allclose(found["output"], [0.0, 1.0, 2.0, 3.0], rtol=1e-6)
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
    harness.save_external(model, tmp_path / "model.onnx", alignment=alignment, offset=offset)
    got = harness.run(harness.make_session(tmp_path / "model.onnx"), feeds)["output"]
    assert got.tobytes() == want.tobytes()
