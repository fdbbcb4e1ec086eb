"""One step of the corpus in its own process: `python -m models.corpus.worker export|judge EXPORTER FOLDER ARCH...`.

For each architecture FOLDER/ARCH/export.json or judge.json is written when it is done, whatever became of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from models.corpus.registry import EXPORTERS


def main() -> None:
    """Do the step for each architecture; a failure is noted and does not stop the rest."""
    step, exporter, folder, *architectures = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for architecture in architectures:
        target = Path(folder) / architecture
        target.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        try:
            found = _export(exporter, architecture, target) if step == "export" else _judge(target)
        except Exception as error:  # any exporter may fail in any way; what it says goes into the table
            (target / f"{step}.log").write_text(traceback.format_exc(), encoding="utf-8")
            found = {"error": first_line(error)}
        found["seconds"] = round(time.perf_counter() - start, 1)
        text = json.dumps(found, indent=1)
        (target / f"{step}.json").write_text(text, encoding="utf-8")


def _export(exporter: str, architecture: str, folder: Path) -> dict[str, Any]:
    import torch

    from models.corpus import recipes

    torch.manual_seed(0)  # the inputs that exporters trace with are random, and some bake in which experts they reach
    row = EXPORTERS[exporter]
    made: recipes.Export = getattr(recipes, row.recipe)(architecture, folder, **row.settings)
    arrays = {}
    for index, inputs in enumerate(made.inputs):
        arrays |= {f"{index}/{name}": array for name, array in inputs.items()}
        arrays[f"{index}/expected"] = made.reference(inputs)
    np.savez(folder / "torch.npz", **arrays)
    return {"moe_layers": made.moe_layers, "sizes": made.sizes}


def _judge(folder: Path) -> dict[str, Any]:
    from models.corpus.judge import judge

    return judge(folder)


def first_line(error: BaseException) -> str:
    """What the innermost cause of an exception says, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    main()
