"""Shapes in graphs that ONNX Runtime has optimised or quantised: ONNX knows none of the operators that it has put in.

To infer shapes, such a node passes for a standard one whose output has the same shape and type.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

_AS_ITS_INPUT = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")


def put_stand_ins(model: onnx.ModelProto) -> None:
    """Let nodes of the main graph of `model`, a copy made for inferring shapes, be the operators that they pass for."""
    graph = model.graph
    opset = max((imported.version for imported in model.opset_import if imported.domain in ("", "ai.onnx")), default=0)
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types |= {
        node.output[0]: a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"
    }
    matrices = {value.name for value in graph.input if len(value.type.tensor_type.shape.dim) == 2}
    for node in graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "SimplifiedLayerNormalization" and len(node.input) == 2 and len(node.output) == 1:
            # It is in the ONNX domain, though ONNX does not have it; its result has the type of the scale.
            if node.input[1] in types:
                _become(node, "Cast", node.input[:1], to=types[node.input[1]])
        elif node.domain != "com.microsoft":
            continue
        elif node.op_type in _AS_ITS_INPUT:
            _become(node, "Sigmoid", node.input[:1])
        elif node.op_type == "FusedMatMul" and opset >= 12:
            if not attributes.get("transBatchA") and not attributes.get("transBatchB"):
                first = "...ji" if attributes.get("transA") else "...ij"
                second = "kj" if attributes.get("transB") else "jk"
                second = second if node.input[1] in matrices else f"...{second}"
                _become(node, "Einsum", node.input[:2], equation=f"{first},{second}->...ik")
        elif node.op_type == "FusedGemm":
            _become(node, "Gemm", node.input[:2], **{name: attributes.get(name, 0) for name in ("transA", "transB")})
        elif node.op_type == "MatMulNBits" and len(node.input) > 2 and node.input[2] in types:
            name, shape = f"{node.output[0]}.weights", [attributes.get("K"), attributes.get("N")]
            graph.input.append(onnx.helper.make_tensor_value_info(name, types[node.input[2]], shape))
            _become(node, "MatMul", [node.input[0], name])


def _become(node: onnx.NodeProto, op_type: str, inputs: Iterable[str], **attributes: int | str) -> None:
    made = onnx.helper.make_node(op_type, list(inputs), list(node.output), node.name)
    made.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    node.CopyFrom(made)
