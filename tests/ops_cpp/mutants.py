"""Models with one fault each, and what the error must say. Every fault is one by construction: no mutant is valid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from graph_passes.moe_spec import split_field
from graph_passes.op_schema import ATTRIBUTES, FLOAT_TYPES, INPUTS
from tests import quantised
from tests.ops_cpp.format_mutants import formats
from tests.ops_cpp.mutant_bases import Base, Mutant, bases, edited_tensor, with_attribute
from tests.tensors import ONNX_TYPES, make_tensor, numpy_type

FIRST_WEIGHT = len(INPUTS)
ANY_PROJECTION = r"(gate_up_proj|gate_proj|up_proj|down_proj)"
HUGE = (2**31, 2**40, 2**62, -(2**63))


def mutants() -> list[Mutant]:
    """All mutants, in an order that does not change."""
    found: list[Mutant] = []
    for base in bases():
        for family in FAMILIES:
            found += family(base)
    return found


# Tensors


def mutable_tensors(base: Base) -> Iterator[tuple[str, np.ndarray]]:
    """Initializers, of per-expert ones only the first, one between and the last."""
    experts = base.node.spec.num_experts
    for name, value in base.node.initializers().items():
        if "." not in name or int(name.split(".")[1]) in (0, experts // 2, experts - 1):
            yield name, value


def shape_pattern(shape: tuple[int, ...]) -> str:
    return r"\[" + r",\s*".join(map(str, shape)) + r"\]"


def other_shape(base: Base, name: str) -> tuple[int, ...]:
    """The other shape that the tensor may have: blocks as an axis, or flattened (see `quantised.reshaped`)."""
    field, _, expert = name.partition(".")
    if split_field(field)[0] not in base.node.spec.formats:
        return ()
    value = quantised.reshaped(base.node.spec, base.node.weights)[field]
    shape: tuple[int, ...] = value[int(expert)].shape if expert else value.shape
    return shape


def tensor_shapes(base: Base) -> Iterator[Mutant]:
    rng = np.random.default_rng(2)
    for name, value in mutable_tensors(base):
        shapes = []
        for axis, size in enumerate(value.shape):
            for other in (size + 1, size - 1, 0):
                shapes.append((*value.shape[:axis], other, *value.shape[axis + 1 :]))
        shapes += [value.shape[::-1], (*value.shape, 1), (1, *value.shape), (value.size,), ()]
        shapes += [tuple(rng.integers(1, 14, rng.integers(1, 5)).tolist()) for _ in range(3)]
        for shape in dict.fromkeys(shapes):
            if shape in (value.shape, other_shape(base, name)):
                continue
            model = edited_tensor(base, name, np.zeros(shape, value.dtype))
            yield base.mutant(f"{name} has shape {shape}", *shape_patterns(name, value.shape, shape), model=model)


def shape_patterns(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[str, ...]:
    """The message names the tensor, what is expected and what came.

    A size that no attribute states is read from some projection: when the rows of gate or up change, or the columns of
    down, another projection may be the one that no longer fits.
    """
    field = name.split(".")[0]
    axes = {"gate_proj": -2, "up_proj": -2, "gate_up_proj": -2, "down_proj": -1}
    intermediate = axes.get(field.removeprefix("shared_"))
    if intermediate is not None and len(old) == len(new):
        changed = [axis - len(old) for axis in range(len(old)) if old[axis] != new[axis]]
        if changed == [intermediate]:
            return (ANY_PROJECTION, "expected")
    return (field, "expected", shape_pattern(new))


def takes(base: Base, name: str, kind: str) -> bool:
    """Whether the tensor may be of type `kind`, in some shape, beside the others as they are."""
    projection, part = split_field(name.split(".")[0])
    form = base.node.spec.formats.get(projection)
    if form is None:
        return kind in FLOAT_TYPES
    if part == "_scales":
        return kind == "uint8" if form.name == "mxfp4" else kind in FLOAT_TYPES
    if part == "_zero_points" and form.name == "int4":
        return kind == "uint8" or kind in FLOAT_TYPES
    alone = f"{projection}_zero_points" not in base.node.weights
    return kind == base.node.weights[projection].dtype or (form.name == "int8" and kind in ("uint8", "int8") and alone)


def tensor_types(base: Base) -> Iterator[Mutant]:
    spoken = {"float64": "(float64|double)", "int64": "int64", "int8": "int8", "uint8": "uint8", "float32": "float32"}
    for name, value in mutable_tensors(base):
        for kind, pattern in spoken.items():
            if takes(base, name, kind):
                continue
            model = edited_tensor(base, name, value.astype(kind))
            yield base.mutant(f"{name} is {kind}", name.split(".")[0], pattern, model=model)


# Attributes


def bad_values(base: Base) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Attribute, value that it must not have, extra patterns."""
    spec = base.node.spec
    for attribute in ATTRIBUTES:
        if attribute.default is None:
            yield attribute.name, None, ()
        if attribute.values:
            for word in ("", "nonsense", attribute.values[0].upper(), attribute.values[0] + " "):
                yield attribute.name, word, attribute.values
    for value in (0, 2, -1, *HUGE):
        yield "spec_version", value, (str(value),)
    for value in (0, -1, *HUGE):
        yield "num_experts", value, (str(value),)
        yield "top_k", value, (str(value),)
    yield "top_k", spec.num_experts + 1, (str(spec.num_experts + 1), str(spec.num_experts))
    for name in ("experts_stacked", "gate_up_interleaved", "norm_topk_prob"):
        for value in (2, -1, *HUGE):
            yield name, value, (str(value),)
    for value in (0, -1, 4, *HUGE):
        yield "n_group", value, (str(value),)
    for value in (0, -1, spec.n_group + 1, *HUGE):
        yield "topk_group", value, (str(value),)
    for value in (-1, 5, *HUGE):
        yield "accuracy_level", value, (str(value),)
    for value in (0.0, -1.0, math.nan):
        yield "norm_p", value, ()
    if spec.router_input != "topk_ids":
        yield "score_func", "sparsemixer", ("(top_k|n_group)",)
    if spec.n_group > 1:
        yield "score_func", "softmax_topk", ("n_group",)


def attribute_values(base: Base) -> Iterator[Mutant]:
    for name, value, patterns in bad_values(base):
        yield base.mutant(f"{name} = {value!r}", name, *patterns, model=with_attribute(base, name, value))
    # More experts than tensors, or fewer: the tensors no longer fit, and the message names one or the count.
    for change in (1, -1):
        model = with_attribute(base, "num_experts", base.node.spec.num_experts + change)
        patterns = (f"(router|{ANY_PROJECTION}|num_experts|n_group)", "(expected|needs)")
        yield base.mutant(f"num_experts off by {change}", *patterns, model=model)
    for number, value in enumerate(weight_inputs(base)):
        model = with_attribute(base, "weight_inputs", value)
        yield base.mutant(f"weight_inputs {number} = {value[:60]!r}", f"(weight_inputs|{ANY_PROJECTION})", model=model)


def weight_inputs(base: Base) -> list[str]:
    """Lists that contradict themselves or the tensors."""
    names = list(base.node.spec.weight_inputs)
    lists = [names[:-1], names[1:], [*names, names[0]], [*names, "extra_proj"], ["x" * 5000, *names], ["down_proj"]]
    lists += [[*names, "down_proj_bias", "shared_down_proj"], [names[0].upper(), *names[1:]], [""]]
    lists += [["gate_proj", "down_proj"]]
    lists += [["gate_up_proj", "gate_proj", "up_proj", "down_proj"], ["up_proj", "down_proj", "gate_proj_bias"]]
    return [" ".join(words) for words in lists]


def attribute_types(base: Base) -> Iterator[Mutant]:
    wrong = {"int": (1.0, "1", [1, 2]), "float": (1, "1", [1.0]), "string": (1, 1.0, ["softmax"])}
    for attribute in ATTRIBUTES:
        for value in wrong[attribute.type]:
            model = with_attribute(base, attribute.name, value)
            yield base.mutant(f"{attribute.name} = {value!r}", attribute.name, attribute.type, model=model)


# Inputs


def with_inputs(base: Base, change: dict[int, str]) -> ModelProto:
    """The model with node inputs replaced by name, at the positions given."""
    model = base.copy()
    names = model.graph.node[0].input
    for position, name in change.items():
        names[position] = name
    return model


def position_of(name: str) -> int:
    return next(index for index, item in enumerate(INPUTS) if item.name == name)


def node_inputs(base: Base) -> Iterator[Mutant]:
    spec, names = base.node.spec, list(base.model.graph.node[0].input)
    none = position_of(spec.router_input)
    yield base.mutant("no router", "router_weight", "router_logits", "topk_ids", model=with_inputs(base, {none: ""}))
    yield base.mutant("no hidden_states", "(hidden_states|[Ii]nput)", model=with_inputs(base, {0: ""}))
    for extra in sorted({"router_logits", "router_weight", "topk_ids"} - {spec.router_input}):
        yield base.mutant(f"{extra} too", extra, spec.router_input, model=with_extra_input(base, extra))
    if spec.router_input != "router_weight":
        model = with_extra_input(base, "router_bias")
        yield base.mutant("router_bias alone", "router_bias", "router_weight", model=model)
    if spec.router_input == "topk_ids":
        yield base.mutant("no topk_weights", "topk_weights", model=with_inputs(base, {position_of("topk_weights"): ""}))
    else:
        model = with_extra_input(base, "topk_weights")
        yield base.mutant("topk_weights alone", "topk_weights", "topk_ids", model=model)
    for position in range(FIRST_WEIGHT, len(names)):
        field = names[position].split(".")[0]
        if position in (FIRST_WEIGHT, len(names) - 1, len(names) // 2):
            # ONNX Runtime itself refuses a hole in a variadic list, and names the node only.
            yield base.mutant(f"{names[position]} left out", f"({field}|moe)", model=with_inputs(base, {position: ""}))
    for count in (FIRST_WEIGHT, FIRST_WEIGHT + 1, len(names) - 1):
        model = base.copy()
        del model.graph.node[0].input[count:]
        yield base.mutant(f"only {count} inputs", f"(weight_inputs|{ANY_PROJECTION}|[Ii]nput)", model=model)
    for more in (1, 50):
        model = base.copy()
        model.graph.node[0].input.extend([names[-1]] * more)
        yield base.mutant(f"{more} inputs too many", "(weight_inputs|weight tensors|[Ii]nputs)", model=model)


def with_extra_input(base: Base, name: str) -> ModelProto:
    """The model with one more fixed input, of the right shape and type, fed by a constant."""
    spec, kind = base.node.spec, numpy_type(base.node.activation_type)
    values = {
        "router_weight": np.zeros((spec.num_experts, spec.hidden_size), kind),
        "router_bias": np.zeros(spec.num_experts, kind),
        "router_logits": np.zeros((4, spec.num_experts), kind),
        "topk_ids": np.zeros((4, spec.top_k), np.int64),
        "topk_weights": np.zeros((4, spec.top_k), kind),
    }
    model = with_inputs(base, {position_of(name): name})
    model.graph.initializer.append(make_tensor(name, values[name]))
    return model


def graph_inputs(base: Base) -> Iterator[Mutant]:
    """Weights that are no constants; inputs of a wrong declared shape or type; runs that contradict the model."""
    for name, value in mutable_tensors(base):
        model = base.copy()
        kept = [tensor for tensor in model.graph.initializer if tensor.name != name]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        kind = ONNX_TYPES[value.dtype.name]
        model.graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
        feeds = base.feeds | {name: value}
        patterns = (name.split(".")[0], "(constant|initializer)")
        yield base.mutant(f"{name} is no constant", *patterns, model=model, feeds=feeds)
    for position, value_info in enumerate(base.model.graph.input):
        yield from graph_input(base, position, value_info.name)


def graph_input(base: Base, position: int, name: str) -> Iterator[Mutant]:
    value = base.feeds[name]
    size = value.shape[-1]
    any_name = f"({name}|router_weight|router_logits|hidden_states|{ANY_PROJECTION})"
    for wrong in (size + 1, size - 1, 1):
        feeds = base.feeds | {name: np.zeros((4, wrong), value.dtype)}
        model = with_graph_input(base, position, value.dtype.name, ["T", wrong])
        patterns = (any_name, "expected", rf"\b{wrong}\b")
        yield base.mutant(f"{name} is declared [T, {wrong}]", *patterns, model=model, feeds=feeds)
        model = with_graph_input(base, position, value.dtype.name, ["T", "unknown"])
        patterns = (name, "expected", rf"\b{wrong}\b")
        yield base.mutant(f"{name} is fed as [4, {wrong}]", *patterns, model=model, feeds=feeds)
    scalar = with_graph_input(base, position, value.dtype.name, None)
    yield base.mutant(f"{name} is a scalar", name, model=scalar, feeds=base.feeds | {name: np.zeros((), value.dtype)})
    if name != "hidden_states":
        for leading in ((3,), (5,), (2, 3), ()):
            feeds = base.feeds | {name: np.zeros((*leading, size), value.dtype)}
            yield base.mutant(f"{name} with leading {leading}", name, "expected", model=scalar, feeds=feeds)
    for kind in sorted({"float64", "int8", "int64"} - {value.dtype.name}):
        model = with_graph_input(base, position, kind, ["T", size])
        spoken = "(float64|double)" if kind == "float64" else kind
        feeds = base.feeds | {name: value.astype(kind)}
        yield base.mutant(f"{name} is {kind}", name, spoken, model=model, feeds=feeds)


def with_graph_input(base: Base, position: int, kind: str, shape: list[int | str] | None) -> ModelProto:
    """The model with one graph input declared anew; the output goes with the type of hidden_states."""
    model = base.copy()
    name = model.graph.input[position].name
    model.graph.input[position].CopyFrom(helper.make_tensor_value_info(name, ONNX_TYPES[kind], shape))
    if name == "hidden_states":
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("output", ONNX_TYPES[kind], None))
    return model


FAMILIES = (tensor_shapes, tensor_types, attribute_values, formats, attribute_types, node_inputs, graph_inputs)
