"""Where the bytes of a model lie, under a HinaMoE node or not, layer by layer, and what a conversion made of them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from graph_passes.moe_node import is_hina_moe, spec_of
from graph_passes.moe_spec import FIELDS
from graph_passes.quantize.formats import WeightFormat
from graph_passes.quantize.rewrite import NodeChange, WeightTypes

_LAYER = re.compile(r"(?:layers|layer|blocks|block|h)[._/](\d+)(?!\d)")
_SCOPE_KEYS = ("namespace", "pkg.torch.onnx.name_scopes")
OUTSIDE = "outside the layers"


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of weights of one layer: read by HinaMoE nodes, and by all others."""

    layer: str
    bytes_fused: int
    bytes_left: int


@dataclass(frozen=True)
class ProjectionWeights:
    """A projection whose weights were converted: types or formats, bytes (scales and zero points too), and error.

    `relative_l2` is sqrt(sum (w - new w)^2 / sum w^2) over all experts, None when no model was written.
    """

    name: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    relative_l2: float | None


@dataclass(frozen=True)
class NodeWeights:
    """A HinaMoE node whose weights were to be converted; `projections` holds those that had another type before."""

    node: str
    layer: str
    accuracy_level_before: int
    accuracy_level: int
    projections: list[ProjectionWeights]

    @classmethod
    def of(cls, change: NodeChange) -> NodeWeights:
        """What `convert_weights` did to a node."""
        projections = [
            ProjectionWeights(name, c.before, c.after, c.bytes_before, c.bytes_after, c.relative_l2)
            for name, c in change.projections.items()
        ]
        name, levels = str(change.node.name), (change.accuracy_level_before, change.accuracy_level)
        return cls(name, layer_of(change.node), *levels, projections)

    @property
    def worst_relative_l2(self) -> float | None:
        """The largest error of a projection."""
        return max((p.relative_l2 for p in self.projections if p.relative_l2 is not None), default=None)

    @property
    def activations_changed(self) -> bool:
        """Whether the node rounds activations to int8 and did not before, or the other way round."""
        return (self.accuracy_level == 4) != (self.accuracy_level_before == 4)

    @property
    def exact(self) -> bool:
        """Whether the node computes what it did before, up to the rounding of its arithmetic."""
        return not self.worst_relative_l2 and not self.activations_changed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        totals = {
            "bytes_before": sum(p.bytes_before for p in self.projections),
            "bytes_after": sum(p.bytes_after for p in self.projections),
            "worst_relative_l2": self.worst_relative_l2,
        }
        return asdict(self) | totals


def without_effect(changes: list[NodeChange], types: WeightTypes, *, shared_asked: bool) -> list[str]:
    """What was asked for in `types` and changed nothing in any of the nodes, in words.

    `shared_asked` says whether a type of shared experts was asked for by name, and is not that of the others.
    """
    lines = []
    asked = (("--weights", types.routed, False), ("--shared-weights", types.shared if shared_asked else None, True))
    for option, target, shared in asked:
        present = [n for change in changes for n in spec_of(change.node).projections if FIELDS[n].shared == shared]
        converted = [n for change in changes for n in change.projections if FIELDS[n].shared == shared]
        if target is None or not changes or converted:
            continue
        if not present:
            lines.append(f"{option}: there are no shared experts")
            continue
        name = str(target) if isinstance(target, WeightFormat) else target.numpy().name
        lines.append(f"{option}: nothing to convert, the projections are {name} already")
    same = all(c.accuracy_level_before == c.accuracy_level and not c.projections for c in changes)
    if types.accuracy_level is not None and changes and same:
        lines.append(f"--accuracy-level: it is {types.accuracy_level} already")
    return lines


def layer_of(node: ir.Node) -> str:
    """Name of the decoder layer that `node` belongs to, from its name or the scopes that torch exports record."""
    for text in (node.name or "", *(node.metadata_props.get(key, "") for key in _SCOPE_KEYS)):
        if found := _LAYER.search(text):
            return f"layers.{found.group(1)}"
    return (node.name or OUTSIDE) if is_hina_moe(node) else OUTSIDE


def weights_by_layer(model: ir.Model) -> list[LayerBytes]:
    """Bytes of initializers of each layer, layers in ascending order; one that several nodes read counts once."""
    fused: dict[str, int] = {}
    left: dict[str, int] = {}
    seen: set[int] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.inputs:
            if value is None or value.const_value is None or not value.is_initializer() or id(value) in seen:
                continue
            seen.add(id(value))
            layer = layer_of(node)
            side = fused if is_hina_moe(node) else left
            side[layer] = side.get(layer, 0) + value.const_value.nbytes
    layers = sorted({*fused, *left}, key=lambda name: (name == OUTSIDE, _natural(name)))
    return [LayerBytes(name, fused.get(name, 0), left.get(name, 0)) for name in layers]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
