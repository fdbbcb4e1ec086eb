"""The result of `bench_layer` as tables."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def title(result: dict[str, Any]) -> str:
    """One line: the layer, its weights and activations."""
    shape = result["shape"]
    sizes = f"E={shape['num_experts']} k={shape['top_k']} H={shape['hidden_size']} I={shape['intermediate_size']}"
    if shape["shared_intermediate_size"]:
        sizes += f" shared={shape['shared_intermediate_size']}"
    weights = result["weights"]
    if result["block"] is not None and weights != "mxfp4":
        weights += f", blocks of {result['block']}" if result["block"] else ", one scale per row"
    activations = "int8" if result["accuracy_level"] == 4 else result["activations"]
    name = f"{shape['name']} ({sizes})" if "," not in shape["name"] else sizes
    return f"{name}; weights {weights}; activations {activations}"


def limits(result: dict[str, Any]) -> str:
    """One line: what the machine can do at most."""
    machine = result["machine"]
    return (
        f"limits with {result['threads']} threads, {machine['isa']}: {machine['read_bytes_per_second'] / 1e9:.1f} GB/s "
        f"read, {machine['float32_flops'] / 1e9:.0f} GFLOP/s float32, {machine['int8_ops'] / 1e9:.0f} GOP/s int8"
    )


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader has to know about peers and the set-up, a sentence each."""
    lines = []
    for engine in result["engines"]:
        note = f"; it {engine['note']}" if engine["note"] else ""
        lines.append(f"{engine['name']}: {engine['label']}, version {engine['version']}{note}")
    lines += [f"{peer['name']} is left out: {peer['reason']}" for peer in result["missing"]]
    total, cache = result["layers"] * result["layer_bytes"], result["machine"]["last_level_cache_bytes"]
    lines.append(f"{result['layers']} layers of {result['layer_bytes'] / 2**20:.0f} MiB, one after another in each run")
    if total < 4 * cache:
        lines.append(
            f"together only {total / cache:.1f} times the last-level cache of {cache / 2**20:.0f} MiB: part of the "
            "weights comes from there, and shares of the bandwidth may exceed 100 %"
        )
    return lines


def show_layer(result: dict[str, Any], console: Console) -> None:
    """Print a table with a row for each token count and engine."""
    for line in (title(result), limits(result)):
        console.print(line, soft_wrap=True)
    unit = "GOP/s" if result["accuracy_level"] == 4 else "GFLOP/s"
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("tokens", "engine"):
        table.add_column(name)
    for name in ("ms", "quartiles", "ratio", "GB/s", "of read", unit, "of peak"):
        table.add_column(name, justify="right")
    for cell in result["cells"]:
        for name, values in cell["engines"].items():
            first = name == "hina"
            table.add_row(
                str(cell["tokens"]) if first else "",
                name,
                number(values["median_ms"]),
                f"{number(values['lower_ms'])}-{number(values['upper_ms'])}",
                "" if first else f"{values['ratio']:.2f}x",
                f"{values['gigabytes_per_second']:.1f}",
                f"{values['bandwidth_share']:.0%}",
                f"{values['gigaops_per_second']:.0f}",
                f"{values['compute_share']:.0%}",
            )
        table.add_section()
    console.print(table)
    for line in remarks(result):
        console.print(f"- {line}", soft_wrap=True)


def number(value: float) -> str:
    """A positive number with three significant digits, at most."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def show_tuning(result: dict[str, Any], console: Console) -> None:
    """Print how many times as fast AMX is, by tokens of an expert, and from how many on it is used."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("kernels")
    for tokens in result["cases"][0]["tokens"]:
        table.add_column(f"{tokens} tokens", justify="right")
    table.add_column("AMX from", justify="right")
    for case in result["cases"]:
        used = case["amx_from"] in case["tokens"]
        ratios = [f"{ratio:.2f}x" for ratio in case["ratios"]]
        table.add_row(case["key"], *ratios, f"{case['amx_from']} tokens" if used else "never")
    console.print(table)
    where = f"kept in {result['file']}" if result["file"] else "nothing was kept"
    console.print(f"{result['threads']} threads of {result['cpu']}; {where}", soft_wrap=True)
