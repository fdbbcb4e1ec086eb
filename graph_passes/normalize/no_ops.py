"""Removal of Cast nodes that cast to the type that their input has."""

from __future__ import annotations

import onnx_ir as ir


class RemoveNoOpCasts(ir.passes.InPlacePass):
    """Replace Cast(x, to=type of x) by x, unless it names a graph output."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply the pass to the main graph."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Cast" or node.domain not in ("", "ai.onnx"):
                continue
            source, result = node.inputs[0], node.outputs[0]
            if source is None or source.dtype != ir.DataType(node.attributes.get_int("to")) or result.is_graph_output():
                continue
            ir.convenience.replace_all_uses_with(result, source)
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)
