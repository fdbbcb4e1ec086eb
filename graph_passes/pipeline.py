"""The ordered passes: normalise, match, probe, fuse -> FusionReport."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.cut import block_values
from graph_passes.fuse_moe import UniqueNames, check, fuse
from graph_passes.matchers import MATCHERS, Miss, MoeMatch, subgraph_misses
from graph_passes.moe_spec import MoeSpec
from graph_passes.normalize import normalize
from graph_passes.probe import ProbeResult, probe

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many blocks are done."""


@dataclass(frozen=True)
class FusedBlock:
    """A block that was proven: its name, what it computes, the matcher's family, the probe's error, weight bytes."""

    name: str
    spec: MoeSpec
    family: str
    worst_relative_l2: float
    bytes: int


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
    model: ir.Model, *, rtol: float = 1e-4, partial: bool = False, progress: Progress | None = None
) -> FusionReport:
    """Replace every MoE block of `model`, in place, by a HinaMoE node.

    A block is replaced only when the probe agrees within `rtol` (see `probe`). When anything is refused, the model
    is left exactly as it was, unless `partial` allows the rest to be fused. A model without MoE blocks, or one that
    is already fused, is left as it is.
    """
    report = progress or (lambda stage, done, total: None)
    before = _count_nodes(model)
    report("reading the graph", 0, 1)
    working = model.clone()
    candidates = find_blocks(working)
    report("reading the graph", 1, 1)
    proven, refused = _prove(working, candidates, rtol, report)
    found = [item.block for item in proven]
    if not proven or (refused and not partial):
        return FusionReport(found, refused, False, before, before)
    _rewrite(working, proven, report)
    model.graph = working.graph
    model.functions.clear()
    model.functions.update(working.functions)
    return FusionReport(found, refused, True, before, _count_nodes(model))


def find_blocks(model: ir.Model) -> list[MoeMatch | Miss]:
    """Normalise `model` in place, and list what looks like a MoE block in it, subgraphs included."""
    with _without_tracebacks():
        normalize(model)
    return [*(found for matcher in MATCHERS for found in matcher(model.graph)), *subgraph_misses(model)]


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep onnx_ir from logging the traceback of a shape inference that fails; the shapes stay as they are then."""
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _prove(
    model: ir.Model, candidates: list[MoeMatch | Miss], rtol: float, report: Progress
) -> tuple[list[_Proven], list[Miss]]:
    """Check and probe what the matchers propose: what is proven, and what is refused."""
    proven: list[_Proven] = []
    refused: list[Miss] = []
    for done, found in enumerate(candidates):
        report("checking MoE blocks", done, len(candidates))
        if isinstance(found, Miss):
            refused.append(found)
            continue
        values = block_values(found)
        objection = _objection(found, values, proven)
        outcome = ProbeResult(math.inf, objection) if objection else probe(model, found, rtol)
        if not outcome.ok:
            refused.append(Miss(found.name, outcome.reason))
            continue
        size = sum(source.nbytes for sources in found.weights.values() for source in sources)
        block = FusedBlock(found.name, found.spec, found.family, outcome.worst_relative_l2, size)
        proven.append(_Proven(found, values, block))
    report("checking MoE blocks", len(candidates), len(candidates))
    return proven, refused


def _objection(match: MoeMatch, values: set[ir.Value], proven: list[_Proven]) -> str:
    """Why the block, which computes `values`, cannot be fused even if it is what it seems; empty if it can.

    Blocks may share nodes in front of them (a flattening of the tokens, say), but none may compute another's output.
    """
    for other in proven:
        if match.output in other.values or other.match.output in values:
            return f"it overlaps with {other.match.name}, which was proven before it; report this model"
    try:
        check(match)
    except ValueError as error:
        return str(error)
    return ""


def _rewrite(model: ir.Model, proven: list[_Proven], report: Progress) -> None:
    names = UniqueNames(model)
    replaced: dict[ir.Value, ir.Value] = {}
    for done, item in enumerate(proven):
        report("rewriting MoE blocks", done, len(proven))
        match = _follow_replaced(item.match, replaced)
        replaced[match.output] = fuse(model, match, names).outputs[0]
    report("rewriting MoE blocks", len(proven), len(proven))


def _follow_replaced(match: MoeMatch, replaced: dict[ir.Value, ir.Value]) -> MoeMatch:
    """`match` with inputs that are outputs of blocks fused before it brought up to date."""
    inputs = {name: replaced.get(value, value) for name, value in match.inputs.items()}
    return replace(match, hidden_states=replaced.get(match.hidden_states, match.hidden_states), inputs=inputs)


def _count_nodes(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
