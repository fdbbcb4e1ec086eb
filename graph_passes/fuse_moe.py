"""MoeMatch -> HinaMoE node. The only file that creates the node.

Cases, per weight field:
1. one stacked `[E, N, K]` initializer, or E slices of one: referenced as it is (`experts_stacked=1`).
2. E initializers that lie `[N, K]`: referenced as they are (`experts_stacked=0`).
3. anything else (stored `[K, N]`, or fields of both kinds): one `StackedExperts`, computed when the model is saved.

After the rewrite the nodes and initializers that only served the old block are gone; values with other consumers stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from graph_passes.external_data import release
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.moe_spec import FIELDS, MoeSpec, split_field
from graph_passes.op_schema import ATTRIBUTES, DOMAIN, FLOAT_TYPES, INPUTS, OP_TYPE, OPSET_VERSION
from graph_passes.streaming import ChunkedTensor


def check(match: MoeMatch) -> None:
    """Raise ValueError, naming the tensor, when a HinaMoE node cannot take what `match` names.

    Every tensor must have a type that the op knows and as many elements as the spec asks for, experts that are to be
    stacked must share a type, and numbers must be finite. A match that passes can be proven and fused.
    """
    spec = match.spec
    if match.output.graph is None or match.output.producer() is None:
        raise ValueError(f"its output {match.output.name} is not computed in the model")
    for attribute in ATTRIBUTES:
        finite = isinstance(attribute.default, float) and math.isfinite(attribute.default)
        if finite and not math.isfinite(number := getattr(spec, attribute.name)):
            raise ValueError(f"{attribute.name} is {number} in the graph, HinaMoE takes finite numbers")
    allowed = {item.name: item.types for item in INPUTS}
    for name, value in {"hidden_states": match.hidden_states, **match.inputs}.items():
        if value.dtype is not None:
            _check_type(name, value, value.dtype, allowed[name])
    for name, source in match.constants.items():
        _check_source(name, source, _constant_shape(match, name), allowed[name])
    for name in spec.weight_inputs:
        sources, shape = match.weights[name], match.field_shape(name)
        if FIELDS[name].shared:
            _check_source(name, sources[0], shape, _types(spec, name))
            continue
        if len(sources) == 1:
            shape = (spec.num_experts, *shape)
        elif len(sources) != spec.num_experts:
            raise ValueError(f"{name} has {len(sources)} tensors for {spec.num_experts} experts")
        for source in sources:
            _check_source(name, source, shape, _types(spec, name))
            if source.dtype != sources[0].dtype and _is_stacked(match):
                raise ValueError(
                    f"the experts' {name} have types {sources[0].dtype} and {source.dtype}; use one for all"
                )


def _is_stacked(match: MoeMatch) -> bool:
    """Whether the node takes one tensor per field; else every expert's tensors are read where they lie."""

    def lie_per_expert(name: str) -> bool:
        sources, shape = match.weights[name], match.field_shape(name)
        return len(sources) == match.spec.num_experts and all(_lies(name, source, shape, match) for source in sources)

    return not all(lie_per_expert(name) for name in match.spec.weight_inputs if not FIELDS[name].shared)


def _lies(name: str, source: WeightSource, shape: tuple[int, ...], match: MoeMatch) -> bool:
    """Whether the op can read the initializer as it is; codes may have an axis of blocks, scales may lie flat."""
    value, shapes = source.value, [shape]
    projection, part = split_field(name)
    if part:
        shapes.append((*shape[:-2], math.prod(shape[-2:])))
    elif (form := match.spec.formats.get(projection)) is not None:
        blocks = form.blocks(match.spec.matrix_shape(projection)[-1])
        shapes.append((*shape[:-1], blocks, shape[-1] // blocks))
    return source.in_place and source.shape in shapes and value.is_initializer()


def _types(spec: MoeSpec, name: str) -> tuple[str, ...]:
    """Element types that a weight field may have."""
    projection, part = split_field(name)
    form = spec.formats.get(projection)
    if form is None or (part == "_scales" and form.name != "mxfp4"):
        return FLOAT_TYPES
    if form.name == "int8":
        return ("uint8", "int8")
    return ("uint8", *FLOAT_TYPES) if part == "_zero_points" else ("uint8",)


def _check_source(name: str, source: WeightSource, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    _check_type(name, source.value, source.dtype, types)
    if math.prod(source.shape) != math.prod(shape):
        raise ValueError(f"{name} ({source.value.name}) is {list(source.shape)}, expected {list(shape)}")


def _check_type(name: str, value: ir.Value, dtype: ir.DataType, types: tuple[str, ...]) -> None:
    if (got := dtype.numpy().name) not in types:
        raise ValueError(
            f"{name} ({value.name}) has type {got}, HinaMoE takes {', '.join(types)}; export the model "
            "in one of these types"
        )


def _constant_shape(match: MoeMatch, name: str) -> tuple[int, ...]:
    experts = match.spec.num_experts
    return (experts, match.spec.hidden_size) if name == "router_weight" else (experts,)


def fuse(model: ir.Model, match: MoeMatch, names: UniqueNames | None = None) -> ir.Node:
    """Replace the block of `match` by a HinaMoE node and return it.

    The node's output takes the name, shape and type of `match.output`. `names` may be shared by the blocks of one
    model, so that its names are read once. Raises the ValueErrors of `check`; the model is then unchanged.
    """
    check(match)
    graph, old = _graph_of(match), match.output.producer()
    assert old is not None
    names = names or UniqueNames(model)
    builder = _Builder(names, match)
    spec = replace(match.spec, experts_stacked=builder.stacked)
    inputs = builder.inputs()
    node = ir.Node(DOMAIN, OP_TYPE, inputs, ir.convenience.convert_attributes(spec.attributes()), num_outputs=1)
    node.name = names.unique(f"{match.name}/{OP_TYPE}")
    for value in builder.created:
        graph.register_initializer(value)
    for imports in (graph.opset_imports, model.opset_imports):
        imports[DOMAIN] = OPSET_VERSION
    graph.insert_before(old, node)
    _take_over(match, node.outputs[0], names)
    _sweep(old)
    return node


class UniqueNames:
    """Names for new values and nodes that clash with none of the model, and the initializers that were `made` so far.

    `tensors` are what these hold: initializers of several bodies may hold the same, which is saved once.
    """

    def __init__(self, model: ir.Model) -> None:
        self.made: dict[tuple[ir.Graph, tuple[WeightSource, ...], tuple[int, ...]], ir.Value] = {}
        self.tensors: dict[tuple[tuple[WeightSource, ...], tuple[int, ...]], ir.TensorProtocol] = {}
        self._taken: set[str | None] = set()
        for graph in model.graphs():
            self._taken.update(graph.initializers)
            self._taken.update(value.name for value in (*graph.inputs, *graph.outputs))
            for node in graph:
                self._taken.add(node.name)
                self._taken.update(value.name for value in node.outputs)

    def unique(self, wanted: str) -> str:
        """`wanted`, numbered if it is in use; it is in use from now on."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


class StackedExperts(ChunkedTensor):
    """One expert per source as one tensor `[E, *shape]`, computed when it is read; `expert` reads a single one."""

    __slots__ = ("_each", "_sources")

    def __init__(self, sources: tuple[WeightSource, ...], shape: tuple[int, ...], name: str) -> None:
        super().__init__(self._experts, sources[0].dtype, ir.Shape((len(sources), *shape)), name=name)
        self._sources, self._each = sources, shape

    def expert(self, index: int) -> npt.NDArray[Any]:
        """The tensor of one expert, a copy."""
        return _read(self._sources[index], self._each)

    def _experts(self) -> Iterator[npt.NDArray[Any]]:
        return (self.expert(index) for index in range(len(self._sources)))


class _Builder:
    """Collects the inputs of the node; new initializers are in `created` and not yet part of the graph."""

    def __init__(self, names: UniqueNames, match: MoeMatch) -> None:
        self.names = names
        self.match = match
        self.created: list[ir.Value] = []
        self.stacked = _is_stacked(match)

    def inputs(self) -> list[ir.Value | None]:
        """Inputs of the node in the order of the op schema, then the weights; trailing absent inputs are kept."""
        match = self.match
        values: list[ir.Value | None] = [match.hidden_states]
        for item in INPUTS[1:]:
            if item.name in match.constants:
                shape = _constant_shape(match, item.name)
                values.append(self._constant(item.name, match.constants[item.name], shape))
            else:
                values.append(match.inputs.get(item.name))
        for name in match.spec.weight_inputs:
            values.extend(self._field(name, match.weights[name]))
        return values

    def _field(self, name: str, sources: tuple[WeightSource, ...]) -> list[ir.Value]:
        shape = self.match.field_shape(name)
        experts = self.match.spec.num_experts
        if not self.stacked or FIELDS[name].shared:
            return [self._constant(name, source, shape) for source in sources]
        if len(sources) == 1:
            return [self._whole(name, sources[0], shape)]
        whole = sources[0].value
        if _size(whole) == experts * math.prod(shape) and all(
            source == WeightSource(whole, index=e) for e, source in enumerate(sources)
        ):
            return [self._constant(name, WeightSource(whole), (experts, *shape))]
        return [self._stack(name, sources, shape)]

    def _whole(self, name: str, source: WeightSource, shape: tuple[int, ...]) -> ir.Value:
        """All experts of a field from one initializer."""
        experts = self.match.spec.num_experts
        if not source.in_place and source.index is None and source.shape == (experts, *shape):
            each = tuple(replace(source, index=e) for e in range(experts))
            return self._stack(name, each, shape)
        return self._constant(name, source, (experts, *shape))

    def _constant(self, name: str, source: WeightSource, shape: tuple[int, ...]) -> ir.Value:
        """The initializer itself when it can be read where it lies, else a new one of `shape`.

        In a body it gets one that holds the same tensor: ONNX Runtime up to 1.23 shows an operator only the
        initializers of its own graph.
        """
        if _lies(name, source, shape, self.match):
            if source.value.graph is _graph_of(self.match):
                return source.value
            stored = source.stored
            return self._add(str(source.value.name), (source,), tuple(stored.shape.numpy()), lambda new: stored)
        wanted = f"{self.match.name}.{name}"

        def lazy(new: str) -> ir.LazyTensor:
            return ir.LazyTensor(
                lambda: ir.Tensor(_read(source, shape), dtype=source.dtype),
                dtype=source.dtype,
                shape=ir.Shape(shape),
                name=new,
            )

        return self._add(wanted, (source,), shape, lazy)

    def _stack(self, name: str, sources: tuple[WeightSource, ...], shape: tuple[int, ...]) -> ir.Value:
        wanted = f"{self.match.name}.{name}"
        return self._add(wanted, sources, (len(sources), *shape), lambda new: StackedExperts(sources, shape, new))

    def _add(
        self,
        wanted: str,
        sources: tuple[WeightSource, ...],
        shape: tuple[int, ...],
        tensor_named: Callable[[str], ir.TensorProtocol],
    ) -> ir.Value:
        """A new initializer of the block's graph; blocks that read the same weights share it, or its tensor."""
        made, tensors, key = self.names.made, self.names.tensors, (sources, shape)
        graph = _graph_of(self.match)
        if (graph, *key) not in made:
            name = self.names.unique(wanted)
            tensor = tensors.setdefault(key, tensor_named(name))
            value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.created.append(value)
            made[(graph, *key)] = value
        return made[(graph, *key)]


def _graph_of(match: MoeMatch) -> ir.Graph:
    """The graph that the block's output belongs to: the main graph, or a body."""
    graph = match.output.graph
    assert isinstance(graph, ir.Graph)
    return graph


def _size(value: ir.Value) -> int:
    return value.const_value.size if value.const_value is not None else 0


def _read(source: WeightSource, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A copy of the tensor in memory; where it lies is unmapped again."""
    array: npt.NDArray[Any] = source.tensor().numpy().reshape(shape)
    if source.in_place:
        array = array.copy()  # else it is a copy already
    release(source.value.const_value)
    return array


def _take_over(match: MoeMatch, new: ir.Value, names: UniqueNames) -> None:
    """Give `new` the name, type, shape and consumers of the block's output."""
    old, like = match.output, match.hidden_states
    new.type = old.type or like.type
    shape = old.shape or like.shape
    new.shape = shape.copy() if shape is not None else None
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = names.unique(f"{match.name}/replaced")
    new.name = name


def _sweep(start: ir.Node) -> None:
    """Remove `start` and, going backwards, every node and initializer that nothing uses any more.

    What a body alone has used of the graphs around it goes as well.
    """
    pending = [start]
    while pending:
        node = pending.pop()
        if node.graph is None or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        for value in inputs:
            if producer := value.producer():
                pending.append(producer)
            elif value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                assert value.name is not None and isinstance(value.graph, ir.Graph)
                value.graph.initializers.pop(value.name, None)
