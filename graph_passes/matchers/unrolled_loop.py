"""Unrolled loop over experts: one branch of nodes per expert, each with its id as a constant.

Written by optimum-onnx (qwen3_moe: OneHot, NonZero, Gather, ScatterElements into zeros, Add) and by torch dynamo
(Equal with arange, NonZero, GatherND, ScatterND with reduction=add). Such an export can be silently incomplete: an
exporter that traces the loop drops the experts its example input did not reach. So a block is matched only when its
branches are exactly the experts 0..E-1, E being the width of the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from graph_passes.matchers import router
from graph_passes.matchers.ends import check_routing, ends, zeros_like
from graph_passes.matchers.loop_branch import Branch, common_shape, parse
from graph_passes.matchers.loop_mask import Mask, find_mask, gathers_weights
from graph_passes.matchers.match import Miss, MoeMatch
from graph_passes.matchers.places import block_name, judge, recognised
from graph_passes.matchers.views import NoMatch, dim, follow, is_standard, operand, produced_by, scalar, strip
from graph_passes.moe_spec import MoeSpec

FAMILY = "unrolled_loop"


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every unrolled loop over experts in `graph` (normalised, types and shapes inferred)."""
    return [judge(masks[0].node, partial(_match, ids, masks), FAMILY) for ids, masks in find_places(graph).items()]


def find_places(graph: ir.Graph) -> dict[ir.Value, list[Mask]]:
    """The masks of experts in `graph`, by the ids that they compare."""
    places: dict[ir.Value, list[Mask]] = {}
    for node in graph:
        if node.op_type == "NonZero" and is_standard(node) and (mask := find_mask(node)) is not None:
            places.setdefault(mask.ids, []).append(mask)
    return places


def _match(ids: ir.Value, masks: Sequence[Mask]) -> MoeMatch:
    _refuse_computed(masks)
    experts = [mask.expert for mask in masks if mask.expert is not None]
    recognised("experts", f"{len(experts)} branches, one for each expert id, that read {ids.name}")
    width = _top_k_width(ids)
    if width is not None:
        check_ids(experts, width, ids)
    branches = sorted((parse(mask) for mask in masks), key=lambda branch: branch.expert)
    _check_alike(branches)
    total = _sum_of(branches)
    top_k = dim(ids, -1)
    if top_k is None:
        raise router.unknown_top_k(ids.producer(), ids)
    weights = {field: tuple(branch.weights[field] for branch in branches) for field in branches[0].weights}
    shapes = {field: common_shape(field, branches) for field in weights}
    hidden_size, intermediate_size = shapes["down_proj"]
    tokens = branches[0].tokens
    hidden_states, output = ends(tokens, total.value, hidden_size, total.has_rows_of(tokens, hidden_size))
    read = router.recognise(branches[0].mixing, ids, hidden_states, top_k)
    if width is None:
        # Ids that are no TopK are distinct, and their number is known, only if the whole router is.
        if read.num_experts is None:
            raise NoMatch(ids.producer(), f"the graph does not say from how many experts {ids.name} is chosen")
        width = read.num_experts
        check_ids(experts, width, ids)
    check_routing(read, tokens, width, hidden_size)
    spec = MoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=width,
        top_k=top_k,
        weight_inputs=tuple(weights),
        experts_stacked=not all(source.in_place for sources in weights.values() for source in sources),
        **read.fields,
        **branches[0].fields,
    )
    for field, shape in shapes.items():
        if shape != spec.field_shape(field):
            raise NoMatch(branches[0].scatter, f"{field} is {list(shape)}, expected {list(spec.field_shape(field))}")
    name = block_name(masks[0].node, read.constants.get("router_weight"))
    return MoeMatch(name, FAMILY, spec, hidden_states, output, read.inputs, read.constants, weights)


def _refuse_computed(masks: Sequence[Mask]) -> None:
    """NoMatch when the branches are not those of constant experts, with the cause of it."""
    for mask in masks:
        if mask.limited:
            raise NoMatch(
                mask.node,
                "each expert takes a limited number of tokens (the router's expert capacity) and the others are "
                "dropped, which HinaMoE cannot say; leave this block as it is, or remove the limit from the model",
            )
        if mask.expert is not None:
            continue
        if mask.number is not None and gathers_weights(mask.number):
            raise NoMatch(
                mask.node,
                f"the number of experts that the traced input reached, {len(masks)}, is fixed in this graph: it fails "
                "on inputs that reach another number; export with "
                "model.set_experts_implementation('batched_mm')",
            )
        raise NoMatch(
            mask.node,
            "the expert id is computed while the graph runs, but the weights are fixed: this export holds only the "
            f"{len(masks)} experts that the traced input reached, so its outputs are wrong when others are chosen; "
            "export with transformers 5 and model.set_experts_implementation('batched_mm'), or with optimum-onnx",
        )


def _top_k_width(ids: ir.Value) -> int | None:
    """Number of scores that the TopK behind `ids` chooses from; None when there is none or it is not known."""
    top_k = produced_by(ids, "TopK")
    return None if top_k is None else dim(operand(top_k, 0), -1)


def check_ids(experts: Sequence[int], width: int, ids: ir.Value) -> None:
    """NoMatch unless `experts` are the experts 0 .. width - 1, each once."""
    missing = sorted(set(range(width)) - set(experts))
    if missing:
        raise NoMatch(
            ids.producer(),
            f"router width {width} but {_listed(missing)} missing: this export dropped experts that its dummy input "
            "did not reach, so its outputs are wrong; export with transformers 5 and "
            "model.set_experts_implementation('batched_mm'), or trace with more tokens until no expert is missing",
        )
    unknown = sorted(set(experts) - set(range(width)))
    if unknown:
        raise NoMatch(ids.producer(), f"the router scores {width} experts, but there is a branch for id {unknown[0]}")
    twice = sorted(e for e in set(experts) if experts.count(e) > 1)
    if twice:
        raise NoMatch(ids.producer(), f"expert {twice[0]} has {experts.count(twice[0])} branches, expected one")


def _listed(missing: Sequence[int]) -> str:
    names = ", ".join(str(e) for e in missing)
    return f"expert {names} is" if len(missing) == 1 else f"experts {names} are"


_ALIKE = {
    "tokens": "input",
    "mixing": "set of mixing weights",
    "layout": "order of gate and up",
    "fields": "activation",
}
"""What all branches have in common, and what it is called."""


def _check_alike(branches: Sequence[Branch]) -> None:
    first = branches[0]
    for branch in branches:
        for what, words in _ALIKE.items():
            if getattr(branch, what) != getattr(first, what):
                raise NoMatch(
                    branch.scatter,
                    f"expert {branch.expert} has another {words} than expert {first.expert}; HinaMoE needs all experts "
                    "alike, leave this block as it is",
                )
        if branch.weights.keys() != first.weights.keys():
            raise NoMatch(
                branch.scatter,
                f"expert {branch.expert} has {', '.join(branch.weights)}, and expert {first.expert} "
                f"{', '.join(first.weights)}; HinaMoE needs all experts alike, leave this block as it is",
            )


@dataclass(frozen=True)
class _Sum:
    """The sum of all branches, its `parts`, and the `zeros` that it begins with and that experts scatter into."""

    value: ir.Value
    parts: Sequence[ir.Value]
    zeros: Sequence[ir.Value]

    def has_rows_of(self, tokens: ir.Value, hidden_size: int) -> bool:
        """Whether all zeros have the shape of `tokens`, or of another value of the sum, which has it by induction."""
        known = {strip(value) for value in (tokens, *self.parts, *self.zeros)}
        return all(zeros_like(value, known, hidden_size) for value in self.zeros)


def _sum_of(branches: Sequence[Branch]) -> _Sum:
    """The value that is exactly the sum of all branches, each once."""
    by_scatter = {branch.scatter.outputs[0]: branch for branch in branches}
    accumulators = {branch.accumulator: None for branch in branches}
    consumed = {strip(v) for node in accumulators for v in node.inputs if v is not None}
    tops = [node.outputs[0] for node in accumulators if node.outputs[0] not in consumed]
    if len(tops) != 1:
        raise NoMatch(branches[0].accumulator, f"the experts' outputs go into {len(tops)} sums, expected one")
    left = dict(by_scatter)
    parts: dict[ir.Value, None] = {}
    zeros = [operand(branch.scatter, 0) for branch in branches if not branch.adds]
    pending = [tops[0]]
    while pending:
        value = follow(pending.pop())
        node = value.producer()
        if value in by_scatter:
            parts[value] = None
            branch = left.pop(value, None)
            if branch is None:
                raise NoMatch(node, "an expert's output is added twice")
            if branch.adds:
                pending.append(operand(branch.scatter, 0))
        elif node is not None and node.op_type == "Add" and is_standard(node):
            parts[value] = None
            pending.extend((operand(node, 0), operand(node, 1)))
        elif scalar(value) != 0.0:
            raise NoMatch(node or tops[0].producer(), f"{value.name} is added to the experts' outputs inside the loop")
        else:
            zeros.append(value)
    if left:
        experts = ", ".join(str(branch.expert) for branch in left.values())
        raise NoMatch(tops[0].producer(), f"the outputs of experts {experts} do not reach the sum")
    return _Sum(tops[0], list(parts), zeros)
