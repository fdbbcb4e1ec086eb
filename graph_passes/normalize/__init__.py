"""Few canonical shapes, so that patterns stay few. Every step keeps what the model computes, bit for bit.

Large tensors are neither read nor copied.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from graph_passes.normalize.constants import FoldSmallConstants
from graph_passes.normalize.no_ops import RemoveNoOpCasts


def normalize(model: ir.Model) -> None:
    """Bring `model` into canonical shape, in place.

    Functions are inlined, missing types and shapes are inferred, Constant nodes become initializers, Identity nodes
    and Casts to the same type disappear, small constant expressions are computed, equal nodes are merged and unused
    ones dropped.
    """
    if any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        # transformers leaves it out: ONNX Runtime does not mind, shape inference fails on the whole model.
        model.opset_imports.setdefault("com.microsoft", 1)
    passes: list[ir.passes.InPlacePass] = []
    if model.functions:
        passes.append(common.InlinePass())
    passes += [
        common.ShapeInferencePass(strict_mode=False, data_prop=True),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.IdentityEliminationPass(),
        RemoveNoOpCasts(),
        FoldSmallConstants(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    ]
    ir.passes.Sequential(*passes)(model)
