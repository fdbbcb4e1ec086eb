"""Evaluation of small constant expressions, such as the arithmetic that exporters put around shapes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graph_passes.streaming import ChunkedTensor

LIMIT = 1 << 16
"""Bytes; nothing larger is read or made."""

# Operators whose result is the same in every implementation: moves of data of any type, and arithmetic, which is folded
# for integers only.
_MOVES = frozenset({"Concat", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where"})
_ARITHMETIC = frozenset({"Add", "Cast", "Div", "Equal", "Mul", "Neg", "Not", "OneHot", "Shape", "Sub"})

_BROADCASTING = frozenset({"Add", "Div", "Equal", "Mul", "Sub", "Where"})
_FEW = 8
"""Numbers of a constant that is worth comparing with others, such as a shape."""

_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})

_READ_SIZES = frozenset({"ConstantOfShape", "Expand", "OneHot", "Range", "Reshape", "Slice", "Split", "Tile", "TopK"})
"""Operators whose output's shape is a matter of the values of an input."""


def fold_small_constants(model: ir.Model) -> bool:
    """Replace nodes, those of subgraphs too, whose inputs are all small constants by initializers.

    Floating-point arithmetic is left alone: only integer expressions and moves of data are computed. An equal constant
    of few numbers that the graph has is used again, so that nodes which differ by nothing else are equal. Returns if
    a node now reads a size from a constant that it did not before, so that inferring shapes again may tell more.
    """
    sizes_known = False
    few: dict[ir.Graph, dict[_Key, ir.Value]] = {}
    for node in [node for graph in model.graphs() for node in graph]:
        if node.op_type not in _MOVES | _ARITHMETIC or node.domain not in ("", "ai.onnx"):
            continue
        result = node.outputs[0]
        if len(node.outputs) != 1 or result.is_graph_output() or result.name is None:
            continue
        try:
            array = _result(node, model.opset_imports.get("", 18))
        except Exception:  # of any kind, when the node is not valid: who runs the model will say so
            continue
        if array is None:
            continue
        sizes_known = sizes_known or any(reader.op_type in _READ_SIZES for reader in result.consumers())
        graph = node.graph
        assert graph is not None
        known = few.setdefault(graph, _few_numbers(graph) if graph not in few else {})
        folded = known.get(_key(array)) or _initializer(graph, str(result.name), array)
        if array.size <= _FEW:
            known[_key(array)] = folded
        ir.convenience.replace_all_uses_with(result, folded)
        graph.remove(node, safe=True)
    return sizes_known


_Key = tuple[str, tuple[int, ...], bytes]


def _key(array: npt.NDArray[np.generic]) -> _Key:
    return array.dtype.str, array.shape, array.tobytes()


def _few_numbers(graph: ir.Graph) -> dict[_Key, ir.Value]:
    """The constants of the graph that have few numbers, by what they are."""
    found: dict[_Key, ir.Value] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size <= _FEW and (array := _constant_array(value)) is not None:
            found.setdefault(_key(array), value)
    return found


def _initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """A new initializer of the graph, in place of the value of that name."""
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _result(node: ir.Node, opset: int) -> npt.NDArray[np.generic] | None:
    """What the node computes, when that is small and known; any exception when the node is not valid."""
    sizes = _sizes(node, opset)
    if sizes is not None:
        return sizes if (sizes >= 0).all() else None
    inputs = _constant_inputs(node)
    if inputs is None or not _is_small(node, [a for a in inputs if a is not None]):
        return None
    return _evaluate(node, inputs, opset)


def _sizes(node: ir.Node, opset: int) -> npt.NDArray[np.int64] | None:
    """Axes of a value that Shape gives, or that Gather or Slice picks out of its shape, -1 for those not known."""
    picks = node.op_type in ("Gather", "Slice")
    shape = node.inputs[0].producer() if picks and node.inputs[0] is not None else node
    if shape is None or shape.op_type != "Shape" or shape.inputs[0] is None or shape.inputs[0].shape is None:
        return None
    whole = [d if isinstance(d, int) else -1 for d in shape.inputs[0].shape]
    start, end = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", len(whole))
    sizes = np.array(whole[start:end], np.int64)
    if not picks:
        return sizes
    picked = [_constant_array(value) for value in node.inputs[1:]]
    if any(value is not None and array is None for value, array in zip(node.inputs[1:], picked, strict=True)):
        return None
    return _evaluate(node, [sizes, *picked], opset).astype(np.int64)


def _constant_array(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """The array of an initializer that is no graph input, small, and of a type that is folded; else None.

    A matrix that is computed when it is read is a weight, however small: what reads it has to find it.
    """
    tensor = None if value is None or value.is_graph_input() else value.const_value
    if tensor is None or tensor.nbytes > LIMIT or tensor.dtype not in _DTYPES:
        return None
    if isinstance(tensor, ChunkedTensor) and len(tensor.shape) > 1:
        return None
    return tensor.numpy()


def _constant_inputs(node: ir.Node) -> list[npt.NDArray[np.generic] | None] | None:
    if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to")) not in _DTYPES:
        return None
    arrays: list[npt.NDArray[np.generic] | None] = []
    for value in node.inputs:
        array = _constant_array(value)
        if value is not None and array is None:
            return None
        if array is not None and array.dtype.kind == "f" and node.op_type not in _MOVES:
            return None
        arrays.append(array)
    return arrays if arrays else None


def _is_small(node: ir.Node, inputs: list[npt.NDArray[np.generic]]) -> bool:
    """Whether the result, of at most 8 bytes an element where the type changes, is within LIMIT; False if invalid."""
    size = max(a.itemsize for a in inputs)
    shapes = [a.shape for a in inputs]
    if node.op_type in _BROADCASTING:
        try:
            elements = math.prod(np.broadcast_shapes(*shapes))
        except ValueError:
            return False
    elif node.op_type == "OneHot":
        elements = inputs[0].size * int(inputs[1].max(initial=0))
    elif node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0)
        elements = inputs[1].size * math.prod((*shapes[0][:axis], *shapes[0][axis:][1:]))
    else:
        elements = sum(a.size for a in inputs)
    return elements * (8 if node.op_type == "Cast" else size) <= LIMIT


def _evaluate(node: ir.Node, inputs: list[npt.NDArray[np.generic] | None], opset: int) -> npt.NDArray[np.generic]:
    values = [None if a is None else ir.Value(name=f"input_{i}") for i, a in enumerate(inputs)]
    alone = ir.Node("", node.op_type, values, list(node.attributes.values()), outputs=[ir.Value(name="output")])
    graph = ir.Graph([v for v in values if v is not None], alone.outputs, nodes=[alone], opset_imports={"": opset})
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {f"input_{i}": a for i, a in enumerate(inputs) if a is not None}
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(result)
