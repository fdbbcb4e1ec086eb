"""Local functions that hold whole MoE blocks: fused once, in the function, for all its calls.

Weights may be constants of the function or arguments of its calls. Each call is taken out as a model of its own, whose
initializers are the constants that the call hands over: so the blocks are matched and proven with the weights of every
call. The function gets the nodes of the first when all calls agree on them; tensors that had to be made of arguments
(weights stored `[K, N]`, say) become arguments too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir import serde
from onnx_ir.passes import common

from graph_passes.fuse_moe import UniqueNames
from graph_passes.matchers.match import WeightSource
from graph_passes.moe_node import is_fused
from graph_passes.normalize.lifting import lift_constants
from graph_passes.normalize.shapes import infer_shapes
from graph_passes.op_schema import DOMAIN, OPSET_VERSION


@dataclass
class Call:
    """A call `node` as a `model` of its own; `arguments` are the values there that stand for the node's inputs.

    `names` holds the tensors that were made when the model's blocks were fused.
    """

    node: ir.Node
    model: ir.Model
    arguments: Sequence[ir.Value | None]
    names: UniqueNames | None = None

    @property
    def made(self) -> dict[ir.Value, tuple[WeightSource, ...]]:
        """Tensors that were made of what the call hands over, and of what."""
        assert self.names is not None
        return {
            value: sources
            for (_, sources, _), value in self.names.made.items()
            if any(source.value in self.arguments for source in sources)
        }


def calls_of_functions(model: ir.Model) -> list[list[ir.Node]]:
    """The calls of each function that the main graph alone calls, and that is not fused yet.

    A call in a body is inlined, for HinaMoE may need initializers of the body, see `fuse_moe`. Constants of the main
    graph become initializers, and types and shapes are inferred, in place.
    """
    if not model.functions:
        return []
    _drop_unused(model)
    lift_constants(model)
    infer_shapes(model)
    elsewhere = {node.op_identifier() for function in model.functions.values() for node in function.all_nodes()}
    elsewhere |= {node.op_identifier() for node in model.graph.all_nodes() if node.graph is not model.graph}
    calls: dict[ir.OperatorIdentifier, list[ir.Node]] = {}
    for node in model.graph:
        function = model.functions.get(node.op_identifier())
        if function is not None and node.op_identifier() not in elsewhere and not is_fused(function):
            calls.setdefault(node.op_identifier(), []).append(node)
    return list(calls.values())


def calls_left(model: ir.Model) -> Iterator[ir.Node]:
    """The calls in the graph and its bodies of functions that are not fused, which normalisation could not inline."""
    for node in model.graph.all_nodes() if model.functions else ():
        function = model.functions.get(node.op_identifier())
        if function is not None and not is_fused(function):
            yield node


def _drop_unused(model: ir.Model) -> None:
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir has no annotations there


def alone(model: ir.Model, node: ir.Node) -> Call:
    """The call as a model of its own, which has the function's opset."""
    function = model.functions[node.op_identifier()]
    inputs: list[ir.Value] = []
    constants: list[ir.Value] = []
    arguments: list[ir.Value | None] = []
    for formal, actual in zip(function.inputs, node.inputs, strict=False):
        if actual is None:
            arguments.append(None)
            continue
        constant = None if actual.is_graph_input() else actual.const_value
        value = ir.Value(name=formal.name, type=actual.type, shape=actual.shape, const_value=constant)
        (inputs if constant is None else constants).append(value)
        arguments.append(value)
    call = ir.Node(
        node.domain,
        node.op_type,
        arguments,
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        name=function.name,
    )
    for result, formal, actual in zip(call.outputs, function.outputs, node.outputs, strict=False):
        result.name, result.type, result.shape = formal.name, actual.type, actual.shape
    graph = ir.Graph(
        inputs,
        call.outputs,
        nodes=[call],
        initializers=constants,
        opset_imports={**function.opset_imports, node.domain: 1},
        name=function.name,
    )
    needed = _needed(model, function)
    return Call(node, ir.Model(graph, ir_version=model.ir_version, functions=needed), arguments)


def _needed(model: ir.Model, function: ir.Function) -> list[ir.Function]:
    """Copies of the function and of those that it calls."""
    needed = {function.identifier(): function}
    pending = [function]
    while pending:
        for node in pending.pop().all_nodes():
            called = model.functions.get(node.op_identifier())
            if called is not None and called.identifier() not in needed:
                needed[called.identifier()] = called
                pending.append(called)
    return [item.clone() for item in needed.values()]


def put_back(model: ir.Model, calls: Sequence[Call]) -> bool:
    """Give the function of `calls`, all of its calls with their blocks fused, the nodes that they agree on.

    Returns False, and changes nothing, when they do not agree.
    """
    first = calls[0]
    graph, function = first.model.graph, model.functions[first.node.op_identifier()]
    if any(value.producer() is None for value in graph.outputs):
        return False
    if any(value.graph is not graph for value in first.made):  # a body in the function has weights that are arguments
        return False
    if not all(_alike(first, call) for call in calls[1:]):
        return False
    kept = [index for index, value in enumerate(first.arguments) if value is not None and value.uses()]
    made = [value.name for value in first.made]
    names = UniqueNames(model)
    for call in calls:
        new = _made_outside(model, call, made, names)
        old = [call.node.inputs[index] for index in kept]
        call.node.resize_inputs(len(kept) + len(new))
        for index, value in enumerate([*old, *new]):
            call.node.replace_input_with(index, value)
        call.node.attributes.clear()
    arguments = [value for index in kept if (value := first.arguments[index]) is not None]
    _constants_inside(graph, [*arguments, *first.made])
    used = {node.domain for node in graph.all_nodes()} | {""}
    for domain in [domain for domain in graph.opset_imports if domain not in used]:
        del graph.opset_imports[domain]
    graph.opset_imports[DOMAIN] = model.opset_imports[DOMAIN] = OPSET_VERSION
    fused = ir.Function(function.domain, function.name, function.overload, graph=graph, attributes=[])
    model.functions[function.identifier()] = fused
    _drop_unused(model)
    return True


def _alike(one: Call, other: Call) -> bool:
    """Whether two calls have the same nodes, and the same constants beside what they are handed over."""
    first, second = one.model.graph, other.model.graph
    if _text(first) != _text(second) or list(first.initializers) != list(second.initializers):
        return False
    if [value.name for value in one.made] != [value.name for value in other.made]:
        return False
    given = {value.name for value in (*one.arguments, *one.made) if value is not None}
    for name, value in first.initializers.items():
        a, b = value.const_value, second.initializers[name].const_value
        if name not in given and a is not b and (a is None or b is None or not _equal(a, b)):
            return False
    return True


def _equal(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())


def _text(graph: ir.Graph) -> list[bytes]:
    nodes = [serde.serialize_node(node).SerializeToString(deterministic=True) for node in graph]
    return nodes + [str(value.name).encode() for value in (*graph.inputs, *graph.outputs)]


def _made_outside(model: ir.Model, call: Call, made: Sequence[str | None], names: UniqueNames) -> list[ir.Value]:
    """The tensors `made` for a call as initializers of `model`; calls that hand over the same weights share them."""
    outside = dict(zip(call.arguments, call.node.inputs, strict=False))
    values = []
    for name, (value, sources) in zip(made, call.made.items(), strict=True):
        tensor = value.const_value
        assert tensor is not None and name is not None
        key = (
            model.graph,
            tuple(replace(source, value=outside.get(source.value) or source.value) for source in sources),
            tuple(int(size) for size in tensor.shape.numpy()),
        )
        if key not in names.made:
            new = ir.Value(name=names.unique(name), type=value.type, shape=value.shape, const_value=tensor)
            model.graph.register_initializer(new)
            names.made[key] = new
        values.append(names.made[key])
    return values


def _constants_inside(graph: ir.Graph, inputs: Sequence[ir.Value]) -> None:
    """Turn a graph into that of a function: of its initializers those in `inputs` are inputs, others Constant nodes."""
    formal = {value: ir.Value(name=value.name, type=value.type, shape=value.shape) for value in inputs}
    for value, new in formal.items():
        value.replace_all_uses_with(new)
    first = graph[0]
    for value in list(graph.initializers.values()):
        assert value.name is not None and value.const_value is not None
        del graph.initializers[value.name]
        if value in formal or not value.uses():
            continue
        node = ir.node("Constant", [], {"value": value.const_value}, name=f"{value.name}/Constant")
        result = node.outputs[0]
        result.name, result.type, result.shape = value.name, value.type, value.shape
        value.replace_all_uses_with(result)
        graph.insert_before(first, node)
    graph.inputs.clear()
    graph.inputs.extend(formal.values())
