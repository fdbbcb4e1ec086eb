"""Measure the set of benchmarks on docs/performance.md and write its results: `python -m docs.generate_performance`.

Each benchmark is a process of its own, so that none inherits memory or threads of another. Their JSON files stay in
build/bench; `--reuse` writes the page from those without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generated import with_generated
from hina_ort.bench.show import number

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "build" / "bench"
_START, _END = "<!-- measured: generated -->\n", "<!-- end of measured -->\n"


@dataclass(frozen=True)
class Run:
    """One call of `hina-ort bench layer`; `hidden` makes it one as on an AVX2 machine, `threads` 0 are all."""

    shape: str
    weights: str
    tokens: str = "1,16,64,256,1024"
    peers: str = "ort,vllm"
    hidden: bool = False
    threads: int = 0

    @property
    def result(self) -> Path:
        """Its JSON file."""
        threads = f".{self.threads}thread" if self.threads else ""
        return FOLDER / f"{self.shape}.{self.weights}{threads}{'.avx2' if self.hidden else ''}.json"

    @property
    def arguments(self) -> list[str]:
        """Of the command."""
        options = {"shape": self.shape, "weights": self.weights, "tokens": self.tokens, "vs": self.peers}
        options["json"] = str(self.result)
        if self.threads:
            options["threads"] = str(self.threads)
        return ["bench", "layer", "--quiet", *(f"--{name}={value}" for name, value in options.items())]


QWEN, FEW = "qwen3-30b-a3b", "1,16,256,1024"
OTHERS = ("qwen3.6-35b-a3b", "olmoe", "deepseek-v2-lite", "gpt-oss-20b")
RUNS = (
    *(Run(QWEN, weights, peers="ort", hidden=True) for weights in ("int4", "int8", "f32")),
    Run(QWEN, "bf16", peers="vllm", hidden=True),
    *(Run(QWEN, weights, "1,16,256", "ort", hidden=True, threads=1) for weights in ("int4", "int8", "f32")),
    *(Run(shape, "int4", FEW, "ort", hidden=True) for shape in OTHERS),
    Run("gpt-oss-20b", "mxfp4", FEW, "ort", hidden=True),
    Run("mixtral-8x7b", "int4", "1,16,64", "ort", hidden=True),
    *(Run(shape, weights, "1,16,256", "ort", hidden=True) for shape in OTHERS for weights in ("int8", "f32")),
    *(Run(shape, "bf16", "1,16,256", "vllm", hidden=True) for shape in OTHERS),
    *(Run("mixtral-8x7b", weights, "1,16,64", "ort", hidden=True) for weights in ("int8", "f32")),
    Run("mixtral-8x7b", "bf16", "1,16,64", "vllm", hidden=True),
    Run(QWEN, "int4", peers="ort,vllm,vectors"),
    *(Run(QWEN, weights, peers="ort,vectors") for weights in ("int8", "mxfp4")),
    Run(QWEN, "f32", peers="ort"),
    Run(QWEN, "bf16", peers="vllm,vectors"),
)


def measure(runs: Sequence[Run]) -> None:
    """Run the benchmarks one after another; those that fail are told on stderr and have no file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    library = _hiding_library() if any(run.hidden for run in runs) else None
    for done, run in enumerate(runs):
        start = time.monotonic()
        environment = dict(os.environ)
        if run.hidden:
            if library is None:
                continue
            environment["LD_PRELOAD"] = str(library)
        print(f"{done + 1} of {len(runs)}: {run.result.stem}", end="", flush=True, file=sys.stderr)
        command = [sys.executable, "-c", "from hina_ort.cli import app; app()", *run.arguments]
        failed = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
        print(", failed" if failed else "", f", {time.monotonic() - start:.0f} s", sep="", file=sys.stderr)


def _hiding_library() -> Path | None:
    """tools/hide_isa.c, compiled; None, told on stderr, where this machine cannot run it."""
    library, compiler = FOLDER / "hide_isa.so", shutil.which("cc") or "gcc"
    source = ROOT / "tools" / "hide_isa.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    works = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": str(library)}, check=False).returncode == 0
    if not works:
        print("this machine cannot hide instruction sets: no results as on an AVX2 machine", file=sys.stderr)
    return library if works else None


def results(runs: Sequence[Run]) -> str:
    """The generated part of the page, as Markdown; ValueError when nothing was measured."""
    found = {run: json.loads(run.result.read_text(encoding="utf-8")) for run in runs if run.result.is_file()}
    if not found:
        raise ValueError(f"there are no results in {FOLDER}: run python -m docs.generate_performance without --reuse")
    parts = [_machine(found[min(found, key=lambda run: run.hidden)])]
    for hidden, title in ((False, "## Results"), (True, "## Results as on a machine with AVX2 only")):
        tables = [_table(run, result) for run, result in found.items() if run.hidden == hidden]
        parts += [title, *tables] if tables else []
    return "\n\n".join(parts) + "\n"


def _machine(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    engines = {engine["name"]: engine["version"] for engine in result["engines"]}
    names = {"torch": "torch", "vllm": "vLLM"}
    software = [f"ONNX Runtime {versions['onnxruntime']}"]
    software += [f"{names[name]} {engines[name]}" for name in names if name in engines]
    return (
        "## The machine\n\n"
        f"{machine['cpu']}, {result['threads']} threads, {machine['last_level_cache_bytes'] >> 20} MiB of last-level "
        f"cache. hina-ort {versions['hina-ort']} with the instruction set {machine['isa']}; {', '.join(software)}; "
        f"measured in {time.strftime('%B %Y')}."
    )


def _table(run: Run, result: dict[str, Any]) -> str:
    """A table with a row for each token count: HinaMoE's figures, then the ratios of the peers."""
    peers = [engine for engine in result["engines"] if engine["name"] != "hina"]
    int8 = result["accuracy_level"] == 4
    machine = result["machine"]
    kind = result["weights"] if result["block"] is None else f"{result['weights']}, blocks of {result['block']}"
    lines = [
        f"### {run.shape}, {kind}" + (f", {run.threads} thread{'s' * (run.threads > 1)}" if run.threads else ""),
        "",
        _row(["tokens", "ms", "GB/s", "GOP/s" if int8 else "GFLOP/s", "of limit", "by", *(p["label"] for p in peers)]),
        _row(["---:"] * 5 + ["---"] + ["---:"] * len(peers)),
    ]
    for cell in result["cells"]:
        own = cell["engines"]["hina"]
        figures = [number(own["median_ms"]), f"{own['gigabytes_per_second']:.1f}", f"{own['gigaops_per_second']:.0f}"]
        by = "memory" if own["bandwidth_share"] >= own["compute_share"] else "arithmetic"
        ratios = [f"{cell['engines'][p['name']]['ratio']:.2f}x" for p in peers]
        lines.append(_row([str(cell["tokens"]), *figures, f"{own['limit_share']:.0%}", by, *ratios]))
    lines += [
        "",
        f"Limits: {machine['read_bytes_per_second'] / 1e9:.1f} GB/s, {_peaks(result)}. {result['layers']} layers of "
        f"{result['layer_bytes'] / 2**20:.0f} MiB. {_notes(result)}".rstrip(),
    ]
    return "\n".join(lines)


def _peaks(result: dict[str, Any]) -> str:
    machine = result["machine"]
    if result["accuracy_level"] == 4:
        return f"{machine['int8_ops'] / 1e9:.0f} GOP/s int8"
    text = f"{machine['float32_flops'] / 1e9:.0f} GFLOP/s float32"
    if result["weights"] != "bf16" or machine["bfloat16_flops"] is None:
        return text
    return f"{text}, {machine['bfloat16_flops'] / 1e9:.0f} GFLOP/s bfloat16 (half for activations of float32)"


def _notes(result: dict[str, Any]) -> str:
    notes = [f"{engine['label']} {engine['note']}." for engine in result["engines"] if engine["note"]]
    return " ".join([*notes, *(f"{peer['name']} is left out: {peer['reason']}." for peer in result["missing"])])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(middle: str) -> str:
    """The whole page with these results; ValueError when the page has lost its markers."""
    return with_generated(PAGE, _START, middle, _END)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reuse", action="store_true", help="write the page from the last results")
    if not parser.parse_args().reuse:
        measure(RUNS)
    PAGE.write_text(page(results(RUNS)), encoding="utf-8")
