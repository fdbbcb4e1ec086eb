"""Give the weights of the HinaMoE nodes of a model another type, in place: floats or quantised formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.fuse_moe import UniqueNames
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import FIELDS, MoeSpec, split_field
from graph_passes.normalize.inlining import inline_fused
from graph_passes.op_schema import FLOAT_TYPES, INPUTS, PROJECTIONS
from graph_passes.quantize.formats import WeightFormat, either
from graph_passes.quantize.rtn import WeightError
from graph_passes.quantize.tensors import Conversion, Target

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class WeightTypes:
    """What the projections of routed and of shared experts become; None keeps them.

    `symmetric` int8 and int4 weights have no zero points. `accuracy_level` is set on nodes with quantised weights;
    None keeps it.
    """

    routed: Target | None = None
    shared: Target | None = None
    symmetric: bool = False
    accuracy_level: int | None = None

    @property
    def keep_all(self) -> bool:
        """Whether nothing is to be changed."""
        return self.routed is None and self.shared is None and self.accuracy_level is None


@dataclass(frozen=True)
class NodeChange:
    """A HinaMoE node after the conversion, and those of its projections that were converted."""

    node: ir.Node
    accuracy_level_before: int
    accuracy_level: int
    projections: dict[str, Conversion]


def convert_weights(model: ir.Model, types: WeightTypes, progress: Progress | None = None) -> list[NodeChange]:
    """Convert the weights of all HinaMoE nodes of `model` as `types` says.

    Where `types.routed` is given, router weights, biases and the gate of the shared expert become float32. New
    projections are computed when the model is saved, and their errors are known then. `progress(stage, done, total)`
    counts matrices, first in the stage "measuring weights", and in the saving in the stage "quantising".

    Raises WeightError, naming node or tensor, for a node that is not valid, for weights that are quantised already in
    another format, for NaN, infinities and weights beyond the range of the new type, and for a function with such nodes
    that has another opset than the model; the nodes are unchanged then. Functions that hold such nodes are inlined.
    """
    try:
        inline_fused(model)  # each call has weights of its own
    except ValueError as error:
        raise WeightError(str(error)) from error
    nodes = [_Node(node, types) for node in model.graph.all_nodes() if is_hina_moe(node)]
    conversions: dict[object, Conversion] = {}  # several nodes may read the same weights
    for node in nodes:
        for name, target in node.targets.items():
            tensors = [id(value.const_value) for value in node.weights[name]]
            key = (*tensors, node.spec.matrix_shape(name), target)
            node.conversions[name] = conversions.setdefault(key, node.conversion(name))
    unmeasured = [conversion for conversion in conversions.values() if conversion.needs_measuring]
    tick = _counter(progress, "measuring weights", sum(conversion.matrices for conversion in unmeasured))
    for conversion in unmeasured:
        conversion.measure(tick)
    rewriter = _Rewriter(
        UniqueNames(model), _counter(progress, "quantising", sum(c.matrices for c in conversions.values()))
    )
    return [rewriter.rewrite(node) for node in nodes]


def _counter(progress: Progress | None, stage: str, total: int) -> Callable[[], None]:
    """A function that reports one more done each time it is called."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(stage, min(done, total), total)

    return tick


class _Node:
    """One HinaMoE node, checked and not changed yet, and what its projections are to become."""

    def __init__(self, node: ir.Node, types: WeightTypes) -> None:
        self.node, self.types = node, types
        self.conversions: dict[str, Conversion] = {}
        try:
            self.spec, self.weights = spec_of(node), weights_of(node)
            targets = {name: self._target(name) for name in self.spec.projections}
        except ValueError as error:
            raise WeightError(f"the HinaMoE node {node.name} is not valid: {error}") from error
        self.targets = {name: target for name, target in targets.items() if target is not None}

    def conversion(self, name: str) -> Conversion:
        """A new conversion of projection `name`."""
        n, k = self.spec.matrix_shape(name)
        return Conversion(self.weights[name], self._leading(name), (n, k), self.targets[name], self.types.symmetric)

    def _leading(self, name: str) -> tuple[int, ...]:
        return (self.spec.num_experts,) if self.spec.experts_stacked and not FIELDS[name].shared else ()

    def _target(self, name: str) -> Target | None:
        """What projection `name` is to become; None where it stays as it is."""
        target = self.types.shared if FIELDS[name].shared else self.types.routed
        form = self.spec.formats.get(name)
        if form is not None and target is not None:
            asymmetric = self.types.symmetric and f"{name}_zero_points" in self.weights
            if target != form or asymmetric:
                raise WeightError(
                    f"{name} of {self.node.name} is quantised already, as {form}"
                    f"{' with zero points' if asymmetric else ''}; convert the original model"
                )
        if target is None or target == form:
            return None
        shape = (*self._leading(name), *self.spec.matrix_shape(name))
        types = set()
        for value in self.weights[name]:
            tensor = value.const_value
            assert tensor is not None
            types.add(tensor.dtype)
            if (dtype := tensor.dtype.numpy().name) not in FLOAT_TYPES:
                raise ValueError(f"{name} ({value.name}) has type {dtype}, expected {either(FLOAT_TYPES)}")
            if tensor.size != math.prod(shape):
                raise ValueError(f"{name} ({value.name}) is {tensor.shape.numpy()}, expected {list(shape)}")
        return None if types == {target} else target


class _Rewriter:
    """Puts nodes with new weights in the place of old ones."""

    def __init__(self, names: UniqueNames, tick: Callable[[], None]) -> None:
        self._names, self._tick = names, tick
        self._as_float32: dict[ir.Value, ir.Value] = {}

    def rewrite(self, old: _Node) -> NodeChange:
        """Replace `old.node` in its graph; initializers that nothing uses any more go."""
        graph = old.node.graph
        assert isinstance(graph, ir.Graph)
        formats = {name: str(form) for name, form in old.spec.formats.items()}
        fields: dict[str, list[ir.Value]] = {}
        for name, values in old.weights.items():
            if conversion := old.conversions.get(name):
                made = conversion.values(graph, self._names.unique, self._tick)
                fields |= {name + part: new for part, new in made.items()}
                if isinstance(conversion.target, WeightFormat):
                    formats[name] = str(conversion.target)
            elif old.types.routed is None or split_field(name)[0] in PROJECTIONS:
                fields[name] = values
            else:
                fields[name] = [self._float32(value) for value in values]
        level = old.types.accuracy_level
        spec = replace(
            old.spec,
            weight_inputs=tuple(fields),
            weight_formats=tuple(f"{name}={form}" for name, form in formats.items()),
            accuracy_level=old.spec.accuracy_level if level is None or not formats else level,
        )
        inputs: list[ir.Value | None] = [None] * len(INPUTS)
        for index, (item, value) in enumerate(zip(INPUTS, old.node.inputs, strict=False)):
            if value is not None and item.constant and old.types.routed is not None:
                value = self._float32(value)
            inputs[index] = value
        inputs += [value for values in fields.values() for value in values]
        node = _replace(old.node, inputs, spec)
        return NodeChange(node, old.spec.accuracy_level, spec.accuracy_level, old.conversions)

    def _float32(self, value: ir.Value) -> ir.Value:
        """`value`, or a new float32 initializer where it is a constant of 16 bits."""
        tensor = value.const_value
        if tensor is None or tensor.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            return value
        if value not in self._as_float32:
            name = self._names.unique(f"{value.name}.float32")
            wide = ir.Tensor(tensor.numpy().astype(np.float32), name=name)
            assert value.graph is not None
            new = ir.Value(name=name, shape=wide.shape, type=ir.TensorType(wide.dtype), const_value=wide)
            value.graph.register_initializer(new)
            self._as_float32[value] = new
        return self._as_float32[value]


def _replace(old: ir.Node, inputs: list[ir.Value | None], spec: MoeSpec) -> ir.Node:
    graph = old.graph
    assert graph is not None
    new = ir.Node(
        old.domain,
        old.op_type,
        inputs,
        ir.convenience.convert_attributes(spec.attributes()),
        num_outputs=len(old.outputs),
        name=old.name,
        metadata_props=old.metadata_props,
        doc_string=old.doc_string,
    )
    before = [value for value in old.inputs if value is not None]
    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs, new.outputs)
    for value in before:
        if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            assert value.graph is not None and value.name is not None
            value.graph.initializers.pop(value.name, None)
    return new
