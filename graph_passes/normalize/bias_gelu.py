"""BiasGelu and FastGelu with a bias, which ONNX Runtime makes of Add and Gelu, as these two."""

from __future__ import annotations

import onnx_ir as ir


def split_bias_gelu(model: ir.Model) -> None:
    """Write BiasGelu(x, b) as Gelu(x + b), and FastGelu(x, b) as FastGelu(x + b)."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if (
                node.domain == "com.microsoft"
                and node.op_type in ("BiasGelu", "FastGelu")
                and len(node.inputs) == 2
                and node.inputs[1] is not None
            ):
                _split(graph, node)


def _split(graph: ir.Graph, node: ir.Node) -> None:
    result = node.outputs[0]
    addition = ir.Node("", "Add", node.inputs, num_outputs=1, name=f"{node.name or result.name}/bias")
    added = addition.outputs[0]
    added.name, added.type = f"{result.name}/biased", result.type
    added.shape = None if result.shape is None else result.shape.copy()
    graph.insert_before(node, addition)
    node.op_type = node.op_type.removeprefix("Bias")
    node.resize_inputs(1)
    node.replace_input_with(0, added)
