"""Experts computed densely: every expert for every token, as batched products with the stacked weights.

Two patterns, by where the scores of the experts enter:

    x [T, H] -> E copies [E, T, H] -> MatMul with W [E, H, 2I] -> activation -> MatMul with W [E, I, H]
      -> Mul by scores [E, T, 1] -> ReduceSum(axis 0)                             (gpt_oss of optimum-onnx)
    x [T, H] -> E copies -> Mul by scores [E * T, 1] -> the same products -> ReduceSum(axis 0)        (llama4)

Scores `[T, E]` are the k mixing weights of a token scattered into zeros, or Sigmoid or Softmax of its k largest logits
scattered into -inf. So an expert that was not chosen adds 0, as long as its own output is finite; HinaMoE leaves it
out. A place is a pair of stacked products, one behind the other, that meets something a TopK chose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.assembly import assemble
from graph_passes.matchers.dense_scores import Scores, read_scores, recognise_router
from graph_passes.matchers.ends import check_routing, ends
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import judge, node_name, recognised
from graph_passes.matchers.products import Product, weight_fields
from graph_passes.matchers.sizes import Size, axes_of, entries_of
from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import (
    NoMatch,
    dim,
    follow,
    is_standard,
    is_view,
    node_axes,
    only_consumer,
    operand,
    other_operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    reshape_chain,
    strip,
    weight,
)

FAMILY = "dense_experts"

_NOT_IN_AN_EXPERT = frozenset({"MatMul", "Gemm", "ReduceSum", "Tile", "Expand", "TopK", "ScatterElements"})
"""Operators that never lie between the projections of one expert."""

_NOT_ON_SCORES = frozenset({"MatMul", "Gemm", "ReduceSum", "Add"})
"""Operators that never lie between the TopK of a router and the scores that meet the experts."""

_STEPS = 64
"""How many values are looked at to see whether products belong together."""


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    return [judge(products[-1].node, partial(_match, products), FAMILY) for products in find_places(graph).values()]


def find_places(graph: ir.Graph) -> dict[ir.Value, list[Product]]:
    """The stacked products of each place, the down projection last, by its result."""
    products = {p.node.outputs[0]: p for node in graph if (p := _stacked_product(node)) is not None}
    places = {}
    for result, down in products.items():
        inputs = [products[v] for v in _ancestors([down.x], _NOT_IN_AN_EXPERT) if v in products]
        if inputs and _is_routed(inputs, result):
            places[result] = [*inputs, down]
    return places


def _stacked_product(node: ir.Node) -> Product | None:
    """x @ W with W a stacked initializer `[E, K, N]` and x computed, else None."""
    if node.op_type != "MatMul" or not is_standard(node):
        return None
    source = stored_weight(operand(node, 1))
    if source is None or len(source.shape) != 3 or weight(operand(node, 0)) is not None:
        return None
    return Product(node, operand(node, 0), (replace(source, transpose=not source.transpose),))


def _ancestors(values: Sequence[ir.Value], barred: Collection[str]) -> list[ir.Value]:
    """The nearest `_STEPS` values that `values` are computed from, through no node of `barred` types."""
    found: dict[ir.Value, None] = {}
    pending = deque(values)
    while pending and len(found) < _STEPS:
        value = pending.popleft()
        node = value.producer()
        if value in found or node is None:
            continue
        found[value] = None
        if node.op_type not in barred:
            pending.extend(v for v in node.inputs if v is not None)
    return list(found)


def _is_routed(inputs: Sequence[Product], result: ir.Value) -> bool:
    """Whether what multiplies the tokens, or the experts' outputs `result`, comes from a TopK."""
    factors = [product.x for product in inputs]
    pending = deque([result])
    for _ in range(_STEPS):
        if not pending:
            break
        for node in pending.popleft().consumers():
            if node.op_type == "Mul":
                factors.extend(v for v in node.inputs if v is not None)
            if node.op_type not in _NOT_IN_AN_EXPERT:
                pending.extend(node.outputs)
    near = _ancestors(factors, _NOT_ON_SCORES)
    return any(produced_by(value, "TopK", through_views=False) for value in near)


def _match(products: list[Product]) -> MoeMatch:
    *inputs, down = products
    experts, (hidden_size, intermediate_size) = down.experts, down.shape
    for product in inputs:
        if product.experts != experts:
            raise NoMatch(
                product.node,
                f"the stacked weights hold {product.experts} and {experts} experts: experts are missing",
            )
    tokens, weighting = _expert_input(inputs[0], experts)
    for product in inputs[1:]:
        other, its_weighting = _expert_input(product, experts)
        if strip(other) is not strip(tokens) or its_weighting != weighting:
            raise NoMatch(product.node, "the projections of an expert read different tokens")
    recognised("products", f"{len(products)} of all tokens with the stacked weights of {experts} experts")
    combine = _combine(down, experts)
    recognised("combine", f"a sum over {experts} experts ({node_name(combine.node)})")
    scores = weighting or combine.scores
    if scores is None or (weighting is not None and combine.scores is not None):
        times = "never" if scores is None else "twice"
        raise NoMatch(combine.node, f"the experts are {times} multiplied by scores, expected once")
    mlp = expert_mlp.recognise(down.x)
    weights, biases = weight_fields(mlp, inputs, combine.down, partial(_stacked_bias, experts=experts))
    if weighting is not None and biases:
        raise NoMatch(
            combine.node,
            "the scores multiply the inputs of experts that have biases: experts that were not chosen add to the sum, "
            "which HinaMoE cannot say",
        )
    routing, top_k = recognise_router(scores, tokens, experts)
    check_routing(routing, tokens, experts, hidden_size)
    hidden_states, output = _block_ends(tokens, combine, hidden_size)
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": experts,
        "top_k": top_k,
        "apply_weights_to": "output" if weighting is None else "input",
    }
    return assemble(FAMILY, combine.node, sizes, mlp, routing, (hidden_states, output), weights, biases)


def _expert_input(product: Product, experts: int) -> tuple[ir.Value, Scores | None]:
    """The tokens that every expert reads, as `[T, H]` where the graph has that, and the scores that multiply them."""
    x = product.x
    value = _behind(x)
    multiplication = produced_by(value, "Mul", through_views=False)
    copies, scores = value, None
    if multiplication is not None:
        first, second = operand(multiplication, 0), operand(multiplication, 1)
        if produced_by(_behind(second), "Tile", "Expand", through_views=False) is not None:
            first, second = second, first
        if produced_by(_behind(first), "Tile", "Expand", through_views=False) is not None:
            copies, scores = first, read_scores(second, experts)
            _check_aligned(multiplication, axes_of(first), second, experts)
    tokens = _copied(copies, experts)
    if tokens is not None:
        if rank(x) != 3 or dim(x, 0) != experts:
            raise NoMatch(product.node, f"the copies of the tokens are not [{experts}, tokens, hidden_size]")
        return _as_rows(tokens), scores
    # MatMul itself copies [T, H] or [1, T, H] for each expert.
    if rank(x) == 2 or (rank(x) == 3 and dim(x, 0) == 1):
        return _as_rows(x), None
    raise NoMatch(product.node, f"{x.name} is not a copy of the tokens for each of {experts} experts")


def _as_rows(value: ir.Value) -> ir.Value:
    """`value` as `[T, H]` where that is seen behind it through views, else as it is."""
    return next((v for v in reshape_chain(value) if rank(v) == 2), value)


def _behind(value: ir.Value) -> ir.Value:
    """The value behind views and copies by ones; NoMatch at one that fixes the number of tokens."""
    while (inner := _without_ones(follow(value))) is not value:
        value = inner
    return value


def _without_ones(value: ir.Value) -> ir.Value:
    """The value behind every Expand by ones, which copies nothing."""
    node = produced_by(value, "Expand", through_views=False)
    return _without_ones(operand(node, 0)) if node is not None and set(entries_of(operand(node, 1))) == {1} else value


def _copied(value: ir.Value, experts: int) -> ir.Value | None:
    """The tokens when `value` holds one copy of them all for each expert, one behind the other; None if no copies."""
    node = produced_by(_behind(value), "Tile", "Expand", through_views=False)
    if node is None:
        return None
    inner, counts = _without_ones(operand(node, 0)), entries_of(operand(node, 1))
    axes = rank(inner)
    whole = len(counts) > 1 and counts == [experts, *[1] * (len(counts) - 1)]
    if node.op_type == "Tile":
        whole &= axes == len(counts)
    else:
        whole &= axes is not None and (len(counts) > axes or (axes > 2 and len(counts) == axes and dim(inner, 0) == 1))
    if not whole:
        shown = ", ".join(str(count) if isinstance(count, int) else "?" for count in counts)
        raise NoMatch(
            node,
            f"{node.op_type} by [{shown}] does not lay a copy of all tokens for each of {experts} experts behind each "
            "other",
        )
    return inner


@dataclass(frozen=True)
class _Combine:
    """The end of a block: `node` sums, over the experts, the down projection times `scores` if they come here.

    `axes` are those of what it sums.
    """

    node: ir.Node
    down: Product
    scores: Scores | None
    axes: Sequence[Size]


def _combine(down: Product, experts: int) -> _Combine:
    value, scores, axes = down.node.outputs[0], None, axes_of(down.node.outputs[0])
    while True:
        node = only_consumer(value)
        if is_view(node) and node.inputs[0] is value:
            refuse_fixed_tokens(node)
            axes = axes_of(node.outputs[0])
        elif node.op_type == "Add" and is_standard(node) and scores is None and down.bias is None:
            down = replace(down, bias=_stacked_bias(node, value, experts))
        elif node.op_type == "Mul" and is_standard(node) and scores is None:
            factor = other_operand(node, value)
            scores = read_scores(factor, experts)
            _check_aligned(node, axes, factor, experts)
        elif node.op_type == "ReduceSum" and is_standard(node) and node.inputs[0] is value:
            break
        else:
            raise NoMatch(
                node, f"{node.op_type} after the down projection; expected bias, scores, and a sum over the experts"
            )
        value = node.outputs[0]
    summed, hidden_size = node_axes(node), down.shape[0]
    if len(axes) < 3 or axes[0] != experts or axes[-1] != hidden_size or summed not in ((0,), (-len(axes),)):
        raise NoMatch(
            node,
            f"ReduceSum over axes {summed} does not sum [{experts}, tokens, {hidden_size}] over the {experts} experts",
        )
    return _Combine(node, down, scores, axes)


def _check_aligned(node: ir.Node, axes: Sequence[Size], factor: ir.Value, experts: int) -> None:
    """NoMatch unless each row of a value with `axes` meets one score of `factor` in the multiplication `node`."""
    sizes = axes_of(factor)
    aligned = len(sizes) == len(axes) and sizes[-1:] == [1]
    if len(axes) > 2:
        aligned &= axes[0] == sizes[0] == experts
    if len(axes) > 3:
        aligned &= list(axes[1:-1]) == sizes[1:-1] and None not in sizes
    if not aligned:
        raise NoMatch(node, f"the graph does not say that each row of a token and expert meets one score {factor.name}")


def _stacked_bias(addition: ir.Node, product: ir.Value, experts: int) -> WeightSource:
    """The stacked bias, stored as `[E, N]` or `[E, 1, N]`, that an Add joins to a product `[E, T, N]`."""
    added = other_operand(addition, product)
    source = next((s for v in reshape_chain(added) if (s := weight(v)) is not None), None)
    expected = [experts, 1, dim(product, -1)]
    if source is None or rank(product) != 3 or rank(added) != 3 or [dim(added, axis) for axis in range(3)] != expected:
        raise NoMatch(addition, f"what is added to a projection is not a stored bias {expected} of the experts")
    return source


def _block_ends(tokens: ir.Value, combine: _Combine, hidden_size: int) -> tuple[ir.Value, ir.Value]:
    """hidden_states and output of the block.

    The summed value has one row for each token. Where it is reshaped to the leading axes of `[B, S, H]` tokens before
    the sum, with one axis left to be inferred, it has their shape.
    """
    output, leading = combine.node.outputs[0], combine.axes[1:-1]
    for value in reshape_chain(tokens):
        if (
            rank(value) == len(leading) + 1 == rank(output)
            and len(leading) > 1
            and all(_is_axis(size, value, axis) for axis, size in enumerate(leading))
            and dim(value, -1) == hidden_size
            and value.dtype == output.dtype
        ):
            return value, output
        if (node := value.producer()) is not None and is_view(node):
            refuse_fixed_tokens(node)
    return ends(tokens, output, hidden_size, same_rows=True)


def _is_axis(size: Size, value: ir.Value, axis: int) -> bool:
    """Whether `size` is that of an axis of `value`, by number, by name, or because it is whatever is left."""
    named = size[0].shape[size[1]] if isinstance(size, tuple) and size[0].shape is not None else None
    same_name = isinstance(named, ir.SymbolicDim) and named.value is not None and named == (value.shape or [])[axis]
    return size in (-1, (value, axis), dim(value, axis) or -1) or same_name
