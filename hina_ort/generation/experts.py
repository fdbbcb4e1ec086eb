"""How many tokens each expert of each layer gets: counted by HinaMoE nodes, shown as a table and as a heat map."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir import serde

from graph_passes import external_data
from graph_passes.external_data import ModelFileError
from graph_passes.matchers.places import node_name
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.op_schema import OUTPUTS
from hina_ort.files import UsageError
from hina_ort.weights import layer_of

Array = npt.NDArray[Any]

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""Entry of a session's options: where the data files of a model lie that is given as bytes."""
_LEAST_RELEASE = (1, 21)
"""That of ONNX Runtime which knows this entry."""


@dataclass(frozen=True)
class CountingModel:
    """A model as bytes whose graph gives out the tokens per expert of each HinaMoE node, and where its data files lie.

    `outputs` are the names of these outputs, int64 [E] each, `layers` the names of their layers.
    """

    model: bytes
    folder: Path
    layers: list[str]
    outputs: list[str]


def counting_model(source: Path) -> CountingModel:
    """The model file `source` with more outputs; no file is written, and weights stay where they are.

    Raises ModelFileError when the model cannot be read, and when it has no HinaMoE node or has some in subgraphs,
    UsageError when ONNX Runtime is too old.
    """
    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < _LEAST_RELEASE:
        raise UsageError(f"--experts-stats needs ONNX Runtime 1.21 or later, and this is {ort.__version__}; upgrade it")
    model = external_data.load(source)
    nodes = [node for node in model.graph if is_hina_moe(node)]
    found = sum(is_hina_moe(node) for node in all_nodes(model))
    if not nodes or found > len(nodes):
        reason = "holds no HinaMoE node; convert it first" if not found else "holds HinaMoE nodes in subgraphs"
        raise ModelFileError(f"--experts-stats cannot count in {source}: it {reason}")
    outputs = []
    for node in nodes:
        node.resize_outputs(len(OUTPUTS))
        counts = node.outputs[1]
        counts.name = counts.name or f"{node_name(node)}.{OUTPUTS[1][0]}"
        counts.type = ir.TensorType(ir.DataType.INT64)
        if counts not in model.graph.outputs:
            model.graph.outputs.append(counts)
        outputs.append(counts.name)
    folder = _relocate(model, source.parent)
    return CountingModel(
        serde.serialize_model(model).SerializeToString(), folder, [layer_of(n) for n in nodes], outputs
    )


def _relocate(model: ir.Model, folder: Path) -> Path:
    """Name the data files of `model` from the folder that all of them lie in, links resolved; return it.

    Of a model given as bytes, ONNX Runtime refuses data that a link leads out of the folder that it is told.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    external = [(value, value.const_value) for value in values if isinstance(value.const_value, ir.ExternalTensor)]
    paths = {os.path.realpath(tensor.path) for _, tensor in external}
    home = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else os.path.realpath(folder)
    for value, tensor in external:
        value.const_value = ir.ExternalTensor(
            os.path.relpath(os.path.realpath(tensor.path), home),
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=value.name or "",
        )
    return Path(home)


@dataclass(frozen=True)
class ExpertCounts:
    """Tokens of each expert, int64 [layers, E]; layers of fewer experts have zeros at the end."""

    layers: list[str]
    counts: list[list[int]]

    def rows(self) -> list[tuple[str, ...]]:
        """A layer a row: its name, tokens, experts with some, least, median and most of an expert, and the busiest."""
        return [_row(layer, counts) for layer, counts in zip(self.layers, self.counts, strict=True)]

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain values for JSON."""
        return [{"layer": n, "tokens_per_expert": c} for n, c in zip(self.layers, self.counts, strict=True)]


COLUMNS = ("layer", "tokens x top_k", "experts used", "least", "median", "most", "busiest experts: share")
_BUSIEST = 5


def _row(layer: str, counts: list[int]) -> tuple[str, ...]:
    total, used = sum(counts), sum(count > 0 for count in counts)
    order = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))[:_BUSIEST]
    busiest = ", ".join(f"{expert}: {counts[expert] / max(total, 1):.1%}" for expert in order)
    spread = (min(counts), f"{float(np.median(counts)):g}", max(counts))
    return (layer, str(total), f"{used} of {len(counts)}", *(str(value) for value in spread), busiest)


def draw_heat_map(found: ExpertCounts, path: Path) -> None:
    """Write a PNG: a layer a row, an expert a column, its tokens as a share of what uniform routing gives it."""
    from hina_ort.bench.plot import import_matplotlib

    pyplot = import_matplotlib("--heatmap")
    shares = np.full((len(found.counts), max(len(counts) for counts in found.counts)), np.nan)
    for row, counts in zip(shares, found.counts, strict=True):
        row[: len(counts)] = np.array(counts) * len(counts) / max(sum(counts), 1)
    height, width = shares.shape
    size = (min(max(5.0, 0.11 * width + 2), 30.0), min(max(2.4, 0.16 * height + 1.4), 24.0))
    figure, axes = pyplot.subplots(figsize=size, dpi=120, layout="constrained")
    image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0.0, interpolation="nearest")
    every = max(1, height // 40)
    axes.set_yticks(range(0, height, every), found.layers[::every], fontsize=7)
    axes.set_xlabel("expert")
    axes.set_title("tokens of each expert, 1: its share if all had the same", fontsize=9, loc="left")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, format="png")
    pyplot.close(figure)
