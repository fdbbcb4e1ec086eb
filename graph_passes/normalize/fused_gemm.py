"""com.microsoft::FusedGemm, which graphs optimised by ONNX Runtime hold, as the Gemm and the activation that it was."""

from __future__ import annotations

import onnx_ir as ir

_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh")
"""Those without numbers of their own."""


def split_fused_gemm(model: ir.Model) -> None:
    """Replace each FusedGemm whose activation is a standard operator by Gemm and that operator."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if (node.domain, node.op_type) == ("com.microsoft", "FusedGemm"):
                _split(graph, node)


def _split(graph: ir.Graph, node: ir.Node) -> None:
    activation, result = node.attributes.get_string("activation", ""), node.outputs[0]
    if activation not in _ACTIVATIONS:
        return
    kept = [attribute for name, attribute in node.attributes.items() if not name.startswith("activation")]
    gemm = ir.Node("", "Gemm", node.inputs, kept, num_outputs=1, name=node.name)
    gemm.outputs[0].name = f"{result.name}/before_{activation}"
    gemm.outputs[0].type = result.type
    gemm.outputs[0].shape = None if result.shape is None else result.shape.copy()
    apply = ir.Node("", activation, gemm.outputs, num_outputs=1, name=f"{node.name or result.name}/{activation}")
    ir.convenience.replace_nodes_and_values(graph, node, [node], [gemm, apply], [result], apply.outputs)
