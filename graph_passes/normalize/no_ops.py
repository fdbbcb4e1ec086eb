"""Removal of nodes that hand on what they read: Identity, and Cast to the type that its input has."""

from __future__ import annotations

import onnx_ir as ir


def remove_no_ops(model: ir.Model) -> None:
    """Remove the no-ops of the main graph and of all below it; names of graph outputs stay.

    One that gives a graph output stays where its input is an output too, or comes from outside its graph: a body may
    not hand out a value that it only captures.
    """
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.domain in ("", "ai.onnx") and node.op_type in ("Identity", "Cast"):
                _remove(graph, node)


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None:
        return
    if node.op_type == "Cast" and source.dtype != ir.DataType(node.attributes.get_int("to")):
        return
    is_output = result.is_graph_output()
    if is_output:
        producer = source.producer()
        if producer is None or producer.graph is not graph or source.is_graph_output():
            return
    source.type = source.type or result.type
    source.shape = source.shape or result.shape
    name = result.name
    result.replace_all_uses_with(source, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if is_output:
        source.name = name
