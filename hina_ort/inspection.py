"""What MoE blocks a model holds: fused already, recognised, or left alone and why. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes import external_data
from graph_passes.matchers.match import Miss, MoeMatch
from graph_passes.moe_spec import FIELDS, ROUTER_INPUTS, MoeSpec
from graph_passes.op_schema import INPUTS
from graph_passes.pipeline import find_blocks
from hina_ort.conversion import find_model
from hina_ort.weights import is_hina_moe


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


def spec_of_node(node: ir.Node) -> MoeSpec:
    """Read a HinaMoE node back into the spec that it says.

    Raises ValueError when its attributes or weights do not make one.
    """
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    shapes = {name: tensors[0].shape.numpy() for name, tensors in _weights(node).items()}
    if "down_proj" not in shapes:
        raise ValueError("its weight_inputs name no down_proj")
    down, shared = shapes["down_proj"], shapes.get("shared_down_proj")
    present = {item.name for item, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
    return MoeSpec.from_attributes(
        values,
        hidden_size=int(down[-2]),
        intermediate_size=int(down[-1]),
        shared_intermediate_size=int(shared[-1]) if shared else 0,
        router_input=next((name for name in ROUTER_INPUTS if name in present), "none"),
    )


def _weights(node: ir.Node) -> dict[str, list[ir.TensorProtocol]]:
    """Weight tensors of a HinaMoE node by field, in the order of its experts."""
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    stacked, experts = values.get("experts_stacked", 1), int(values.get("num_experts", 1))
    left = [v.const_value for v in node.inputs[len(INPUTS) :] if v is not None and v.const_value is not None]
    fields: dict[str, list[ir.TensorProtocol]] = {}
    for name in str(values.get("weight_inputs", "")).split():
        count = 1 if stacked or (name in FIELDS and FIELDS[name].shared) else experts
        if len(left) < count:
            raise ValueError(f"it lacks weights of {name}")
        fields[name], left = left[:count], left[count:]
    return fields


def _fused(node: ir.Node) -> Block:
    name = node.name or "HinaMoE without a name"
    try:
        size = sum(tensor.nbytes for tensors in _weights(node).values() for tensor in tensors)
        return Block(name, "fused", spec=spec_of_node(node), bytes=size)
    except ValueError as error:
        return Block(name, "refused", reason=f"this HinaMoE node is not valid: {error}")


def _found(item: MoeMatch | Miss) -> Block:
    if isinstance(item, Miss):
        return Block(item.name, "refused", reason=item.reason)
    size = sum(source.nbytes for sources in item.weights.values() for source in sources)
    return Block(item.name, "recognised", family=item.family, spec=item.spec, bytes=size)
