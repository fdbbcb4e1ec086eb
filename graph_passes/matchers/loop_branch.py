"""One expert's branch of an unrolled loop: from the mask of its tokens to the scatter of their outputs.

NonZero(mask of expert e) -> (token, slot)
output[token] += mixing[token, slot] * mlp_e(x[token])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.loop_mask import Mask
from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.places import recognised
from graph_passes.matchers.projection import projection
from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import (
    RESHAPES,
    NoMatch,
    dim,
    follow,
    is_standard,
    is_view,
    one_entry,
    operand,
    produced_by,
    readers,
    refuse_fixed_tokens,
    scalar,
    swaps_last_two,
)

_INDEX_OPS = frozenset({"Transpose", "Split", "Slice", "Gather", "Expand", "Cast", *RESHAPES})


@dataclass(frozen=True)
class Branch:
    """What one expert's branch computes, and where it is added.

    `accumulator` is the node that adds it to the others; `tokens` is x before the gather, `mixing` the weights
    `[T, k]`; `layout` and `fields` are words of MoeSpec; `weights` maps weight fields to their sources. `adds` is
    False for a scatter that overwrites, which is a sum only when no token comes twice.
    """

    expert: int
    scatter: ir.Node
    accumulator: ir.Node
    adds: bool
    tokens: ir.Value
    mixing: ir.Value
    layout: tuple[str, ...]
    fields: Mapping[str, Any]
    weights: Mapping[str, WeightSource] = field(default_factory=dict)


def parse(mask: Mask) -> Branch:
    """Read the branch of `mask`, whose expert id is constant. Raises NoMatch, naming the node where it parts."""
    assert mask.expert is not None
    if not mask.rows:
        raise NoMatch(mask.node, "Squeeze drops an axis of the mask that NonZero reads, other than the expert's own")
    scatter = _find_scatter(mask)
    reduction = scatter.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        raise NoMatch(scatter, f"{scatter.op_type} combines the experts' outputs by {reduction}, expected a sum")
    if scatter.op_type == "ScatterElements" and scatter.attributes.get_int("axis", 0) != 0:
        raise NoMatch(scatter, "ScatterElements does not scatter along the token axis")
    accumulator = scatter if reduction == "add" else _addition(scatter)
    product = produced_by(follow(operand(scatter, 2), "Expand"), "Mul")
    if product is None:
        raise NoMatch(scatter, "what is scattered is not an expert's output times its mixing weight")
    for index in (0, 1):
        mixing = _mixing(operand(product, index), mask)
        if mixing is not None:
            output = operand(product, 1 - index)
            break
    else:
        raise NoMatch(product, "the expert's output is not multiplied by its token's mixing weight")
    tokens, layout, fields, weights = _mlp(output, mask)
    if _row(operand(scatter, 1), mask) != "token":
        raise NoMatch(scatter, "the experts' outputs are not scattered to the tokens that chose them")
    adds = reduction == "add"
    recognised("branches", f"mask, tokens, MLP, mixing weight and scatter, the last one of expert {mask.expert}")
    return Branch(mask.expert, scatter, accumulator, adds, tokens, mixing, layout, fields, weights)


def _find_scatter(mask: Mask) -> ir.Node:
    """The one ScatterElements or ScatterND that takes its indices from the mask."""
    found: dict[ir.Node, None] = {}
    pending = deque(mask.node.outputs)
    while pending:
        for use in pending.popleft().uses():
            node, index = use.node, use.idx
            if node.op_type in ("ScatterElements", "ScatterND") and index == 1:
                found[node] = None
            elif node.op_type in _INDEX_OPS and index == 0:
                pending.extend(node.outputs)
    if len(found) != 1:
        raise NoMatch(mask.node, f"the tokens of expert {mask.expert} are scattered {len(found)} times, expected once")
    return next(iter(found))


def _row(value: ir.Value, mask: Mask) -> str | None:
    """Which row of the mask's NonZero `value` is ("token" or "slot"), or None."""
    value = follow(value, "Expand")
    turned = produced_by(value, "Transpose", through_views=False)  # of one row, hence no more than a view
    entry = one_entry(value if turned is None else operand(turned, 0))
    if entry is None:
        return None
    source, axis, row = entry
    transpose = produced_by(source, "Transpose", through_views=False)
    if transpose is not None:
        source = operand(transpose, 0)
    if source.producer() is not mask.node or axis % 2 != (1 if transpose is not None else 0):
        return None
    return mask.rows[row] if 0 <= row < len(mask.rows) else None


def _addition(scatter: ir.Node) -> ir.Node:
    """The Add behind a scatter into zeros without reduction."""
    if scalar(operand(scatter, 0)) != 0.0:
        raise NoMatch(scatter, f"{scatter.op_type} without reduction overwrites values other than zeros")
    consumers = readers(scatter.outputs[0])
    while len(consumers) == 1 and consumers[0].op_type == "Cast" and is_view(consumers[0]):
        consumers = readers(consumers[0].outputs[0])
    if len(consumers) != 1 or consumers[0].op_type != "Add" or not is_standard(consumers[0]):
        raise NoMatch(scatter, "the scattered output of an expert is not added to the others")
    return consumers[0]


def _mixing(value: ir.Value, mask: Mask) -> ir.Value | None:
    """The weights `[T, k]` when `value` is their entries at (token, slot), else None."""
    gather = follow(value, "Expand").producer()
    if gather is None or len(gather.inputs) < 2:
        return None
    indices = operand(gather, 1)
    if gather.op_type == "Gather" and gather.attributes.get_int("axis", 0) == 0:
        return follow(operand(gather, 0)) if _is_flat_index(indices, mask) else None
    if gather.op_type == "GatherND" and gather.attributes.get_int("batch_dims", 0) == 0:
        pair = produced_by(indices, "Concat")
        rows = [] if pair is None else [_row(v, mask) for v in pair.inputs if v is not None]
        return follow(operand(gather, 0)) if rows == ["token", "slot"] else None
    return None


def _is_flat_index(value: ir.Value, mask: Mask) -> bool:
    """Whether `value` is token * k + slot. That k is the right number is left to the probe where it is computed."""
    addition = produced_by(follow(value), "Add")
    if addition is None:
        return False
    if {_row(operand(addition, 0), mask), _row(operand(addition, 1), mask)} == {"token", "slot"}:
        return dim(mask.ids, -1) == 1  # times 1
    for index in (0, 1):
        product = produced_by(operand(addition, index), "Mul")
        if product is None or _row(operand(addition, 1 - index), mask) != "slot":
            continue
        return "token" in (_row(operand(product, 0), mask), _row(operand(product, 1), mask))
    return False


@dataclass(frozen=True)
class _Projection:
    """x @ weight.T + bias. `columns`: tokens run along the last axis of the projection's input."""

    x: ir.Value
    weight: WeightSource
    bias: WeightSource | None
    columns: bool


_Mlp = tuple[ir.Value, tuple[str, ...], dict[str, Any], dict[str, WeightSource]]


def _mlp(output: ir.Value, mask: Mask) -> _Mlp:
    """Tokens before the gather, layout, MoeSpec fields and weights of the expert that computes `output`."""
    value, columns = _orient(output, False)
    gather = produced_by(value, "Gather", "GatherND", through_views=False)
    if gather is not None and _row(operand(gather, 1), mask) == "token":
        raise NoMatch(gather, f"expert {mask.expert} hands on its tokens as they are, which HinaMoE cannot say")
    down = _project(value, columns)
    arithmetic = expert_mlp.recognise(down.x)
    layout = arithmetic.layout
    inner = [_project(half.source, down.columns) for half in (arithmetic.gate, arithmetic.up) if half is not None]
    projections = dict(zip(layout, inner, strict=False)) | {"down_proj": down}
    weights = {name: projection.weight for name, projection in projections.items()}
    weights |= {f"{name}_bias": p.bias for name, p in projections.items() if p.bias is not None}
    tokens = {_tokens(p.x, p.columns, mask) for name, p in projections.items() if name != "down_proj"}
    if len(tokens) != 1:
        raise NoMatch(down.x.producer(), "gate and up read different values")
    return tokens.pop(), layout, {**arithmetic.fields, **arithmetic.layout_fields}, weights


def _orient(value: ir.Value, columns: bool) -> tuple[ir.Value, bool]:
    """Go behind views and Transposes of matrices; each of them swaps rows and columns."""
    while (node := value.producer()) is not None and is_standard(node):
        if node.op_type == "Transpose" and swaps_last_two(node):
            columns = not columns
        elif is_view(node):
            refuse_fixed_tokens(node)
        else:
            break
        value = operand(node, 0)
    return value, columns


def _project(value: ir.Value, columns: bool) -> _Projection:
    if not columns:
        right = projection(value, follow)
        x, columns = _orient(right.x, False)
        return _Projection(x, right.weight, right.bias, columns)
    value = follow(value)
    node = produced_by(value, "MatMul", through_views=False) or _fused_with_transpose(value)
    source = None if node is None else stored_weight(operand(node, 0))
    if node is None or source is None:
        raise NoMatch(
            value.producer(), f"expected a MatMul of stored weights with the transposed tokens at {value.name}"
        )
    x, columns = _orient(operand(node, 1), not node.attributes.get_int("transB", 0))
    return _Projection(x, source, None, columns)


def _fused_with_transpose(value: ir.Value) -> ir.Node | None:
    """The FusedMatMul behind `value` when it does no more than transpose its second operand."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("com.microsoft", "FusedMatMul"):
        return None
    more = any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return None if more or node.attributes.get_float("alpha", 1.0) != 1.0 else node


def _tokens(value: ir.Value, columns: bool, mask: Mask) -> ir.Value:
    """x in x[token]: the rows that the expert reads."""
    gather = follow(value).producer()
    if columns or gather is None or gather.op_type not in ("Gather", "GatherND") or not is_standard(gather):
        raise NoMatch(gather, f"expert {mask.expert} does not read the tokens that chose it by Gather or GatherND")
    if _row(operand(gather, 1), mask) != "token":
        raise NoMatch(gather, f"expert {mask.expert} reads other rows than those of its tokens")
    return operand(gather, 0)


def common_shape(name: str, branches: list[Branch]) -> tuple[int, ...]:
    """Shape of weight field `name`, the same in every branch, else NoMatch."""
    first = branches[0].weights[name].shape
    for branch in branches:
        shape = branch.weights[name].shape
        if shape != first:
            raise NoMatch(
                branch.scatter,
                f"{name} of expert {branch.expert} is {list(shape)}, of expert {branches[0].expert} {list(first)}: "
                "experts of different sizes cannot be one HinaMoE",
            )
    return first
