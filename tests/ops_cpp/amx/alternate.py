"""A program for test_tile_state.py: ONNX Runtime's own int8 product and HinaMoE in turn, on the same threads.

Prints one JSON object: whether each was right in every call, and with the emulator, what was executed beside a HinaMoE
that multiplies bfloat16 only. ONNX Runtime multiplies uint8 by int8 with AMX where CPUID says that the CPU has it.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from graph_passes.op_schema import PROJECTIONS
from tests import node as harness
from tests.node import Node, make_spec
from tests.ops_cpp.amx.environment import Recorder

DEPTH, COLUMNS = 256, 192


def model_of(node: Node, weights: np.ndarray) -> Any:
    """HinaMoE between two products of `bytes` [T, DEPTH] with `weights` [DEPTH, COLUMNS]."""
    model = harness.make_model(node)
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("bytes", TensorProto.UINT8, ["T", DEPTH]))
    graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    for name, place in (("before", 0), ("after", 2)):
        graph.node.insert(place, helper.make_node("MatMulInteger", ["bytes", "weights"], [name]))
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, None))
    return model


def alternate(node: Node, seed: int) -> dict[str, bool]:
    """Whether products and layers were right in every call of sessions of one thread and of two."""
    rng = np.random.default_rng(seed)
    # Seven bits: with AVX2 only, ONNX Runtime adds pairs of products up in 16 bits.
    weights = rng.integers(-64, 64, (DEPTH, COLUMNS)).astype(np.int8)
    sessions = [harness.make_session(model_of(node, weights), threads) for threads in (1, 2)]
    right = {"products": True, "layers": True}
    for tokens in (1, 200, 3, 33, 128, 64, 17):
        feeds = harness.random_feeds(node, rng, (tokens,))
        values = rng.integers(0, 256, (tokens, DEPTH)).astype(np.uint8)
        expected = values.astype(np.int32) @ weights.astype(np.int32)
        found = [harness.run(session, feeds | {"bytes": values}) for session in sessions]
        products = [one[name] for one in found for name in ("before", "after")]
        right["products"] &= all(np.array_equal(product, expected) for product in products)
        right["layers"] &= found[0]["output"].tobytes() == found[1]["output"].tobytes()
        try:
            harness.assert_right(node, feeds, {"output": found[0]["output"]})
        except AssertionError:
            right["layers"] = False
    return right


def main() -> None:
    rng = np.random.default_rng(1)
    sizes = {"hidden_size": 160, "intermediate_size": 96, "num_experts": 16, "top_k": 4}
    plain = make_spec(**sizes)
    plain_node = harness.random_node(plain, rng, types=dict.fromkeys(plain.weight_inputs, "bfloat16"))
    int8 = make_spec(**sizes, formats=dict.fromkeys(PROJECTIONS, "int8:32"), accuracy_level=4)
    with Recorder() if "HINA_AMX_EMULATOR" in os.environ else nullcontext() as recorder:
        answer: dict[str, Any] = {"bfloat16": alternate(plain_node, 2)}
    answer["int8"] = alternate(harness.random_node(int8, rng), 3)
    if recorder is not None:
        answer["counts"] = recorder.counts
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
