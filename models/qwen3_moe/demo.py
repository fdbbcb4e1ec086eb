"""The whole way in one command: build a small random Qwen3-MoE, export it, fuse it, generate, and compare.

`make demo` runs it. The exit code is 0 only when both models generate the same tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import hina_ort
from hina_ort.conversion import ConversionReport
from hina_ort.tables import size
from models.qwen3_moe.build import CONFIG, build, export

PROMPT = "Experts are chosen anew for every token"
NEW_TOKENS = 32
PREFILL_TOKENS = 256
TURNS = {"prefill": 8, "decode": 15}
RUNS_PER_TURN = 3


def main() -> int:
    """Run the demo, or with --measure one measurement of it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the models here and keep them")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(_measure_load(arguments.measure)))
        return 0
    if arguments.keep:
        return _demo(arguments.keep)
    with tempfile.TemporaryDirectory(prefix="hina-demo-") as folder:
        return _demo(Path(folder))


def _demo(folder: Path) -> int:
    console = Console()
    warnings.simplefilter("ignore")  # the exporters warn about themselves
    logging.disable(logging.WARNING)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        step = bars.add_task("building and exporting a Qwen3-MoE", total=2)
        checkpoint = build(folder / "checkpoint")
        bars.advance(step)
        original, fused = folder / "original", folder / "fused"
        export(checkpoint, original)
        bars.advance(step)

        stages: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(f"converting: {stage}")
            bars.update(stages[stage], completed=done, total=total)

        report = hina_ort.convert(original, fused, overwrite=True, progress=show)
        if report.written is None:
            console.print("the model could not be fused:", *(f"{miss.name}: {miss.reason}" for miss in report.refused))
            return 1

        step = bars.add_task(f"generating {NEW_TOKENS} tokens with each", total=2)
        tokens = {}
        for path in (original, fused):
            tokens[path] = _generate(path)
            bars.advance(step)

        step = bars.add_task("measuring load time and memory", total=2)
        loads = {}
        for path in (original, fused):
            loads[path] = _in_fresh_process(path)
            bars.advance(step)
        step = bars.add_task("measuring speed, in turns", total=sum(TURNS.values()))
        speeds = _measure_speed([original, fused], lambda: bars.advance(step))

    _show(console, report, [loads[original], loads[fused]], speeds)
    equal = tokens[original] == tokens[fused]
    console.print(f"original: {tokens[original]}", f"fused:    {tokens[fused]}", sep="\n", highlight=False)
    console.print(f"[green]the {NEW_TOKENS} tokens are equal[/]" if equal else "[red]the tokens differ[/]")
    return 0 if equal else 1


def _generate(folder: Path) -> list[int]:
    """Generate greedily with optimum; return the new token ids."""
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    model = ORTModelForCausalLM.from_pretrained(folder, session_options=hina_ort.session_options())
    inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    new: list[int] = generated[0, inputs["input_ids"].shape[1] :].tolist()
    return new


def _session(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        str(folder / "model.onnx"), hina_ort.session_options(), providers=["CPUExecutionProvider"]
    )


def _inputs(tokens: int, past: int) -> dict[str, np.ndarray]:
    """Inputs for `tokens` new tokens after `past` cached ones."""
    random = np.random.default_rng(0)
    cache = (1, CONFIG["num_key_value_heads"], past, CONFIG["head_dim"])
    inputs = {
        "input_ids": random.integers(3, CONFIG["vocab_size"], (1, tokens)),
        "attention_mask": np.ones((1, past + tokens), np.int64),
        "position_ids": np.arange(past, past + tokens)[None],
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        for kind in ("key", "value"):
            inputs[f"past_key_values.{layer}.{kind}"] = random.standard_normal(cache).astype(np.float32)
    return inputs


def _measure_load(folder: Path) -> dict[str, float]:
    """Seconds to make a session, and the peak memory of this process after one prefill and one decode step."""
    start = time.perf_counter()
    session = _session(folder)
    seconds = time.perf_counter() - start
    for tokens, past in ((PREFILL_TOKENS, 0), (1, PREFILL_TOKENS)):
        session.run(None, _inputs(tokens, past))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024}


def _in_fresh_process(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "models.qwen3_moe.demo", "--measure", os.fspath(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _measure_speed(folders: list[Path], advance: Any) -> dict[str, list[float]]:
    """Median tokens/s of each model, for prefill and decode; the models take turns, so that both see the same load."""
    sessions = [_session(folder) for folder in folders]
    speeds = {}
    for kind, (tokens, past) in {"prefill": (PREFILL_TOKENS, 0), "decode": (1, PREFILL_TOKENS)}.items():
        inputs = _inputs(tokens, past)
        seconds: list[list[float]] = [[] for _ in sessions]
        for _ in range(TURNS[kind]):
            for session, times in zip(sessions, seconds, strict=True):
                session.run(None, inputs)  # wakes this session's threads while the other's go to sleep
                for _ in range(RUNS_PER_TURN):
                    start = time.perf_counter()
                    session.run(None, inputs)
                    times.append(time.perf_counter() - start)
            advance()
        speeds[kind] = [tokens / statistics.median(times) for times in seconds]
    return speeds


def _show(
    console: Console,
    report: ConversionReport,
    loads: list[dict[str, float]],
    speeds: dict[str, list[float]],
) -> None:
    blocks = len(report.fused)
    table = Table("", "original", "fused", "ratio", title=f"Qwen3-MoE, {blocks} MoE layers fused")
    rows: list[tuple[str, str, str, float]] = [
        ("nodes", str(report.nodes_before), str(report.nodes_after), report.nodes_before / report.nodes_after),
        (
            "bytes on disk",
            size(report.bytes_before),
            size(report.bytes_after),
            report.bytes_before / (report.bytes_after or 1),
        ),
    ]
    seconds = [load["seconds"] for load in loads]
    rows.append(("load time", f"{seconds[0]:.2f} s", f"{seconds[1]:.2f} s", seconds[0] / seconds[1]))
    peaks = [load["peak_bytes"] for load in loads]
    rows.append(("peak memory", size(peaks[0]), size(peaks[1]), peaks[0] / peaks[1]))
    for kind, (one, other) in speeds.items():
        name = f"prefill, {PREFILL_TOKENS} tokens" if kind == "prefill" else f"decode after {PREFILL_TOKENS} tokens"
        rows.append((name, f"{one:.0f} tokens/s", f"{other:.0f} tokens/s", other / one))
    for name, one, other, ratio in rows:
        table.add_row(name, one, other, f"{ratio:.2f}x")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
