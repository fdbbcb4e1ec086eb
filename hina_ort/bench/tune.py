"""`hina-ort bench tune`: from how many tokens of an expert on AMX is faster on this machine, kept for all sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hina_ort.bench.layer import Progress, bench_layer
from hina_ort.bench.onnx_engines import NEVER, amx_from
from hina_ort.bench.options import LayerOptions, Shape
from hina_ort.files import UsageError
from hina_ort.runtime import cpu_info

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 128)
"""Of an expert: all experts take all tokens of the layer that is timed."""
LAYER = Shape("16 experts for each token", 16, 16, 2048, 768)


@dataclass(frozen=True)
class Case:
    """Kernels that have a threshold of their own, `key` in the file, and a layer that uses them."""

    key: str
    weights: str
    activations: str


CASES = (
    Case("bf16", "bf16", "bf16"),
    Case("bf16x2", "bf16", "f32"),
    Case("int8", "int8", "f32"),
    Case("int4", "int4", "f32"),
    Case("mxfp4", "mxfp4", "f32"),
)


def threshold(tokens: Sequence[int], ratios: Sequence[float]) -> int:
    """The least of `tokens` (ascending) from which on AMX never takes longer; NEVER when the last one does.

    `ratios` are times without AMX to times with it.
    """
    found = NEVER
    for count, ratio in zip(reversed(tokens), reversed(ratios), strict=True):
        if ratio < 1.0:
            break
        found = count
    return found


def tune(threads: int, progress: Progress | None = None, keep: bool = True) -> dict[str, Any]:
    """Time every case with AMX and without, in turns, and write the thresholds into the file that sessions read.

    The keys of the result are those of docs/cli.md. Nothing is written unless `keep`. Raises UsageError where AMX is
    not used, CheckError when results differ by more than rounding explains, OSError when the file cannot be written.
    """
    cpu = cpu_info()
    if not cpu["amx"]:
        raise UsageError(f"there is nothing to tune, AMX is not used here: {cpu['amx_reason']}")
    if keep and not cpu["tuning"]:
        raise UsageError("there is no place for the result: set HOME, XDG_CACHE_HOME or HINA_TUNING")
    cases: list[dict[str, Any]] = []
    for done, case in enumerate(CASES):

        def tell(stage: str, part: int, size: int, done: int = done, case: Case = case) -> None:
            if progress is not None:
                progress(f"{case.key} ({done + 1} of {len(CASES)}): {stage}", part, size)

        options = LayerOptions(
            LAYER,
            weights=case.weights,
            activations=case.activations,
            tokens=TOKENS,
            threads=threads,
            peers=("vectors",),
            repeats=3,
        )
        with amx_from(1):
            result = bench_layer(options, tell, references=1)
        ratios = [cell["engines"]["vectors"]["ratio"] for cell in result["cells"]]
        cases.append({"key": case.key, "tokens": TOKENS, "ratios": ratios, "amx_from": threshold(TOKENS, ratios)})
    path = Path(cpu["tuning"]) if keep else None
    if path is not None:
        _write(path, cpu["model"], {case["key"]: case["amx_from"] for case in cases})
    return {"cpu": cpu["model"], "threads": threads, "file": str(path) if path else None, "cases": cases}


def _write(path: Path, cpu: str, thresholds: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"cpu {cpu}\n" + "".join(f"{key} {tokens}\n" for key, tokens in thresholds.items())
    made = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        made.write_text(text, encoding="utf-8")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
