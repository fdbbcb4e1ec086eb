"""A drawing of `graph_passes.picture` as SVG, to be styled by the page that it stands in."""

from __future__ import annotations

from collections.abc import Callable

from graph_passes.picture import Box, Drawing

_WIDTH, _HEIGHT, _GAP, _DROP = 152, 38, 14, 24
_MOST_COLUMNS = 4
_LETTERS, _NOTE_LETTERS = 21, 23
"""How many letters fit into a box."""


def svg(drawing: Drawing, text: Callable[[object], str]) -> str:
    """The drawing as one SVG element; `text` escapes words."""
    lines = _lines(drawing)
    places = {}
    widest = max(len(line) for line in lines)
    for row, line in enumerate(lines):
        start = (widest - len(line)) * (_WIDTH + _GAP) / 2
        for column, box in enumerate(line):
            places[box] = (start + column * (_WIDTH + _GAP), row * (_HEIGHT + _DROP))
    width, height = widest * (_WIDTH + _GAP) - _GAP, len(lines) * (_HEIGHT + _DROP) - _DROP
    parts = [
        f'<div class="scroll"><svg width="{width + 4}" height="{height + 4}" viewBox="-2 -2 {width + 4} {height + 4}">'
    ]
    parts += [_edge(places[source], places[target]) for source, target in drawing.edges]
    parts += [_box(box, *places[index], text) for index, box in enumerate(drawing.boxes)]
    return "".join([*parts, "</svg></div>"])


def stage_class(stage: str) -> str:
    """The CSS class of the boxes of a stage."""
    return stage.replace(" ", "-")


def _lines(drawing: Drawing) -> list[list[int]]:
    """The boxes of each line, those that read the same side by side; a row of many is several lines."""
    rows: dict[int, list[int]] = {}
    for index, box in enumerate(drawing.boxes):
        rows.setdefault(box.row, []).append(index)
    reads: dict[int, list[int]] = {}
    for source, target in drawing.edges:
        reads.setdefault(target, []).append(source)
    across: dict[int, float] = {}
    lines = []
    for _, row in sorted(rows.items()):
        middle = {i: sum(across[s] for s in reads.get(i, ())) / max(len(reads.get(i, ())), 1) for i in row}
        row.sort(key=lambda i: (middle[i], i))
        for start in range(0, len(row), _MOST_COLUMNS):
            line = row[start : start + _MOST_COLUMNS]
            across |= {index: column - (len(line) - 1) / 2 for column, index in enumerate(line)}
            lines.append(line)
    return lines


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x1, y1, x2, y2 = source[0] + _WIDTH / 2, source[1] + _HEIGHT, target[0] + _WIDTH / 2, target[1]
    bend = (y2 - y1) / 2
    return f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"/>'


def _box(box: Box, x: float, y: float, text: Callable[[object], str]) -> str:
    kind = stage_class(box.stage) + (" marked" if box.marked else "")
    times = f" x {box.count}" if box.count > 1 else ""
    middle = x + _WIDTH / 2
    words = _short(box.text, _LETTERS - len(times)) + times
    whole = " ".join(part for part in (box.text + times, box.note) if part)
    parts = [
        f'<g class="{kind}"><title>{text(whole)}</title>',
        f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
        f'<text x="{middle:g}" y="{y + (17 if box.note else 24):g}" text-anchor="middle">{text(words)}</text>',
    ]
    if box.note:
        note = text(_short(box.note, _NOTE_LETTERS))
        parts.append(f'<text class="note" x="{middle:g}" y="{y + 31:g}" text-anchor="middle">{note}</text>')
    return "".join([*parts, "</g>"])


def _short(words: str, letters: int) -> str:
    """At most so many letters of `words`; the end says more than the beginning."""
    return words if len(words) <= letters else "…" + words[1 - letters :]
