"""What was found about the exports that lie in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.corpus.registry import EXPORTERS
from models.corpus.verdict import Verdict, verdict

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "corpus"


def verdicts_in(folder: Path) -> list[Verdict]:
    """The verdicts on all exports that lie in `folder`, in the order of the registry."""
    return [
        verdict(exporter, architecture, load(folder / exporter / architecture))
        for exporter, row in EXPORTERS.items()
        for architecture in row.architectures
        if any((folder / exporter / architecture / f"{step}.json").exists() for step in ("export", "judge"))
    ]


def read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def load(folder: Path) -> dict[str, Any]:
    """What both steps found: an `error` of the export, or what `judge` returned."""
    exported = read(folder / "export.json")
    if "error" in exported:
        return exported
    judged = read(folder / "judge.json") if (folder / "judge.json").exists() else {"error": "not judged yet"}
    return {"judge_error": judged["error"], **exported} if "error" in judged else {**exported, **judged}
