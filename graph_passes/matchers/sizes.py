"""Sizes that a graph computes: the elements of shape arithmetic, and the axes of what it reshapes."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.matchers.views import dim, integers, node_axes, operand, produced_by, strip

Size = int | str | tuple[ir.Value, int] | None
"""An axis: its size (-1: whatever is left), its name, axis `i` of a value, or nothing known."""


def axes_of(value: ir.Value) -> list[Size]:
    """The axes of `value`, those of a Reshape as its target says them; empty when nothing is known."""
    node = produced_by(value, "Reshape", "Unsqueeze", "Cast", through_views=False)
    if node is not None and node.op_type == "Cast":
        return axes_of(operand(node, 0))
    if node is not None and node.op_type == "Reshape" and (sizes := entries_of(operand(node, 1))):
        known = [dim(value, axis) for axis in range(len(sizes))]
        return [(size or None) if inferred is None else inferred for size, inferred in zip(sizes, known, strict=True)]
    if node is not None and node.op_type == "Unsqueeze" and (new := node_axes(node)) is not None:
        axes = axes_of(operand(node, 0))
        for axis in sorted(a % (len(axes) + len(new)) for a in new):
            axes.insert(axis, 1)
        return axes
    return [] if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]


def entries_of(value: ir.Value) -> list[Size]:
    """The elements of a list of sizes that the graph computes; empty when nothing is known."""
    value = strip(value)
    numbers = integers(value)
    if numbers is not None:
        is_fill = produced_by(value, "ConstantOfShape", "Expand", through_views=False) is not None
        return [*numbers] * ((dim(value, 0) or 0) if is_fill else 1)
    node = produced_by(value, "Concat", "Gather", "Shape", through_views=False)
    if node is None:
        return []
    if node.op_type == "Concat":
        parts = [entries_of(v) if v is not None else [] for v in node.inputs]
        return [entry for part in parts for entry in part] if all(parts) else []
    inner = operand(node, 0)
    if node.op_type == "Shape":
        if node.attributes.get_int("start", 0) or "end" in node.attributes or inner.shape is None:
            return []
        return [d if isinstance(d, int) else (inner, axis) for axis, d in enumerate(inner.shape)]
    picked, source = integers(operand(node, 1)), entries_of(inner)
    if picked is None or any(not -len(source) <= index < len(source) for index in picked):
        return []
    return [source[index] for index in picked]
