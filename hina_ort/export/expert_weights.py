"""Give traced HinaMoE nodes the weights of the checkpoint, where they lie and as they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from graph_passes.external_data import ModelFileError
from graph_passes.fuse_moe import StackedExperts
from graph_passes.matchers.match import WeightSource
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.op_schema import DOMAIN, FLOAT_TYPES, INPUTS, OP_TYPE
from hina_ort.export.shards import StoredTensor
from hina_ort.export.weight_map import Source

Place = Callable[[StoredTensor], ir.ExternalTensor]
"""Says where the model finds a tensor of the checkpoint."""


@dataclass(frozen=True)
class _Field:
    """A weight field of a traced node: the `source` of its parameter, `[E, in, out]` where it is `transposed`."""

    source: Source
    transposed: bool


@dataclass(frozen=True)
class _Weights:
    """What a node is to read: the tensors of each field, and what its attributes say about them."""

    fields: dict[str, list[ir.Value]]
    attributes: dict[str, Any]


def place_experts(model: ir.Model, sources: dict[str, Source], place: Place) -> int:
    """Point the HinaMoE nodes, which read parameters of the traced module, at tensors of the checkpoint; count them.

    Experts that lie one by one are read one by one, stacked ones stacked, MXFP4 as MXFP4. What lies otherwise (`[in,
    out]`, or merged in another way) is computed when the model is saved.
    """
    nodes = [node for node in all_nodes(model) if is_hina_moe(node)]
    for node in nodes:
        values = [value for value in node.inputs[len(INPUTS) :] if value is not None]
        parameters = [_parameter(value) for value in values]
        names = str(node.attributes["weight_inputs"].as_string()).split()
        fields = {
            name: _Field(sources[str(parameter.name)], parameter is not value)
            for name, value, parameter in zip(names, values, parameters, strict=True)
        }
        weights = _per_expert(fields, place) or _mxfp4(fields, place) or _stacked(fields, place)
        _replace(model, node, weights, str(parameters[0].name).rpartition(".")[0])
        for value, parameter in zip(values, parameters, strict=True):
            _drop_unused(model, value, parameter)
    return len(nodes)


def place_drawn_in(model: ir.Model, sources: dict[str, Source], place: Place) -> None:
    """Let HinaMoE nodes read what was drawn into them, parameters of the module, where it lies in the checkpoint."""
    for node in all_nodes(model):
        for value in node.inputs if is_hina_moe(node) else ():
            source = None if value is None else sources.get(str(value.name))
            if value is None or source is None or any(not is_hina_moe(use.node) for use in value.uses()):
                continue
            stored = source.stored
            if stored is not None and stored.shape == source.shape and stored.dtype.numpy().name in FLOAT_TYPES:
                value.const_value = place(stored)
                value.type = ir.TensorType(stored.dtype)


def _parameter(value: ir.Value) -> ir.Value:
    """The parameter that a node reads, maybe through a Transpose of the last two axes."""
    node = value.producer()
    if node is None:
        return value
    if node.op_type != "Transpose" or node.inputs[0] is None or node.inputs[0].producer() is not None:
        raise ModelFileError(f"the experts' weights {value.name} are computed by {node.op_type}; report this model")
    return node.inputs[0]


def _per_expert(fields: dict[str, _Field], place: Place) -> _Weights | None:
    """One tensor per expert and projection, when all fields lie so."""
    found: dict[str, list[ir.Value]] = {}
    for name, field in fields.items():
        lists = field.source.experts()
        if lists is None or field.transposed:
            return None
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" and len(lists) == 2 else (name,)
        if len(parts) != len(lists):
            return None
        found |= {part: [_placed(tensor, place) for tensor in each] for part, each in zip(parts, lists, strict=True)}
    return _Weights(found, {"experts_stacked": 0})


def _mxfp4(fields: dict[str, _Field], place: Place) -> _Weights | None:
    """Codes `[E, N, K / 32, 16]` and scales `[E, N, K / 32]`, when the projections lie so; biases lie stacked."""
    found: dict[str, list[ir.Value]] = {}
    formats = []
    for name, field in fields.items():
        parts = field.source.mxfp4()
        if parts is not None:
            found |= {name: [_placed(parts[0], place)], f"{name}_scales": [_placed(parts[1], place)]}
            formats.append(f"{name}=mxfp4")
        elif name.endswith("_proj"):
            return None
        else:
            found[name] = [_whole(field, name, place)]
    return _Weights(found, {"weight_formats": " ".join(formats)})


def _stacked(fields: dict[str, _Field], place: Place) -> _Weights:
    """One tensor `[E, N, K]` for each field."""
    return _Weights({name: [_whole(field, name, place)] for name, field in fields.items()}, {})


def _whole(field: _Field, name: str, place: Place) -> ir.Value:
    """All experts of a field: where they lie, or computed when the model is saved."""
    source, stored = field.source, field.source.stored
    if stored is not None and stored.shape == source.shape and not field.transposed:
        return _placed(stored, place)
    if stored is not None and stored.shape == source.shape:
        whole = _placed(stored, place)
        each = tuple(WeightSource(whole, transpose=True, index=expert) for expert in range(source.shape[0]))
        return _value(f"{source.name}.transposed", StackedExperts(each, each[0].shape, source.name))
    shape = (*source.shape[:-2], source.shape[-1], source.shape[-2]) if field.transposed else source.shape
    lazy = ir.LazyTensor(
        partial(_computed, field), dtype=source.dtype, shape=ir.Shape(shape), name=f"{source.name}.{name}"
    )
    return _value(str(lazy.name), lazy)


def _computed(field: _Field) -> ir.TensorProtocol:
    array = field.source.numpy()
    return ir.Tensor(array.swapaxes(-1, -2).copy() if field.transposed else array, dtype=field.source.dtype)


def _placed(tensor: StoredTensor, place: Place) -> ir.Value:
    return _value(tensor.name, place(tensor))


def _value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def _replace(model: ir.Model, node: ir.Node, weights: _Weights, module: str) -> None:
    """Put a node with `weights` in the place of `node`; it has the name of the `module` that its parameters are of."""
    initializers = model.graph.initializers
    values = [initializers.setdefault(str(v.name), v) for each in weights.fields.values() for v in each]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    attributes |= {"weight_inputs": " ".join(weights.fields), **weights.attributes}
    inputs = [*node.inputs[: len(INPUTS)], *values]
    new = ir.Node(DOMAIN, OP_TYPE, inputs, ir.convenience.convert_attributes(attributes), name=f"{module}/{OP_TYPE}")
    output, old = new.outputs[0], node.outputs[0]
    output.type, output.shape = old.type, old.shape
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], [old], [output])
    output.name = f"{module}/output"


def _drop_unused(model: ir.Model, *values: ir.Value) -> None:
    """Remove initializers, and Transposes of such, that nothing reads any more."""
    for value in values:
        if value.uses():
            continue
        if (node := value.producer()) is not None:
            assert node.graph is not None
            node.graph.remove(node, safe=True)
        else:
            model.graph.initializers.pop(str(value.name), None)
