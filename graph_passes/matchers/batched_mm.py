"""Experts as batched matrix products: the weights of each token's experts are gathered from stacked tensors.

The pattern of transformers' `batched_mm` experts, as torch.onnx exports it:

    x [T, H] -> every token k times [T*k, H] -> MatMul with GatherND(W [E, 2I, H], ids) -> activation
      -> MatMul with GatherND(W [E, H, I], ids) -> Mul by mixing weights -> Reshape [T, k, H] -> ReduceSum(axis 1)

A place is the set of weight gathers by one ids value. Everything else is found from there by dataflow: which
product is the down projection, whether weights lie [N, K] or [K, N] (by the axis that contracts), biases, limits,
and the combine. Shared experts are a branch beside it, see `shared_expert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import judge, node_name, recognised
from graph_passes.matchers.products import Combine, Product, block_of, top_k_of_sum, weight_fields
from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import (
    NoMatch,
    constant,
    dim,
    follow,
    integers,
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
    swaps_last_two,
    weight,
)

FAMILY = "batched_mm"


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    places = find_places(graph).items()
    return [judge(products[0].node, partial(_match, ids, products), FAMILY) for ids, products in places]


def find_places(graph: ir.Graph) -> dict[ir.Value, list[Product]]:
    """The products with gathered weights, by the ids that gather them."""
    places: dict[ir.Value, list[Product]] = {}
    for node in graph:
        if _gathers_experts(node) and (products := list(_products(node))):
            places.setdefault(strip(operand(node, 1)), []).extend(products)
    return places


def _gathers_experts(node: ir.Node) -> bool:
    """Whether the node looks up matrices of a stacked `[E, ., .]` initializer by computed ids."""
    if node.op_type not in ("Gather", "GatherND") or not is_standard(node):
        return False
    source = stored_weight(operand(node, 0))
    if node.op_type == "Gather":
        first_axis = node.attributes.get_int("axis", 0) == 0
    else:
        first_axis = node.attributes.get_int("batch_dims", 0) == 0 and dim(operand(node, 1), -1) == 1
    return source is not None and len(source.shape) == 3 and first_axis and constant(operand(node, 1)) is None


def _products(gather: ir.Node) -> Iterator[Product]:
    """The products that the gathered matrices enter, with the layout of the weights read off the operand order."""
    source = stored_weight(operand(gather, 0))
    assert source is not None
    pending = [(gather.outputs[0], source)]
    while pending:
        value, stored = pending.pop()
        for node in value.consumers():
            if not is_standard(node):
                continue
            if node.op_type == "Transpose" and swaps_last_two(node):
                pending.append((node.outputs[0], replace(stored, transpose=not stored.transpose)))
            elif node.op_type in ("Cast", "Identity") and is_view(node):
                pending.append((node.outputs[0], stored))
            elif node.op_type == "MatMul":
                left = node.inputs[0] is value
                vector = operand(node, 1 if left else 0)
                if _has_unit_axis(vector, 2 if left else 1):
                    layout = stored if left else replace(stored, transpose=not stored.transpose)
                    yield Product(node, vector, (layout,))


def _has_unit_axis(value: ir.Value, axis: int) -> bool:
    """Whether `axis` of a value with three axes has size 1, by its shape or by the Unsqueeze that makes it."""
    if (size := dim(value, axis)) is not None:
        return size == 1
    node = produced_by(value, "Unsqueeze", through_views=False)
    axes = None if node is None else node_axes(node)
    return axes is not None and len(axes) == 1 and axes[0] in (axis, axis - 3)


def _match(ids: ir.Value, products: list[Product]) -> MoeMatch:
    first = products[0].node
    experts = {p.experts for p in products}
    if len(experts) != 1:
        raise NoMatch(first, f"the stacked weights hold different numbers of experts: {sorted(experts)}")
    hidden: dict[int, tuple[ir.Value, int]] = {}
    for index, product in enumerate(products):
        if (repeated := _repeated(product.x)) is not None:
            hidden[index] = repeated
    inputs = [p for i, p in enumerate(products) if i in hidden]
    downs = [p for i, p in enumerate(products) if i not in hidden]
    if len(downs) != 1 or not inputs:
        raise NoMatch(
            first,
            f"expected one down projection and projections of the repeated tokens, found {len(downs)} and "
            f"{len(inputs)}; export with set_experts_implementation('batched_mm')",
        )
    if len({strip(value) for value, _ in hidden.values()}) != 1:
        raise NoMatch(first, "the projections of an expert read different tokens")
    tokens, repeats = next(iter(hidden.values()))
    recognised("products", f"{len(inputs)} of the tokens, {repeats} times each, and 1 of the experts' activations")
    combine = _combine(downs[0], ids)
    recognised("combine", f"a sum of {combine.top_k} weighted outputs for each token ({node_name(combine.node)})")
    if combine.top_k != repeats:
        raise NoMatch(combine.node, f"tokens are repeated {repeats} times, but {combine.top_k} outputs are summed")
    mlp = expert_mlp.recognise(combine.down.x)
    fields = weight_fields(mlp, inputs, combine.down, partial(_gathered_bias, ids=ids))
    # One row for each token: the router, checked next, gives every row of tokens k ids, which are summed again.
    return block_of(FAMILY, combine, tokens, ids, mlp, fields)


def _repeated(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The tokens `[T, H]` and k when `value` holds every token k times in a row, else None."""
    node = follow(value).producer()
    if node is None or node.op_type not in ("Expand", "Tile") or not is_standard(node):
        return None
    inner, counts = operand(node, 0), integers(operand(node, 1))
    axes = rank(inner)
    if counts is None or axes is None or len(counts) != axes or len(counts) < 2:
        return None
    # [T, 1, H] -> [T, k, H], or as Tile also [T, H] -> [T, k * H]: both lay the copies of a token side by side.
    axis = -2 if len(counts) > 2 else -1
    if node.op_type == "Expand" and axis == -1:
        return None
    others = [c for i, c in enumerate(counts) if i != len(counts) + axis]
    if any(c != 1 for c in others) or (axis == -2 and dim(inner, -2) != 1):
        return None
    # The tokens are what the axis of size 1 was put into, where that can be seen.
    return next((v for v in reshape_chain(inner) if rank(v) != axes or axis == -1), inner), counts[axis]


def _combine(down: Product, ids: ir.Value) -> Combine:
    value, mixing, node = down.node.outputs[0], None, down.node
    while True:
        node = only_consumer(value)
        if is_view(node):
            refuse_fixed_tokens(node)
        elif node.op_type == "Add" and is_standard(node) and mixing is None and down.bias is None:
            down = replace(down, bias=_gathered_bias(node, value, ids))
        elif node.op_type == "Mul" and is_standard(node) and mixing is None:
            mixing = other_operand(node, value)
            follow(mixing)
        elif node.op_type == "ReduceSum" and is_standard(node) and mixing is not None:
            break
        else:
            raise NoMatch(
                node, f"{node.op_type} after the down projection; expected bias, mixing weights, and a sum over top-k"
            )
        value = node.outputs[0]
    assert mixing is not None
    return Combine(node, down, mixing, top_k_of_sum(node, value, down.shape[0]), node.outputs[0])


def _gathered_bias(addition: ir.Node, product: ir.Value, ids: ir.Value) -> WeightSource:
    """The stacked bias `[E, N]` that an Add joins to a product, gathered by the same ids."""
    gather = produced_by(other_operand(addition, product), "Gather", "GatherND")
    source = None if gather is None else weight(operand(gather, 0))
    if gather is None or source is None or len(source.shape) != 2 or strip(operand(gather, 1)) is not ids:
        raise NoMatch(addition, "what is added to a projection is not a bias gathered by the ids of its expert")
    return source
