"""One small block of each export family, as the tests of the families build it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from tests import dense_graphs
from tests.graph_passes import test_batched_mm, test_grouped_mm, test_moe_op, test_sliced_rows, test_split_rows
from tests.unrolled_graphs import Loop, model_of

FAMILIES: dict[str, Callable[[], ir.Model]] = {
    "loop": lambda: model_of(Loop()),
    "loop of ScatterND": lambda: model_of(Loop(scatter_add=True, weights="gemm", bias=True)),
    "batched_mm": test_batched_mm.block,
    "grouped_mm": test_grouped_mm.block,
    "split_rows": test_split_rows.block,
    "sliced_rows": test_sliced_rows.block,
    "dense": lambda: dense_graphs.block(dense_graphs.GPT_OSS),
    "dense, weights on the input": lambda: dense_graphs.block(dense_graphs.LLAMA4),
    "MoE": lambda: test_moe_op.model_of("MoE", test_moe_op.SWIGLU, test_moe_op.floats(test_moe_op.SWIGLU)),
    "QMoE": lambda: test_moe_op.model_of("QMoE", test_moe_op.SWIGLU, test_moe_op.codes(test_moe_op.SWIGLU)),
}
"""Models with one input, hidden states [B, S, H] or [T, H]."""


def tokens(model: ir.Model, sequences: int, length: int, seed: int = 0) -> np.ndarray:
    """Random hidden states for a model of `FAMILIES`, of so many sequences."""
    shape = model.graph.inputs[0].shape
    assert shape is not None
    leading = (sequences, length) if len(shape) == 3 else (sequences * length,)
    return np.random.default_rng(seed).standard_normal((*leading, int(shape[-1]))).astype(np.float32)
