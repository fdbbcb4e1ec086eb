"""Write the tables of docs/exporting.md from what `make corpus` found: `python -m docs.generate_exporting`."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generated import with_generated
from models.corpus.registry import DYNAMO, EXPORTERS, OPTIMUM
from models.corpus.results import FOLDER, verdicts_in
from models.corpus.verdict import FUSED, RESULTS, SKIPPED, WRONG_NOT_FOUND, WRONG_REFUSED, Verdict, without_numbers

PAGE = Path(__file__).resolve().with_name("exporting.md")
START, END = "<!-- results: generated -->\n", "<!-- end of results -->\n"
_TITLES = {DYNAMO: "transformers 5.24", OPTIMUM: "transformers 4.57"}


def tables(verdicts: list[Verdict]) -> str:
    """The generated part of the page, as Markdown."""
    return "\n".join([_summary(verdicts), *(_matrix(verdicts, where) for where in _TITLES), _reasons(verdicts)])


def _summary(verdicts: list[Verdict]) -> str:
    """One row for each exporter: how many exports are right and fused, and how many are wrong and refused."""
    rows = []
    for exporter, row in EXPORTERS.items():
        own = [item for item in verdicts if item.exporter == exporter]
        count = {result: sum(item.result == result for item in own) for result in RESULTS}
        wrong = sum(number for result, number in count.items() if result.startswith("wrong"))
        fails = count["export fails"]
        errors = [item.fused_error for item in own if item.result == FUSED and item.fused_error is not None]
        rows.append(
            (
                f"`{exporter}`",
                row.title,
                str(len(own)),
                str(len(own) - wrong - fails),
                str(count[FUSED]),
                f"{max(errors):.0e}" if errors else "",
                str(wrong),
                str(count[WRONG_REFUSED]),
                str(fails),
            )
        )
    head = ("", "exporter", "tried", "right", "fused", "largest difference", "wrong", "refused", "fails")
    return _table(head, rows)


def _matrix(verdicts: list[Verdict], environment: str) -> str:
    """One row for each architecture, one column for each exporter of an environment."""
    exporters = [name for name, row in EXPORTERS.items() if row.environment == environment]
    results = {(item.exporter, item.architecture): item.result for item in verdicts}
    names = sorted({architecture for name in exporters for architecture in EXPORTERS[name].architectures})
    rows = [
        (f"`{name}`", *(results.get((exporter, name), "").replace(" export", "") for exporter in exporters))
        for name in names
    ]
    title = f"### By architecture, {_TITLES[environment]}\n\n"
    return title + _table(("architecture", *(f"`{exporter}`" for exporter in exporters)), rows)


def _reasons(verdicts: list[Verdict]) -> str:
    """What is said about everything that is not fused, alike reasons together."""
    parts = ["### What is said about the others", ""]
    for exporter in EXPORTERS:
        alike: dict[tuple[str, str], list[Verdict]] = {}
        for item in verdicts:
            if item.exporter == exporter and item.result != FUSED:
                alike.setdefault((item.result, without_numbers(item.reason)), []).append(item)
        parts += [f"- `{exporter}`: {_reason(items)}" for items in alike.values()]
    return "\n".join([*parts, ""])


def _reason(items: list[Verdict]) -> str:
    names = ", ".join(item.architecture for item in items)
    first = items[0]
    if first.known:
        return f"{names}: {first.result}; {first.known}."
    text = first.reason if len(first.reason) <= 400 else f"{first.reason[:400]} ..."
    said = "the converter says" if first.result in ("refused", WRONG_REFUSED) else "the error is"
    if first.result == WRONG_NOT_FOUND:
        said = "ONNX Runtime says" if first.reason else ""
    quoted = f"; {said}: `{text.replace('`', chr(39))}`" if text else ""
    return f"{names}: {first.result}{quoted}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def page(verdicts: list[Verdict]) -> str:
    """The whole page with fresh tables; ValueError when the page has lost its markers."""
    return with_generated(PAGE, START, tables(verdicts), END)


def main() -> None:
    """Write the page; every export has to be there."""
    verdicts = verdicts_in(FOLDER)
    missing = sum(len(row.architectures) for row in EXPORTERS.values()) - len(verdicts)
    if missing:
        sys.exit(f"{missing} exports are missing in {FOLDER}; run `make corpus` first")
    for item in verdicts:
        if item.result == SKIPPED:
            sys.exit(f"{item.exporter} was skipped: {item.reason}; install it and run `make corpus` again")
    PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main()
