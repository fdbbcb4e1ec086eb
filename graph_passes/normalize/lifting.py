"""Constant nodes as initializers."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def lift_constants(model: ir.Model) -> None:
    """Turn Constant nodes into initializers of their graphs, in place.

    Nodes of a graph that hold the same tensor, as calls of a function do once it is inlined, get one initializer.
    Clones of a graph share its tensors, and a tensor takes the name of its initializer when a graph is serialized: so
    that no other model sees that, the initializers get tensors of their own, on the same memory.
    """
    first: dict[tuple[object, ir.TensorProtocol], ir.Value] = {}
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Constant" or "value" not in node.attributes:
            continue
        tensor, result, graph = node.attributes["value"].value, node.outputs[0], node.graph
        same = first.setdefault((graph, tensor), result)
        if same is not result and not result.is_graph_output():
            assert graph is not None
            result.replace_all_uses_with(same)
            graph.remove(node)
            continue
        if isinstance(tensor, ir.Tensor | ir.TensorProtoTensor) and tensor.name != result.name:
            own = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=result.name)
            node.attributes["value"] = ir.AttrTensor("value", own)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
