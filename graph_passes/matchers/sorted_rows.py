"""Rows sorted by expert, so that those of one expert lie in one run: the proof that a graph's permutation is that.

S = T * k rows, k for each token. Everything comes from one TopK that sorts the ids of the experts: which rows are
taken, where the run of each expert ends, and how the rows get back to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.matchers.views import (
    NoMatch,
    constant,
    dim,
    follow,
    integers,
    is_standard,
    is_view,
    node_axes,
    one_entry,
    operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    scalar,
    strip,
)

Array = npt.NDArray[Any]

_ROWS = np.array([*range(1 << 12), (1 << 23) + 1, (1 << 24) - 1])
"""Numbers of rows on which a division by k is tried; float32, in which some exports divide, holds no larger ones."""

_COUNTS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)
"""Types in which many ids can be counted."""

_DEPTH = 32
"""Arithmetic that is nested deeper than this is not followed."""


@dataclass(frozen=True)
class Sorting:
    """`order` `[S]` holds the numbers of the rows in ascending order of their `ids`, `ascending` `[S]` those ids."""

    ids: ir.Value
    order: ir.Value
    ascending: ir.Value


def taken_rows(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The data `[N, ...]` and the numbers `[S]` (views stripped) of the rows that `value` holds; NoMatch if none."""
    node = produced_by(follow(value), "Gather", "GatherND", through_views=False)
    if node is None:
        raise NoMatch(value.producer(), f"{value.name} does not hold rows taken by number (Gather, GatherND)")
    numbers = operand(node, 1)
    if node.op_type == "Gather":
        by_row = node.attributes.get_int("axis", 0) == 0 and rank(numbers) == 1
    else:
        by_row = node.attributes.get_int("batch_dims", 0) == 0 and rank(numbers) == 2 and dim(numbers, -1) == 1
    if not by_row:
        raise NoMatch(node, f"{node.op_type} does not take one row of {operand(node, 0).name} for each number")
    return operand(node, 0), follow(numbers)


def sorting_by(tokens_of_rows: ir.Value) -> tuple[Sorting, int]:
    """The sorting and k when `tokens_of_rows` `[S]` is `order // k`, the token of each sorted row. Raises NoMatch."""
    order = _argument(tokens_of_rows)
    sort = order.producer()
    if sort is None or sort.op_type != "TopK" or not is_standard(sort) or order is not sort.outputs[1]:
        raise NoMatch(
            tokens_of_rows.producer(),
            "the tokens of the rows do not come from a TopK that sorts expert ids; if the model was exported with "
            "optimize=False, export it with optimize=True",
        )
    sorting = _sorting(sort)
    divided = _pointwise(tokens_of_rows, {order: _ROWS})
    k = int((divided == 0).sum())
    if k < 1 or not np.array_equal(divided, _ROWS // k):
        raise NoMatch(tokens_of_rows.producer(), f"the tokens of the rows are not {order.name} // top_k")
    return sorting, k


def _sorting(sort: ir.Node) -> Sorting:
    ids = operand(sort, 0)
    plain = sort.attributes.get_int("largest", 1) == 0 and sort.attributes.get_int("sorted", 1) == 1
    if not plain or rank(ids) != 1:
        raise NoMatch(sort, "TopK does not sort a list of expert ids in ascending order")
    follow(ids)
    length = strip(operand(sort, 1))
    if integers(length) is not None:
        raise NoMatch(
            sort,
            f"TopK sorts a fixed number of ids, {integers(length)}: the export is valid only for the number of tokens "
            "that it was traced with; export it again with dynamic axes",
        )
    if not _is_length(length, {strip(ids)}):
        raise NoMatch(sort, "TopK does not sort all ids: its K is not the length of its input")
    return Sorting(ids, sort.outputs[1], sort.outputs[0])


def _is_length(value: ir.Value, of: set[ir.Value]) -> bool:
    """Whether `value` is the length of a list (one axis) that is a view of one of `of`."""
    node = strip(value).producer()
    while node is not None and node.op_type == "Gather" and integers(operand(node, 1)) in ((0,), (-1,)):
        node = strip(operand(node, 0)).producer()
    if node is None or node.op_type != "Shape" or not is_standard(node):
        return False
    whole = node.attributes.get_int("start", 0) in (0, -1) and node.attributes.get_int("end", 1) == 1
    return whole and rank(operand(node, 0)) == 1 and strip(operand(node, 0)) in of


def check_ends(ends: ir.Value, sorting: Sorting, experts: int) -> None:
    """NoMatch unless `ends` `[experts]` are the ends of the runs of sorted rows: the counts of the ids, added up."""
    total = produced_by(_behind_casts(ends), "CumSum", through_views=False)
    if total is None or integers(operand(total, 1)) not in ((0,), (-1,)):
        raise NoMatch(ends.producer(), "the ends of the experts' rows are not a CumSum of how many each of them has")
    if total.attributes.get_int("exclusive", 0) or total.attributes.get_int("reverse", 0):
        raise NoMatch(total, "CumSum is exclusive or reversed: it does not give the ends of the experts' rows")
    counts = _behind_casts(operand(total, 0))
    scatter = produced_by(counts, "ScatterElements", through_views=False)
    if scatter is None or scatter.attributes.get_string("reduction", "none") != "add":
        raise NoMatch(counts.producer(), "the rows of each expert are not counted by ScatterElements that adds")
    zeros, bins, ones = (operand(scatter, index) for index in range(3))
    if rank(zeros) != 1 or dim(zeros, 0) != experts or scalar(zeros) != 0.0 or zeros.dtype not in _COUNTS:
        raise NoMatch(scatter, f"the rows of each expert are not counted from {experts} zeros of 32 bits or more")
    if scalar(ones) != 1.0:
        raise NoMatch(scatter, "the rows of each expert are not counted by ones")
    refuse_fixed_fill(ones)
    counted = _argument(bins)
    if counted not in (sorting.ascending, strip(sorting.ids)):
        raise NoMatch(
            scatter, f"the rows of each expert are counted in {counted.name}, but sorted by {sorting.ids.name}"
        )
    numbers = np.arange(experts)
    if not np.array_equal(_pointwise(bins, {counted: numbers}), numbers):
        raise NoMatch(scatter, "the rows of an expert are counted for another expert")


def check_sizes(sizes: ir.Value, sorting: Sorting, experts: int) -> None:
    """NoMatch unless `sizes` `[experts]` are how many rows each expert has: ones at the ids of each token, added up."""
    total = produced_by(_behind_casts(_listed(sizes, experts)), "ReduceSum", through_views=False)
    if total is None or node_axes(total) not in ((0,), (-2,)) or rank(operand(total, 0)) != 2:
        raise NoMatch(sizes.producer(), f"{sizes.name} does not count how many rows each expert has")
    marks = produced_by(_behind_casts(operand(total, 0)), "ScatterElements", through_views=False)
    if marks is None or marks.attributes.get_int("axis", 0) not in (1, -1):
        raise NoMatch(total, "the rows of each expert are not counted by a sum of ones scattered at its id")
    zeros, ids, ones = (operand(marks, index) for index in range(3))
    if scalar(zeros) != 0.0 or scalar(ones) != 1.0 or dim(zeros, -1) != experts or rank(ids) != 2:
        raise NoMatch(marks, f"the rows of each expert are not counted by ones scattered into {experts} zeros")
    refuse_fixed_fill(zeros)
    # Indices of one row of a TopK differ, so that each of them leaves its own mark.
    if marks.attributes.get_string("reduction", "none") != "none" or produced_by(ids, "TopK") is None:
        raise NoMatch(marks, "the ids of a token whose rows are counted are not those of a TopK")
    if strip(ids) is not strip(sorting.ids):
        raise NoMatch(marks, f"the rows of each expert are counted in {ids.name}, but sorted by {sorting.ids.name}")


def _listed(value: ir.Value, count: int) -> ir.Value:
    """The list of `count` numbers whose entries `value`, if it is a Concat, joins in their order."""
    joined = produced_by(value, "Concat")
    if joined is None:
        return strip(value)
    entries = [entry_of(operand(joined, index)) for index in range(len(joined.inputs))]
    whole = entries[0][0] if entries[0] is not None else None
    if whole is None or dim(whole, 0) != count or entries != [(whole, index) for index in range(count)]:
        raise NoMatch(joined, f"Concat does not join the {count} numbers of one list in their order")
    return whole


def entry_of(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The list of which `value` is one number, and which one; None when it is something else."""
    found = None
    while (entry := one_entry(strip(value))) is not None:
        whole, axis, number = entry
        if axis != 0 or rank(whole) != 1:
            break
        found, value = (whole, number), whole
        if dim(whole, 0) != 1:
            break
    return found


def refuse_fixed_fill(value: ir.Value) -> None:
    """NoMatch unless the shape of a list of equal numbers is computed."""
    node = strip(value).producer()
    refuse_fixed_tokens(node)
    if node is None or node.op_type not in ("Expand", "ConstantOfShape") or constant(operand(node, -1)) is not None:
        raise NoMatch(
            node,
            f"{value.name} has a fixed length: the export is valid only for the number of tokens that it was traced "
            "with; export it again with dynamic axes",
        )


def check_inverse(numbers: ir.Value, sorting: Sorting) -> None:
    """NoMatch unless `numbers` `[S]` is the inverse of the sorting's `order`: inverse[order] = 0, 1, ..., S - 1."""
    scatter = produced_by(numbers, "ScatterND")
    if scatter is None or scatter.attributes.get_string("reduction", "none") != "none":
        raise NoMatch(numbers.producer(), "the outputs are not put back by an inverse permutation (ScatterND)")
    data, at, updates = (operand(scatter, index) for index in range(3))
    if strip(at) is not sorting.order or rank(at) != 2 or dim(at, -1) != 1:
        raise NoMatch(scatter, f"the outputs are put back by another permutation than {sorting.order.name}")
    # ONNX Runtime refuses updates of another length than `order`, so the end of the Range need not be proven.
    count = produced_by(_behind_expand(updates), "Range", through_views=False)
    if count is None or scalar(operand(count, 0)) != 0 or scalar(operand(count, 2)) != 1:
        raise NoMatch(scatter, "the inverse permutation is not made of the numbers 0, 1, 2, ... of the sorted rows")
    if constant(operand(count, 1)) is not None:
        raise NoMatch(
            count,
            f"Range ends at the fixed number {scalar(operand(count, 1)):g}: the export is valid only for the number of "
            "tokens that it was traced with; export it again with dynamic axes",
        )
    fill = strip(data).producer()
    rows = {sorting.order, sorting.ascending, strip(sorting.ids)}
    if fill is None or fill.op_type not in ("Expand", "ConstantOfShape") or not _is_length(operand(fill, -1), rows):
        raise NoMatch(scatter, "the graph does not say that the inverse permutation is as long as the permutation")


def _behind_expand(value: ir.Value) -> ir.Value:
    """The list behind views and an Expand that leaves it a list."""
    node = produced_by(value, "Expand")
    return strip(operand(node, 0)) if node is not None and rank(node.outputs[0]) == 1 else strip(value)


def _behind_casts(value: ir.Value) -> ir.Value:
    """The value behind views and Casts between types that hold any count."""
    while (node := value.producer()) is not None and is_standard(node):
        if not (value.dtype in _COUNTS if node.op_type == "Cast" else is_view(node)):
            break
        value = operand(node, 0)
    return value


def _cast(node: ir.Node, a: Array) -> Array:
    return a.astype(ir.DataType(node.attributes.get_int("to", 0)).numpy())


def _clip(node: ir.Node, a: Array, low: Array | None = None, high: Array | None = None) -> Array:
    if node.attributes:
        raise NoMatch(node, "Clip has its limits as attributes; convert the model to opset 13 or later")
    a = a if low is None else np.maximum(a, low)
    return a if high is None else np.minimum(a, high)


def _divide(node: ir.Node, a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))


def _mod(node: ir.Node, a: Array, b: Array) -> Array:
    return np.asarray(np.fmod(a, b) if node.attributes.get_int("fmod", 0) else np.mod(a, b))


def _plain(function: np.ufunc) -> Callable[..., Array]:
    return lambda node, *inputs: np.asarray(function(*inputs))


_POINTWISE: Mapping[str, Callable[..., Array]] = {
    "Abs": _plain(np.abs),
    "Add": _plain(np.add),
    "And": _plain(np.logical_and),
    "Cast": _cast,
    "Clip": _clip,
    "Div": _divide,
    "Equal": _plain(np.equal),
    "Floor": _plain(np.floor),
    "Greater": _plain(np.greater),
    "Less": _plain(np.less),
    "Mod": _mod,
    "Mul": _plain(np.multiply),
    "Not": _plain(np.logical_not),
    "Sign": _plain(np.sign),
    "Sub": _plain(np.subtract),
}


def _argument(value: ir.Value) -> ir.Value:
    """The value that `value` is computed from, number by number, as far as can be seen; views are stripped."""
    value = follow(value)
    for _ in range(_DEPTH):
        node = value.producer()
        if node is None or not is_standard(node) or node.op_type not in _POINTWISE:
            break
        computed = [v for v in node.inputs if v is not None and constant(v) is None]
        if not computed:
            break
        value = follow(computed[0])
    return value


def _pointwise(value: ir.Value, known: dict[ir.Value, Array], depth: int = _DEPTH) -> Array:
    """What the graph makes, number by number, of `known` values; NoMatch when it needs more than them and constants.

    Values that are computed on the way are known afterwards.
    """
    value = strip(value)
    if value in known:
        return known[value]
    number, node = constant(value), value.producer()
    if number is not None and number.size == 1:
        return number.reshape(())
    if node is None or not is_standard(node) or node.op_type not in _POINTWISE or not depth:
        raise NoMatch(node, f"{value.name} is not computed number by number by arithmetic that is known")
    inputs = [None if v is None else _pointwise(v, known, depth - 1) for v in node.inputs]
    with np.errstate(all="ignore"):
        known[value] = np.asarray(_POINTWISE[node.op_type](node, *inputs))
    return known[value]
