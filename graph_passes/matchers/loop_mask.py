"""The mask of one expert of an unrolled loop: which tokens chose it, spelled as a row of OneHot or by Equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import (
    integers,
    is_standard,
    is_view,
    node_axes,
    one_entry,
    operand,
    produced_by,
    rank,
    strip,
)


@dataclass(frozen=True)
class Mask:
    """The tokens of one expert: `ids [T, k]`, expert id (None: computed), labels of the rows that NonZero gives.

    `rows` is empty when the axes of the mask are not known. A `limited` mask leaves out tokens beyond an expert's
    capacity.
    """

    node: ir.Node
    ids: ir.Value
    expert: int | None
    rows: tuple[str, ...]
    number: ir.Value | None = None
    limited: bool = False


def find_mask(nonzero: ir.Node) -> Mask | None:
    """The expert mask that `nonzero` reads: a row of OneHot(ids), or ids == e; None when it is something else."""
    value = operand(nonzero, 0)
    moves = []
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity", "Squeeze", "Transpose"):
        if node.op_type in ("Squeeze", "Transpose"):
            moves.append(node)
        value = operand(node, 0)
    if node is None or not is_standard(node):
        return None
    if node.op_type == "Equal":
        for index in (0, 1):
            expert = integers(node.inputs[index])
            ids = operand(node, 1 - index)
            if expert is not None and len(expert) == 1 and produced_by(ids, "TopK"):
                return Mask(nonzero, strip(ids), expert[0], _moved(["token", "slot"], moves))
        return None
    if node.op_type == "Split":  # ONNX Runtime makes one of the Gathers of all experts
        entry, labelled = one_entry(value), _labels(operand(node, 0))
        if entry is None or labelled is None or labelled[1][entry[1]] != "expert":
            return None
        return Mask(nonzero, labelled[0], entry[2], _moved(labelled[1], moves))
    if node.op_type != "Gather":
        return None
    labelled, number = _labels(operand(node, 0)), operand(node, 1)
    if labelled is None:
        limited = _ids_within_capacity(operand(node, 0))
        return None if limited is None else Mask(nonzero, limited, None, (), number, limited=True)
    ids, labels = labelled
    axis = node.attributes.get_int("axis", 0)
    if labels[axis] != "expert":
        return None
    if rank(number) == 0:
        labels.pop(axis)
    experts = integers(number)
    expert_id = experts[0] if experts is not None and len(experts) == 1 else None
    return Mask(nonzero, ids, expert_id, _moved(labels, moves), number)


def _moved(labels: Sequence[str], moves: Sequence[ir.Node]) -> tuple[str, ...]:
    """Labels that Squeeze and Transpose nodes, last one first, leave; none when they drop another than the expert's."""
    left = list(labels)
    for node in reversed(moves):
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm", range(len(left))[::-1])
            if sorted(perm) != list(range(len(left))):
                return ()
            left = [left[axis] for axis in perm]
            continue
        axes = node_axes(node)
        if axes is None or len(axes) != 1 or not -len(left) <= axes[0] < len(left) or left[axes[0]] != "expert":
            return ()
        left.pop(axes[0])
    return tuple(left)


def _labels(value: ir.Value) -> tuple[ir.Value, list[str]] | None:
    """Ids and axis labels of OneHot(ids) or ids == arange, behind Cast and Transpose."""
    node = value.producer()
    if node is None or not is_standard(node):
        return None
    if node.op_type in ("Cast", "Identity"):
        return _labels(operand(node, 0))
    if node.op_type == "Transpose":
        inner, perm = _labels(operand(node, 0)), node.attributes.get_ints("perm", None)
        if inner is None or perm is None or len(perm) != len(inner[1]):
            return None
        return inner[0], [inner[1][axis] for axis in perm]
    if node.op_type == "OneHot":
        labels = ["token", "slot"]
        axis = node.attributes.get_int("axis", -1)
        labels.insert(axis if axis >= 0 else len(labels) + 1 + axis, "expert")
        return (strip(operand(node, 0)), labels) if integers(node.inputs[2]) == (0, 1) else None
    if node.op_type == "Equal":
        for index in (0, 1):
            ids = integers(node.inputs[index])
            if ids is not None and ids == tuple(range(len(ids))):
                return strip(operand(node, 1 - index)), ["token", "slot", "expert"]
    return None


def _ids_within_capacity(value: ir.Value) -> ir.Value | None:
    """The ids of OneHot(ids) * (CumSum <= capacity), as switch_transformers has it; None when it is something else."""
    product = _behind_moves(value).producer()
    if product is None or product.op_type != "Mul" or not is_standard(product):
        return None
    factors = [_behind_moves(v).producer() for v in product.inputs if v is not None]
    for hot, within in (factors, factors[::-1]):
        if hot is None or within is None or hot.op_type != "OneHot" or within.op_type not in ("LessOrEqual", "Less"):
            continue
        if produced_by(operand(within, 0), "CumSum") is not None:
            return strip(operand(hot, 0))
    return None


def _behind_moves(value: ir.Value) -> ir.Value:
    """The value behind views, Transposes and Casts."""
    while (node := value.producer()) is not None and (is_view(node) or node.op_type in ("Transpose", "Cast")):
        value = operand(node, 0)
    return value


def gathers_weights(number: ir.Value) -> bool:
    """Whether stacked weights are looked up by the expert id `number`."""
    pending = deque([strip(number)])
    while pending:
        for use in pending.popleft().uses():
            node, index = use.node, use.idx
            if node.op_type == "Gather" and index == 1:
                source = stored_weight(operand(node, 0))
                if source is not None and len(source.shape) == 3:
                    return True
            elif index == 0 and is_view(node):
                pending.extend(node.outputs)
    return False
