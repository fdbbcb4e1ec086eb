"""MoeMatch -> HinaMoE node. The only file that creates the node.

Cases, per routed weight field:
1. one stacked `[E, N, K]` initializer, or E slices of one: referenced as it is (`experts_stacked=1`).
2. E initializers that lie `[N, K]`: referenced as they are (`experts_stacked=0`).
3. anything else (stored `[K, N]`, or fields of both kinds): one stacked tensor, computed when the model is saved.

After the rewrite the nodes and initializers that only served the old block are gone; values with other consumers stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graph_passes.external_data import release
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.moe_spec import FIELDS
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE, OPSET_VERSION


def fuse(model: ir.Model, match: MoeMatch) -> ir.Node:
    """Replace the block of `match` by a HinaMoE node and return it.

    The node's output takes the name, shape and type of `match.output`. Raises ValueError when the match does not
    belong to `model`, or when a weight's size contradicts the spec; the model is then unchanged.
    """
    graph, old = match.output.graph, match.output.producer()
    if graph is None or old is None:
        raise ValueError(f"{match.name}: its output is not computed in the model")
    builder = _Builder(graph, _UniqueNames(model), match)
    spec = replace(match.spec, experts_stacked=builder.stacked)
    inputs = builder.inputs()
    node = ir.Node(DOMAIN, OP_TYPE, inputs, ir.convenience.convert_attributes(spec.attributes()), num_outputs=1)
    node.name = builder.names.unique(f"{match.name}/{OP_TYPE}")
    for value in builder.created:
        graph.register_initializer(value)
    for imports in (graph.opset_imports, model.opset_imports):
        imports[DOMAIN] = OPSET_VERSION
    graph.insert_before(old, node)
    _take_over(match, node.outputs[0], builder.names)
    _sweep(graph, old)
    return node


class _UniqueNames:
    """Names for new values and nodes that clash with none of the model."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str | None] = set()
        for graph in model.graphs():
            self._taken.update(graph.initializers)
            self._taken.update(value.name for value in (*graph.inputs, *graph.outputs))
            for node in graph:
                self._taken.add(node.name)
                self._taken.update(value.name for value in node.outputs)

    def unique(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


class _Builder:
    """Collects the inputs of the node; new initializers are in `created` and not yet part of the graph."""

    def __init__(self, graph: ir.Graph, names: _UniqueNames, match: MoeMatch) -> None:
        self.graph = graph
        self.names = names
        self.match = match
        self.created: list[ir.Value] = []
        routed = [name for name in match.spec.weight_inputs if not FIELDS[name].shared]
        self.stacked = not all(self._lies_per_expert(name) for name in routed)

    def inputs(self) -> list[ir.Value | None]:
        """Inputs of the node in the order of the op schema, then the weights; trailing absent inputs are kept."""
        match = self.match
        values: list[ir.Value | None] = [match.hidden_states]
        for item in INPUTS[1:]:
            if item.name in match.constants:
                shape = {"router_weight": (match.spec.num_experts, match.spec.hidden_size)}
                expected = shape.get(item.name, (match.spec.num_experts,))
                values.append(self._constant(item.name, match.constants[item.name], expected))
            else:
                values.append(match.inputs.get(item.name))
        for name in match.spec.weight_inputs:
            values.extend(self._field(name, match.weights[name]))
        return values

    def _lies_per_expert(self, name: str) -> bool:
        sources, shape = self.match.weights[name], self.match.spec.field_shape(name)
        return len(sources) == self.match.spec.num_experts and all(self._lies(source, shape) for source in sources)

    def _lies(self, source: WeightSource, shape: tuple[int, ...]) -> bool:
        """Whether the op can read the initializer as it is."""
        value = source.value
        return source.in_place and source.shape == shape and value.is_initializer() and value.graph is self.graph

    def _field(self, name: str, sources: tuple[WeightSource, ...]) -> list[ir.Value]:
        shape = self.match.spec.field_shape(name)
        experts = self.match.spec.num_experts
        if FIELDS[name].shared:
            return [self._constant(name, sources[0], shape)]
        if len(sources) not in (1, experts):
            raise ValueError(f"{self.match.name}: {name} has {len(sources)} tensors for {experts} experts")
        if not self.stacked:
            return [self._constant(name, source, shape) for source in sources]
        if len(sources) == 1:
            return [self._constant(name, sources[0], (experts, *shape))]
        whole = sources[0].value
        if _size(whole) == experts * math.prod(shape) and all(
            s.value is whole and s.index == e and not s.transpose for e, s in enumerate(sources)
        ):
            return [self._constant(name, WeightSource(whole), (experts, *shape))]
        for source in sources:
            _check_size(self.match, name, source, shape)
            if source.dtype != sources[0].dtype:
                raise ValueError(
                    f"{self.match.name}: the experts' {name} have types {sources[0].dtype}, {source.dtype}"
                )
        return [self._create(name, lambda: _stack(sources, shape), sources[0].dtype, (experts, *shape))]

    def _constant(self, name: str, source: WeightSource, shape: tuple[int, ...]) -> ir.Value:
        """The initializer itself when it can be read where it lies, else a new one of `shape`."""
        _check_size(self.match, name, source, shape)
        if self._lies(source, shape):
            return source.value
        return self._create(name, lambda: _read(source, shape), source.dtype, shape)

    def _create(
        self, name: str, evaluate: Callable[[], ir.TensorProtocol], dtype: ir.DataType, shape: tuple[int, ...]
    ) -> ir.Value:
        name = self.names.unique(f"{self.match.name}.{name}")
        tensor = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
        self.created.append(value)
        return value


def _size(value: ir.Value) -> int:
    return value.const_value.size if value.const_value is not None else 0


def _check_size(match: MoeMatch, name: str, source: WeightSource, shape: tuple[int, ...]) -> None:
    if math.prod(source.shape) != math.prod(shape):
        raise ValueError(f"{match.name}: {name} ({source.value.name}) is {list(source.shape)}, expected {list(shape)}")


def _read(source: WeightSource, shape: tuple[int, ...]) -> ir.Tensor[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    array = source.tensor().numpy().reshape(shape).copy()
    release(source.value.const_value)
    return ir.Tensor(array, dtype=source.dtype)


def _stack(
    sources: tuple[WeightSource, ...], shape: tuple[int, ...]
) -> ir.Tensor[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    stacked = np.empty((len(sources), *shape), sources[0].dtype.numpy())
    for row, source in zip(stacked, sources, strict=True):
        row[...] = source.tensor().numpy().reshape(shape)
        release(source.value.const_value)
    return ir.Tensor(stacked, dtype=sources[0].dtype)


def _take_over(match: MoeMatch, new: ir.Value, names: _UniqueNames) -> None:
    """Give `new` the name, type, shape and consumers of the block's output."""
    old, like = match.output, match.hidden_states
    new.type = old.type or like.type
    shape = old.shape or like.shape
    new.shape = shape.copy() if shape is not None else None
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = names.unique(f"{match.name}/replaced")
    new.name = name


def _sweep(graph: ir.Graph, start: ir.Node) -> None:
    """Remove `start` and, going backwards, every node and initializer that nothing uses any more."""
    pending = [start]
    while pending:
        node = pending.pop()
        if node.graph is not graph or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        for value in inputs:
            if producer := value.producer():
                pending.append(producer)
            elif value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                assert value.name is not None
                graph.initializers.pop(value.name, None)
