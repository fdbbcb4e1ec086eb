"""Write the predictions of docs/amx.md: `python -m docs.generate_amx`."""

from __future__ import annotations

from pathlib import Path

from docs.generated import with_generated
from hina_ort.bench.model import Machine, predict
from hina_ort.bench.model_show import COLUMNS, row
from hina_ort.bench.options import SHAPES, LayerOptions
from hina_ort.bench.show import title

PAGE = Path(__file__).resolve().with_name("amx.md")
_START, _END = "<!-- predicted: generated -->\n", "<!-- end of predictions -->\n"
SHAPE_NAMES = ("qwen3-30b-a3b", "qwen3.6-35b-a3b")
WEIGHTS = ("bf16", "int8", "int4")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def tables() -> str:
    """The generated part of the page, as Markdown."""
    parts = []
    for options in (LayerOptions(SHAPES[name], weights, TOKENS) for name in SHAPE_NAMES for weights in WEIGHTS):
        result = predict(options, Machine())
        rows = [COLUMNS, ("---:",) * len(COLUMNS), *map(row, result["cells"])]
        parts.append(f"Predicted: {title(result)}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in rows))
    return "\n".join(parts)


def page() -> str:
    """The whole page with fresh tables; ValueError when the page has lost its markers."""
    return with_generated(PAGE, _START, tables(), _END)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
