"""Write the predictions of docs/numa.md: `python -m docs.generate_numa`."""

from __future__ import annotations

from pathlib import Path

from docs.generated import with_generated
from hina_ort.bench.numa_model import run_numa
from hina_ort.numa.show import model_cells

PAGE = Path(__file__).resolve().with_name("numa.md")
_START, _END = "<!-- predicted: generated -->\n", "<!-- end of predictions -->\n"


def table() -> str:
    """The generated part of the page, as Markdown."""
    machines = run_numa(None)["machines"]
    head = ["Predicted GB/s", *machines[0]["gigabytes_per_second"], "gain of HinaMoE"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *map(model_cells, machines)]
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def page() -> str:
    """The whole page with a fresh table; ValueError when the page has lost its markers."""
    return with_generated(PAGE, _START, table(), _END)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
