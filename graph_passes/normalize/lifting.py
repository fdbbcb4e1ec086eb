"""Constant nodes as initializers."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def lift_constants(model: ir.Model) -> None:
    """Turn Constant nodes into initializers of their graphs, in place.

    Clones of a graph share its tensors, and a tensor takes the name of its initializer when a graph is serialized: so
    that no other model sees that, the initializers get tensors of their own, on the same memory.
    """
    for node in model.graph.all_nodes():
        if node.op_type != "Constant" or "value" not in node.attributes:
            continue
        tensor, name = node.attributes["value"].value, node.outputs[0].name
        if isinstance(tensor, ir.Tensor | ir.TensorProtoTensor) and tensor.name != name:
            own = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=name)
            node.attributes["value"] = ir.AttrTensor("value", own)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
