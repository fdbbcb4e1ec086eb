"""Experts as grouped matrix products: rows are sorted by expert, and each expert multiplies its own run of rows.

The pattern of transformers' `grouped_mm` experts, as its OnnxExporter writes it (S = T * k):

    ids [S] -> TopK(largest=0) sorts them; a histogram of them -> CumSum -> Split: where the run of each expert ends
    x [T, H] -> rows by order // k [S, H] -> each expert: Range from end to end -> Gather -> MatMul with its W [H, 2I]
      -> Concat [S, 2I] -> activation -> the same with W [I, H] -> Concat [S, H] -> Mul by mixing weights in that order
      -> rows by the inverse permutation -> Reshape [T, k, H] -> ReduceSum(axis 1)

A place is a Concat of such products with those that feed it. `sorted_rows` proves the permutation and the runs; the
weights of expert e must multiply run e. Shared experts are a branch beside it, see `shared_expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import judge, node_name, recognised
from graph_passes.matchers.products import Combine, Grouped, block_of, of_all_experts, top_k_of_sum, weight_fields
from graph_passes.matchers.router import Router
from graph_passes.matchers.sorted_rows import Sorting, check_ends, check_inverse, entry_of, sorting_by, taken_rows
from graph_passes.matchers.stored_weight import stored_weight
from graph_passes.matchers.views import (
    NoMatch,
    dim,
    follow,
    is_standard,
    is_view,
    only_consumer,
    operand,
    other_operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    scalar,
    strip,
    weight,
)

FAMILY = "grouped_mm"

_LONGEST_ACTIVATION = 64
"""So many values are looked at between two products of a block."""


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    return [judge(place[-1], partial(_match, place), FAMILY) for place in find_places(graph)]


def find_places(graph: ir.Graph, rows_of: Callable[[ir.Node], ir.Value | None] | None = None) -> list[list[ir.Node]]:
    """The Concats of grouped products, those that feed one another together, the last of a block at the end.

    `rows_of` says which rows a Concat of such products joins, and None of any other node.
    """
    places: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        if (rows := (rows_of or _rows_of_a_run)(node)) is not None:
            feeding = _feeding(rows, places)
            places[node] = [*(product for last in feeding for product in places.pop(last)), node]
    return list(places.values())


def _rows_of_a_run(node: ir.Node) -> ir.Value | None:
    """The rows of which a Concat joins a run, gathered by a Range and multiplied; None when it joins other things."""
    if node.op_type != "Concat" or not is_standard(node):
        return None
    for value in node.inputs:
        product = None if value is None else produced_by(value, "MatMul", "Add")
        if product is not None and product.op_type == "Add":
            product = next((p for v in product.inputs if v is not None and (p := produced_by(v, "MatMul"))), None)
        run = None if product is None else produced_by(operand(product, 0), "Gather")
        if run is not None and produced_by(operand(run, 1), "Range") is not None:
            return operand(run, 0)
    return None


def _feeding(rows: ir.Value, products: dict[ir.Node, list[ir.Node]]) -> list[ir.Node]:
    """Those of `products` that `rows` are computed from without going through a lookup or another product."""
    found: list[ir.Node] = []
    pending, seen = [rows], set[ir.Value]()
    while pending and len(seen) < _LONGEST_ACTIVATION:
        value = pending.pop()
        node = value.producer()
        if value in seen or node is None or node in found:
            continue
        seen.add(value)
        if node in products:
            found.append(node)
        elif node.op_type not in ("Gather", "GatherND", "MatMul", "Gemm", "TopK"):
            pending.extend(v for v in node.inputs if v is not None)
    return found


def _match(place: list[ir.Node]) -> MoeMatch:
    *inputs, down = [_grouped(node) for node in place]
    if not inputs:
        raise NoMatch(
            place[-1],
            "expected a grouped product of the rows of tokens and one of the experts' activations, found only this "
            "one; export with experts_implementation 'grouped_mm' and an unchanged forward",
        )
    tokens, tokens_of_rows = tokens_and_rows(inputs, down)
    sorting, top_k = sorting_by(tokens_of_rows)
    check_ends(down.cuts, sorting, len(down.node.inputs))
    recognised("sorting", f"{top_k} rows for each token, sorted by the expert ids {sorting.ids.name}")
    combine = _combine(down, sorting)
    recognised("combine", f"a sum of {combine.top_k} weighted outputs for each token ({node_name(combine.node)})")
    if combine.top_k != top_k:
        raise NoMatch(combine.node, f"each token has {top_k} rows, but {combine.top_k} outputs are summed")
    mlp = expert_mlp.recognise(down.x)
    fields = weight_fields(mlp, inputs, combine.down, partial(gathered_bias, sorting=sorting))
    # One row for each token: the router, checked next, gives every row of tokens k ids, which are summed again.
    check = partial(_check_largest_id, ids=sorting.ids, experts=combine.down.experts)
    return block_of(FAMILY, combine, tokens, sorting.ids, mlp, fields, check)


def tokens_and_rows(inputs: Sequence[Grouped], down: Grouped) -> tuple[ir.Value, ir.Value]:
    """The tokens `[T, H]` of which all `inputs` read the same rows, cut as those of `down`, and the token of each row.

    Raises NoMatch.
    """
    for product in inputs:
        if strip(product.cuts) is not strip(down.cuts):
            raise NoMatch(product.node, f"the rows are cut at {product.cuts.name} here, but at {down.cuts.name} later")
        if strip(product.x) is not strip(inputs[0].x):
            raise NoMatch(product.node, "the projections of an expert read different rows")
    recognised("products", f"{len(inputs) + 1} grouped products of {down.experts} experts")
    tokens, tokens_of_rows = taken_rows(inputs[0].x)
    if rank(tokens) != 2 or dim(tokens, -1) != inputs[0].shape[1]:
        raise NoMatch(tokens.producer(), f"the rows are not those of a matrix of tokens {tokens.name}")
    return tokens, tokens_of_rows


def _grouped(node: ir.Node) -> Grouped:
    """Read a Concat of E products, run by run. Raises NoMatch at the first that is not as the class says."""
    if node.attributes.get_int("axis", 0) != 0:
        raise NoMatch(node, "Concat does not join the rows of the experts")
    first, weights = None, []
    end: ir.Value | None = None
    for expert in range(len(node.inputs)):
        rows, start, stop, source = _run(operand(node, expert), expert)
        if scalar(start) != 0 if end is None else strip(start) is not strip(end):
            raise NoMatch(node, f"the rows of expert {expert} do not start where those before it end")
        entry = entry_of(stop)
        if entry is None or dim(entry[0], 0) == 1 != len(node.inputs):
            raise NoMatch(stop.producer(), f"the end of the rows of expert {expert} is not one entry of a list of ends")
        (cut_at, index), experts = entry, dim(entry[0], 0)
        first = first or (rows, cut_at)
        if experts != len(node.inputs):
            raise NoMatch(
                node,
                f"the products of {len(node.inputs)} experts are joined, but {experts} have rows: some are missing",
            )
        if index != expert or cut_at is not first[1]:
            raise NoMatch(node, f"the rows joined at place {expert} are those of expert {index} of {cut_at.name}")
        if strip(rows) is not strip(first[0]):
            raise NoMatch(node, f"experts 0 and {expert} read different rows: {first[0].name} and {rows.name}")
        weights.append(source)
        end = stop
    assert first is not None
    return Grouped(node, first[0], of_all_experts(node, weights), cuts=first[1])


def _run(product: ir.Value, expert: int) -> tuple[ir.Value, ir.Value, ir.Value, WeightSource]:
    """The rows, start and end of the run of an expert, and its weights, of `rows[start:end] @ W`."""
    node = produced_by(product, "MatMul", through_views=False)
    run = None if node is None else produced_by(operand(node, 0), "Gather", through_views=False)
    numbers = None if run is None else produced_by(operand(run, 1), "Range", through_views=False)
    if node is None or run is None or numbers is None:
        raise NoMatch(product.producer(), f"expected MatMul of a run of rows (Gather of a Range) for expert {expert}")
    rows = operand(run, 0)
    if run.attributes.get_int("axis", 0) != 0 or rank(rows) != 2 or scalar(operand(numbers, 2)) != 1:
        raise NoMatch(run, f"expert {expert} does not read a run of the rows of a matrix")
    source = stored_weight(operand(node, 1))
    if source is None or len(source.shape) != 2:
        raise NoMatch(node, f"the weights of expert {expert} are computed by the graph or not stored as an initializer")
    start, stop = operand(numbers, 0), operand(numbers, 1)
    return rows, start, stop, replace(source, transpose=not source.transpose)


def _combine(down: Grouped, sorting: Sorting) -> Combine:
    value, mixing, restored = down.node.outputs[0], None, False
    while True:
        node = only_consumer(value)
        if is_view(node):
            refuse_fixed_tokens(node)
        elif node.op_type == "Add" and is_standard(node) and mixing is None and down.bias is None:
            down = replace(down, bias=gathered_bias(node, value, sorting))
        elif node.op_type == "Mul" and is_standard(node) and mixing is None:
            mixing = mixing_weights(node, value, sorting)
        elif node.op_type in ("Gather", "GatherND") and is_standard(node) and mixing is not None and not restored:
            data, numbers = taken_rows(node.outputs[0])
            if data is not value or rank(value) != 2 or dim(value, -1) != down.shape[0]:
                raise NoMatch(node, f"{node.op_type} does not put the outputs of the experts back into their order")
            check_inverse(numbers, sorting)
            restored = True
        elif node.op_type == "ReduceSum" and is_standard(node) and restored:
            break
        else:
            raise NoMatch(
                node,
                f"{node.op_type} after the down projection; expected bias, mixing weights, the inverse permutation, "
                "and a sum over top-k",
            )
        value = node.outputs[0]
    assert mixing is not None
    return Combine(node, down, mixing, top_k_of_sum(node, value, down.shape[0]), node.outputs[0])


def mixing_weights(product: ir.Node, value: ir.Value, sorting: Sorting) -> ir.Value:
    """The weights `[S]`, in the order of the tokens, of which a Mul takes one for each sorted row."""
    factors = other_operand(product, value)
    weights, numbers = taken_rows(factors)
    if numbers is not sorting.order:
        raise NoMatch(product, f"the mixing weights are sorted by {numbers.name}, the rows by {sorting.order.name}")
    if dim(factors, -1) != 1 or rank(factors) != 2 or (rank(weights) != 1 and dim(weights, -1) != 1):
        raise NoMatch(product, "the outputs of the experts are not multiplied by one mixing weight for each row")
    follow(weights)
    return weights


def gathered_bias(addition: ir.Node, product: ir.Value, sorting: Sorting) -> WeightSource:
    """The stacked bias `[E, N]` that an Add joins to a product, taken by the sorted ids."""
    rows, ids = taken_rows(other_operand(addition, product))
    source = weight(rows)
    if source is None or len(source.shape) != 2 or ids is not sorting.ascending:
        raise NoMatch(addition, "what is added to a product is not a bias taken by the sorted ids of the experts")
    return source


def _check_largest_id(routing: Router, ids: ir.Value, experts: int) -> None:
    """NoMatch when ids of a router that was not recognised may be `experts` or more: the last expert takes those."""
    chosen = produced_by(ids, "TopK")
    if routing.num_experts is None and (chosen is None or dim(operand(chosen, 0), -1) != experts):
        raise NoMatch(
            strip(ids).producer(),
            f"{ids.name} may hold ids above {experts - 1}, which this graph gives to the last expert; the router was "
            f"not recognised: {routing.note}",
        )
