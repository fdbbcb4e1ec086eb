"""What MoE blocks a model holds: fused already, recognised, or left alone and why. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_passes import external_data
from graph_passes.explain import Explanation, Place, describe, describe_node, explain
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.moe_spec import MoeSpec
from graph_passes.names import NamingError
from graph_passes.normalize.inlining import inlined
from graph_passes.pipeline import find_blocks, find_in_calls
from hina_ort.files import UsageError, blaming, find_model
from hina_ort.memory_plan import MemoryPlan, Sizes, plan


@dataclass(frozen=True)
class Block:
    """One MoE block. `state` is "fused" (a HinaMoE node), "recognised" or "refused", which alone has a `reason`.

    `family` is the export family that was recognised, or tried; `bytes` are those of the expert weights; `note` says
    why a branch that looks like the block's shared expert stays outside, mostly there is none.
    """

    node: str
    state: str
    family: str | None = None
    spec: MoeSpec | None = None
    bytes: int | None = None
    reason: str | None = None
    note: str = ""

    @classmethod
    def of(cls, place: Place) -> Block:
        """The block in short."""
        size = place.bytes if place.spec is not None else None
        return cls(place.node, place.state, place.family, place.spec, size, place.reason, place.note)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "spec": self.spec and self.spec.to_dict()}


@dataclass(frozen=True)
class Inspection:
    """The model file, its size in nodes and in bytes of weights, its MoE blocks, and what it takes of memory."""

    model: str
    nodes: int
    weight_bytes: int
    blocks: list[Block]
    memory: MemoryPlan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {
            **vars(self),
            "blocks": [block.to_dict() for block in self.blocks],
            "memory": self.memory.to_dict(),
        }


def inspect_model(
    path: str | os.PathLike[str], *, html: str | os.PathLike[str] | None = None, measure: bool = False
) -> Inspection:
    """List the MoE blocks of the model `path` (a file, or a folder with model.onnx); `html` names a page to write.

    With `measure` the memory's bandwidth is measured too. Raises ModelFileError when the model cannot be read,
    UsageError or OSError when the page cannot be written, and CheckError when the memory cannot be measured.
    """
    source = find_model(Path(path))
    if html is not None:
        from hina_ort.html_report import check_target, inspection_page, write

        check_target(Path(html), source)
    model = external_data.load(source)
    count = sum(1 for _ in all_nodes(model))
    model = inlined(model)
    sizes = Sizes.of(model, source.parent)
    nodes = list(model.graph.all_nodes())
    places = [describe_node(node, pictures=html is not None) for node in nodes if is_hina_moe(node)]
    with blaming(source):
        found = [*find_blocks(model), *(item for _, item in find_in_calls(model))]
        places += [describe(item, pictures=html is not None) for item in found]
    memory = plan(sizes, places, source.parent, measure=measure)
    blocks = [Block.of(place) for place in places]
    inspection = Inspection(str(source), count, sizes.weights, blocks, memory)
    if html is not None:
        write(Path(html), inspection_page(inspection, places))
    return inspection


def explain_node(path: str | os.PathLike[str], node: str) -> Explanation:
    """Describe the MoE blocks of the model `path` that `node` (a node, a value or a module) is part of, or near to.

    Raises ModelFileError when the model cannot be read, and UsageError, with similar names, when nothing or several
    modules are called `node`.
    """
    source = find_model(Path(path))
    model = external_data.load(source)
    with blaming(source):
        try:
            return explain(model, node)
        except NamingError as error:
            raise UsageError(f"--explain: {error}") from error
