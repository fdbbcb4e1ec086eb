"""Unfuse a model: write its HinaMoE nodes as standard ONNX operators, for runtimes and people without the library."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graph_passes import external_data
from graph_passes.mapped import bounded
from graph_passes.moe_node import all_nodes
from graph_passes.unfuse import UnfusedBlock, unfuse_model
from hina_ort.files import (
    DataFile,
    Progress,
    copy_side_files,
    external_bytes,
    refuse_weights_as_target,
    resolve,
    use_of_files,
    writing,
)


@dataclass(frozen=True)
class UnfusingReport:
    """What `unfuse` did. `written` and `bytes_after` are None when SRC holds no HinaMoE node; bytes are those of files.

    Of the data files of SRC that DST `reads` still, only its tensors count.
    """

    source: str
    written: str | None
    unfused: list[UnfusedBlock]
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int | None
    reads: list[DataFile]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {
            "source": self.source,
            "written": self.written,
            "unfused": [{"node": block.name, "spec": block.spec.to_dict()} for block in self.unfused],
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "reads": [asdict(file) for file in self.reads],
            "seconds": self.seconds,
        }


@bounded()
def unfuse(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UnfusingReport:
    """Write the model `src` (a file, or a folder with model.onnx) to `dst` with standard operators for HinaMoE nodes.

    A folder becomes a folder; its tokenizer and configuration files are copied along. Weights stay as they are stored,
    quantised ones too, and a `dst` beside `src` reads them from the data files of `src`. Nothing is written when there
    is no HinaMoE node. An error or an interrupt leaves no half-written file.

    Raises UsageError for contradicting arguments, ModelFileError for a model that cannot be read, FileExistsError
    when `dst` exists and `overwrite` is false, UnfuseError for a node that standard operators cannot say, OSError when
    `dst` cannot be written.
    """
    start = time.perf_counter()
    report_stage = progress or (lambda stage, done, total: None)
    paths = resolve(Path(src), Path(dst), overwrite)

    report_stage("reading", 0, 1)
    model = external_data.load(paths.source)
    data_files = set(external_bytes(model))
    refuse_weights_as_target(paths, data_files)
    bytes_before = sum(path.stat().st_size for path in (paths.source, *data_files))
    nodes_before = sum(1 for _ in all_nodes(model))
    report_stage("reading", 1, 1)

    unfused = unfuse_model(model)
    report = UnfusingReport(
        source=str(src),
        written=None,
        unfused=unfused,
        nodes_before=nodes_before,
        nodes_after=sum(1 for _ in all_nodes(model)),
        bytes_before=bytes_before,
        bytes_after=None,
        reads=[],
        seconds=0.0,
    )
    if unfused:
        with writing(paths) as target:
            external_data.save(model, target, lambda done, total: report_stage("writing", done, total))
            bytes_after, reads = use_of_files(target)
            report = replace(report, written=str(dst), bytes_after=bytes_after, reads=reads)
            if paths.folder is not None:
                copy_side_files(paths.source, target.parent, data_files)
    return replace(report, seconds=time.perf_counter() - start)
