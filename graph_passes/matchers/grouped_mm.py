"""Experts as grouped matrix products: rows are sorted by expert, and each expert multiplies its own run of rows.

The pattern of transformers' `grouped_mm` experts, as its OnnxExporter writes it (S = T * k):

    ids [S] -> TopK(largest=0) sorts them; a histogram of them -> CumSum -> Split: where the run of each expert ends
    x [T, H] -> rows by order // k [S, H] -> each expert: Range from end to end -> Gather -> MatMul with its W [H, 2I]
      -> Concat [S, 2I] -> activation -> the same with W [I, H] -> Concat [S, H] -> Mul by mixing weights in that order
      -> rows by the inverse permutation -> Reshape [T, k, H] -> ReduceSum(axis 1)

A place is a Concat of such products with those that feed it. `sorted_rows` proves the permutation and the runs; the
weights of expert e must multiply run e. Shared experts are a parallel branch and stay in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp, router
from graph_passes.matchers.assembly import assemble
from graph_passes.matchers.ends import check_routing, ends
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import judge
from graph_passes.matchers.projection import stored_weight
from graph_passes.matchers.router import Router
from graph_passes.matchers.sorted_rows import Sorting, check_ends, check_inverse, sorting_by, taken_rows
from graph_passes.matchers.views import (
    NoMatch,
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
    scalar,
    strip,
    swaps_last_two,
    weight,
)

FAMILY = "grouped_mm"

_LONGEST_ACTIVATION = 64
"""So many values are looked at between two products of a block."""


@dataclass(frozen=True)
class Grouped:
    """One grouped product: rows `x` `[S, K]`, cut at `ends` `[E]`, run e times the weights of expert e `[N, K]`."""

    node: ir.Node
    x: ir.Value
    ends: ir.Value
    weights: tuple[WeightSource, ...]
    bias: WeightSource | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """N and K."""
        return self.weights[0].shape[-2:]


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    return [judge(place[-1], partial(_match, place)) for place in find_places(graph)]


def find_places(graph: ir.Graph) -> list[list[ir.Node]]:
    """The Concats of grouped products, those that feed one another together, the last of a block at the end."""
    places: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        if (rows := _rows_of_a_run(node)) is not None:
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
    for product in inputs:
        if strip(product.ends) is not strip(down.ends):
            raise NoMatch(product.node, f"the rows are cut at {product.ends.name} here, but at {down.ends.name} later")
        if strip(product.x) is not strip(inputs[0].x):
            raise NoMatch(product.node, "the projections of an expert read different rows")
    tokens, tokens_of_rows = taken_rows(inputs[0].x)
    if rank(tokens) != 2 or dim(tokens, -1) != inputs[0].shape[1]:
        raise NoMatch(tokens.producer(), f"the rows are not those of a matrix of tokens {tokens.name}")
    sorting, top_k = sorting_by(tokens_of_rows)
    check_ends(down.ends, sorting, len(down.node.inputs))
    combine = _combine(down, sorting)
    if combine.top_k != top_k:
        raise NoMatch(combine.node, f"each token has {top_k} rows, but {combine.top_k} outputs are summed")
    return _assemble(sorting, tokens, inputs, combine)


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
        split = _entry(stop)
        if split is None:
            raise NoMatch(stop.producer(), f"the end of the rows of expert {expert} is not one entry of a list of ends")
        cut_at, experts, index = split
        first = first or (rows, cut_at)
        if experts != len(node.inputs):
            raise NoMatch(
                node,
                f"the products of {len(node.inputs)} experts are joined, but {experts} have rows: some are missing",
            )
        if index != expert or strip(cut_at) is not strip(first[1]):
            raise NoMatch(node, f"the rows joined at place {expert} are those of expert {index} of {cut_at.name}")
        if strip(rows) is not strip(first[0]):
            raise NoMatch(node, f"experts 0 and {expert} read different rows: {first[0].name} and {rows.name}")
        weights.append(source)
        end = stop
    assert first is not None
    return Grouped(node, *first, _of_all_experts(node, weights))


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
    source = _weights(operand(node, 1))
    if source is None or len(source.shape) != 2:
        raise NoMatch(node, f"the weights of expert {expert} are computed by the graph or not stored as an initializer")
    start, stop = operand(numbers, 0), operand(numbers, 1)
    return rows, start, stop, replace(source, transpose=not source.transpose)


def _entry(value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """What `value` is one entry of, along the first axis: that value, its number of entries, and which one."""
    value = strip(value)
    split = produced_by(value, "Split", through_views=False)
    if split is None or split.attributes.get_int("axis", 0) != 0:
        return None
    whole, count, index = operand(split, 0), len(split.outputs), value.index()
    sizes = integers(split.inputs[1]) if len(split.inputs) > 1 else None
    if index is None or dim(whole, 0) != count or (sizes is not None and set(sizes) != {1}):
        return None
    return whole, count, index


def _weights(value: ir.Value) -> WeightSource | None:
    """The stored matrix behind `value`, or the stacked one of which it is one entry; None when it is computed."""
    if (direct := stored_weight(value)) is not None:
        return direct
    transpose = False
    while (node := value.producer()) is not None and is_standard(node) and node.op_type in ("Transpose", "Squeeze"):
        if node.op_type == "Transpose" and not swaps_last_two(node):
            return None
        transpose ^= node.op_type == "Transpose"
        value = operand(node, 0)
    split = _entry(value)
    stacked = None if split is None else weight(split[0])
    if split is None or stacked is None:
        return None
    return WeightSource(stacked.value, stacked.transpose != transpose, split[2])


def _of_all_experts(node: ir.Node, weights: list[WeightSource]) -> tuple[WeightSource, ...]:
    """The stacked tensor whose entries, in order, are the weights of the experts, or one tensor for each."""
    first = weights[0]
    if first.index is None:
        if any(w.index is not None or w.shape != first.shape or w.dtype != first.dtype for w in weights):
            raise NoMatch(node, "the weights of the experts are not alike")
        return tuple(weights)
    for expert, source in enumerate(weights):
        if source.value is not first.value or source.transpose is not first.transpose:
            raise NoMatch(
                node, f"expert 0 has weights of {first.value.name}, but expert {expert} those of {source.value.name}"
            )
        if source.index != expert:
            raise NoMatch(node, f"the rows of expert {expert} are multiplied by the weights of expert {source.index}")
    whole = replace(first, index=None)
    if whole.shape[0] != len(weights):
        raise NoMatch(node, f"{first.value.name} holds {whole.shape[0]} experts, but {len(weights)} are used")
    return (whole,)


@dataclass(frozen=True)
class _Combine:
    """The end of a block: `output` [T, H] = sum over k of `mixing` [S] * (down projection and its bias)."""

    node: ir.Node
    down: Grouped
    mixing: ir.Value
    top_k: int
    output: ir.Value


def _combine(down: Grouped, sorting: Sorting) -> _Combine:
    value, mixing, restored = down.node.outputs[0], None, False
    while True:
        node = only_consumer(value)
        if is_view(node):
            refuse_fixed_tokens(node)
        elif node.op_type == "Add" and is_standard(node) and mixing is None and down.bias is None:
            down = replace(down, bias=_gathered_bias(node, value, sorting))
        elif node.op_type == "Mul" and is_standard(node) and mixing is None:
            mixing = _mixing_weights(node, value, sorting)
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
    axes, top_k, hidden_size = node_axes(node), dim(value, -2), down.shape[0]
    if rank(value) is None or top_k is None or dim(value, -1) != hidden_size or axes is None:
        raise NoMatch(node, f"ReduceSum does not sum a tensor [tokens, top_k, {hidden_size}]")
    if len(axes) != 1 or axes[0] not in (-2, (rank(value) or 0) - 2):
        raise NoMatch(node, f"ReduceSum runs over axes {list(axes)}, expected the experts of a token")
    assert mixing is not None
    return _Combine(node, down, mixing, top_k, node.outputs[0])


def _mixing_weights(product: ir.Node, value: ir.Value, sorting: Sorting) -> ir.Value:
    """The weights `[S]`, in the order of the tokens, of which a Mul takes one for each sorted row."""
    factors = other_operand(product, value)
    weights, numbers = taken_rows(factors)
    if numbers is not sorting.order:
        raise NoMatch(product, f"the mixing weights are sorted by {numbers.name}, the rows by {sorting.order.name}")
    if dim(factors, -1) != 1 or rank(factors) != 2 or (rank(weights) != 1 and dim(weights, -1) != 1):
        raise NoMatch(product, "the outputs of the experts are not multiplied by one mixing weight for each row")
    follow(weights)
    return weights


def _gathered_bias(addition: ir.Node, product: ir.Value, sorting: Sorting) -> WeightSource:
    """The stacked bias `[E, N]` that an Add joins to a product, taken by the sorted ids."""
    rows, ids = taken_rows(other_operand(addition, product))
    source = weight(rows)
    if source is None or len(source.shape) != 2 or ids is not sorting.ascending:
        raise NoMatch(addition, "what is added to a product is not a bias taken by the sorted ids of the experts")
    return source


def _projection_at(value: ir.Value, inputs: list[Grouped], sorting: Sorting) -> Grouped:
    """The projection (with its bias, if one is added) whose result `value` is."""
    addition = produced_by(value, "Add")
    candidates = [value] if addition is None else [v for v in addition.inputs if v is not None]
    for candidate in candidates:
        for product in inputs:
            if strip(candidate) is product.node.outputs[0]:
                if addition is None:
                    return product
                return replace(product, bias=_gathered_bias(addition, candidate, sorting))
    raise NoMatch(value.producer(), f"{value.name} is not one of the projections of the sorted rows")


def _assemble(sorting: Sorting, tokens: ir.Value, inputs: list[Grouped], combine: _Combine) -> MoeMatch:
    down = combine.down
    experts, (hidden_size, intermediate_size) = len(down.node.inputs), down.shape
    mlp = expert_mlp.recognise(down.x)
    halves = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    sources = dict(zip(mlp.layout, halves, strict=False))
    projections = {name: _projection_at(half.source, inputs, sorting) for name, half in sources.items()}
    weights: dict[str, tuple[WeightSource, ...]] = {}
    biases: dict[str, tuple[WeightSource, ...]] = {}
    for name, product in {**projections, "down_proj": down}.items():
        rows = {"gate_up_proj": 2 * intermediate_size, "down_proj": hidden_size}.get(name, intermediate_size)
        columns = intermediate_size if name == "down_proj" else hidden_size
        _check_shape(product, name, product.shape, (rows, columns))
        weights[name] = product.weights
        if product.bias is not None:
            _check_shape(product, name + "_bias", product.bias.shape, (experts, rows))
            biases[name + "_bias"] = (product.bias,)
    routing = router.recognise(combine.mixing, sorting.ids, tokens, combine.top_k)
    # One row for each token: the router, checked next, gives every row of tokens k ids, which are summed again.
    block_ends = ends(tokens, combine.output, hidden_size, same_rows=True)
    check_routing(routing, tokens, experts, hidden_size)
    _check_largest_id(routing, sorting.ids, experts)
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": experts,
        "top_k": combine.top_k,
    }
    return assemble(FAMILY, combine.node, sizes, mlp, routing, block_ends, weights, biases)


def _check_shape(product: Grouped, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise NoMatch(product.node, f"{name} is {list(found)}, expected {list(expected)}")


def _check_largest_id(routing: Router, ids: ir.Value, experts: int) -> None:
    """NoMatch when ids of a router that was not recognised may be `experts` or more: the last expert takes those."""
    chosen = produced_by(ids, "TopK")
    if routing.num_experts is None and (chosen is None or dim(operand(chosen, 0), -1) != experts):
        raise NoMatch(
            strip(ids).producer(),
            f"{ids.name} may hold ids above {experts - 1}, which this graph gives to the last expert; the router was "
            f"not recognised: {routing.note}",
        )
