"""Standard ONNX operators written one after the other: what a rewrite that makes many nodes says again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.fuse_moe import UniqueNames

FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32

_KEEP_TYPE = frozenset({"Reshape", "Gather", "GatherND"})


class Constants:
    """Small initializers of one graph, each made once."""

    def __init__(self, graph: ir.Graph, names: UniqueNames) -> None:
        self._graph, self._names = graph, names
        self._made: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def of(self, array: npt.NDArray[Any]) -> ir.Value:
        """The initializer that holds `array`."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._made:
            tensor = ir.Tensor(array, name=self._names.unique(f"constants/{array.dtype.name}_{len(self._made)}"))
            value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self._graph.register_initializer(value)
            self._made[key] = value
        return self._made[key]


class Nodes:
    """New nodes in `nodes`, in an order in which they can run; they are not part of a graph yet.

    Their names begin with `path`; `opset` is that of the model, 13 or later.
    """

    def __init__(self, path: str, opset: int, names: UniqueNames, constants: Constants) -> None:
        self.nodes: list[ir.Node] = []
        self._path, self._opset, self._names, self.constants = path, opset, names, constants
        self._wide: dict[ir.Value, ir.Value] = {}

    @contextmanager
    def within(self, folder: str) -> Iterator[None]:
        """Put `folder` into the path of the nodes that the body makes."""
        before, self._path = self._path, f"{self._path}/{folder}"
        try:
            yield
        finally:
            self._path = before

    def ops(self, op_type: str, *inputs: ir.Value, count: int, name: str = "", **attributes: Any) -> Sequence[ir.Value]:
        """A new node with `count` outputs, called `name` (else `op_type`) below the path."""
        given = {key: int(value) if isinstance(value, ir.DataType) else value for key, value in attributes.items()}
        unique = self._names.unique(f"{self._path}/{name or op_type}")
        node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(given), num_outputs=count, name=unique)
        for index, value in enumerate(node.outputs):
            value.name = unique if count == 1 else self._names.unique(f"{unique}.{index}")
        if op_type in _KEEP_TYPE:
            node.outputs[0].type = inputs[0].type
        self.nodes.append(node)
        return node.outputs

    def op(self, op_type: str, *inputs: ir.Value, name: str = "", **attributes: Any) -> ir.Value:
        """A new node with one output."""
        return self.ops(op_type, *inputs, count=1, name=name, **attributes)[0]

    def integer(self, value: int) -> ir.Value:
        """A constant int64 scalar."""
        return self.constants.of(np.array(value, np.int64))

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A constant int64 vector."""
        return self.constants.of(np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        """A constant float32 scalar."""
        return self.constants.of(np.array(value, np.float32))

    def filled_like(self, value: ir.Value, number: float) -> ir.Value:
        """A float32 tensor in the shape of `value` that holds `number` everywhere."""
        element = ir.Tensor(np.array([number], np.float32))
        return self.op("ConstantOfShape", self.op("Shape", value), value=element)

    def float32(self, value: ir.Value) -> ir.Value:
        """`value` as float32, cast at most once; one whose type is not known is cast too."""
        if value.dtype == FLOAT:
            return value
        if value not in self._wide:
            self._wide[value] = self.op("Cast", value, to=FLOAT)
        return self._wide[value]

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        """`value` in a constant shape."""
        return self.op("Reshape", value, self.ints(shape))

    def unsqueeze(self, value: ir.Value) -> ir.Value:
        """`value` with a last axis of size 1 behind the others."""
        return self.op("Unsqueeze", value, self.ints([-1]))

    def columns(self, value: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
        """value[:, start:end:step]."""
        return self.op("Slice", value, *(self.ints([number]) for number in (start, end, 1, step)))

    def reduce(self, op_type: str, value: ir.Value, *axes: int, keepdims: int) -> ir.Value:
        """A reduction over `axes`, which became an input of ReduceSum first, of the others in opset 18."""
        if self._opset < 18 and op_type != "ReduceSum":
            return self.op(op_type, value, axes=list(axes), keepdims=keepdims)
        return self.op(op_type, value, self.ints(axes), keepdims=keepdims)

    def gemm(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, name: str) -> ir.Value:
        """x @ weight.T + bias."""
        return self.op("Gemm", *([x, weight] if bias is None else [x, weight, bias]), transB=1, name=name)

    def looked_up(self, table: npt.NDArray[Any], values: ir.Value) -> ir.Value:
        """table[values] for unsigned bytes `values`."""
        return self.op("Gather", self.constants.of(table), self.op("Cast", values, to=INT32), axis=0)
