"""Rows sorted by expert and split into runs by how many rows each expert has.

The pattern of the `ParallelExperts` of granitemoe and jetmoe, as torch dynamo exports it (S = T * k):

    ids [T, k] -> ones scattered into zeros [T, E] -> ReduceSum(axis 0): how many rows each expert has
    ids -> TopK(largest=0) sorts them; x [T, H] -> rows by order // k [S, H] -> Split by those sizes
      -> each expert: Gemm with its W [2I, H] -> Concat [S, 2I] -> activation -> Split -> Gemm with W [H, I] -> Concat
      -> Mul by mixing weights in that order -> ScatterND(reduction=add) into zeros [T, H] at the tokens of the rows

Exported by TorchScript, the sizes are those of the traced input and the scatter has no reduction: refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import expert_mlp, grouped_mm
from graph_passes.matchers.ends import zeros_like
from graph_passes.matchers.grouped_mm import gathered_bias, mixing_weights, tokens_and_rows
from graph_passes.matchers.match import Miss, MoeMatch
from graph_passes.matchers.places import judge, node_name, recognised
from graph_passes.matchers.products import Combine, Grouped, block_of, of_all_experts, weight_fields
from graph_passes.matchers.projection import projection
from graph_passes.matchers.sorted_rows import Sorting, check_sizes, refuse_fixed_fill, sorting_by
from graph_passes.matchers.views import (
    NoMatch,
    constant,
    dim,
    follow,
    integers,
    is_standard,
    is_view,
    only_consumer,
    operand,
    produced_by,
    rank,
    refuse_fixed_tokens,
    scalar,
    strip,
)

FAMILY = "split_rows"

_STEPS = 32
"""So many values behind the last product are looked at to see what is wrong with an export."""


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every block of this family in `graph`: a match, or a Miss that says where and why it is none."""
    return [judge(place[-1], partial(_match, place), FAMILY) for place in find_places(graph)]


def find_places(graph: ir.Graph) -> list[list[ir.Node]]:
    """The Concats of products of split rows, of two layers at least, the last of a block at the end.

    The rows of the first are looked up by computed numbers.
    """
    places = grouped_mm.find_places(graph, _split_rows)
    return [place for place in places if len(place) > 1 and _are_looked_up(_split_rows(place[0]))]


def _are_looked_up(rows: ir.Value | None) -> bool:
    lookup = None if rows is None else produced_by(rows, "Gather", "GatherND")
    return lookup is not None and constant(operand(lookup, 1)) is None


def _split_rows(node: ir.Node) -> ir.Value | None:
    """The rows whose parts, cut by one Split, each enter a product that the Concat `node` joins; None if it is none."""
    if node.op_type != "Concat" or not is_standard(node) or node.attributes.get_int("axis", 0) != 0:
        return None
    splits = {_split_of(value) for value in node.inputs if value is not None}
    split = splits.pop() if len(splits) == 1 else None
    return None if split is None else operand(split, 0)


def _split_of(product: ir.Value) -> ir.Node | None:
    """The Split along the first axis of which a part enters the product."""
    node = produced_by(product, "MatMul", "Gemm", "Add")
    if node is not None and node.op_type == "Add":
        node = next((n for v in node.inputs if v is not None and (n := produced_by(v, "MatMul"))), None)
    split = None if node is None else produced_by(operand(node, 0), "Split")
    by_sizes = split is not None and len(split.inputs) > 1 and split.attributes.get_int("axis", 0) == 0
    return split if by_sizes else None


def _match(place: list[ir.Node]) -> MoeMatch:
    *inputs, down = [_grouped(node) for node in place]
    _refuse_fixed_sizes(down)
    tokens, tokens_of_rows = tokens_and_rows(inputs, down)
    sorting, top_k = sorting_by(tokens_of_rows)
    check_sizes(down.cuts, sorting, down.experts)
    recognised("sorting", f"{top_k} rows for each token, sorted by the expert ids {sorting.ids.name}")
    combine = _combine(down, sorting, tokens, tokens_of_rows, top_k)
    recognised("combine", f"a sum of {top_k} weighted outputs for each token ({node_name(combine.node)})")
    mlp = expert_mlp.recognise(down.x)
    fields = weight_fields(mlp, inputs, combine.down, partial(gathered_bias, sorting=sorting))
    return block_of(FAMILY, combine, tokens, sorting.ids, mlp, fields)


def _grouped(node: ir.Node) -> Grouped:
    """Read a Concat of the products of E runs. Raises NoMatch at the first that is not that of its expert."""
    split, weights = _split_of(operand(node, 0)), []
    assert split is not None
    if len(split.outputs) != len(node.inputs):
        raise NoMatch(
            node, f"the products of {len(node.inputs)} experts are joined, but {len(split.outputs)} have rows"
        )
    for expert in range(len(node.inputs)):
        product = projection(operand(node, expert), follow)
        if follow(product.x) is not split.outputs[expert]:
            raise NoMatch(product.node, f"the rows joined at place {expert} are not those that Split cuts there")
        if product.bias is not None or len(product.weight.shape) != 2:
            raise NoMatch(product.node, f"the product of expert {expert} is not one with a matrix and no bias")
        weights.append(product.weight)
    return Grouped(node, operand(split, 0), of_all_experts(node, weights), cuts=operand(split, 1))


def _refuse_fixed_sizes(down: Grouped) -> None:
    """NoMatch when the sizes of the runs are constant, as TorchScript writes them."""
    sizes = integers(down.cuts)
    if sizes is None:
        return
    shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
    also = ""
    if (scatter := _scatter_behind(down.node)) is not None and not _adds(scatter):
        also = f", and {scatter.op_type} without reduction overwrites the outputs of a token's experts instead of "
        also += "adding them up, so that its outputs are wrong on every input"
    raise NoMatch(
        down.node,
        f"Split gives the experts fixed numbers of rows ([{shown}]): this export holds the choices of the input that "
        f"it was traced with{also}; export with torch.onnx.export(dynamo=True), or with transformers 5",
    )


def _scatter_behind(node: ir.Node) -> ir.Node | None:
    """The first scatter of what is computed from the node."""
    pending = deque(node.outputs)
    for _ in range(_STEPS):
        if not pending:
            break
        for consumer in pending.popleft().consumers():
            if consumer.op_type in ("ScatterND", "ScatterElements"):
                return consumer
            if consumer.op_type != "Shape":
                pending.extend(consumer.outputs)
    return None


def _adds(scatter: ir.Node) -> bool:
    return scatter.attributes.get_string("reduction", "none") == "add"


def _combine(down: Grouped, sorting: Sorting, tokens: ir.Value, tokens_of_rows: ir.Value, top_k: int) -> Combine:
    value, mixing = down.node.outputs[0], None
    while True:
        node = only_consumer(value)
        if is_view(node):
            refuse_fixed_tokens(node)
        elif node.op_type == "Add" and is_standard(node) and mixing is None and down.bias is None:
            down = replace(down, bias=gathered_bias(node, value, sorting))
        elif node.op_type == "Mul" and is_standard(node) and mixing is None:
            mixing = mixing_weights(node, value, sorting)
        elif node.op_type == "ScatterND" and is_standard(node) and mixing is not None:
            break
        elif node.op_type != "Expand" or rank(node.outputs[0]) != 2 or dim(node.outputs[0], -1) != down.shape[0]:
            raise NoMatch(
                node,
                f"{node.op_type} after the down projection; expected bias, mixing weights and a ScatterND that adds "
                "the outputs of each token's experts",
            )
        value = node.outputs[0]
    zeros, at = operand(node, 0), operand(node, 1)
    if not _adds(node):
        raise NoMatch(
            node,
            "ScatterND without reduction overwrites the outputs of a token's experts instead of adding them up: this "
            "export is wrong on every input",
        )
    if operand(node, 2) is not value or rank(at) != 2 or dim(at, -1) != 1 or strip(at) is not strip(tokens_of_rows):
        raise NoMatch(node, "the outputs of the experts are not added to the tokens of their rows")
    if scalar(zeros) != 0.0 or rank(zeros) != 2 or dim(zeros, -1) != down.shape[0]:
        raise NoMatch(node, "the outputs of the experts are not added to zeros")
    refuse_fixed_fill(zeros)
    assert mixing is not None
    same_rows = zeros_like(zeros, {strip(tokens)}, down.shape[0])
    return Combine(node, down, mixing, top_k, node.outputs[0], same_rows)
