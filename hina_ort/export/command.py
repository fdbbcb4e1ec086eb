"""Export a checkpoint of Hugging Face as an ONNX model with HinaMoE nodes that reads the experts where they lie."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes import external_data
from graph_passes.draw_in import Drawn, draw_in
from graph_passes.external_data import ModelFileError
from graph_passes.mapped import MappedTensor, bounded
from graph_passes.quantize.rewrite import WeightTypes, convert_weights
from graph_passes.staging import publish, staging_folder
from hina_ort.export import architectures, dense_weights, expert_weights, genai_config, transformers_model
from hina_ort.export.shards import INDEX_NAME, Checkpoint, StoredTensor
from hina_ort.files import MODEL_NAME, DataFile, Progress, UsageError, use_of_files
from hina_ort.weight_options import weight_types

TASK = "text-generation-with-past"
OPSET, OPSETS = 21, range(18, 24)
SIDE_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What is copied of a checkpoint: configuration and tokenizer."""


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote: HinaMoE nodes and what they compute, all nodes, and bytes.

    `bytes_written` are those of model and data; of the shards that it `reads`, only its tensors count. `tested` says
    whether exports of the architecture are compared with transformers, `genai` whether onnxruntime-genai can load it.
    """

    checkpoint: str
    written: str
    architecture: str
    tested: bool
    layers: list[Drawn]
    nodes: int
    bytes_written: int
    reads: list[DataFile]
    copied: bool
    genai: bool
    seconds: float
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        layers = [{"node": x.name, "spec": x.spec.to_dict(), "notes": list(x.notes)} for x in self.layers]
        return {**asdict(self), "layers": layers}


@bounded()
def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    task: str = TASK,
    weights: str = "keep",
    dense: str = "f32",
    opset: int = OPSET,
    copy: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Export the local `checkpoint` (a folder with config.json and safetensors) into the folder `out`.

    The graph is traced without weights. Experts stay in the checkpoint: `out` holds hard links to its shards, or with
    `copy` copies of those that are read; links share the data, so that neither may be changed. What ONNX Runtime cannot
    run in their types is converted and written: `dense` is f32, f16, int8 or int4 for matrices of linear layers.
    `weights` is what the experts' projections become: keep, f32, f16, bf16, int8, int4 or mxfp4 (see `convert`).

    Configuration and tokenizer are copied. An error or an interrupt leaves nothing. Raises UsageError for arguments
    that are not known or contradict each other and when transformers 5 is missing, ModelFileError for a checkpoint that
    cannot be read or exported, WeightError for weights that cannot be converted, OSError when `out` cannot be written.
    """
    start, stage = time.perf_counter(), progress or (lambda stage, done, total: None)
    source, folder = Path(checkpoint), Path(out)
    types = _checked_options(task, weights, dense, opset)
    stored = Checkpoint.read(source)
    _check_output(source, folder, overwrite)
    stage("tracing", 0, 1)
    decoder = transformers_model.load(stored, opset)
    stage("tracing", 1, 1)
    model = decoder.model
    with staging_folder(folder) as staged:
        links = _Links(staged, copy)
        expert_weights.place_experts(model, decoder.sources, links.place)
        dense_weights.fill(model, decoder.sources)
        drawn = draw_in(model, progress=progress)
        expert_weights.place_drawn_in(model, decoder.sources, links.place)
        dense_weights.place_dense(model, decoder.sources, links.place, dense)
        if not types.keep_all:
            convert_weights(model, types, progress)
        bytes_written, reads = _save(model, staged, folder, progress)
        links.drop_unread(reads)
        _copy_side_files(source, staged)
        genai = genai_config.write(staged, decoder.config, decoder.states, _generation(source))
        publish(staged, folder, last=MODEL_NAME)
    return ExportReport(
        checkpoint=str(checkpoint),
        written=str(out),
        architecture=decoder.config.model_type,
        tested=stored.config.get("model_type") in architectures.SUPPORTED,
        layers=drawn,
        nodes=sum(1 for _ in model.graph.all_nodes()),
        bytes_written=bytes_written,
        reads=[DataFile(str(folder / Path(data.file).name), data.bytes) for data in reads],
        copied=copy,
        genai=genai,
        seconds=time.perf_counter() - start,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _checked_options(task: str, weights: str, dense: str, opset: int) -> WeightTypes:
    if task != TASK:
        raise UsageError(f"--task is {task!r}, and {TASK} is the only one")
    if dense not in dense_weights.CHOICES:
        raise UsageError(f"--dense-weights is {dense!r}, expected one of {', '.join(dense_weights.CHOICES)}")
    if opset not in OPSETS:
        raise UsageError(f"--opset is {opset}, expected {OPSETS[0]} to {OPSETS[-1]}")
    try:
        return weight_types(weights, None, False, None, None)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_output(source: Path, folder: Path, overwrite: bool) -> None:
    """Raise an error that says what is wrong with the output folder."""
    if folder.resolve() == source.resolve():
        raise UsageError(f"CHECKPOINT and OUT are the same, {folder}; name another OUT")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"OUT {folder} is a file, and a folder is written; name another OUT")
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists already; pass --overwrite (overwrite=True) to replace it")
    home = folder if folder.is_dir() else folder.absolute().parent
    if not home.is_dir():
        raise FileNotFoundError(f"the folder {home} for OUT does not exist; make it first")
    if not os.access(home, os.W_OK):
        raise PermissionError(f"the folder {home} for OUT cannot be written; choose another one")


def _save(model: ir.Model, staged: Path, folder: Path, progress: Progress | None) -> tuple[int, list[DataFile]]:
    """Write the model into `staged`, which becomes `folder`: bytes of its own files, and what it reads of shards."""

    def written(done: int, total: int) -> None:
        if progress is not None:
            progress("writing", done, total)

    target = staged / MODEL_NAME
    try:
        external_data.save(model, target, written)
    except ModelFileError as error:
        raise ModelFileError(str(error).replace(str(staged), str(folder))) from error
    total, reads = use_of_files(target)
    return total - sum(data.bytes for data in reads), reads


def _copy_side_files(source: Path, folder: Path) -> None:
    for path in sorted({path for pattern in SIDE_FILES for path in source.glob(pattern)}):
        if path.name != INDEX_NAME and path.is_file():
            shutil.copyfile(path, folder / path.name)


def _generation(source: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        values = json.loads((source / "generation_config.json").read_bytes())
        return values if isinstance(values, dict) else {}
    return {}


class _Links:
    """Hard links to the shards in the output folder, or copies of them: ONNX Runtime reads nothing outside it."""

    def __init__(self, folder: Path, copy: bool) -> None:
        self._folder, self._copy = folder, copy
        self._made: set[Path] = set()

    def place(self, tensor: StoredTensor) -> MappedTensor:
        """Where the model finds `tensor`."""
        link = self._folder / tensor.file.name
        if link not in self._made:
            self._make(tensor.file, link)
            self._made.add(link)
        return tensor.tensor(self._folder)

    def drop_unread(self, reads: Sequence[DataFile]) -> None:
        """Remove those that are not in `reads`."""
        for link in self._made - {Path(data.file) for data in reads}:
            link.unlink()

    def _make(self, shard: Path, link: Path) -> None:
        real = shard.resolve()
        if self._copy:
            shutil.copyfile(real, link)
            return
        try:
            os.link(real, link)
        except OSError as error:
            raise UsageError(
                f"{shard} cannot be linked into OUT ({error.strerror}); choose OUT on its file system, or pass --copy"
            ) from error
