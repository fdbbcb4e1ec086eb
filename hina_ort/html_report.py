"""The MoE blocks of a model as one page of HTML: nothing is loaded from elsewhere, and nothing in it runs.

Blocks that look alike share a section and its pictures, so that the page stays small for models of many layers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from graph_passes.explain import NodeView, Place, Stored, ValueView
from graph_passes.picture import STAGES, Drawing
from graph_passes.staging import staging_folder
from hina_ort.drawing import stage_class, svg
from hina_ort.files import UsageError
from hina_ort.tables import explain_command, outcome, printable, size

if TYPE_CHECKING:
    from hina_ort.conversion import ConversionReport
    from hina_ort.inspection import Inspection

_MOST_PICTURES = 1 << 20
"""Bytes; beyond them, sections have no pictures."""
_WORDS = {
    "fused": "fused",
    "proven": "can be fused",
    "recognised": "recognised, not proven",
    "refused": "not fused",
}
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--soft:#5b6877;--page:#fff;--card:#f4f6f9;--line:#d4dae2;--edge:#8794a4;
--good:#1a7f4b;--bad:#b3261e;--input:#e3e8ee;--router:#d9e6ff;--choice:#e8defc;--dispatch:#dff0f2;--experts:#ddf2e0;
--shared:#f0f2cf;--combine:#fdebd0;--hina:#ffd9e3}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9f0;--soft:#9aa7b6;--page:#12161c;--card:#1b2129;--line:#333d49;
--edge:#66748a;--good:#5fd396;--bad:#ff8a80;--input:#2a323d;--router:#1f3357;--choice:#37295a;--dispatch:#1b3d42;
--experts:#1d4128;--shared:#3d4120;--combine:#4a3718;--hina:#5a2436}}
*{box-sizing:border-box}body{margin:0 auto;max-width:70rem;padding:1rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{font-size:1.15rem;overflow-wrap:anywhere}h3{font-size:1rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.25rem 1rem 1rem;margin:1rem 0}
p,li,td,th{overflow-wrap:anywhere}.soft{color:var(--soft)}.fused,.proven{color:var(--good)}.refused{color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}th,td{border-bottom:1px solid var(--line);
padding:.2rem .75rem .2rem 0;text-align:left;vertical-align:top}code,.name{font:.85em ui-monospace,monospace}
ul{padding-left:1.2rem;margin:.25rem 0}summary{cursor:pointer;margin-top:.5rem}
.pair{display:flex;flex-wrap:wrap;gap:2rem}
figure{margin:.5rem 0;min-width:0;max-width:100%}figcaption{color:var(--soft);font-size:.85rem}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}svg .note{font-size:10.5px;fill:var(--soft)}
svg path{fill:none;stroke:var(--edge);stroke-width:1.2}svg rect{stroke:var(--line);fill:var(--input)}
.router rect{fill:var(--router)}.top-k rect{fill:var(--choice)}.dispatch rect{fill:var(--dispatch)}
.experts rect{fill:var(--experts)}.shared-expert rect{fill:var(--shared)}.combine rect{fill:var(--combine)}
.output rect{fill:var(--hina)}.marked rect{stroke:var(--bad);stroke-width:2.5}
.key span{display:inline-block;margin-right:1rem}.key svg{vertical-align:-2px;margin-right:.3rem}
"""


@dataclass(frozen=True)
class Group:
    """Places that look alike; `name` stands for all their names."""

    name: str
    places: list[Place]

    @property
    def state(self) -> str:
        """What became of them, a word of `_WORDS`."""
        first = self.places[0]
        return "proven" if first.state == "recognised" and _is_proven(first) else first.state


def check_target(file: Path, *models: Path) -> None:
    """Raise UsageError unless a page can be written to `file`, which must be none of `models`."""
    if file.is_dir():
        raise UsageError(f"--html names {file}, which is a folder; name a file")
    if any(file.resolve() == model.resolve() for model in models):
        raise UsageError(f"--html names {file}, which is the model; name another file")
    if file.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--html names {file}; name a file that ends in .html")
    home = file.absolute().parent
    if not home.is_dir():
        raise UsageError(f"--html names {file}, but there is no folder {home}; make it first")
    if not os.access(home, os.W_OK):
        raise UsageError(f"--html names {file}, but the folder {home} cannot be written; choose another one")


def write(file: Path, page: str) -> None:
    """Write `page`; a reader sees the old file or the new one, complete."""
    with staging_folder(file) as staged:
        (staged / file.name).write_text(page, encoding="utf-8")
        os.replace(staged / file.name, file)


def render(model: str, facts: Iterable[tuple[str, str]], places: Sequence[Place]) -> str:
    """The page of `model`: `facts` are rows of its first table, `places` what the sections are about."""
    groups = group(places)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        f"<title>{_text(model)}: MoE blocks</title><style>{_STYLE}</style></head><body>",
        f'<h1>MoE blocks of <span class="name">{_text(model)}</span></h1>',
        _table(None, [[_text(name), _text(value)] for name, value in facts]),
    ]
    if groups:
        rows = [_overview(index, each) for index, each in enumerate(groups)]
        parts += [_table(["blocks", "number", "state", "what"], rows), _key(groups)]
    else:
        parts.append("<p>No MoE block was found.</p>")
    used = 0
    for index, each in enumerate(groups):
        pictures = _pictures(each.places[0]) if used < _MOST_PICTURES else "<p>No picture, as there are many.</p>"
        used += len(pictures)
        parts.append(_section(index, each, pictures, model))
    return "\n".join([*parts, "</body></html>\n"])


def conversion_page(report: ConversionReport, places: Sequence[Place], *, dry_run: bool) -> str:
    """The page of a conversion."""
    written = {block.name for block in report.fused} if report.written else set()
    places = [replace(p, state="fused") if _is_proven(p) and p.node in written else p for p in places]
    facts = [("result", outcome(report, dry_run)), ("nodes before", str(report.nodes_before))]
    if report.written:
        facts += [("nodes after", str(report.nodes_after)), ("bytes before", size(report.bytes_before))]
        facts += [("bytes after", size(report.bytes_after))]
    if report.checks:
        worst = max(check.relative_l2 for check in report.checks)
        facts.append(("whole models", f"compared on {len(report.checks)} inputs, worst relative L2 {worst:.1e}"))
    return render(report.source, facts, places)


def inspection_page(found: Inspection, places: Sequence[Place]) -> str:
    """The page of an inspection."""
    return render(found.model, [("nodes", str(found.nodes)), ("weights", size(found.weight_bytes))], places)


def _is_proven(place: Place) -> bool:
    return place.proof is not None and place.proof.proven


def group(places: Sequence[Place]) -> list[Group]:
    """Places that differ in names only, together, in the order of the first of each."""
    alike: dict[object, list[Place]] = {}
    for place in places:
        words = (_unnumbered(place.note), _unnumbered(place.reason or ""))
        what = (place.state, place.family, _is_proven(place), place.spec, *words)
        alike.setdefault((*what, _shape_of(place.before), _shape_of(place.after)), []).append(place)
    return [Group(common_name([place.node for place in each]), each) for each in alike.values()]


def common_name(names: Sequence[str]) -> str:
    """One name for `names` that differ in one number, as `model.layers.0-47.mlp`; else the first and how many."""
    pieces = [re.split(r"(\d+)", name) for name in names]
    columns = list(zip(*pieces, strict=True)) if len({len(piece) for piece in pieces}) == 1 else []
    varying = [column for column in columns if len(set(column)) > 1]
    if len(names) == 1:
        return names[0]
    if len(varying) != 1 or not all(part.isdigit() for part in varying[0]):
        return f"{names[0]} and {len(names) - 1} more"
    numbers = sorted({int(part) for part in varying[0]})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ",".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)
    return "".join(words if column is varying[0] else column[0] for column in columns)


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _shape_of(drawing: Drawing | None) -> object:
    """What a picture shows but the names of values and nodes, which are notes of inputs and around a marked node."""
    if drawing is None:
        return None
    around = any(box.marked for box in drawing.boxes)
    return drawing.edges, tuple(
        (box.text, "" if around or box.stage == "input" else box.note, box.stage, box.count, box.marked)
        for box in drawing.boxes
    )


def _text(words: object) -> str:
    """`words` for HTML; characters that cannot be seen, or that turn the direction of text, are replaced."""
    return escape(printable(words))


def _table(head: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "" if head is None else f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def _overview(index: int, each: Group) -> list[str]:
    first = each.places[0]
    what = first.reason or (first.spec.summary() if first.spec else "")
    link = f'<a href="#b{index}" class="name">{_text(each.name)}</a>'
    return [link, str(len(each.places)), f'<span class="{each.state}">{_WORDS[each.state]}</span>', _text(what)]


def _key(groups: Sequence[Group]) -> str:
    used = {box.stage for each in groups for d in (each.places[0].before,) if d is not None for box in d.boxes}
    names = [stage for stage in STAGES[1:-1] if stage in used]
    square = '<rect width="14" height="14" rx="3"/>'
    marks = (
        f'<span><svg class="{stage_class(name)}" width="14" height="14">{square}</svg>{name}</span>' for name in names
    )
    return f'<p class="key">{"".join(marks)}</p>' if names else ""


def _section(index: int, each: Group, pictures: str, model: str) -> str:
    first = each.places[0]
    family = f" ({_text(first.family)})" if first.family else ""
    parts = [
        f'<section id="b{index}"><h2 class="name">{_text(each.name)}</h2>',
        f'<p><strong class="{each.state}">{_WORDS[each.state]}</strong>{family}'
        f"{': ' + _text(first.spec.summary()) if first.spec else ''}</p>",
    ]
    if first.reason:
        parts.append(f"<p>{_text(first.reason)}</p>")
    if first.note:
        parts.append(f"<p>{_text(first.note)}</p>")
    if first.state == "refused" and first.steps:
        parts.append(f"<p>Recognised before:</p><ul>{''.join(f'<li>{_text(step)}</li>' for step in first.steps)}</ul>")
    parts.append(pictures)
    if first.broke_at is not None:
        parts += ["<h3>Where graph and pattern part</h3>", _node(first.broke_at)]
    if first.state == "refused":
        parts.append(f"<p>The same in a terminal: <code>{_text(explain_command(model, first.node))}</code></p>")
    parts.append(_members(each))
    if first.spec is not None:
        stored = [*first.constants, *first.weights]
        parts.append(
            _details("Weights", _table(["field", "tensor", "number", "type", "shape", "bytes"], map(_row, stored)))
        )
        rows = [[name, _text(value)] for name, value in first.spec.to_dict().items()]
        parts.append(_details("MoeSpec", _table(["field", "value"], rows)))
    return "\n".join([*parts, "</section>"])


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _row(stored: Stored) -> list[str]:
    cells = (stored.field, stored.tensor, stored.count, stored.type, stored.shape, size(stored.bytes))
    return [_text(cell) for cell in cells]


def _members(each: Group) -> str:
    """One row for each block of a group."""
    rows = []
    for place in each.places:
        worst = place.proof.worst_relative_l2 if place.proof else None
        cells = (place.node, "-" if worst is None else f"{worst:.1e}", size(place.bytes) if place.weights else "-")
        differs = place.reason if place.reason != each.places[0].reason else ""
        rows.append([f'<span class="name">{_text(cells[0])}</span>', *cells[1:], _text(differs or "")])
    table = _table(["block", "error of the proof", "expert weights", ""], rows)
    return table if len(rows) <= 4 else _details(f"The {len(rows)} blocks", table)


def _pictures(place: Place) -> str:
    figures = []
    if place.before is not None:
        caption = "before" if place.spec is not None else "around the node"
        figures.append(f"<figure><figcaption>{caption}</figcaption>{svg(place.before, _text)}</figure>")
    if place.after is not None:
        figures.append(f"<figure><figcaption>after</figcaption>{svg(place.after, _text)}</figure>")
    counts = "" if place.before is None else _counts(place.before)
    return f'<div class="pair">{"".join(figures)}</div>{counts}' if figures else ""


def _counts(drawing: Drawing) -> str:
    """How many nodes of which operator each stage has, those that are not drawn too."""
    rows = []
    for stage, operators in drawing.operators.items():
        often = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
        rows.append([stage, str(sum(operators.values())), _text(", ".join(f"{n} {name}" for name, n in often))])
    if not rows:
        return ""
    total = sum(int(row[1]) for row in rows)
    return _details(f"The {total} nodes of the block", _table(["part", "nodes", "operators"], rows))


def _node(node: NodeView) -> str:
    """A node, what it reads, and what reads it, as lists in lists."""
    items = [f"<li>reads {_value(value)}</li>" for value in node.inputs]
    items += [f"<li>gives {_value(value, nested=False)}</li>" for value in node.outputs]
    items += [f"<li>read by {_text(reader)}</li>" for reader in node.readers]
    if node.left_out:
        items.append(f"<li>and {node.left_out} more</li>")
    listed = f"<ul>{''.join(items)}</ul>" if items else ""
    return f'<div><strong>{_text(node.op_type)}</strong> <span class="name">{_text(node.name)}</span>{listed}</div>'


def _value(value: ValueView, nested: bool = True) -> str:
    words = f'<span class="name">{_text(value.name)}</span> {_text(value.describe())}'
    return f"{words} of {_node(value.producer)}" if nested and value.producer is not None else words
