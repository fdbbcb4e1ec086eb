"""The result of `bench model` as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hina_ort.bench.show import number, title

BOUNDS = {
    "dram": "DRAM",
    "l3": "L3",
    "l2": "L2",
    "loads": "loads",
    "tmul": "TMUL",
    "stores": "stores",
    "vectors": "vectors",
}
"""Words for what bounds the time."""

COLUMNS = ("tokens", "experts", "tokens each", "loads/product", *BOUNDS.values(), "ms", "apart", "bound by")


def row(cell: dict[str, Any]) -> tuple[str, ...]:
    """What the columns show of a token count."""
    return (
        str(cell["tokens"]),
        f"{cell['distinct_experts']:.0f}",
        f"{cell['tokens_per_expert']:.1f}",
        f"{cell['loads'] / cell['products']:.2f}",
        *(number(cell["bounds_ms"][name]) for name in BOUNDS),
        number(cell["predicted_ms"]),
        number(cell["apart_ms"]),
        BOUNDS[cell["bound"]],
    )


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader has to know about the figures, a sentence each."""
    lines = [
        "bounds in ms, if all cores share the work evenly: ms is the largest, when all overlap, apart their sum, when "
        "none does; docs/amx.md says how they are found and how far off they were"
    ]
    cache = result["machine"]["l2_bytes"]
    large = [str(cell["tokens"]) for cell in result["cells"] if cell["block_bytes"] > cache]
    if large:
        lines.append(
            f"with {', '.join(large)} tokens a block of rows and its tokens exceed the {cache / 2**20:.0f} MiB of L2: "
            "it takes longer than this"
        )
    return lines


def show_model(result: dict[str, Any], console: Console) -> None:
    """Print a table with a row for each token count."""
    machine = result["machine"]
    console.print(title(result), soft_wrap=True)
    console.print(
        f"{result['note']}: {machine['cores']} cores at {machine['ghz']:g} GHz, "
        f"{machine['bytes_per_second'] / 1e9:g} GB/s",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for cell in result["cells"]:
        table.add_row(*row(cell))
    console.print(table)
    for line in remarks(result):
        console.print(f"- {line}", soft_wrap=True)
