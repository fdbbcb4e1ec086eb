"""Where the weights of a converted model are in memory, layer by layer: `hina-ort doctor --model`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes import external_data
from graph_passes.mapped import InlineTensor
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import FIELDS
from graph_passes.normalize.inlining import inlined
from hina_ort.files import UsageError, blaming, find_model
from hina_ort.numa.files import MappedFile
from hina_ort.numa.kernel import PAGE, Kernel
from hina_ort.runtime import placement
from hina_ort.weights import layer_of

INSIDE, UNKNOWN, MIXED = "in the model file", "unknown", "mixed"
_KNOWN = ("interleaved", "one node")
_REASONS = {
    INSIDE: "ONNX Runtime copies weights that have no data file of their own, when a session is made",
    UNKNOWN: "only who owns the data file, or may write it, is told what of it is in memory",
}

Look = Callable[[int, int], dict[str, Any]]


@dataclass
class LayerPlacement:
    """The matrices of a HinaMoE node.

    `nodes` counts bytes in memory by node, `patterns` matrices by what they look like; `pattern` is what all of them
    are, else "mixed". `node_order` and `page_bytes` are those of the first interleaved one.
    """

    layer: str
    node: str
    bytes: int = 0
    resident_bytes: int = 0
    nodes: dict[int, int] = field(default_factory=dict)
    pattern: str = UNKNOWN
    patterns: dict[str, int] = field(default_factory=dict)
    node_order: list[int] = field(default_factory=list)
    page_bytes: int | None = None
    huge_pages: bool = False
    reason: str = ""

    def count(self, pattern: str, reason: str, matrices: int = 1) -> None:
        """Add matrices; kept is the first reason why one is not as it should be."""
        self.patterns[pattern] = self.patterns.get(pattern, 0) + matrices
        self.pattern = pattern if len(self.patterns) == 1 else MIXED
        self.reason = self.reason or ("" if pattern in _KNOWN else reason)


def model_placement(
    path: str | os.PathLike[str], *, kernel: Kernel | None = None, look: Look = placement
) -> dict[str, Any]:
    """Where the matrices of the HinaMoE nodes of `path` (a file, or a folder with model.onnx) are in memory.

    Data files are mapped, nothing is read that is not cached. The keys are those of docs/cli.md; `look` is what the
    library says about a matrix. Raises ModelFileError when the model cannot be read, UsageError when it holds no
    HinaMoE node, and what `look` raises.
    """
    source = find_model(Path(path))
    model = external_data.load(source)
    with blaming(source):
        weights = [(node, _matrices(node)) for node in inlined(model).graph.all_nodes() if is_hina_moe(node)]
    if not weights:
        raise UsageError(f"--model: {source} holds no HinaMoE node; run hina-ort convert first, and name its result")
    with ExitStack() as stack:
        files = _Files(stack, kernel or Kernel(), look)
        layers = [_layer(node, tensors, files) for node, tensors in weights]
        total, inside = sum(layer.bytes for layer in layers), sum(layer.resident_bytes for layer in layers)
        return {
            "model": str(source),
            "bytes": total,
            "resident_bytes": inside,
            "refused": files.refused,
            "layers": [asdict(layer) for layer in layers],
        }


def _matrices(node: ir.Node) -> list[tuple[ir.TensorProtocol, int]]:
    """The tensors of a node's matrices, without scales and zero points, and how many matrices each holds.

    Raises ValueError when its attributes and weights do not fit.
    """
    spec, weights, found = spec_of(node), weights_of(node), []
    for name in spec.projections:
        count = spec.num_experts if spec.experts_stacked and not FIELDS[name].shared else 1
        found += [(value.const_value, count) for value in weights[name] if value.const_value is not None]
    return found


def _layer(node: ir.Node, tensors: list[tuple[ir.TensorProtocol, int]], files: _Files) -> LayerPlacement:
    found = LayerPlacement(layer_of(node), node.name or "")
    for tensor, count in tensors:
        found.bytes += tensor.nbytes
        if isinstance(tensor, ir.ExternalTensor) and not isinstance(tensor, InlineTensor):
            files.add(found, tensor, count)
        else:
            found.count(INSIDE, _REASONS[INSIDE], count)
    return found


class _Files:
    """The data files of a model, each mapped once."""

    def __init__(self, stack: ExitStack, kernel: Kernel, look: Look) -> None:
        self._stack, self._kernel, self._look = stack, kernel, look
        self._files: dict[str, MappedFile] = {}
        self.refused: str | None = None
        """Why the kernel does not say on which node a page is, if it does not."""

    def add(self, layer: LayerPlacement, tensor: ir.ExternalTensor, matrices: int) -> None:
        """Look at a tensor of so many matrices, one after another."""
        path = os.path.realpath(tensor.path)
        if path not in self._files:
            self._files[path] = self._stack.enter_context(MappedFile(Path(path)))
        file, offset, size = self._files[path], tensor.offset or 0, tensor.nbytes // matrices
        if not file.tells:
            layer.count(UNKNOWN, _REASONS[UNKNOWN], matrices)
            return
        self._count_bytes(layer, file, offset, tensor.nbytes)
        for begin in range(offset, offset + matrices * size, size):
            said = self._look(file.address + begin, size)
            layer.count(said["pattern"], said["reason"])
            layer.huge_pages |= bool(said["huge_pages"])
            if said["pattern"] == "interleaved" and layer.page_bytes is None:
                layer.node_order, layer.page_bytes = list(said["nodes"]), said["page_bytes"]

    def _count_bytes(self, layer: LayerPlacement, file: MappedFile, offset: int, size: int) -> None:
        """Count the bytes that are in memory, and map their pages, so that the kernel tells their nodes."""
        first, last = offset // PAGE, -(-(offset + size) // PAGE)
        pages = first + np.flatnonzero(file.resident(first, last - first))
        file.map(pages)
        ends = np.minimum((pages + 1) * PAGE, offset + size)
        sizes = ends - np.maximum(pages * PAGE, offset)
        layer.resident_bytes += int(sizes.sum())
        if self.refused is not None:
            return
        try:
            nodes = self._kernel.nodes_of(file.address + pages.astype(np.uint64) * np.uint64(PAGE))
        except OSError as error:
            self.refused = f"the kernel refuses move_pages ({error.strerror})"
            return
        counts = Counter(layer.nodes)
        for node in np.unique(nodes[nodes >= 0]):
            counts[int(node)] += int(sizes[nodes == node].sum())
        layer.nodes = dict(counts)
