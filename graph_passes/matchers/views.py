"""Looking through a graph: constants by value, producers behind views, projections to named axes.

A view is a node that leaves every element's value and the row-major order of the elements as they are: Reshape,
Flatten, Unsqueeze, Squeeze, Identity, a Transpose of more than two axes that leaves them in order but for those of size
1, and a Cast between float types or between integer types.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.matchers.match import WeightSource

RESHAPES = frozenset({"Reshape", "Flatten", "Unsqueeze", "Squeeze", "Identity"})
SMALL = 1 << 16
"""Constants with more elements than this are weights, never read while matching."""


class NoMatch(Exception):
    """The place is not what the pattern says; carries the `node` where they part and the reason in plain words."""

    def __init__(self, node: ir.Node | None, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def is_standard(node: ir.Node) -> bool:
    """Whether the node belongs to the ONNX domain."""
    return node.domain in ("", "ai.onnx")


def strip(value: ir.Value) -> ir.Value:
    """The value behind all views."""
    while (node := value.producer()) is not None and is_view(node):
        value = operand(node, 0)
    return value


def follow(value: ir.Value, *more: str) -> ir.Value:
    """The value behind all views and nodes of the types `more`; NoMatch at one that fixes the number of tokens."""
    while (node := value.producer()) is not None and (is_view(node) or (node.op_type in more and is_standard(node))):
        refuse_fixed_tokens(node)
        value = operand(node, 0)
    return value


def refuse_fixed_tokens(node: ir.Node | None) -> None:
    """NoMatch when `node`, which token rows go through, gives them a constant shape."""
    if node is None or node.op_type not in ("Reshape", "Expand") or len(node.inputs) < 2:
        return
    target = integers(node.inputs[1])
    if target and all(size > 0 for size in target) and (node.op_type == "Reshape" or max(target[:-1] or target) > 1):
        raise NoMatch(
            node,
            f"{node.op_type} fixes the shape {list(target)}: the export is valid only for the number of tokens that it "
            "was traced with; export it again with dynamic axes and an exporter that keeps them",
        )


def is_view(node: ir.Node) -> bool:
    """Whether the node is a view as the module docstring defines it."""
    if not is_standard(node) or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return _same_kind(node.inputs[0].dtype, node.outputs[0].dtype or _cast_target(node))
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm", None)
        if perm is None:
            return False
        units = len(perm) > 2  # of a matrix, it matters whether it is turned even where its elements stay in place
        moved = [axis for axis in perm if not units or dim(node.inputs[0], axis) != 1]
        return moved == sorted(moved)
    return node.op_type in RESHAPES


def _cast_target(node: ir.Node) -> ir.DataType:
    return ir.DataType(node.attributes.get_int("to", 0))


def _same_kind(a: ir.DataType | None, b: ir.DataType | None) -> bool:
    if a is None or b is None:
        return False
    return (a.is_floating_point() and b.is_floating_point()) or (a.is_integer() and b.is_integer())


def operand(node: ir.Node, index: int) -> ir.Value:
    """Input `index` of the node; NoMatch when it is absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise NoMatch(node, f"{node.op_type} has no input {index}")
    return value


def produced_by(value: ir.Value, *op_types: str, through_views: bool = True) -> ir.Node | None:
    """The node behind `value` (and its views) if it is an ONNX node of one of `op_types`, else None."""
    node = (strip(value) if through_views else value).producer()
    return node if node is not None and node.op_type in op_types and is_standard(node) else None


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value:
    """The operand of a two-input node that is not a view of `value`."""
    first, second = operand(node, 0), operand(node, 1)
    return second if strip(first) is strip(value) else first


def constant(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """The array of a small constant, looked up by value through views, or None.

    A constant is an initializer that is no graph input, the output of a Constant node, or a fill of one number
    (ConstantOfShape, Expand): of a fill only the element is given, as an array without axes.
    """
    if value is None:
        return None
    value = strip(value)
    if value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size <= SMALL else None
    node = value.producer()
    if node is None or not is_standard(node):
        return None
    if node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(value)
        return tensor.numpy() if tensor is not None and tensor.size <= SMALL else None
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value", None)
        return np.zeros((), np.float32) if fill is None else fill.numpy().reshape(())
    if node.op_type == "Expand":
        inner = constant(node.inputs[0])
        return inner.reshape(()) if inner is not None and inner.size == 1 else None
    return None


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant holds in every element, or None.

    A float32 constant gives its shortest decimal, so that 1.702 stays 1.702.
    """
    array = constant(value)
    if array is None or array.size == 0 or not bool((array == array.flat[0]).all()):
        return None
    number = array.flat[0]
    return float(str(number)) if array.dtype == np.float32 else float(number)


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The integers of a small constant, flat, or None."""
    array = constant(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(int(i) for i in array.ravel())


def with_scalar(value: ir.Value, op_type: str) -> tuple[ir.Value, float] | None:
    """Split `op_type(x, number)`, operands in either order, into (x, number); None when it is something else.

    The number must be a constant of one element: a bias whose elements happen to be equal is a bias.
    """
    node = produced_by(value, op_type)
    if node is None or len(node.inputs) != 2:
        return None
    for index in (1, 0):
        array, number = constant(node.inputs[index]), scalar(node.inputs[index])
        if array is not None and array.size == 1 and number is not None:
            return operand(node, 1 - index), number
    return None


def rank(value: ir.Value) -> int | None:
    """Number of axes, or None when the graph does not say."""
    return None if value.shape is None else len(value.shape)


def dim(value: ir.Value, axis: int) -> int | None:
    """Size of one axis, or None when the graph does not give a number."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = axis_of(value.shape[axis])
    return size if isinstance(size, int) else None


def axis_of(entry: int | ir.SymbolicDim) -> int | str | None:
    """Size or name of an axis, or None; a number as a name, which torch.export may give a fixed axis, is its size."""
    name = entry if isinstance(entry, int) else entry.value
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def is_last_axis(axis: int, value: ir.Value) -> bool:
    """Whether `axis` is the last axis of `value`."""
    axes = rank(value)
    return axis == -1 or (axes is not None and axis == axes - 1)


def node_axes(node: ir.Node) -> tuple[int, ...] | None:
    """Axes of a reduction or (un)squeeze, given as an input or as an attribute; None when absent or computed."""
    if len(node.inputs) > 1:
        return integers(node.inputs[1])
    axes = node.attributes.get_ints("axes", None)
    return None if axes is None else tuple(axes)


def reduces_last(node: ir.Node, keepdims: bool | None = None) -> bool:
    """Whether a reduction runs over the last axis alone (and keeps it, or not, as `keepdims` asks)."""
    axes = node_axes(node)
    if axes is None or len(axes) != 1 or not is_last_axis(axes[0], operand(node, 0)):
        return False
    return keepdims is None or bool(node.attributes.get_int("keepdims", 1)) is keepdims


def weight(value: ir.Value) -> WeightSource | None:
    """The initializer behind `value` through Identity, widening Cast and Transpose of the last two axes, or None."""
    transpose = False
    while (node := value.producer()) is not None:
        if node.op_type == "Transpose" and is_standard(node):
            if not swaps_last_two(node):
                return None
            transpose = not transpose
        elif not is_view(node) or not (node.op_type == "Identity" or (node.op_type == "Cast" and widens(node))):
            return None
        value = operand(node, 0)
    if value.const_value is None or value.is_graph_input():
        return None
    return WeightSource(value, transpose)


def widens(node: ir.Node) -> bool:
    """Whether a Cast between floats keeps every value."""
    source, target = operand(node, 0).dtype, node.outputs[0].dtype or _cast_target(node)
    return source == target or target == ir.DataType.FLOAT or target == ir.DataType.DOUBLE


def swaps_last_two(node: ir.Node) -> bool:
    """Whether a Transpose node swaps the last two axes and nothing else."""
    perm = node.attributes.get_ints("perm", None)
    if perm is None:
        return rank(operand(node, 0)) == 2
    axes = list(range(len(perm)))
    return len(perm) >= 2 and list(perm) == [*axes[:-2], axes[-1], axes[-2]]


def one_entry(value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """What `value` is one entry of, by Split, Slice or Gather of a constant: the whole, the axis and the number."""
    node = value.producer()
    if node is None or not is_standard(node) or node.op_type not in ("Split", "Slice", "Gather"):
        return None
    whole, axis, number = operand(node, 0), node.attributes.get_int("axis", 0), value.index()
    if node.op_type == "Split":
        sizes = integers(node.inputs[1]) if len(node.inputs) > 1 else None
        single = dim(value, axis) == 1 if sizes is None else set(sizes) == {1}
        return (whole, axis, number) if single and number is not None else None
    if node.op_type == "Gather":
        picked = integers(node.inputs[1])
        return (whole, axis, picked[0]) if picked is not None and len(picked) == 1 else None
    start, end, axes, step = (integers(v) for v in (*node.inputs, None, None, None, None)[1:5])
    if not start or not end or not axes or len(start) != 1 or end[0] != start[0] + 1 or step not in (None, (1,)):
        return None
    return whole, axes[0], start[0]


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read more of `value` than its shape."""
    return [node for node in value.consumers() if node.op_type != "Shape"]


def only_consumer(value: ir.Value) -> ir.Node:
    """The one node that reads more of `value` than its shape; NoMatch when others, or the graph's outputs, do too."""
    consumers = readers(value)
    if value.is_graph_output():
        raise NoMatch(
            value.producer(),
            f"{value.name}, a value inside the block, is a graph output, which HinaMoE does not give; leave it out",
        )
    if len(consumers) != 1:
        others = ", ".join(node.op_type for node in consumers) or "no node"
        raise NoMatch(
            value.producer(),
            f"{value.name}, a value inside the block, is read by {others}; expected one node that goes on with it",
        )
    return consumers[0]


def reshape_chain(value: ir.Value) -> Iterator[ir.Value]:
    """`value`, then the values before each view but Cast in front of it."""
    yield value
    while (node := value.producer()) is not None and is_view(node) and node.op_type != "Cast":
        value = operand(node, 0)
        yield value
