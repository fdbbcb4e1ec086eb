"""Make the exports, convert them, judge the results: `python -m models.corpus` (`make corpus`)."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.corpus.registry import DYNAMO, EXPORTERS
from models.corpus.results import FOLDER, ROOT, read, verdicts_in
from models.corpus.verdict import RESULTS, SKIPPED, Verdict, lacks_package


def main() -> int:
    """Run the corpus; 1 when a result is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="EXPORTER[/ARCH]", help="these; may be given several times")
    parser.add_argument("--jobs", type=int, default=2, help="exporters that run at the same time (default: 2)")
    parser.add_argument("--again", action="store_true", help="make cached exports again")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where exports are kept (default: build/corpus)")
    arguments = parser.parse_args()
    chosen = select(arguments.only)
    console = Console()

    def run(exporter: str) -> None:
        for step in ("export", "judge"):
            run_step(step, exporter, chosen[exporter], arguments.folder, again=arguments.again or step == "judge")
            console.print(f"{exporter}: {step} done", highlight=False)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, reversed(chosen)))  # the slow ones stand last in the registry
    everything = verdicts_in(arguments.folder)
    results = arguments.folder / "results.json"
    results.write_text(json.dumps([item.to_dict() for item in everything], indent=1) + "\n", encoding="utf-8")
    verdicts = [item for item in everything if item.architecture in chosen.get(item.exporter, ())]
    show(console, verdicts)
    console.print(f"wrote {results}", highlight=False)
    return 1 if any(not item.expected for item in verdicts) else 0


def select(only: Iterable[str] | None) -> dict[str, list[str]]:
    """The architectures of each exporter that `only` (all when empty) asks for."""
    chosen: dict[str, list[str]] = {}
    for wanted in only or EXPORTERS:
        exporter, _, architecture = wanted.partition("/")
        if exporter not in EXPORTERS or (architecture and architecture not in EXPORTERS[exporter].architectures):
            raise SystemExit(f"--only {wanted} is unknown; exporters: {', '.join(EXPORTERS)}")
        chosen.setdefault(exporter, []).extend([architecture] if architecture else EXPORTERS[exporter].architectures)
    return chosen


def run_step(step: str, exporter: str, architectures: Iterable[str], folder: Path, *, again: bool) -> None:
    """Run one step for the architectures that lack its result; when the process dies, go on behind the culprit."""
    home = folder / exporter
    if again:
        for architecture in architectures:
            if step == "export":
                shutil.rmtree(home / architecture, ignore_errors=True)
            else:
                (home / architecture / "judge.json").unlink(missing_ok=True)
    if step == "export":
        for skipped in (home / a / "export.json" for a in architectures):
            if skipped.exists() and lacks_package(read(skipped)):
                skipped.unlink()
    usable = [a for a in architectures if step == "export" or "error" not in read(home / a / "export.json")]
    python = ROOT / (EXPORTERS[exporter].environment if step == "export" else DYNAMO) / "bin" / "python"
    while missing := [a for a in usable if not (home / a / f"{step}.json").exists()]:
        command = [str(python), "-m", "models.corpus.worker", step, exporter, str(home), *missing]
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"{step}.log").open("a") as log:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
        still = [a for a in missing if not (home / a / f"{step}.json").exists()]
        if still:
            (home / still[0]).mkdir(exist_ok=True)
            (home / still[0] / f"{step}.json").write_text(
                json.dumps({"error": f"the process died with exit code {done.returncode}"}), encoding="utf-8"
            )


def show(console: Console, verdicts: list[Verdict]) -> None:
    """Print how many exports had which result, and each that is not as it should be."""
    results = [result for result in RESULTS if any(item.result == result for item in verdicts)]
    table = Table("exporter", *results)
    for exporter in dict.fromkeys(item.exporter for item in verdicts):
        counts = Counter(item.result for item in verdicts if item.exporter == exporter)
        table.add_row(exporter, *(str(counts[result] or "") for result in results))
    console.print(table)
    for item in verdicts:
        if not item.expected or item.known or item.result == SKIPPED:
            why = f"known: {item.known}" if item.known else item.reason
            name = f"{item.exporter}/{item.architecture}"
            console.print(escape(f"{name}: {item.result}; {why}"), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
