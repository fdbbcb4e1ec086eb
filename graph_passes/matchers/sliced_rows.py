"""Rows sorted by expert and sliced into runs, each of which goes through the whole MLP of its expert.

The pattern of deepseek_v2's loop over experts, as TorchScript exports it (S = T * k):

    ids [T, k] -> ones scattered into zeros [T, E] -> ReduceSum(axis 0): how many rows each expert has
    ids -> TopK(largest=0) sorts them; x [T, H] -> rows by order // k [S, H]
      -> each expert: Slice from the end of the run before to that end plus its number of rows -> MLP
      -> Concat [S, H] -> ScatterND at order: each row to its place -> Reshape [T, k, H] -> Mul by mixing weights
      -> ReduceSum(axis 1)

The trace leaves out the experts that its input does not reach: a block is matched only with all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.ends import zeros_like
from graph_passes.matchers.expert_mlp import ExpertMlp
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import judge, node_name, recognised
from graph_passes.matchers.products import Combine, Product, block_of, of_all_experts, top_k_of_sum, weight_fields
from graph_passes.matchers.projection import Projection, projection
from graph_passes.matchers.sorted_rows import Sorting, check_sizes, entry_of, sorting_by, taken_rows
from graph_passes.matchers.unrolled_loop import check_ids
from graph_passes.matchers.views import (
    NoMatch,
    dim,
    follow,
    integers,
    is_standard,
    is_view,
    only_consumer,
    operand,
    other_operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    strip,
)

FAMILY = "sliced_rows"

_STEPS = 32
"""So many values are looked at between the slice of an expert's rows and its output."""


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    return [judge(node, partial(_match, node), FAMILY) for node in find_places(graph)]


def find_places(graph: ir.Graph) -> list[ir.Node]:
    """The Concats whose parts are computed from slices of looked-up rows."""
    return [
        node
        for node in graph
        if node.op_type == "Concat"
        and is_standard(node)
        and node.attributes.get_int("axis", 0) == 0
        and rank(node.outputs[0]) == 2
        and all(value is not None and _slice_behind(value) is not None for value in node.inputs)
    ]


def _slice_behind(product: ir.Value) -> ir.Node | None:
    """The Slice to a computed end, of looked-up rows, behind the projections that make `product`; None without one."""
    if produced_by(product, "MatMul", "Gemm", "Add") is None:
        return None
    pending, projections = deque([product]), 0
    for _ in range(_STEPS):
        if not pending:
            break
        node = pending.popleft().producer()
        if node is None or node.op_type in ("Gather", "GatherND", "Concat", "Shape"):
            continue
        if node.op_type == "Slice" and projections and len(node.inputs) > 2 and integers(node.inputs[2]) is None:
            rows = produced_by(operand(node, 0), "Gather", "GatherND")
            return node if rows is not None and rank(operand(node, 0)) == 2 else None
        projections += node.op_type in ("MatMul", "Gemm")
        pending.extend(v for v in node.inputs if v is not None)
    return None


@dataclass(frozen=True)
class _Run:
    """The MLP of one expert: what it reads, a Slice, and its projections by the names of their weights."""

    rows: ir.Node
    mlp: ExpertMlp
    projections: Mapping[str, Projection]


def _match(joined: ir.Node) -> MoeMatch:
    runs = [_run(operand(joined, index)) for index in range(len(joined.inputs))]
    rows, sizes = _check_runs(runs)
    tokens, tokens_of_rows = taken_rows(rows)
    sorting, top_k = sorting_by(tokens_of_rows)
    experts = dim(sizes, 0) or 0
    check_sizes(sizes, sorting, experts)
    recognised("sorting", f"{top_k} rows for each token, sorted by the expert ids {sorting.ids.name}")
    products = {name: _product(name, runs) for name in runs[0].projections}
    down = products.pop("down_proj")
    combine = _combine(joined, down, sorting)
    recognised("combine", f"a sum of {combine.top_k} weighted outputs for each token ({node_name(combine.node)})")
    if combine.top_k != top_k:
        raise NoMatch(combine.node, f"each token has {top_k} rows, but {combine.top_k} outputs are summed")
    fields = weight_fields(runs[0].mlp, list(products.values()), down, _no_bias)
    return block_of(FAMILY, combine, tokens, sorting.ids, runs[0].mlp, fields)


def _run(output: ir.Value) -> _Run:
    down = projection(output, follow)
    mlp = expert_mlp.recognise(down.x)
    halves = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    inner = [projection(half.source, follow) for half in halves]
    read = {follow(p.x) for p in inner}
    rows = read.pop().producer() if len(read) == 1 else None
    if rows is None or rows.op_type != "Slice" or not is_standard(rows):
        raise NoMatch(down.node, "the projections of an expert do not read one slice of the rows")
    return _Run(rows, mlp, dict(zip(mlp.layout, inner, strict=False)) | {"down_proj": down})


def _check_runs(runs: list[_Run]) -> tuple[ir.Value, ir.Value]:
    """The rows, and the list of how many each expert has, when the runs are those of all experts, in their order."""
    rows, end, sizes = operand(runs[0].rows, 0), None, None
    experts: list[int] = []
    for run in runs:
        start, stop = operand(run.rows, 1), operand(run.rows, 2)
        axes, step = (integers(v) if v is not None else None for v in (*run.rows.inputs, None, None)[3:5])
        if strip(operand(run.rows, 0)) is not strip(rows) or axes != (0,) or step not in (None, (1,)):
            raise NoMatch(run.rows, "Slice does not cut a run out of the rows of all experts")
        if integers(start) != (0,) if end is None else strip(start) is not strip(end):
            raise NoMatch(run.rows, "the rows of an expert do not start where those before it end")
        entry = _added(stop, end)
        if entry is None or (sizes is not None and strip(entry[0]) is not strip(sizes)):
            raise NoMatch(run.rows, "the rows of an expert do not end where its number of rows says")
        sizes, end = entry[0], stop
        experts.append(entry[1])
        if (run.mlp.layout, run.mlp.layout_fields, run.mlp.fields) != (
            runs[0].mlp.layout,
            runs[0].mlp.layout_fields,
            runs[0].mlp.fields,
        ):
            raise NoMatch(run.rows, f"expert {experts[-1]} computes something else than expert {experts[0]}")
    assert sizes is not None
    check_ids(experts, dim(sizes, 0) or 0, sizes)
    if experts != sorted(experts):
        raise NoMatch(runs[0].rows, "the rows of the experts are not joined in the order of the experts")
    return rows, sizes


def _added(stop: ir.Value, end: ir.Value | None) -> tuple[ir.Value, int] | None:
    """The list and the number of its entry that `stop` adds to `end`, the end of the run before."""
    if end is None:
        return entry_of(stop)
    addition = produced_by(stop, "Add")
    if addition is None or not any(v is not None and strip(v) is strip(end) for v in addition.inputs):
        return None
    return entry_of(other_operand(addition, end))


def _product(name: str, runs: list[_Run]) -> Product:
    """The projections of all experts by one field, on the nodes of the first."""
    first = runs[0].projections[name]
    sources: list[WeightSource] = []
    for run in runs:
        found = run.projections[name]
        if found.bias is not None or len(found.weight.shape) != 2:
            raise NoMatch(found.node, f"{name} of an expert is not a matrix without bias")
        sources.append(found.weight)
    return Product(first.node, first.x, of_all_experts(first.node, sources))


def _no_bias(addition: ir.Node, product: ir.Value) -> WeightSource:
    raise NoMatch(addition, "what is added to a projection of an expert is unknown")


def _combine(joined: ir.Node, down: Product, sorting: Sorting) -> Combine:
    value, mixing, placed = joined.outputs[0], None, False
    while True:
        node = only_consumer(value)
        if is_view(node):
            refuse_fixed_tokens(node)
        elif node.op_type == "ScatterND" and is_standard(node) and not placed:
            _check_placing(node, value, joined, down, sorting)
            placed = True
        elif node.op_type == "Mul" and is_standard(node) and placed and mixing is None:
            mixing = other_operand(node, value)
            if rank(value) != 3 or rank(mixing) != 3 or dim(mixing, -1) != 1 or dim(mixing, -2) != dim(value, -2):
                raise NoMatch(node, "the outputs of the experts are not multiplied by one mixing weight each")
            follow(mixing)
        elif node.op_type == "ReduceSum" and is_standard(node) and mixing is not None:
            break
        else:
            raise NoMatch(
                node,
                f"{node.op_type} behind the experts; expected a ScatterND of the rows to their places, mixing weights, "
                "and a sum over top-k",
            )
        value = node.outputs[0]
    return Combine(node, down, mixing, top_k_of_sum(node, value, down.shape[0]), node.outputs[0])


def _check_placing(scatter: ir.Node, value: ir.Value, joined: ir.Node, down: Product, sorting: Sorting) -> None:
    """NoMatch unless the scatter puts each sorted row to its place among as many."""
    at = operand(scatter, 1)
    if operand(scatter, 2) is not value or scatter.attributes.get_string("reduction", "none") != "none":
        raise NoMatch(scatter, "ScatterND does not put the outputs of the experts to their places")
    if strip(at) is not sorting.order or rank(at) != 2 or dim(at, -1) != 1:
        raise NoMatch(scatter, f"the outputs are put back by another permutation than {sorting.order.name}")
    if not zeros_like(operand(scatter, 0), {joined.outputs[0]}, down.shape[0]):
        raise NoMatch(scatter, "the graph does not say that the outputs, put back, are as many as before")
