"""Write the tables of docs/op.md from graph_passes/op_schema.py: `python -m docs.generate_op`."""

from __future__ import annotations

from pathlib import Path

from docs.generated import with_generated
from graph_passes.op_schema import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, OPSET_VERSION, OUTPUTS, WEIGHT_FIELDS

PAGE = Path(__file__).resolve().with_name("op.md")
_START, _END = "<!-- tables: generated -->\n", "<!-- end of tables -->\n"


def tables() -> str:
    """The generated part of the page, as Markdown."""
    parts = [f"Domain `{DOMAIN}`, type `{OP_TYPE}`, opset version {OPSET_VERSION}.\n"]
    rows = [
        (
            str(position),
            f"`{item.name}`",
            item.shape,
            ", ".join(item.types),
            "yes" if item.required else "no",
            "yes" if item.constant else "no",
            item.doc,
        )
        for position, item in enumerate(INPUTS)
    ]
    head = ("position", "name", "shape", "types", "required", "initializer", "meaning")
    parts.append(_table("Fixed inputs", head, rows))
    fields = [(f"`{f.name}`", f.shape, "yes" if f.shared else "no", f.doc) for f in WEIGHT_FIELDS]
    head = ("name", "shape of one expert", "shared expert", "meaning")
    parts.append(_table(f"Weight fields (from input {len(INPUTS)} on, in the order of `weight_inputs`)", head, fields))
    attributes = [
        (
            f"`{a.name}`",
            a.type,
            "required" if a.default is None else f"`{a.default}`" if a.default != "" else "empty",
            ", ".join(f"`{value}`" for value in a.values),
            a.doc,
        )
        for a in ATTRIBUTES
    ]
    parts.append(_table("Attributes", ("name", "type", "default", "values", "meaning"), attributes))
    outputs = [(f"`{name}`", types, shape) for name, types, shape in OUTPUTS]
    parts.append(_table("Outputs", ("name", "type", "shape"), outputs))
    return "\n".join(parts)


def page() -> str:
    """The whole page with fresh tables; ValueError when the page has lost its markers."""
    return with_generated(PAGE, _START, tables(), _END)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"### {title}", "", _row(head), _row(("---",) * len(head))]
    return "\n".join([*lines, *(_row(row) for row in rows), ""])


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
