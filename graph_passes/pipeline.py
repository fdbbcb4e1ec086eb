"""The ordered passes: normalise, match, probe, fuse -> FusionReport."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes import collector
from graph_passes.cut import block_values
from graph_passes.fuse_moe import UniqueNames, check, fuse
from graph_passes.local_functions import Call, alone, calls_left, calls_of_functions, put_back
from graph_passes.matchers import MATCHERS, Miss, MoeMatch, shared_expert
from graph_passes.matchers.places import node_name
from graph_passes.moe_node import all_nodes
from graph_passes.moe_spec import MoeSpec
from graph_passes.normalize import normalize
from graph_passes.normalize.inlining import conflicts
from graph_passes.probe import ProbeResult, probe, probe_shared_expert

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many blocks are done."""

Watch = Callable[[MoeMatch | Miss, ProbeResult | None], None]
"""Called with each place that looks like a block and what its proof gave, while the graph is as it was."""


@dataclass(frozen=True)
class FusedBlock:
    """A block that was proven: its name, what it computes, the matcher's family, the probe's error, weight bytes.

    The `note` says why a branch that looks like its shared expert was left in the graph; mostly there is none.
    """

    name: str
    spec: MoeSpec
    family: str
    worst_relative_l2: float
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class FusionReport:
    """What was `found` and proven, what was `refused` and why, and whether the rewrite was `applied`."""

    found: list[FusedBlock]
    refused: list[Miss]
    applied: bool
    nodes_before: int
    nodes_after: int

    @property
    def fused(self) -> list[FusedBlock]:
        """The blocks that are HinaMoE nodes now."""
        return self.found if self.applied else []


@dataclass(frozen=True)
class _Proven:
    match: MoeMatch
    values: set[ir.Value]
    block: FusedBlock


def fuse_model(
    model: ir.Model,
    *,
    rtol: float = 1e-4,
    partial: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> FusionReport:
    """Replace every MoE block of `model`, in place, by a HinaMoE node.

    A block is replaced only when the probe agrees within `rtol` (see `probe`). When anything is refused, the model
    is left exactly as it was, unless `partial` allows the rest to be fused. A model without MoE blocks, or one that
    is already fused, is left as it is.
    """
    report = progress or _nowhere
    before = _count_nodes(model)
    report("reading the graph", 0, 1)
    with collector.paused():
        working = model.clone()
        in_functions = _fuse_functions(working, rtol, watch)
        candidates = find_blocks(working)
    report("reading the graph", 1, 1)
    with collector.frozen():
        proven, refused = _prove(working, candidates, rtol, report, watch or _unwatched)
        refused += _refused_in_calls(working, rtol, watch or _unwatched)
    found = [*in_functions, *(item.block for item in proven)]
    if not found or (refused and not partial):
        return FusionReport(found, refused, False, before, before)
    with collector.paused():
        _rewrite(working, proven, report)
    model.graph = working.graph
    model.functions.clear()
    model.functions.update(working.functions)
    return FusionReport(found, refused, True, before, _count_nodes(model))


def find_blocks(model: ir.Model) -> list[MoeMatch | Miss]:
    """Normalise `model` in place, and list what looks like a MoE block in it, subgraphs included."""
    normalize(model)
    found = [item for graph in model.graphs() for matcher in MATCHERS for item in matcher(graph)]
    return [shared_expert.draw_in(item) if isinstance(item, MoeMatch) else item for item in found]


def find_in_calls(model: ir.Model) -> list[tuple[ir.Model, MoeMatch | Miss]]:
    """What looks like a MoE block in functions that `find_blocks` could not inline, call by call; nothing is proven.

    Where all calls of a function lie in the main graph, it may be fused as a whole: its blocks come with the model of
    a call. Others are refused, and come with `model`.
    """
    found: list[tuple[ir.Model, MoeMatch | Miss]] = []
    whole = [node for calls in calls_of_functions(model) for node in calls]
    for node in calls_left(model):
        call = alone(model, node).model
        items = find_blocks(call)
        if node in whole:
            found += [(call, item) for item in items]
        else:
            found += [(model, miss) for miss in _held_back(model, node, items)]
    return found


def _held_back(model: ir.Model, call: ir.Node, found: Sequence[MoeMatch | Miss]) -> list[Miss]:
    """Why what is `found` in the function of a `call` that could not be inlined stays there."""
    reason = conflicts(model)[call.op_identifier()] if found else ""
    return [
        Miss(node_name(call), item.reason if isinstance(item, Miss) else reason, item.family, call, call, item.steps)
        for item in found
    ]


def _refused_in_calls(model: ir.Model, rtol: float, watch: Watch) -> list[Miss]:
    """Why blocks in calls that could not be inlined, and were not fused with their function, stay there."""
    misses: list[Miss] = []
    for node in calls_left(model):
        call = alone(model, node).model
        proven, refused = _prove(call, find_blocks(call), rtol, _nowhere, _unwatched)
        misses += _held_back(model, node, [*refused, *(item.match for item in proven)])
    for miss in misses:
        watch(miss, None)
    return misses


def _prove(
    model: ir.Model, candidates: list[MoeMatch | Miss], rtol: float, report: Progress, watch: Watch
) -> tuple[list[_Proven], list[Miss]]:
    """Check and probe what the matchers propose: what is proven, and what is refused."""
    proven: list[_Proven] = []
    refused: list[Miss] = []
    for done, found in enumerate(candidates):
        report("checking MoE blocks", done, len(candidates))
        if isinstance(found, Miss):
            refused.append(found)
            watch(found, None)
            continue
        found, outcome = prove(model, found, proven, rtol)
        watch(found, outcome)
        if not outcome.ok:
            refused.append(Miss(found.name, outcome.reason, found.family, found.output.producer()))
            continue
        size = sum(source.nbytes for sources in found.weights.values() for source in sources)
        block = FusedBlock(found.name, found.spec, found.family, outcome.worst_relative_l2, size, found.note)
        proven.append(_Proven(found, block_values(found), block))
    report("checking MoE blocks", len(candidates), len(candidates))
    return proven, refused


def prove(model: ir.Model, match: MoeMatch, proven: list[_Proven], rtol: float) -> tuple[MoeMatch, ProbeResult]:
    """Check and probe a match: what of it counts, and the outcome. A shared expert never keeps the rest from fusing."""
    routed = match.routed_only or match
    objection = _objection(routed, proven)
    outcome = ProbeResult(math.inf, objection) if objection else probe(model, routed, rtol)
    if routed is match or not outcome.ok:
        return routed, outcome
    objection = _objection(match, proven)
    shared = ProbeResult(math.inf, objection) if objection else probe_shared_expert(model, match, rtol)
    if not shared.ok:
        return replace(routed, note=shared_expert.left_out(shared.reason)), outcome
    return match, ProbeResult(max(outcome.worst_relative_l2, shared.worst_relative_l2))


def _objection(match: MoeMatch, proven: list[_Proven]) -> str:
    """Why the block cannot be fused even if it is what it seems; empty if it can.

    Blocks may share nodes in front of them (a flattening of the tokens, say), but none may compute another's output.
    """
    values = block_values(match)
    for other in proven:
        if match.output in other.values or other.match.output in values:
            return f"it overlaps with {other.match.name}, which was proven before it; report this model"
    try:
        check(match)
    except ValueError as error:
        return str(error)
    return ""


def _fuse_functions(model: ir.Model, rtol: float, watch: Watch | None) -> list[FusedBlock]:
    """Fuse, in place, local functions whose blocks are proven for every call; others will be inlined."""
    found: list[FusedBlock] = []
    for nodes in calls_of_functions(model):
        calls: list[Call] = []
        blocks: list[list[FusedBlock]] = []
        for node in nodes:
            call = alone(model, node)
            candidates = find_blocks(call.model)
            proven, refused = _prove(call.model, candidates, rtol, _nowhere, _unwatched)
            if refused or not proven:
                break
            call.names = _rewrite(call.model, proven, _nowhere)
            calls.append(call)
            blocks.append([item.block for item in proven])
        shown = alone(model, nodes[0]).model if watch is not None else None
        if len(calls) == len(nodes) and put_back(model, calls):
            if shown is not None and watch is not None:
                _prove(shown, find_blocks(shown), rtol, _nowhere, watch)
            for same in zip(*blocks, strict=True):
                found.append(replace(same[0], worst_relative_l2=max(block.worst_relative_l2 for block in same)))
    return found


def _nowhere(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def _unwatched(found: MoeMatch | Miss, outcome: ProbeResult | None) -> None:
    """A Watch that does not look."""


def _rewrite(model: ir.Model, proven: list[_Proven], report: Progress) -> UniqueNames:
    """Fuse what is proven; returns the names and tensors that were made."""
    names = UniqueNames(model)
    replaced: dict[ir.Value, ir.Value] = {}
    for done, item in enumerate(proven):
        report("rewriting MoE blocks", done, len(proven))
        match = _follow_replaced(item.match, replaced)
        replaced[match.output] = fuse(model, match, names).outputs[0]
    report("rewriting MoE blocks", len(proven), len(proven))
    return names


def _follow_replaced(match: MoeMatch, replaced: dict[ir.Value, ir.Value]) -> MoeMatch:
    """`match` with inputs that are outputs of blocks fused before it brought up to date."""
    inputs = {name: replaced.get(value, value) for name, value in match.inputs.items()}
    return replace(match, hidden_states=replaced.get(match.hidden_states, match.hidden_states), inputs=inputs)


def _count_nodes(model: ir.Model) -> int:
    return sum(1 for _ in all_nodes(model))
