"""Inference of types and shapes, by ONNX, for graphs of any size.

onnx_ir's own pass takes time that grows with the square of the number of initializers, and builds a second model from
what ONNX answers; here the answers alone are read.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir import serde

from graph_passes.normalize.contrib_shapes import put_stand_ins

LIMIT = 1 << 10
"""Bytes; of larger constants ONNX is told the shape only, and none is read."""


def infer_shapes(model: ir.Model) -> None:
    """Give every value of `model`, subgraphs included, the type and shape that ONNX infers, where it infers any.

    Nothing changes when ONNX cannot infer, as for operators or types that it does not know.
    """
    graph = model.graph
    constants = {value: None for value in graph.initializers.values()}
    small = [v for v in constants if v.const_value is not None and v.const_value.nbytes <= LIMIT]
    view = ir.GraphView(
        [*graph.inputs, *(value for value in constants if not value.is_graph_input())],
        graph.outputs,
        nodes=graph,
        initializers=small,
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    proto = onnx.ModelProto(ir_version=model.ir_version)
    proto.opset_import.extend(onnx.helper.make_opsetid(*item) for item in model.opset_imports.items())
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version == 13:
            opset.version = 14  # from which on ONNX carries sizes through a Reshape; shapes differ in nothing else
    try:
        serde.serialize_graph_into(proto.graph, view)  # type: ignore[arg-type]  # it takes views, too
        proto.functions.extend(serde.serialize_function(function) for function in model.functions.values())
        _show_constants(proto.graph, {})
        put_stand_ins(proto)
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=False, data_prop=True)
    except Exception:  # of any kind: see above
        return
    _take(graph, inferred.graph)


def _show_constants(graph: onnx.GraphProto, outer: dict[str, onnx.TensorProto]) -> None:
    """Give bodies below `graph` the small integers that they capture: ONNX looks for them only in the body itself."""
    bodies = [body for node in graph.node for a in node.attribute for body in (*a.graphs, *([a.g] if a.g.node else []))]
    if not bodies:
        return
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    own = {t.name: t for t in graph.initializer if t.data_type in integers and not t.external_data}
    visible = {name: tensor for name, tensor in (outer | own).items() if tensor.ByteSize() <= 2 * LIMIT}
    for body in bodies:
        used = {name for node in body.node for name in node.input} - {tensor.name for tensor in body.initializer}
        body.initializer.extend(visible[name] for name in sorted(used & visible.keys()))
        _show_constants(body, visible)


def _take(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Let the values of `graph` have the types and shapes of those of the same name in `inferred`."""
    known = {info.name: info.type for infos in (inferred.value_info, inferred.output) for info in infos}
    for node, other in zip(graph, inferred.node, strict=True):
        for value in node.outputs:
            if value.name in known:
                _set_type(value, known[value.name])
        for name, attribute in node.attributes.items():
            if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or attribute.is_ref():
                continue
            (answer,) = (a for a in other.attribute if a.name == name)
            if attribute.type == ir.AttributeType.GRAPH:
                _take(attribute.as_graph(), answer.g)
            else:
                for body, result in zip(attribute.as_graphs(), answer.graphs, strict=True):
                    _take(body, result)


def _set_type(value: ir.Value, proto: onnx.TypeProto) -> None:
    shape, kind = serde.deserialize_type_proto_for_shape(proto), serde.deserialize_type_proto_for_type(proto)
    if shape is not None:
        value.shape = shape
    if kind is not None:
        value.type = kind
