"""Weights behind what graphs do to them: lookups in a stacked tensor by constants, views, casts, DequantizeLinear."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.quantised_weights import dequantised_weight
from graph_passes.matchers.views import (
    integers,
    is_standard,
    node_axes,
    one_entry,
    operand,
    rank,
    swaps_last_two,
    widens,
)


def stored_weight(value: ir.Value) -> WeightSource | None:
    """The stored weights that `value` holds, also when they are one entry, picked by a constant, of a stacked tensor.

    None when the graph computes them. Quantised weights are a QuantisedWeight.
    """
    seen = _seen(value)
    return None if seen is None or seen.units else seen.source


@dataclass(frozen=True)
class _Seen:
    """What a value holds: the `source`, with `units` axes of size 1 in front of its own."""

    source: WeightSource
    units: int = 0

    @property
    def axes(self) -> int:
        """Number of axes of the source."""
        return len(self.source.shape)

    def picked(self, index: int, *, keeps_axis: bool) -> _Seen | None:
        """One entry of the leading axis; None when that is not one of a stack of matrices or vectors."""
        source = self.source
        stacked = self.axes == 3 or (self.axes == 2 and not source.transpose)
        if self.units or source.index is not None or not stacked:
            return None
        count = source.shape[0]
        index = index + count if index < 0 else index
        return _Seen(replace(source, index=index), int(keeps_axis)) if 0 <= index < count else None


def _seen(value: ir.Value) -> _Seen | None:
    path: list[tuple[ir.Node, ir.Value]] = []
    while (node := value.producer()) is not None and node.op_type in _THROUGH and is_standard(node):
        path.append((node, value))
        value = operand(node, 0)
    seen = _stored(value)
    while seen is not None and path:
        seen = _through(seen, *path.pop())
    return seen


def _stored(value: ir.Value) -> _Seen | None:
    """An initializer, or what DequantizeLinear makes of one."""
    node = value.producer()
    if node is None:
        constant = value.const_value is not None and not value.is_graph_input()
        return _Seen(WeightSource(value)) if constant else None
    dequantised = dequantised_weight(node) if node.op_type == "DequantizeLinear" else None
    return None if dequantised is None else _Seen(dequantised)


def _through(behind: _Seen, node: ir.Node, value: ir.Value) -> _Seen | None:
    """What `value`, a result of `node`, holds of what its input does."""
    match node.op_type:
        case "Identity":
            return behind
        case "Cast":
            return behind if widens(node) else None
        case "Transpose":
            turned = replace(behind.source, transpose=not behind.source.transpose)
            return replace(behind, source=turned) if swaps_last_two(node) and behind.axes > 1 else None
        case "Squeeze" | "Unsqueeze":
            return _with_units(behind, node)
        case "Reshape":
            return _reshaped(behind, node)
        case _:
            return _entry(behind, node, value)


_THROUGH = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})


def _with_units(behind: _Seen, node: ir.Node) -> _Seen | None:
    """Squeeze and Unsqueeze of axes in front of the source's own."""
    axes, squeezes = node_axes(node), node.op_type == "Squeeze"
    units = behind.units - len(axes or ()) if squeezes else behind.units + len(axes or ())
    in_front = max(behind.units, units)
    if axes is None or units < 0 or any(not 0 <= axis < in_front for axis in axes):
        return None
    return replace(behind, units=units)


def _reshaped(behind: _Seen, node: ir.Node) -> _Seen | None:
    """A Reshape that only adds or drops axes of size 1 in front of the source's own."""
    target, own = integers((*node.inputs, None)[1]), list(behind.source.shape)
    if target is None or 0 in target or len(target) < len(own):
        return None
    known = math.prod(size for size in target if size != -1)
    shape = [math.prod(own) // known if size == -1 else size for size in target]
    units = len(shape) - len(own)
    return replace(behind, units=units) if shape == [1] * units + own else None


def _entry(behind: _Seen, node: ir.Node, value: ir.Value) -> _Seen | None:
    """One entry of the first axis, by Gather, Slice or Split."""
    entry = one_entry(value)
    if entry is None or entry[1] != 0:
        return None
    axes_of_index = rank(operand(node, 1)) if node.op_type == "Gather" else 1
    return behind.picked(entry[2], keeps_axis=axes_of_index == 1) if axes_of_index in (0, 1) else None
