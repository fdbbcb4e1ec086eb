"""Few canonical shapes, so that patterns stay few. Every step keeps what the model computes, bit for bit.

Large tensors are neither read nor copied.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from graph_passes.normalize.bias_gelu import split_bias_gelu
from graph_passes.normalize.constants import fold_small_constants
from graph_passes.normalize.fused_gemm import split_fused_gemm
from graph_passes.normalize.inlining import inline_functions
from graph_passes.normalize.lifting import lift_constants
from graph_passes.normalize.names import make_names_unique
from graph_passes.normalize.no_ops import remove_no_ops
from graph_passes.normalize.reshapes import merge_reshapes
from graph_passes.normalize.shapes import infer_shapes

_ROUNDS = 4
"""Shapes are inferred at most so often: once more after each folding that made sizes known."""


def normalize(model: ir.Model) -> None:
    """Bring `model` into canonical shape, in place.

    Functions are inlined, but for those that are fused or of another opset, missing types and shapes are inferred,
    Constant nodes become initializers, Identity nodes and Casts to the same type disappear, small constant expressions
    are computed, reshapes of reshapes become one, activations of FusedGemm become nodes, equal nodes are merged and
    unused ones dropped.
    """
    if any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        # transformers leaves it out: ONNX Runtime does not mind, shape inference fails on the whole model.
        model.opset_imports.setdefault("com.microsoft", 1)
    if model.functions:
        inline_functions(model)
    split_fused_gemm(model)
    split_bias_gelu(model)
    make_names_unique(model)
    _merge_equal_nodes(model)  # a graph of many small constants shrinks by half
    lift_constants(model)
    for _ in range(_ROUNDS):
        infer_shapes(model)
        remove_no_ops(model)
        if not fold_small_constants(model):
            break
    merge_reshapes(model)
    _merge_equal_nodes(model)
    common.RemoveUnusedNodesPass()(model)


def _merge_equal_nodes(model: ir.Model) -> None:
    """Within each graph: what a body computes is not moved out of it."""
    for graph in list(model.graphs()):
        common.CommonSubexpressionEliminationPass()(ir.Model(graph, ir_version=model.ir_version))
