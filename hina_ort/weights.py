"""Where the bytes of a model lie: under a HinaMoE node or not, layer by layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx_ir as ir

from graph_passes.op_schema import DOMAIN, OP_TYPE

_LAYER = re.compile(r"(?:layers|layer|blocks|block|h)[._/](\d+)(?!\d)")
_SCOPE_KEYS = ("namespace", "pkg.torch.onnx.name_scopes")
OUTSIDE = "outside the layers"


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of weights of one layer: read by HinaMoE nodes, and by all others."""

    layer: str
    bytes_fused: int
    bytes_left: int


def is_hina_moe(node: ir.Node) -> bool:
    """Whether `node` is a HinaMoE node."""
    return node.domain == DOMAIN and node.op_type == OP_TYPE


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
