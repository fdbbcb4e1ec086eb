"""Evaluation of small constant expressions, such as the arithmetic that exporters put around shapes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

LIMIT = 1 << 16
"""Bytes; nothing larger is read or made."""

# Operators whose result is the same in every implementation: moves of data of any type, and arithmetic, which is folded
# for integers only.
_MOVES = frozenset({"Concat", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where"})
_ARITHMETIC = frozenset({"Add", "Cast", "Div", "Equal", "Mul", "Neg", "Not", "Shape", "Sub"})


_BROADCASTING = frozenset({"Add", "Div", "Equal", "Mul", "Sub", "Where"})
_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


class FoldSmallConstants(ir.passes.InPlacePass):
    """Replace nodes whose inputs are all small constants by initializers.

    Floating-point arithmetic is left alone: only integer expressions and moves of data are computed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply the pass to the main graph."""
        modified = False
        for node in list(model.graph):
            if node.op_type not in _MOVES | _ARITHMETIC or node.domain not in ("", "ai.onnx"):
                continue
            result = node.outputs[0]
            if len(node.outputs) != 1 or result.is_graph_output() or result.name is None:
                continue
            inputs = _constant_inputs(node)
            if inputs is None or not _is_small(node, [a for a in inputs if a is not None]):
                continue
            try:
                array = _evaluate(node, inputs, model.opset_imports.get("", 18))
            except Exception:  # of any kind, when the node is not valid: who runs the model will say so
                continue
            folded = ir.Value(
                name=result.name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                const_value=ir.Tensor(array, name=result.name),
            )
            ir.convenience.replace_all_uses_with(result, folded)
            model.graph.remove(node, safe=True)
            model.graph.register_initializer(folded)
            modified = True
        return ir.passes.PassResult(model, modified)


def _constant_inputs(node: ir.Node) -> list[npt.NDArray[np.generic] | None] | None:
    if node.op_type == "Shape":
        return _static_shape(node)
    if node.op_type == "Gather" and (known := _known_axes(node)) is not None:
        return known
    if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to")) not in _DTYPES:
        return None
    arrays: list[npt.NDArray[np.generic] | None] = []
    for value in node.inputs:
        if value is None:
            arrays.append(None)
            continue
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or tensor.nbytes > LIMIT:
            return None
        if tensor.dtype.is_floating_point() and node.op_type not in _MOVES:
            return None
        if tensor.dtype not in _DTYPES:
            return None
        arrays.append(tensor.numpy())
    return arrays if arrays else None


def _is_small(node: ir.Node, inputs: list[npt.NDArray[np.generic]]) -> bool:
    """Whether the result, of at most 8 bytes an element where the type changes, is within LIMIT; False if invalid."""
    size = max(a.itemsize for a in inputs)
    shapes = [a.shape for a in inputs]
    if node.op_type == "Shape":
        return True
    if node.op_type in _BROADCASTING:
        try:
            elements = math.prod(np.broadcast_shapes(*shapes))
        except ValueError:
            return False
    elif node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0)
        elements = inputs[1].size * math.prod((*shapes[0][:axis], *shapes[0][axis:][1:]))
    else:
        elements = sum(a.size for a in inputs)
    return elements * (8 if node.op_type == "Cast" else size) <= LIMIT


def _static_shape(node: ir.Node) -> list[npt.NDArray[np.generic] | None] | None:
    """For Shape, a stand-in without elements is enough: an array broadcast to the shape of the input."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None or not shape.is_static():
        return None
    return [np.broadcast_to(np.zeros((), np.float32), shape.numpy())]


def _known_axes(node: ir.Node) -> list[npt.NDArray[np.generic] | None] | None:
    """For Gather(Shape(x), axes) whose `axes` of x are known: a stand-in for the shape, and the axes."""
    shape, picked = node.inputs[0].producer() if node.inputs[0] else None, node.inputs[1]
    if shape is None or shape.op_type != "Shape" or shape.attributes or shape.inputs[0] is None:
        return None
    if shape.inputs[0].shape is None or picked is None or picked.const_value is None or picked.is_graph_input():
        return None
    sizes = [d if isinstance(d, int) else -1 for d in shape.inputs[0].shape]
    axes = picked.const_value.numpy()
    if any(not -len(sizes) <= a < len(sizes) or sizes[a] < 0 for a in axes.ravel()):
        return None
    return [np.array(sizes, np.int64), axes]


def _evaluate(node: ir.Node, inputs: list[npt.NDArray[np.generic] | None], opset: int) -> npt.NDArray[np.generic]:
    values = [None if a is None else ir.Value(name=f"input_{i}") for i, a in enumerate(inputs)]
    alone = ir.Node("", node.op_type, values, list(node.attributes.values()), outputs=[ir.Value(name="output")])
    graph = ir.Graph([v for v in values if v is not None], alone.outputs, nodes=[alone], opset_imports={"": opset})
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {f"input_{i}": a for i, a in enumerate(inputs) if a is not None}
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(result)
