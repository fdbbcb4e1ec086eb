"""Reshapes there and back again."""

from __future__ import annotations

import onnx_ir as ir

_KEEP_ORDER = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def merge_reshapes(model: ir.Model) -> None:
    """Replace each Reshape to the constant shape that the same elements have had before by the value that had it.

    A 0 in the shape takes an axis over from its input: such a Reshape stays. So does one behind a Reshape that fixes
    all sizes, which makes a model that holds for one number of tokens only.
    """
    for graph in list(model.graphs()):
        for node in list(graph):
            shape = _target(node)
            if shape is None or 0 in shape or node.outputs[0].is_graph_output():
                continue
            if (before := _had_before(node, shape)) is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], before)
                graph.remove(node, safe=True)


def _had_before(node: ir.Node, shape: list[int]) -> ir.Value | None:
    """The value that the Reshape `node` to `shape` gives back."""
    value = node.inputs[0]
    while value is not None and (before := value.producer()) is not None and before.graph is node.graph:
        if before.domain not in ("", "ai.onnx"):
            return None
        target = _target(before)
        if target == shape:
            return value
        if before.op_type not in _KEEP_ORDER or (target is not None and min(target, default=1) > 0):
            return None
        value = before.inputs[0]
    return None


def _target(node: ir.Node) -> list[int] | None:
    """The shape that a Reshape gives, when it is constant."""
    if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return [int(size) for size in value.const_value.numpy().ravel()]
