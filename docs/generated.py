"""Pages of which a part, between two marker lines, is generated."""

from __future__ import annotations

from pathlib import Path


def with_generated(page: Path, start: str, middle: str, end: str) -> str:
    """The text of `page` with `middle` between the lines `start` and `end`; ValueError when it has lost one."""
    before, start_found, rest = page.read_text(encoding="utf-8").partition(start)
    _, end_found, after = rest.partition(end)
    if not (start_found and end_found):
        raise ValueError(f"{page.name} lacks the lines {start.strip()} and {end.strip()}")
    return f"{before}{start}{middle}{end}{after}"
