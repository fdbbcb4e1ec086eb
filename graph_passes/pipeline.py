"""The ordered passes: normalise, match, probe, fuse -> FusionReport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from graph_passes.cut import block_values
from graph_passes.fuse_moe import fuse
from graph_passes.matchers import MATCHERS, Miss, MoeMatch
from graph_passes.moe_spec import MoeSpec
from graph_passes.normalize import normalize
from graph_passes.probe import probe

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


@dataclass
class _Proven:
    match: MoeMatch
    block: FusedBlock


@dataclass
class _Results:
    proven: list[_Proven] = field(default_factory=list)
    refused: list[Miss] = field(default_factory=list)


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
    normalize(working)
    report("reading the graph", 1, 1)
    results = _prove(working, rtol, report)
    proven, refused = results.proven, results.refused
    found = [item.block for item in proven]
    if not proven or (refused and not partial):
        return FusionReport(found, refused, False, before, before)
    refused += _rewrite(working, proven, report)
    if (refused and not partial) or not proven:
        return FusionReport(found, refused, False, before, before)
    model.graph = working.graph
    model.functions.clear()
    model.functions.update(working.functions)
    return FusionReport([item.block for item in proven], refused, True, before, _count_nodes(model))


def _prove(model: ir.Model, rtol: float, report: Progress) -> _Results:
    """Run every matcher and probe what they propose."""
    results = _Results()
    candidates = [found for matcher in MATCHERS for found in matcher(model.graph)]
    taken: set[ir.Value] = set()
    for done, found in enumerate(candidates):
        report("checking MoE blocks", done, len(candidates))
        if isinstance(found, Miss):
            results.refused.append(found)
            continue
        values = block_values(found)
        if values & taken:
            results.refused.append(Miss(found.name, f"{found.family} overlaps with a block that was matched before it"))
            continue
        outcome = probe(model, found, rtol)
        if not outcome.ok:
            results.refused.append(Miss(found.name, outcome.reason))
            continue
        taken |= values
        size = sum(source.nbytes for sources in found.weights.values() for source in sources)
        block = FusedBlock(found.name, found.spec, found.family, outcome.worst_relative_l2, size)
        results.proven.append(_Proven(found, block))
    report("checking MoE blocks", len(candidates), len(candidates))
    return results


def _rewrite(model: ir.Model, proven: list[_Proven], report: Progress) -> list[Miss]:
    """Fuse what is proven; what cannot be fused leaves `proven` and is returned."""
    refused: list[Miss] = []
    replaced: dict[ir.Value, ir.Value] = {}
    for done, item in enumerate(list(proven)):
        report("rewriting MoE blocks", done, len(proven))
        match = _follow_replaced(item.match, replaced)
        try:
            replaced[match.output] = fuse(model, match).outputs[0]
        except ValueError as error:
            proven.remove(item)
            refused.append(Miss(match.name, str(error)))
    report("rewriting MoE blocks", len(proven), len(proven))
    return refused


def _follow_replaced(match: MoeMatch, replaced: dict[ir.Value, ir.Value]) -> MoeMatch:
    """`match` with inputs that are outputs of blocks fused before it brought up to date."""
    inputs = {name: replaced.get(value, value) for name, value in match.inputs.items()}
    return replace(match, hidden_states=replaced.get(match.hidden_states, match.hidden_states), inputs=inputs)


def _count_nodes(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
