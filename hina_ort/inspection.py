"""What MoE blocks a model holds: fused already, recognised, or left alone and why. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes import external_data
from graph_passes.matchers.match import Miss, MoeMatch
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import MoeSpec
from graph_passes.pipeline import find_blocks
from hina_ort.files import find_model


@dataclass(frozen=True)
class Block:
    """One MoE block. `state` is "fused" (a HinaMoE node), "recognised" or "refused", which alone has a `reason`.

    `family` is the export family of a recognised block; `bytes` are those of its expert weights.
    """

    node: str
    state: str
    family: str | None = None
    spec: MoeSpec | None = None
    bytes: int | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "spec": self.spec and self.spec.to_dict()}


@dataclass(frozen=True)
class Inspection:
    """The model file, its size in nodes and in bytes of weights, and its MoE blocks."""

    model: str
    nodes: int
    weight_bytes: int
    blocks: list[Block]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {**vars(self), "blocks": [block.to_dict() for block in self.blocks]}


def inspect_model(path: str | os.PathLike[str]) -> Inspection:
    """List the MoE blocks of the model `path` (a file, or a folder with model.onnx).

    Raises ModelFileError when it cannot be read.
    """
    source = find_model(Path(path))
    model = external_data.load(source)
    nodes = list(model.graph.all_nodes())
    constants = [v.const_value for graph in model.graphs() for v in graph.initializers.values()]
    blocks = [_fused(node) for node in nodes if is_hina_moe(node)]
    blocks += [_found(item) for item in find_blocks(model)]
    return Inspection(str(source), len(nodes), sum(c.nbytes for c in constants if c is not None), blocks)


def _fused(node: ir.Node) -> Block:
    name = node.name or "HinaMoE without a name"
    try:
        tensors = [value.const_value for values in weights_of(node).values() for value in values]
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return Block(name, "fused", spec=spec_of(node), bytes=size)
    except ValueError as error:
        return Block(name, "refused", reason=f"this HinaMoE node is not valid: {error}")


def _found(item: MoeMatch | Miss) -> Block:
    if isinstance(item, Miss):
        return Block(item.name, "refused", reason=item.reason)
    size = sum(source.nbytes for sources in item.weights.values() for source in sources)
    return Block(item.name, "recognised", family=item.family, spec=item.spec, bytes=size)
