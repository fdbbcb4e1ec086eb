"""Convert a model: fuse its Mixture-of-Experts blocks, give weights another type, check the result, and write it."""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes import external_data
from graph_passes.explain import Place, describe, describe_node
from graph_passes.mapped import bounded
from graph_passes.matchers.match import Miss, MoeMatch
from graph_passes.moe_node import all_nodes, is_hina_moe, spec_of
from graph_passes.normalize.inlining import inlined
from graph_passes.pipeline import FusedBlock, FusionReport, fuse_model
from graph_passes.probe import ProbeResult
from graph_passes.quantize.rewrite import NodeChange, WeightTypes, convert_weights
from hina_ort.comparison import CheckError, Comparison, Skipped, compare_in_full, compare_models
from hina_ort.files import (
    MODEL_NAME,
    DataFile,
    Paths,
    Progress,
    UsageError,
    blaming,
    copy_side_files,
    external_bytes,
    refuse_weights_as_target,
    resolve,
    use_of_files,
    writing,
)
from hina_ort.genai import GenaiFolder, dropped_experts, hint
from hina_ort.weight_options import weight_types
from hina_ort.weights import LayerBytes, NodeWeights, weights_by_layer, without_effect

RTOL = 1e-5


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` found and did. `written` is None when nothing was written; bytes are those of files.

    Blocks that were `proven` are `fused` unless another was refused; `stopped` says that `partial` would have let the
    rest be fused or converted then. `already_fused` counts HinaMoE nodes that SRC held before. `bytes_after` is None
    unless a model was written; of the data files of SRC that it `reads` still, only its tensors count. `weights` has
    the nodes whose weights were converted, or on a dry run would be; it is empty when that was not asked for, or
    `stopped`. `without_effect` says in words what was asked for about weights and changed nothing, and `genai` what
    was done, or is to be done, for onnxruntime-genai.
    """

    source: str
    written: str | None
    proven: list[FusedBlock]
    fused: list[FusedBlock]
    refused: list[Miss]
    stopped: bool
    already_fused: int
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int | None
    reads: list[DataFile]
    layers: list[LayerBytes]
    weights: list[NodeWeights]
    without_effect: list[str]
    checks: list[Comparison]
    checks_skipped: list[Skipped]
    genai: list[str]
    html: str | None
    seconds: float
    peak_rss_bytes: int

    @property
    def must_agree(self) -> bool:
        """Whether the outputs of DST have to be those of SRC, so that a check can fail.

        They have not when weights lost precision, or activations lost or gained it. Nor when HinaMoE nodes of SRC
        have other types now: they were not proven in this conversion, and how far another type's rounding moves them
        was not measured.
        """
        retyped = any(node.projections for node in self.weights)
        return all(node.exact for node in self.weights) and not (self.already_fused and retyped)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {
            "source": self.source,
            "written": self.written,
            "fused": [
                {
                    "node": block.name,
                    "family": block.family,
                    "spec": block.spec.to_dict(),
                    "worst_relative_l2": block.worst_relative_l2,
                    "bytes": block.bytes,
                    "note": block.note,
                }
                for block in self.fused
            ],
            "proven": len(self.proven),
            "refused": [
                {"node": miss.name, "reason": miss.reason, "family": miss.family or None} for miss in self.refused
            ],
            "already_fused": self.already_fused,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "reads": [asdict(file) for file in self.reads],
            "bytes_fused": sum(layer.bytes_fused for layer in self.layers),
            "bytes_left": sum(layer.bytes_left for layer in self.layers),
            "layers": [asdict(layer) for layer in self.layers],
            "weights": [node.to_dict() for node in self.weights],
            "without_effect": self.without_effect,
            "checks": [asdict(check) for check in self.checks],
            "checks_skipped": [asdict(skipped) for skipped in self.checks_skipped],
            "genai": self.genai,
            "html": self.html,
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


@bounded()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    weights: str = "keep",
    block: int | None = None,
    symmetric: bool = False,
    shared_weights: str | None = None,
    accuracy_level: int | None = None,
    dry_run: bool = False,
    check: int | str = 0,
    rtol: float = RTOL,
    partial: bool = False,
    overwrite: bool = False,
    html: str | os.PathLike[str] | None = None,
    genai: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Fuse the MoE blocks of the model `src` (a file, or a folder with model.onnx) and write the result to `dst`.

    A folder is converted into a folder; its tokenizer and configuration files are copied along. Each block is proven
    to agree within `rtol` (relative L2) before it is replaced; `check` whole-model runs on random inputs are compared
    too, or with `check="full"` one for each of `comparison.FULL`. `html` names a page about the blocks to write, on a
    dry run too. No model is written on a dry run (`dst` may exist then), when there is nothing to do, or when a block
    was refused and `partial` is false. An error or an interrupt leaves no half-written file.

    `genai` is for a folder of onnxruntime-genai: its decoder, whatever the file's name, is converted, the other models
    are copied along, and DST gets the library of HinaMoE and a genai_config.json that names it.

    `weights` is what the experts' projections become, in blocks that were fused now or before: keep, f32, f16, bf16,
    int8, int4 or mxfp4; `shared_weights` that of shared experts (default: the same). `block` is the number of weights
    of int8 and int4 that share a scale: 16, 32, 64, 128 or 256, or 0 for one scale per row (default: 32). `symmetric`
    leaves out their zero points. `accuracy_level` 4 lets nodes with quantised weights take activations as int8, 0 as
    floats (default: unchanged, 0 in new nodes). When weights or activations have other types afterwards, `check`
    reports differences but allows them, unless an output is not finite any more.

    Raises UsageError for contradicting arguments, ModelFileError for a model or genai_config.json that cannot be read,
    FileExistsError when `dst` exists and neither `overwrite` nor `dry_run` is true, WeightError for weights that cannot
    be converted, CheckError when a check fails, OSError when `dst` cannot be written.
    """
    start = time.perf_counter()
    stage = progress or (lambda stage, done, total: None)
    if not (check == "full" or (isinstance(check, int) and check >= 0)):
        raise UsageError(f"--check is {check}, expected a number of runs or full")
    if not 0 < rtol < 1:
        raise UsageError(f"--rtol is {rtol}, expected a number between 0 and 1")
    try:
        types = weight_types(weights, block, symmetric, shared_weights, accuracy_level)
    except ValueError as error:
        raise UsageError(str(error)) from error
    genai_folder = GenaiFolder.read(Path(src)) if genai else None
    name = genai_folder.model_name if genai_folder else MODEL_NAME
    paths = resolve(Path(src), Path(dst), overwrite or dry_run, name)
    page = None if html is None else _Page(Path(html), paths, dry_run)

    source = _Source.read(str(src), paths, stage)
    fusion = _fuse(source, rtol, partial, page, stage)
    refused = bool(fusion.refused) and not partial
    changes = [] if types.keep_all or refused else _convert_weights(source, types, stage)
    report = _report(
        source,
        fusion,
        changes,
        stopped=refused and bool(fusion.found or (source.already_fused and not types.keep_all)),
        without_effect=without_effect(changes, types, shared_asked=shared_weights not in (None, weights)),
        html=None if html is None else str(html),
    )
    if (fusion.applied or changes) and not dry_run:
        with writing(paths) as target:
            report = _write(replace(report, written=str(dst)), source, changes, target, genai_folder, stage)
            if check:
                report = _checked(report, paths.source, target, check, stage)
                _require_agreement(report, rtol)
            if page is not None:
                page.write(report)
    elif page is not None:
        page.write(report)
    return replace(
        report,
        seconds=time.perf_counter() - start,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


@dataclass(frozen=True)
class _Source:
    """What SRC, called `name`, holds: the model, converted in place, its data files, and the bytes of all files."""

    name: str
    paths: Paths
    model: ir.Model
    data_files: set[Path]
    bytes: int
    already_fused: int

    @classmethod
    def read(cls, name: str, paths: Paths, progress: Progress) -> _Source:
        """Read it; UsageError when DST would overwrite its weights."""
        progress("reading", 0, 1)
        model = external_data.load(paths.source)
        data_files = set(external_bytes(model))
        refuse_weights_as_target(paths, data_files)
        size = sum(path.stat().st_size for path in (paths.source, *data_files))
        already_fused = sum(is_hina_moe(node) for node in all_nodes(model))
        progress("reading", 1, 1)
        return cls(name, paths, model, data_files, size, already_fused)


def _fuse(source: _Source, rtol: float, partial: bool, page: _Page | None, progress: Progress) -> FusionReport:
    """Fuse what is proven, in place, and show it on the page; experts that a builder dropped count as refused."""
    model, file = source.model, source.paths.source
    if page is not None:
        nodes = inlined(model).graph.all_nodes()
        page.places += [describe_node(node, pictures=True) for node in nodes if is_hina_moe(node)]
    with blaming(file):
        watch = None if page is None else page.add
        fusion = fuse_model(model, rtol=rtol, partial=partial, progress=progress, watch=watch)
    if not (fusion.found or fusion.refused or source.already_fused):
        fusion = replace(fusion, refused=dropped_experts(file.parent, file.name))
    return fusion


def _convert_weights(source: _Source, types: WeightTypes, progress: Progress) -> list[NodeChange]:
    """Convert the weights of all HinaMoE nodes, in place; UsageError for an accuracy level without quantised ones."""
    changes = convert_weights(source.model, types, progress)
    if types.accuracy_level is not None and changes and not any(spec_of(change.node).formats for change in changes):
        raise UsageError(
            f"--accuracy-level is for quantised weights, and {source.name} has none; add --weights int8, int4 or mxfp4"
        )
    return changes


def _report(
    source: _Source,
    fusion: FusionReport,
    changes: list[NodeChange],
    *,
    stopped: bool,
    without_effect: list[str],
    html: str | None,
) -> ConversionReport:
    """What is known before anything is written."""
    return ConversionReport(
        source=source.name,
        written=None,
        proven=fusion.found,
        fused=fusion.fused,
        refused=[replace(miss, node=None, place=None) for miss in fusion.refused],  # they hold the whole graph
        stopped=stopped,
        already_fused=source.already_fused,
        nodes_before=fusion.nodes_before,
        nodes_after=fusion.nodes_after,
        bytes_before=source.bytes,
        bytes_after=None,
        reads=[],
        layers=weights_by_layer(inlined(source.model)),
        weights=[NodeWeights.of(change) for change in changes],
        without_effect=without_effect,
        checks=[],
        checks_skipped=[],
        genai=[],
        html=html,
        seconds=0.0,
        peak_rss_bytes=0,
    )


def _write(
    report: ConversionReport,
    source: _Source,
    changes: list[NodeChange],
    target: Path,
    genai_folder: GenaiFolder | None,
    progress: Progress,
) -> ConversionReport:
    """Write the converted model to `target`, and in a folder what belongs to it; `report` with what is known then."""
    paths = source.paths
    external_data.save(source.model, target, lambda done, total: progress("writing", done, total))
    bytes_after, reads = use_of_files(target)
    saved = [NodeWeights.of(change) for change in changes]  # errors are known now
    report = replace(report, bytes_after=bytes_after, reads=reads, weights=saved)
    if paths.folder is not None:
        copy_side_files(paths.source, target.parent, source.data_files)
    if genai_folder is not None:
        return replace(report, genai=genai_folder.complete(source.model, target))
    return replace(report, genai=hint(paths.source.parent)) if paths.folder is not None else report


class _Page:
    """The page that --html asked for: `places` are collected while the graph is as it was."""

    def __init__(self, file: Path, paths: Paths, dry_run: bool) -> None:
        from hina_ort.html_report import check_target

        check_target(file, paths.source, paths.destination)
        self.places: list[Place] = []
        self._file, self._dry_run = file, dry_run

    def add(self, found: MoeMatch | Miss, outcome: ProbeResult | None) -> None:
        """Describe what was found, and what its proof gave."""
        self.places.append(describe(found, outcome, pictures=True))

    def write(self, report: ConversionReport) -> None:
        """Write the page."""
        from hina_ort.html_report import conversion_page, write

        write(self._file, conversion_page(report, self.places, dry_run=self._dry_run))


def _checked(
    report: ConversionReport, source: Path, target: Path, check: int | str, progress: Progress
) -> ConversionReport:
    """`report` with the comparisons of both models, `check` of them or a full set."""
    if isinstance(check, int):
        return replace(report, checks=compare_models(source, target, check, progress))
    checks, skipped = compare_in_full(source, target, progress)
    return replace(report, checks=checks, checks_skipped=skipped)


def _require_agreement(report: ConversionReport, rtol: float) -> None:
    """Raise CheckError unless the outputs agree.

    Original and fused block each lie within what the probe measured of the exact result, so a block may move the
    output by twice that, or by `rtol`; the blocks add up, and without any `rtol` is allowed. Where the types of weights
    or activations changed, outputs need only be finite where they were.
    """
    worst = max(report.checks, key=lambda check: check.relative_l2)
    if not report.must_agree:
        if math.isinf(worst.relative_l2):
            raise CheckError(
                f"output {worst.output} of the converted model has NaN or infinities that the original has not, or "
                "the original has only zeros and the converted model has not; nothing was kept, try other weights"
            )
        return
    tolerance = max(rtol, sum(max(rtol, 2 * block.worst_relative_l2) for block in report.fused))
    if not worst.relative_l2 <= tolerance:
        raise CheckError(
            f"the {'fused' if report.fused else 'converted'} model differs from the original: output {worst.output}, "
            f"relative L2 {worst.relative_l2:.3g}, allowed {tolerance:.3g}; nothing was kept, please report this model"
        )
