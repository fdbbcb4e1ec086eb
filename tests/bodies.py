"""Models put into the bodies of If, Loop and Scan nodes of others."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper


def _model(
    like: onnx.ModelProto,
    node: onnx.NodeProto,
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> ir.Model:
    graph = helper.make_graph([node], "outer", inputs, outputs, initializers)
    made = helper.make_model(graph, opset_imports=like.opset_import, ir_version=9)
    onnx.checker.check_model(made, full_check=False)
    return ir.from_proto(made)


def _renamed(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.name = name
    return copy


def _moved_out(body: onnx.GraphProto) -> list[onnx.TensorProto]:
    """The initializers of `body`, taken out of it."""
    taken = list(body.initializer)
    del body.initializer[:]
    return taken


def inside_if(model: ir.Model, *, weights_outside: bool = False, twice: bool = False) -> ir.Model:
    """`(x, first) -> chosen`: what `model` computes of its one input in one branch, else -x, or the same `twice`.

    The branch captures x, and with `weights_outside` its initializers too.
    """
    proto = ir.to_proto(model)
    body = proto.graph
    inputs, output = list(body.input), body.output[0]
    x, condition = inputs[0].name, f"{output.name}_first"
    del body.input[:]
    initializers = _moved_out(body) if weights_outside else []
    if twice:
        other = onnx.GraphProto()
        other.CopyFrom(body)
        for node in other.node:
            node.name = f"{node.name}_again"
            node.output[:] = [f"{name}_again" for name in node.output]
            made = {name.removesuffix("_again") for n in other.node for name in n.output}
        for node in other.node:
            node.input[:] = [f"{name}_again" if name in made else name for name in node.input]
        for info in (*other.value_info, *other.output):
            info.name = f"{info.name}_again"
    else:
        minus = _renamed(output, f"{output.name}_minus")
        other = helper.make_graph([helper.make_node("Neg", [x], [minus.name])], "other", [], [minus])
    node = helper.make_node(
        "If", [condition], [f"{output.name}_chosen"], name="choice", then_branch=body, else_branch=other
    )
    first = helper.make_tensor_value_info(condition, TensorProto.BOOL, [])
    return _model(proto, node, [*inputs, first], [_renamed(output, f"{output.name}_chosen")], initializers)


def inside_loop(model: ir.Model, *, weights_outside: bool = False, carried: str = "") -> ir.Model:
    """`(x, times) -> final`: `model` on its own result, so many times; `carried` is a weight that goes along."""
    proto = ir.to_proto(model)
    body = proto.graph
    x, output = body.input[0], body.output[0]
    initializers = _moved_out(body) if weights_outside or carried else []
    states = [x] + [
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in initializers if t.name == carried
    ]
    del body.input[:]
    body.input.append(helper.make_tensor_value_info("round", TensorProto.INT64, []))
    body.input.append(helper.make_tensor_value_info("go", TensorProto.BOOL, []))
    body.input.extend(states)
    del body.output[:]
    body.output.append(helper.make_tensor_value_info("go_on", TensorProto.BOOL, []))
    body.output.append(output)
    body.node.append(helper.make_node("Identity", ["go"], ["go_on"]))
    if carried:
        body.node.append(helper.make_node("Identity", [carried], ["carried_on"]))
        body.output.append(_renamed(states[1], "carried_on"))
        for tensor in initializers:
            tensor.name = "carried_in" if tensor.name == carried else tensor.name
    start = ["times", "", "start", *(["carried_in"] if carried else [])]
    node = helper.make_node("Loop", start, ["final", *(["carried_out"] if carried else [])], name="again", body=body)
    times = helper.make_tensor_value_info("times", TensorProto.INT64, [])
    return _model(proto, node, [_renamed(x, "start"), times], [_renamed(output, "final")], initializers)


def inside_scan(model: ir.Model) -> ir.Model:
    """`xs [N, *] -> ys [N, *]`: `model` on each entry."""
    proto = ir.to_proto(model)
    x, output = proto.graph.input[0], proto.graph.output[0]
    node = helper.make_node("Scan", ["xs"], ["ys"], name="each", body=proto.graph, num_scan_inputs=1)

    def stacked(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
        sizes = [d.dim_value or d.dim_param for d in info.type.tensor_type.shape.dim]
        return helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, ["N", *sizes])

    return _model(proto, node, [stacked(x, "xs")], [stacked(output, "ys")])
