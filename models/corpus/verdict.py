"""From what was measured to a verdict in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from models.corpus.judge import EQUAL, RIGHT
from models.corpus.known import KNOWN
from models.corpus.registry import EXPORTERS

FUSED, REFUSED, NOT_FOUND = "fused", "refused", "not found"
WRONG_REFUSED, WRONG_NOT_FOUND, WRONG_FUSED = "wrong export, refused", "wrong export, not found", "wrong export, fused"
EXPORT_FAILS, CONVERTER_FAILS, FUSED_WRONGLY = "export fails", "converter fails", "fused wrongly"
SKIPPED = "skipped"

RESULTS: dict[str, str] = {
    FUSED: "the export computes what torch computes, and so does the fused model, with one node for each MoE layer",
    REFUSED: "the export is right, but a MoE layer was refused",
    NOT_FOUND: "the export is right, but a MoE layer was not recognised",
    WRONG_REFUSED: "the export does not compute what torch computes, and the converter refuses it with the cause",
    WRONG_NOT_FOUND: "the export does not compute what torch computes, and the converter sees no MoE layer in it",
    WRONG_FUSED: "the export does not compute what torch computes, and the fused model repeats that",
    EXPORT_FAILS: "the exporter raises an error",
    SKIPPED: "a package that the exporter needs is not installed",
    CONVERTER_FAILS: "the converter raises an error",
    FUSED_WRONGLY: "the fused model does not compute what the export computes",
}
"""What can become of an export."""


@dataclass(frozen=True)
class Verdict:
    """What became of one export: the result (a key of `RESULTS`), the reason for it, and what was measured.

    `export_error` is the largest relative L2 difference of the export from torch, `fused_error` that of the fused
    model from the export, and `fused_vs_torch` that of the fused model from torch; None where one of them cannot run.
    """

    exporter: str
    architecture: str
    result: str
    reason: str = ""
    moe_layers: int = 0
    fused: int = 0
    families: tuple[str, ...] = ()
    export_error: float | None = None
    fused_error: float | None = None
    fused_vs_torch: float | None = None

    @property
    def known(self) -> str:
        """Why a result that is neither of the two good ones is accepted; empty when it is not."""
        for exporter, architecture, result, reason in KNOWN:
            if fnmatchcase(self.exporter, exporter) and (architecture, result) == (self.architecture, self.result):
                return reason
        return ""

    @property
    def expected(self) -> bool:
        """Whether the result is as it should be, or is listed with its reason."""
        return self.result in (FUSED, WRONG_REFUSED, EXPORT_FAILS, SKIPPED) or bool(self.known)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "expected": self.expected, "known": self.known}


def verdict(exporter: str, architecture: str, found: Mapping[str, Any]) -> Verdict:
    """Judge what `judge.judge` measured, or the `error` of the export or of the judge."""
    if "error" in found:
        result = SKIPPED if lacks_package(found) else EXPORT_FAILS
        return Verdict(exporter, architecture, result, found["error"])
    if "judge_error" in found:
        return Verdict(exporter, architecture, CONVERTER_FAILS, found["judge_error"], found["moe_layers"])
    row = EXPORTERS[exporter]
    error, fused_error, fused = found["export_error"], found.get("fused_error"), found["fused"]
    if error is None and not row.runs_on_cpu:
        error = fused_error = found.get("fused_vs_torch")
    reasons = _unlike([miss["reason"] for miss in found["refused"]])
    reason = "; ".join(reasons)
    if fused and (fused_error is None or not fused_error <= EQUAL[row.dtype]):
        result, reason = FUSED_WRONGLY, found.get("fused_failure") or reason
    elif "convert_error" in found:
        result, reason = CONVERTER_FAILS, found["convert_error"]
    elif error is not None and error <= RIGHT[row.dtype]:
        result = FUSED if fused == found["moe_layers"] and not reasons else REFUSED if reasons else NOT_FOUND
    else:
        result = WRONG_REFUSED if reasons else WRONG_FUSED if fused else WRONG_NOT_FOUND
        reason = reason or found["export_failure"]
    return Verdict(
        exporter=exporter,
        architecture=architecture,
        result=result,
        reason=reason,
        moe_layers=found["moe_layers"],
        fused=fused,
        families=tuple(found["families"]),
        export_error=error,
        fused_error=fused_error,
        fused_vs_torch=found.get("fused_vs_torch"),
    )


def lacks_package(found: Mapping[str, Any]) -> bool:
    """Whether an export failed because a package is not installed."""
    return str(found.get("error", "")).startswith("ModuleNotFoundError")


def without_numbers(reason: str) -> str:
    """A reason without what differs between layers and architectures: numbers, and names of values and nodes."""
    return re.sub(r"\S*[/_.]\S*|\d[\d, ]*", "*", reason)


def _unlike(reasons: list[str]) -> list[str]:
    """The reasons without those that differ from an earlier one in numbers and names only."""
    return list({without_numbers(reason): reason for reason in reversed(reasons)}.values())[::-1]
