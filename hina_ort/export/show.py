"""What `export` says to people, on stdout."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from hina_ort.export.command import ExportReport
from hina_ort.tables import escape, size


def show_export(report: ExportReport) -> None:
    """Print what the nodes compute, what was left in the graph and why, and what OUT holds and reads."""
    console = Console()

    def line(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    for text, count in Counter(layer.spec.summary() for layer in report.layers).items():
        line(f"{count} x HinaMoE: {text}")
    for text, count in Counter(note for layer in report.layers for note in layer.notes).items():
        line(f"{count} x note: {text}")
    if not report.tested:
        line(f"exports of {report.architecture} are not compared with transformers in our tests: check its outputs")
    line(f"{report.nodes} nodes, {size(report.bytes_written)} of model and weights written")
    kind = "copies" if report.copied else "hard links, which share their data with the checkpoint: change neither"
    if report.reads:
        total = sum(data.bytes for data in report.reads)
        line(f"{size(total)} of weights stay as they are in {len(report.reads)} shards ({kind})")
    if report.genai:
        line("genai_config.json was written: onnxruntime-genai can load it")
    line(f"{report.seconds:.1f} s, peak memory {size(report.peak_rss_bytes)}")
    line(f"wrote {report.written}")
