"""What `hina-ort generate` prints: the text on stdout, all else on stderr."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hina_ort.generation.command import Report
from hina_ort.generation.experts import COLUMNS
from hina_ort.tables import escape, printable

_ENDS = {
    "stop": "the text ended",
    "length": "--max-new-tokens reached",
    "context": "the model takes no longer text",
    "interrupted": "interrupted",
}
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal, or turn the direction of text; lines and tabs, and what joins letters, are none."""


def write(text: str) -> None:
    """Print a piece of the text; a terminal is not to be steered by it."""
    if sys.stdout is None:  # the program was started with stdout closed
        return
    sys.stdout.write(_STEERING.sub("\ufffd", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def warn(words: str) -> None:
    """Print a warning."""
    typer.echo(f"warning: {printable(words)}", err=True)


def show_generation(report: Report, *, quiet: bool) -> None:
    """End the text's last line and, unless `quiet`, print how fast it came and which experts it took."""
    write("\n")
    found = report.to_dict()
    console = Console(stderr=True)
    if report.experts is not None:
        table = Table(*COLUMNS)
        for row in report.experts.rows():
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
    if not quiet:
        speeds = "; ".join(f"{name}: {_rate(found[name])}" for name in ("prefill", "decode"))
        typer.echo(f"{speeds}; {_ENDS[report.finish]}", err=True)


def _rate(speed: dict[str, Any]) -> str:
    rate = speed["tokens_per_second"]
    return "none" if rate is None else f"{speed['tokens']} tokens, {rate:.1f} tokens/s"
