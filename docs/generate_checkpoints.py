"""Write the tables of docs/checkpoints.md: `python -m docs.generate_checkpoints`."""

from __future__ import annotations

from pathlib import Path

from docs.generated import with_generated
from hina_ort.export.architectures import GENAI_TYPES, SUPPORTED, UNSUPPORTED

PAGE = Path(__file__).resolve().with_name("checkpoints.md")
_START, _END = "<!-- architectures: generated -->\n", "<!-- end of architectures -->\n"


def tables() -> str:
    """The generated part of the page, as Markdown."""
    tried = [(f"`{name}`", f"`{GENAI_TYPES[name]}`" if name in GENAI_TYPES else "") for name in SUPPORTED]
    refused = [(f"`{name}`", reason) for name, reason in sorted(UNSUPPORTED.items())]
    lines = ["", *_table(("`model_type`", "decoder of onnxruntime-genai"), tried)]
    return "\n".join([*lines, "", *_table(("refused", "why"), refused), "", ""])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def page() -> str:
    """The whole page with fresh tables; ValueError when the page has lost its markers."""
    return with_generated(PAGE, _START, tables(), _END)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
