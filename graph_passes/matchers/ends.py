"""The ends of a block: what the op reads and what it replaces, and the proof that both hold the same tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from graph_passes.matchers.router import Router
from graph_passes.matchers.views import (
    NoMatch,
    axis_of,
    dim,
    is_standard,
    is_view,
    operand,
    produced_by,
    rank,
    readers,
    refuse_fixed_tokens,
    reshape_chain,
    strip,
)

_Axis = int | str | None
"""Size, name, or neither."""


def ends(tokens: ir.Value, summed: ir.Value, hidden_size: int, same_rows: bool) -> tuple[ir.Value, ir.Value]:
    """hidden_states and output of a block whose experts read `tokens` and whose outputs add up to `summed`.

    `tokens` `[T, H]` may be a Reshape of `[B, S, H]`, and `summed` may be reshaped back to it: the result is the pair
    furthest out that has one type and, by the graph's own names of axes or by a Reshape to it, one shape. When none
    has, it is the pair `[T, H]` itself, provided that the caller knows that the two have the `same_rows`. Raises
    NoMatch.
    """
    starts = list(reshape_chain(tokens))
    for value in starts[:-1]:
        refuse_fixed_tokens(value.producer())
    alike = [
        (s, e)
        for s in starts
        for e in views_after(summed)
        if s.dtype == e.dtype and dim(s, -1) == hidden_size == dim(e, -1)
    ]
    for hidden_states, output in reversed(alike):
        if _same(_axes(hidden_states), _axes(output)) or _is_reshaped_like(output, hidden_states):
            return hidden_states, output
    for hidden_states, output in alike:
        if same_rows and rank(hidden_states) == rank(output) == 2:
            return hidden_states, output
    raise NoMatch(
        summed.producer(),
        f"the graph does not say that a value after {summed.name} has the shape and type of the tokens {tokens.name}; "
        "name the dynamic axes when exporting",
    )


def views_after(value: ir.Value) -> list[ir.Value]:
    """`value`, then the values behind each view that is the only reader of the one before, but for its shape."""
    values = [value]
    while (node := only_reader(values[-1])) is not None and is_view(node) and node.inputs[0] is values[-1]:
        values.append(node.outputs[0])
    return values


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads more of `value` than its shape; None when there are others, or the model puts it out."""
    nodes = readers(value)
    return nodes[0] if len(nodes) == 1 and not value.is_graph_output() else None


def _is_reshaped_like(output: ir.Value, like: ir.Value) -> bool:
    node = produced_by(output, "Reshape", through_views=False)
    return node is not None and len(node.inputs) > 1 and _shape_of(node.inputs[1]) is like


def _shape_of(shape: ir.Value | None) -> ir.Value | None:
    """The value whose whole shape `shape` is, or None."""
    node = None if shape is None else produced_by(shape, "Shape", through_views=False)
    whole = node is not None and not node.attributes.get_int("start", 0) and "end" not in node.attributes
    return node.inputs[0] if node is not None and whole else None


def zeros_like(value: ir.Value, known: Collection[ir.Value], hidden_size: int) -> bool:
    """Whether `value` is filled in the shape `[T, hidden_size]` of a view of one of `known` (themselves no views)."""
    node = produced_by(value, "ConstantOfShape", "Expand", through_views=False)
    like = None if node is None else _shape_of(node.inputs[0 if node.op_type == "ConstantOfShape" else 1])
    if like is None:
        return False
    return rank(like) == 2 and dim(like, -1) == hidden_size and strip(like) in known


def check_routing(routing: Router, tokens: ir.Value, experts: int, hidden_size: int) -> None:
    """NoMatch unless the router chooses among `experts` experts, once for every row of `tokens`."""
    place = tokens.producer()
    if routing.num_experts is not None and routing.num_experts != experts:
        raise NoMatch(
            place,
            f"the router scores {routing.num_experts} experts, but the weights hold {experts}: experts are missing or "
            "unused; export the model again",
        )
    source = routing.constants.get("router_weight")
    if source is not None and source.shape != (experts, hidden_size):
        raise NoMatch(
            place,
            f"the weights of the router ({source.value.name}) are {list(source.shape)}, expected "
            f"{[experts, hidden_size]}",
        )
    for name, value in routing.inputs.items():
        if not _have_same_rows(value, tokens):
            raise NoMatch(
                value.producer(),
                f"the graph does not say that {value.name}, read as {name}, has one row for each token of "
                f"{tokens.name}; name the dynamic axes when exporting",
            )


def _have_same_rows(value: ir.Value, tokens: ir.Value) -> bool:
    """Whether the axes in front of the last are, by their names, the same in `value` and `tokens`, or views of them."""
    return _rows_match(value, tokens, {}) or _rows_match(value, tokens, _equal_names(value.producer()))


def _rows_match(value: ir.Value, tokens: ir.Value, names: Mapping[_Axis, _Axis]) -> bool:
    width, hidden_size = dim(value, -1), dim(tokens, -1)
    return any(
        dim(a, -1) == width
        and dim(b, -1) == hidden_size
        and _same([names.get(x, x) for x in _axes(a)[:-1]], [names.get(x, x) for x in _axes(b)[:-1]])
        for a in reshape_chain(value)
        for b in reshape_chain(tokens)
    )


def _equal_names(node: ir.Node | None) -> dict[_Axis, _Axis]:
    """Names of first axes that are new only because of a Reshape that keeps the rows, each with the name it renames."""
    names: dict[_Axis, _Axis] = {}
    for reshape in node.graph if node is not None and node.graph is not None else ():
        if reshape.op_type != "Reshape" or not is_standard(reshape):
            continue
        before, after = _axes(operand(reshape, 0)), _axes(reshape.outputs[0])
        if not before or not after or _size(before[1:]) != _size(after[1:]) or not _size(after[1:]):
            continue
        if before[0] is not None and isinstance(after[0], str):
            names.setdefault(after[0], names.get(before[0], before[0]))
    return names


def _axes(value: ir.Value) -> list[_Axis]:
    return [] if value.shape is None else [axis_of(d) for d in value.shape]


def _same(a: list[_Axis], b: list[_Axis]) -> bool:
    return bool(a) and None not in a and a == b


def _size(axes: list[_Axis]) -> int:
    """The product of the axes, or 0 when one of them is not a number."""
    return math.prod(axis if isinstance(axis, int) else 0 for axis in axes)
