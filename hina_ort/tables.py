"""Reports for people, as tables on stdout."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Table

from graph_passes.explain import Explanation, NodeView, Place
from graph_passes.pipeline import FusedBlock
from hina_ort.comparison import in_words
from hina_ort.conversion import ConversionReport
from hina_ort.inspection import Inspection
from hina_ort.memory_plan import MemoryPlan
from hina_ort.weights import NodeWeights


def printable(words: object) -> str:
    """`words` without what cannot be seen, turns the direction of text, or steers a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t " else "\ufffd" for c in str(words))


def escape(words: str) -> str:
    """`words` for a console."""
    return markup.escape(printable(words))


def size(count: int | float | None) -> str:
    """`count` bytes in words; "-" for None."""
    if count is None:
        return "-"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {units[unit]}" if unit == 0 else f"{value:.1f} {units[unit]}"


def show_conversion(report: ConversionReport, *, dry_run: bool) -> None:
    """Print what was fused, what was not and why, and what it cost."""
    console = Console()
    for text, blocks in _alike(report.proven).items():
        verb = "fused" if report.written else "can fuse"
        worst = max(block.worst_relative_l2 for block in blocks)
        console.print(
            f"[green]{verb}[/] {len(blocks)} x {blocks[0].family}: {escape(text)}; {size(blocks[0].bytes)} of expert "
            f"weights each, worst relative L2 {worst:.1e}",
            highlight=False,
        )
    for block in report.proven:
        _show_note(console, block.name, block.note)
    for miss in report.refused:
        console.print(f"[yellow]not fused[/] {escape(miss.name)}: {escape(miss.reason)}", highlight=False)
    _show_hint(console, report.source, [miss.name for miss in report.refused if miss.family])
    _show_layers(console, report)
    _show_weights(console, report.weights)
    for line in (*_activations(report.weights), *report.without_effect):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table("", "before", "after")
    table.add_row("nodes", str(report.nodes_before), str(report.nodes_after))
    table.add_row("bytes on disk", size(report.bytes_before), size(report.bytes_after))
    console.print(table)
    _show_checks(console, report)
    console.print(f"{report.seconds:.1f} s, peak memory {size(report.peak_rss_bytes)}", highlight=False)
    for line in report.genai:
        console.print(escape(line), highlight=False, soft_wrap=True)
    for data in report.reads:
        text = f"{report.written} still reads {size(data.bytes)} of {data.file}; keep it"
        console.print(escape(text), highlight=False, soft_wrap=True)
    if report.html:
        console.print(f"wrote {escape(report.html)}", highlight=False, soft_wrap=True)
    console.print(escape(outcome(report, dry_run)), highlight=False, soft_wrap=True)


def _alike(blocks: list[FusedBlock]) -> dict[str, list[FusedBlock]]:
    """Group blocks that compute the same, by what they compute."""
    groups: dict[str, list[FusedBlock]] = {}
    for block in blocks:
        groups.setdefault(block.spec.summary(), []).append(block)
    return groups


def _show_layers(console: Console, report: ConversionReport) -> None:
    """Print where the bytes lie, so that weights left untreated cannot go unseen."""
    if not any(layer.bytes_fused for layer in report.layers):
        return
    table = Table("layer", "bytes in HinaMoE", "bytes in other nodes", title="Weights")
    for layer in report.layers:
        table.add_row(escape(layer.layer), size(layer.bytes_fused), size(layer.bytes_left))
    console.print(table)


def _show_weights(console: Console, nodes: list[NodeWeights]) -> None:
    """Print what became of the weights of each layer; errors are missing on a dry run."""
    if not any(node.projections for node in nodes):
        return
    table = Table("layer", "before", "after", "worst relative L2", "projections", title="Converted weights")
    for node in nodes:
        total = node.to_dict()
        parts = (f"{p.name} {p.after} {_error(p.relative_l2)}".rstrip(" -") for p in node.projections)
        cells = (size(total["bytes_before"]), size(total["bytes_after"]), _error(node.worst_relative_l2))
        table.add_row(escape(node.layer), *cells, escape("\n".join(parts)))
    console.print(table)


def _activations(nodes: list[NodeWeights]) -> list[str]:
    """How many layers take their activations in another type now."""
    lines = []
    for words, to_int8 in (("float to int8", True), ("int8 to float", False)):
        count = sum(node.activations_changed and (node.accuracy_level == 4) == to_int8 for node in nodes)
        if count:
            lines.append(f"activations of {count} layer{'s' if count > 1 else ''}: {words}")
    return lines


def _error(relative_l2: float | None) -> str:
    return "-" if relative_l2 is None else f"{relative_l2:.1e}"


def _show_checks(console: Console, report: ConversionReport) -> None:
    """Print how far the outputs are apart: the worst, or where nothing was demanded the worst of each output."""
    if not report.checks:
        return
    for skipped in report.checks_skipped:
        text = f"not checked with {in_words(skipped.sizes)}: {skipped.reason}"
        console.print(escape(text), highlight=False, soft_wrap=True)
    worst = max(check.relative_l2 for check in report.checks)
    text = f"checked on {len(report.checks)} random inputs: worst relative L2 {worst:.1e}"
    if report.must_agree:
        console.print(text)
        return
    console.print(f"{text}; not held to --rtol, as weights or activations have other types now", soft_wrap=True)
    table = Table("output", "relative L2")
    for name in report.checks[0].outputs:
        table.add_row(escape(name), f"{max(check.outputs[name] for check in report.checks):.1e}")
    console.print(table)


def outcome(report: ConversionReport, dry_run: bool) -> str:
    """Whether a model was written, and why if not."""
    if report.written:
        return f"wrote {report.written}"
    if report.stopped:
        return "nothing was written, because a block was refused; --partial goes on with the rest"
    if not (report.proven or report.refused or report.weights):
        already = f"; it holds {report.already_fused} HinaMoE nodes already" if report.already_fused else ""
        return f"nothing was written: no MoE block to fuse in {report.source}{already}"
    return (
        "nothing was written: this was a dry run"
        if dry_run and (report.fused or report.weights)
        else "nothing was written"
    )


def show_inspection(found: Inspection) -> None:
    """Print the MoE blocks of a model."""
    console = Console()
    console.print(f"{escape(found.model)}: {found.nodes} nodes, {size(found.weight_bytes)} of weights", soft_wrap=True)
    if not found.blocks:
        console.print("no MoE blocks found; --explain NODE says what the patterns look for at a node")
    for block in found.blocks:
        text = block.spec.summary() if block.spec else block.reason or ""
        weights = "" if block.bytes is None else f"; {size(block.bytes)} of expert weights"
        family = f" ({block.family})" if block.family else ""
        console.print(f"[bold]{block.state}[/]{family} {escape(block.node)}: {escape(text)}{weights}", highlight=False)
        _show_note(console, block.node, block.note)
    _show_hint(console, found.model, [block.node for block in found.blocks if block.state == "refused"])
    for line in _memory(found.memory):
        console.print(line, highlight=False, soft_wrap=True)
    for warning in found.memory.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _memory(plan: MemoryPlan) -> Iterator[str]:
    """What a model takes of memory, and what that means for its speed."""
    shared = f", {size(plan.shared_expert_bytes)} of shared experts" if plan.shared_expert_bytes else ""
    yield f"weights: {size(plan.expert_bytes)} of experts{shared}, {size(plan.dense_bytes)} of other weights"
    if plan.cache_bytes_per_token or plan.state_bytes:
        state = f", and {size(plan.state_bytes)} whatever its length" if plan.state_bytes else ""
        full = plan.cache_bytes_per_token * (plan.context or 0)
        most = f"; {size(full)} for {plan.context} tokens" if full else ""
        yield f"cache of a sequence: {size(plan.cache_bytes_per_token)} per token{state}{most}"
    yield f"a token of decoding reads {size(plan.decode_bytes_per_token)} of weights, and its cache"
    if plan.read_bytes_per_second is None or plan.ceiling_tokens_per_second is None:
        yield "how fast that can be at most on this machine: --measure"
    else:
        yield (
            f"this machine reads {plan.read_bytes_per_second / 1e9:.1f} GB/s: at most "
            f"{plan.ceiling_tokens_per_second:.1f} tokens/s of one sequence with little in its cache; a ceiling, "
            "not a prediction"
        )


def _show_note(console: Console, block: str, note: str) -> None:
    """Say what was left outside of a block, and why."""
    if note:
        console.print(escape(f"{block}: {note}"), highlight=False, soft_wrap=True)


def _show_hint(console: Console, model: str, refused: list[str]) -> None:
    """Say how to see where a pattern broke."""
    if refused:
        command = explain_command(model, refused[0])
        console.print(f"where its pattern broke: {escape(command)}", highlight=False, soft_wrap=True)


def explain_command(model: str, node: str) -> str:
    """The command that shows where the pattern of a refused block broke."""
    return f"hina-ort inspect {shlex.quote(model)} --explain {shlex.quote(node)}"


def show_explanation(found: Explanation) -> None:
    """Print what the matchers make of a place."""
    console = Console()
    several = " and other nodes" if len(found.nodes) > 1 else ""
    here = f"{found.nodes[0]}{several}" if found.nodes else found.asked
    if found.distance is None:
        where = "is near no MoE block; these patterns are known:"
    elif found.distance:
        where = f"is part of no MoE block; the nearest is {found.distance} nodes away"
    else:
        looks = "what looks like " if found.places[0].state == "refused" else ""
        where = f"{'are' if several else 'is'} part of {looks}a MoE block"
    console.print(f"{escape(here)} {where}", highlight=False, soft_wrap=True)
    for family, words in found.patterns.items():
        console.print(f"  {family}: {escape(words)}", highlight=False, soft_wrap=True)
    for place in found.places:
        for line in _place(place):
            console.print(escape(line), highlight=False, soft_wrap=True)


def _place(place: Place) -> Iterator[str]:
    """A block, or where its pattern broke, line by line."""
    family = f" ({place.family})" if place.family else ""
    yield f"{place.state}{family} {place.node}{f': {place.spec.summary()}' if place.spec else ''}"
    if place.reason:
        yield f"  reason: {place.reason}"
    if place.note:
        yield f"  note: {place.note}"
    for step in place.steps:
        yield f"  recognised {step}"
    if place.broke_at is not None:
        yield f"  where it broke: {place.broke_at.op_type} {place.broke_at.name}"
        yield from _node(place.broke_at, "    ")
    for stored in (*place.constants, *place.weights):
        several = f" and {stored.count - 1} more" if stored.count > 1 else ""
        yield f"  {stored.field}: {stored.tensor}{several}, {stored.type} {stored.shape}, {size(stored.bytes)}"
    if place.proof is not None and place.proof.proven:
        yield f"  proven: worst relative L2 {place.proof.worst_relative_l2:.1e}"


def _node(node: NodeView, indent: str) -> Iterator[str]:
    """What a node reads and gives, and what reads that."""
    for value in node.inputs:
        maker = f" from {value.producer.op_type} {value.producer.name}" if value.producer else ""
        yield f"{indent}reads {value.name}: {value.describe()}{maker}"
        if value.producer is not None:
            yield from _node(value.producer, indent + "  ")
    for value in node.outputs:
        yield f"{indent}gives {value.name}: {value.describe()}"
    for reader in node.readers:
        yield f"{indent}read by {reader}"
    if node.left_out:
        yield f"{indent}and {node.left_out} more"


def show_diagnosis(found: dict[str, Any]) -> None:
    """Print what `doctor.diagnose` returned."""
    table = Table(show_header=False)
    runtime, cpu, threads, container = found["onnxruntime"], found["cpu"], found["threads"], found["container"]
    table.add_row("hina-ort", found["version"])
    table.add_row("library", found["library"]["path"] or "missing")
    packages = ", ".join(f"{name} {version}" for name, version in runtime["packages"].items())
    table.add_row("ONNX Runtime", f"{packages or 'missing'}; API version {runtime['api_version']}")
    if cpu:
        table.add_row("needs", f"ONNX Runtime API version {cpu['minimum_ort_api']} or later")
        table.add_row("CPU", f"{cpu['vendor']} {cpu['model']}")
        table.add_row("CPU features", " ".join(cpu["features"]))
        table.add_row("instruction set", f"{cpu['isa']}: {cpu['isa_reason']}")
        table.add_row("AMX", f"{'on' if cpu['amx'] else 'off'}: {cpu['amx_reason']}")
        table.add_row("capped by HINA_ISA", cpu["isa_cap"] or "no")
    affinity = ",".join(str(number) for number in threads["affinity"])
    table.add_row("threads", f"{threads['usable']} usable of {threads['cpus']} CPUs; affinity {affinity}")
    cpus = "no limit" if container["cpus"] is None else f"{container['cpus']:g} CPUs"
    memory = "no limit" if container["memory_bytes"] is None else size(container["memory_bytes"])
    version = f"cgroup v{container['cgroup']}" if container["cgroup"] else "no cgroup visible"
    table.add_row("container", f"CPU: {cpus}, memory: {memory} ({version})")
    memory_found = found["memory"]
    total, available = size(memory_found["total_bytes"]), size(memory_found["available_bytes"])
    table.add_row("memory", f"{available} available of {total}")
    from hina_ort.numa.show import rows, show_placement  # it needs this module

    for name, text in rows(found["numa"]) if found["numa"] else ():
        table.add_row(name, text)
    console = Console()
    console.print(table)
    if found["placement"]:
        show_placement(found["placement"], found["numa"])
    for problem in found["problems"]:
        console.print(f"[red]problem[/] {escape(problem)}", highlight=False, soft_wrap=True)
