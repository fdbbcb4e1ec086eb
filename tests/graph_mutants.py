"""Graphs with one small thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

Change = Callable[[ir.Model, ir.Node], None]


def mutants(make: Callable[[], ir.Model]) -> Iterator[tuple[str, ir.Model]]:
    """What `make` gives, one small thing wrong: an integer, an attribute, the order of operands, a node left out."""
    for position, node in enumerate(make().graph):
        for what, change in _changes(node):
            model = make()
            changed = list(model.graph)[position]
            change(model, changed)
            for value in (v for n in model.graph for v in n.outputs if not v.is_graph_output()):
                value.shape = None  # inferred anew
            yield f"{changed.name}: {what}", model


def _changes(node: ir.Node) -> Iterator[tuple[str, Change]]:
    for index, value in enumerate(node.inputs):
        array = None if value is None or value.const_value is None else value.const_value.numpy()
        if array is not None and array.size <= 4:
            yield f"input {index} larger", _with_input(index, array + 1)
            yield f"input {index} smaller", _with_input(index, array - 1)
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.INT:
            yield f"other {name}", _with_attribute(ir.AttrInt64(name, 1 - attribute.as_int()))
        elif attribute.type == ir.AttributeType.INTS:
            yield f"{name} reversed", _with_attribute(ir.AttrInt64s(name, attribute.as_ints()[::-1]))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().size <= 4:
            array = attribute.as_tensor().numpy()
            yield f"{name} larger", _with_attribute(ir.AttrTensor(name, ir.Tensor(array + 1)))
            yield f"{name} smaller", _with_attribute(ir.AttrTensor(name, ir.Tensor(array - 1)))
    if node.inputs and not any(value.is_graph_output() for value in node.outputs):
        yield "left out", lambda _, n: ir.convenience.replace_all_uses_with(n.outputs[0], n.inputs[0])
    if len(node.inputs) == 2:
        yield "operands swapped", _swap


def _with_input(index: int, array: np.ndarray) -> Change:
    def change(model: ir.Model, node: ir.Node) -> None:
        value = ir.Value(name="mutant", const_value=ir.Tensor(array, name="mutant"))
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        model.graph.register_initializer(value)
        node.replace_input_with(index, value)

    return change


def _with_attribute(attribute: ir.Attr) -> Change:
    def change(_: ir.Model, node: ir.Node) -> None:
        node.attributes[attribute.name] = attribute

    return change


def _swap(_: ir.Model, node: ir.Node) -> None:
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)
