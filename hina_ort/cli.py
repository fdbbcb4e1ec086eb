"""The command line. One function per command; what is heavy to import is imported inside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hina_ort import __version__
from hina_ort.bench.cli import bench
from hina_ort.terminal import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_TO_FUSE,
    EXIT_REFUSED,
    Json,
    clear_errors,
    exit_when_killed,
    fail,
    print_json,
    progress_bars,
)

if TYPE_CHECKING:
    from hina_ort.conversion import ConversionReport
    from hina_ort.unfusing import UnfusingReport

app = typer.Typer(
    name="hina-ort",
    help="Fuse the Mixture-of-Experts blocks of exported ONNX models and run them fast in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_TYPES = "keep, f32, f16, bf16, int8, int4, mxfp4"
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a picture of each block.")]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Fuse the Mixture-of-Experts blocks of exported ONNX models and run them fast in ONNX Runtime."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def convert(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="A model file, or an exporter's output folder with model.onnx.")
    ],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The model file, or folder, to write.")],
    weights: Annotated[str, typer.Option(metavar="TYPE", help=f"Type of the experts' weights: {_TYPES}.")] = "keep",
    block: Annotated[
        int | None,
        typer.Option(help="int8 and int4 weights that share a scale; 0: a row. Default: 32.", show_default=False),
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="int8 and int4 weights without zero points.")] = False,
    shared_weights: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of shared experts' weights. Default: as --weights.")
    ] = None,
    accuracy_level: Annotated[
        int | None, typer.Option(help="Activations of quantised weights: 0 floats, 4 int8.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Find and prove blocks, but write nothing.")] = False,
    check: Annotated[
        str, typer.Option(metavar="N|full", help="Compare both whole models on so many random inputs, or a full set.")
    ] = "0",
    rtol: Annotated[float, typer.Option(help="Relative L2 error allowed per block.", min=1e-12, max=0.5)] = 1e-5,
    partial: Annotated[bool, typer.Option("--partial", help="Fuse the rest when a block is refused.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST when it exists.")] = False,
    html: Html = None,
    genai: Annotated[
        bool, typer.Option("--genai", help="SRC is a folder of onnxruntime-genai: let DST load the library.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Fuse the MoE blocks of SRC, give their weights another type if asked, and write the result to DST.

    Exit codes: 0 all blocks fused, or weights converted; 3 nothing to do, 4 a block was refused, 2 wrong usage, 1 any
    other error.
    """
    exit_when_killed()
    with clear_errors(), progress_bars(shown=not (quiet or as_json)) as progress:
        from hina_ort.conversion import convert as run

        report = run(
            src,
            dst,
            weights=weights,
            block=block,
            symmetric=symmetric,
            shared_weights=shared_weights,
            accuracy_level=accuracy_level,
            dry_run=dry_run,
            check=int(check) if check.isdecimal() else check,
            rtol=rtol,
            partial=partial,
            overwrite=overwrite,
            html=html,
            genai=genai,
            progress=progress,
        )
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        from hina_ort.tables import show_conversion

        show_conversion(report, dry_run=dry_run)
    raise typer.Exit(_exit_code(report))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A local Hugging Face folder: config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    task: Annotated[str, typer.Option(help="What the model is for.")] = "text-generation-with-past",
    weights: Annotated[str, typer.Option(metavar="TYPE", help=f"Type of the experts' weights: {_TYPES}.")] = "keep",
    dense: Annotated[
        str, typer.Option("--dense-weights", metavar="TYPE", help="Type of other matrices: f32, f16, int8, int4.")
    ] = "f32",
    opset: Annotated[int, typer.Option(metavar="N", help="Version of the ONNX operators: 18 to 23.")] = 21,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the shards that are read, instead of hard links.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Export CHECKPOINT as an ONNX model with HinaMoE nodes, whose experts stay where they lie; needs transformers 5.

    Exit codes: 0, 2 wrong usage, 1 any other error.
    """
    exit_when_killed()
    with clear_errors(), progress_bars(shown=not (quiet or as_json)) as progress:
        from hina_ort.export.command import export as run

        report = run(
            checkpoint,
            out,
            task=task,
            weights=weights,
            dense=dense,
            opset=opset,
            copy=copy,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        from hina_ort.export.show import show_export

        show_export(report)


@app.command()
def unfuse(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="A converted model file, or a folder with its model.onnx.")
    ],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The model file, or folder, to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST when it exists.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Write SRC to DST with standard ONNX operators for its HinaMoE nodes, to be run without hina-ort, or looked at.

    Exit codes: 0 all HinaMoE nodes were replaced; 3 SRC holds none, 2 wrong usage, 1 any other error.
    """
    exit_when_killed()
    with clear_errors(), progress_bars(shown=not (quiet or as_json)) as progress:
        from hina_ort.unfusing import unfuse as run

        report = run(src, dst, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        _show_unfusing(report)
    raise typer.Exit(0 if report.unfused else EXIT_NOTHING_TO_FUSE)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model file, or a folder with model.onnx.")],
    explain: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Show the block at a node, value or module, or where its pattern broke."),
    ] = None,
    html: Html = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the memory, and say how fast decoding can be at most.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """List the MoE blocks of MODEL with their MoeSpec and bytes, and what MODEL takes of memory, or explain one place.

    Exit codes: 0, 2 wrong usage (nothing is called NODE, say), 1 any other error.
    """
    exit_when_killed()
    with clear_errors():
        from hina_ort.files import UsageError
        from hina_ort.inspection import Inspection, explain_node, inspect_model

        if explain is not None and html is not None:
            raise UsageError("--explain and --html do not go together; run inspect once with each")
        if explain is not None and measure:
            raise UsageError("--explain and --measure do not go together; run inspect once with each")
        found = inspect_model(model, html=html, measure=measure) if explain is None else explain_node(model, explain)
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        from hina_ort.tables import show_explanation, show_inspection

        if isinstance(found, Inspection):
            show_inspection(found)
        else:
            show_explanation(found)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model file, or a folder with model.onnx.")],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to go on with.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from FILE; -: from standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a question: apply the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; 1: by the model's chances.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Choose among so many likeliest tokens.", show_default=False)
    ] = None,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this chance together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Chance that can be repeated.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads. Default: all usable.", show_default=False)] = None,
    experts_stats: Annotated[bool, typer.Option("--experts-stats", help="Count the tokens of each expert.")] = False,
    heatmap: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --experts-stats: draw them as PNG.")
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the text only, and errors.")] = False,
) -> None:
    """Go on with PROMPT, as text on stdout while it comes; speed and expert counts go to stderr.

    MODEL needs its tokenizer.json beside it. Exit codes: 0, 2 wrong usage, 1 any other error, 130 Ctrl-C, which leaves
    the text so far.
    """
    exit_when_killed()
    with clear_errors():
        from hina_ort.generation.command import run_generate
        from hina_ort.generation.show import show_generation, warn, write

        report = run_generate(
            model,
            prompt,
            prompt_file=prompt_file,
            chat=chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            threads=threads,
            experts_stats=experts_stats,
            heatmap=heatmap,
            **({} if as_json else {"write": write}),
            **({} if as_json or quiet else {"warn": warn}),
        )
    if as_json:
        print_json(report.to_dict())
    else:
        show_generation(report, quiet=quiet)
    raise typer.Exit(EXIT_INTERRUPTED if report.finish == "interrupted" else 0)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Show on which NUMA nodes a converted model's weights are.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions, CPU features, the instruction set chosen and why, threads, NUMA nodes and container limits.

    Exit codes: 0 all is well, 1 something keeps hina-ort from running, 2 wrong usage.
    """
    with clear_errors():
        from hina_ort.doctor import diagnose

        found = diagnose(model)
    if as_json:
        print_json(found)
    else:
        from hina_ort.tables import show_diagnosis

        show_diagnosis(found)
    raise typer.Exit(EXIT_ERROR if found["problems"] else 0)


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments.")],
    numa: Annotated[
        str, typer.Option(metavar="MODE", help="off, auto, interleave, bind or copy, as HINA_NUMA.")
    ] = "interleave",
    model: Annotated[
        list[Path] | None, typer.Option(metavar="MODEL", help="Spread this model's weights before. May be repeated.")
    ] = None,
) -> None:
    """Run COMMAND with HINA_NUMA set; with interleave its memory, and MODEL's weights, are spread over all NUMA nodes.

    Exit codes: those of COMMAND; 127 it was not found, 126 it cannot be run, 2 wrong usage, 1 any other error.
    """
    with clear_errors():
        from hina_ort.numa.command import CommandError, run

        try:
            run(numa, model or (), command, lambda text: typer.echo(f"warning: {text}", err=True))
        except CommandError as error:
            fail(str(error), error.code)


def _exit_code(report: ConversionReport) -> int:
    if report.refused:
        return EXIT_REFUSED
    return 0 if report.fused or report.weights else EXIT_NOTHING_TO_FUSE


def _show_unfusing(report: UnfusingReport) -> None:
    from hina_ort.tables import size

    if not report.written:
        typer.echo(f"nothing was written: {report.source} holds no HinaMoE node")
        return
    for summary, count in Counter(block.spec.summary() for block in report.unfused).items():
        typer.echo(f"unfused {count} x HinaMoE: {summary}")
    typer.echo(f"{report.nodes_before} nodes before, {report.nodes_after} after")
    for data in report.reads:
        typer.echo(f"{report.written} still reads {size(data.bytes)} of {data.file}; keep it")
    typer.echo(f"wrote {report.written}")


app.add_typer(bench)
