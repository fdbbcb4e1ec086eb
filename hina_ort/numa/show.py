"""What `hina-ort doctor` says about NUMA, in words and tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from hina_ort.tables import escape, size


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rows(topology: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of doctor's table."""
    lines = []
    for node in topology["nodes"]:
        cpus = f"CPUs {ranges(node['cpus'])}" if node["cpus"] else "no CPUs"
        if node["cpus"] != node["allowed_cpus"]:
            cpus += f", allowed {ranges(node['allowed_cpus']) or 'none'}"
        memory = f"{size(node['free_bytes'])} free of {size(node['memory_bytes'])}"
        lines.append(f"node {node['id']}: {cpus}; {memory}{'' if node['memory_allowed'] else ', not allowed'}")
    yield "NUMA nodes", "\n".join(lines)
    if len(topology["nodes"]) > 1 and topology["distances"]:
        yield "distances", "\n".join(" ".join(f"{d:3}" for d in row) for row in topology["distances"])
    if any(len(group) > 1 for group in topology["near"]):
        groups = " and ".join(ranges(group) for group in topology["near"])
        yield "sub-NUMA clusters", f"nodes {groups} share a socket each"
    yield "pages", f"{size(topology['page_bytes'])}; transparent huge pages: {topology['huge_pages']}"
    why = topology["error"] or topology["mode_reason"] or "each layer looks where its weights are; see docs/numa.md"
    yield "HINA_NUMA", f"{topology['mode']}: {why}"


def show_placement(found: dict[str, Any], topology: dict[str, Any] | None) -> None:
    """Print what `model_placement` returned, layers that look alike in a line, and what to do."""
    console = Console()
    inside = f"{size(found['resident_bytes'])} of {size(found['bytes'])} in memory"
    console.print(escape(f"{found['model']}: weights of experts, {inside}"), soft_wrap=True)
    if found["refused"]:
        console.print(escape(f"nodes are not known: {found['refused']}; see docs/numa.md"), soft_wrap=True)
    table = Table("layer", "in memory", "on nodes", "pattern", "pages")
    for layer in found["layers"]:
        table.add_row(
            escape(layer["layer"]),
            f"{layer['resident_bytes'] / layer['bytes']:.0%} of {size(layer['bytes'])}",
            _shares(layer["nodes"]),
            escape(pattern(layer)),
            _pages(layer),
        )
    console.print(table)
    for reason in dict.fromkeys(layer["reason"] for layer in found["layers"] if layer["reason"]):
        console.print(escape(f"- {reason}"), soft_wrap=True)
    if advice := advise(found, topology):
        console.print(escape(advice), soft_wrap=True)


def pattern(layer: dict[str, Any]) -> str:
    """What the matrices of a layer look like."""
    if layer["pattern"] == "interleaved":
        return f"interleaved over nodes {ranges(layer['node_order'])}"
    if layer["pattern"] == "mixed":
        return ", ".join(f"{count} {name}" for name, count in layer["patterns"].items())
    return str(layer["pattern"])


def advise(found: dict[str, Any], topology: dict[str, Any] | None) -> str:
    """What to do where several nodes could serve and the weights are on one of them, or not in memory; else empty."""
    nodes = topology["workers"] if topology else []
    if len(nodes) < 2 or all(layer["pattern"] == "interleaved" for layer in found["layers"]):
        return ""
    return (
        f"weights are read from all {len(nodes)} nodes at once when they are interleaved: start the program with "
        f"hina-ort run --numa interleave --model {shlex.quote(found['model'])} -- COMMAND"
    )


def _shares(nodes: dict[int, int]) -> str:
    total = sum(nodes.values())
    return ", ".join(f"{node}: {count / total:.0%}" for node, count in sorted(nodes.items())) or "-"


def _pages(layer: dict[str, Any]) -> str:
    if layer["page_bytes"] is None:
        return "huge" if layer["huge_pages"] else "-"
    return f"{size(layer['page_bytes'])}{', huge' if layer['huge_pages'] else ''}"


def model_cells(machine: dict[str, Any]) -> list[str]:
    """A row of the table of `bench numa`: GB/s by where weights lie, and the gain over unaware workers."""
    rates = machine["gigabytes_per_second"]
    gain = rates["interleaved, HinaMoE"] / rates["interleaved"]
    return [machine["name"], *(f"{rate:.0f}" for rate in rates.values()), f"{gain:.2f}x"]


def show_model(result: dict[str, Any], console: Console) -> None:
    """Print what `bench numa` predicts."""
    table = Table("GB/s read", *result["machines"][0]["gigabytes_per_second"], "gain")
    for machine in result["machines"]:
        table.add_row(*map(escape, model_cells(machine)))
    console.print(f"{result['note']}; HinaMoE reads {result['locality']:.0%} of the bytes from the nearest memory")
    console.print(table)
    console.print("gain: of HinaMoE over workers that do not know where the interleaved pages are; see docs/numa.md")
