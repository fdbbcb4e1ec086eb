"""The command line. One function per command; what is heavy to import is imported inside it."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hina_ort import __version__

if TYPE_CHECKING:
    from hina_ort.conversion import ConversionReport
    from hina_ort.files import Progress
    from hina_ort.unfusing import UnfusingReport

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOTHING_TO_FUSE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="hina-ort",
    help="Fuse the Mixture-of-Experts blocks of exported ONNX models and run them fast in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_TYPES = "keep, f32, f16, bf16, int8, int4, mxfp4"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (see docs/cli.md).")]
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
    # Like Ctrl-C, a polite kill has to pass through the clean-up of half-written files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors(), _progress(shown=not (quiet or as_json)) as progress:
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
        _print_json(report.to_dict())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors(), _progress(shown=not (quiet or as_json)) as progress:
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
        _print_json(report.to_dict())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors(), _progress(shown=not (quiet or as_json)) as progress:
        from hina_ort.unfusing import unfuse as run

        report = run(src, dst, overwrite=overwrite, progress=progress)
    if as_json:
        _print_json(report.to_dict())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors():
        from hina_ort.files import UsageError
        from hina_ort.inspection import Inspection, explain_node, inspect_model

        if explain is not None and html is not None:
            raise UsageError("--explain and --html do not go together; run inspect once with each")
        if explain is not None and measure:
            raise UsageError("--explain and --measure do not go together; run inspect once with each")
        found = inspect_model(model, html=html, measure=measure) if explain is None else explain_node(model, explain)
    if as_json:
        _print_json(found.to_dict())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors():
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
        _print_json(report.to_dict())
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
    with _clear_errors():
        from hina_ort.doctor import diagnose

        found = diagnose(model)
    if as_json:
        _print_json(found)
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
    with _clear_errors():
        from hina_ort.numa.command import CommandError, run

        try:
            run(numa, model or (), command, lambda text: typer.echo(f"warning: {text}", err=True))
        except CommandError as error:
            _fail(str(error), error.code)


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


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn errors that a person can act on into one sentence on stderr and an exit code.

    What is heavy to import is imported in the body, so that an interrupt then is clear, too.
    """
    try:
        from graph_passes.external_data import ModelFileError
        from graph_passes.quantize.rtn import WeightError
        from graph_passes.unfuse import UnfuseError
        from hina_ort.comparison import CheckError
        from hina_ort.files import UsageError

        yield
    except (KeyboardInterrupt, ImportError) as error:
        if not _was_interrupted(error):
            raise
        typer.echo("error: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except UsageError as error:
        _fail(str(error), EXIT_USAGE)
    except (ModelFileError, WeightError, UnfuseError, CheckError) as error:
        _fail(str(error), EXIT_ERROR)
    except OSError as error:
        # Errors of the operating system carry a number and a file name; our own are sentences already.
        text = f"{error.filename or 'a file'} cannot be used: {error.strerror}" if error.strerror else str(error)
        _fail(text, EXIT_ERROR)
    except MemoryError:
        _fail("there is not enough memory for this model", EXIT_ERROR)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C led to `error`: during its import, ONNX Runtime makes an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _fail(message: str, code: int) -> NoReturn:
    from hina_ort.tables import printable

    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(code)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def _progress(*, shown: bool) -> Iterator[Progress | None]:
    """Show progress bars on stderr while the body runs; yield the function that moves them."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from hina_ort.files import BYTE_STAGES
    from hina_ort.tables import size

    texts = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}")]
    times = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*texts, *times, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            count = f"{size(done)}/{size(total)}" if stage in BYTE_STAGES else f"{done}/{total}"
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, count=count)
            bars.update(tasks[stage], completed=done, total=total, count=count)

        yield advance


bench = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench)


@bench.callback()
def bench_group() -> None:
    """Benchmarks on this machine."""


@bench.command("layer")
def bench_layer(
    shape: Annotated[
        str, typer.Option(metavar="NAME|E,k,H,I[,S]", help="A layer of a known model, or its sizes.")
    ] = "qwen3-30b-a3b",
    weights: Annotated[str, typer.Option(metavar="TYPE", help="f32, f16, bf16, int8, int4 or mxfp4.")] = "f32",
    tokens: Annotated[str, typer.Option(metavar="N,N,..", help="Token counts.")] = "1,4,16,64,256,1024",
    threads: Annotated[
        int | None, typer.Option(help="Threads of every engine. Default: all usable.", show_default=False)
    ] = None,
    versus: Annotated[
        str, typer.Option("--vs", metavar="PEERS", help="Some of ort, torch, vllm, vectors, numa-off.")
    ] = "ort",
    skew: Annotated[float, typer.Option(help="Zipf exponent of the experts' popularity; 0: uniform.")] = 0.0,
    block: Annotated[
        int | None, typer.Option(help="Weights that share a scale; 0: a row. Default: 32.", show_default=False)
    ] = None,
    accuracy_level: Annotated[
        int | None,
        typer.Option(help="Activations of quantised weights: 0 floats, 4 int8. Default: 4.", show_default=False),
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="int8 and int4 weights with zero points.")] = False,
    activations: Annotated[str, typer.Option(metavar="TYPE", help="f32, f16 or bf16, for HinaMoE.")] = "f32",
    repeats: Annotated[int, typer.Option(help="Turns of each engine; long ones are fewer.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot as PNG.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Time one MoE layer of random weights against other runtimes, and against what this machine can do.

    Results are compared before anything is timed. Exit codes: 0 timed, 2 wrong usage, 1 results differ, or any other
    error.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors(), _progress(shown=not quiet) as progress:
        from hina_ort.bench.command import run_layer

        result = run_layer(
            shape=shape,
            weights=weights,
            tokens=tokens,
            threads=threads,
            versus=versus,
            skew=skew,
            block=block,
            accuracy_level=accuracy_level,
            zero_points=zero_points,
            activations=activations,
            repeats=repeats,
            json_file=json_file,
            plot_file=plot_file,
            progress=progress,
        )
    if not quiet:
        from rich.console import Console

        from hina_ort.bench.show import show_layer

        show_layer(result, Console())


@bench.command("tune")
def bench_tune(
    threads: Annotated[int | None, typer.Option(help="Threads. Default: all usable.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and report, keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Measure from how many tokens of an expert on AMX is faster here, and keep that for all sessions of this user.

    Takes some minutes on an idle machine. Exit codes: 0 measured, 2 AMX is not used here, 1 any other error.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _clear_errors(), _progress(shown=not (quiet or as_json)) as progress:
        from hina_ort.bench.tune import tune
        from hina_ort.doctor import usable_cpus

        result = tune(usable_cpus() if threads is None else threads, progress, keep=not dry_run)
    if as_json:
        _print_json(result)
    elif not quiet:
        from rich.console import Console

        from hina_ort.bench.show import show_tuning

        show_tuning(result, Console())


@bench.command("model")
def bench_model(
    shape: Annotated[
        str, typer.Option(metavar="NAME|E,k,H,I[,S]", help="A layer of a known model, or its sizes.")
    ] = "qwen3-30b-a3b",
    weights: Annotated[str, typer.Option(metavar="TYPE", help="bf16, int8, int4 or mxfp4.")] = "bf16",
    activations: Annotated[str, typer.Option(metavar="TYPE", help="f32, f16 or bf16.")] = "f32",
    tokens: Annotated[str, typer.Option(metavar="N,N,..", help="Token counts.")] = "1,4,16,64,256,1024,4096",
    cores: Annotated[int, typer.Option(help="Cores that share the work.")] = 56,
    ghz: Annotated[float, typer.Option(help="Their clock.")] = 2.0,
    bandwidth: Annotated[float, typer.Option(metavar="GB/S", help="Of memory, all cores together.")] = 250.0,
    l2: Annotated[float, typer.Option(metavar="BYTES", help="From the L2 cache, of a core in a cycle.")] = 48.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Predict, without measuring, how long one MoE layer takes with AMX, and what bounds it; on any machine.

    The defaults are a socket of Sapphire Rapids. Exit codes: 0, 2 wrong usage, 1 any other error.
    """
    with _clear_errors():
        from hina_ort.bench.model import run_model

        result = run_model(
            shape=shape,
            weights=weights,
            activations=activations,
            tokens=tokens,
            cores=cores,
            ghz=ghz,
            bandwidth=bandwidth,
            l2=l2,
            json_file=json_file,
        )
    if not quiet:
        from rich.console import Console

        from hina_ort.bench.model_show import show_model

        show_model(result, Console())


@bench.command("numa")
def bench_numa(
    memory: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Of one socket's memory, read by its own cores.")
    ] = None,
    link: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Of one socket's memory, read by the other's cores.")
    ] = None,
    local: Annotated[float, typer.Option(metavar="NS", help="Latency of a socket's own memory.")] = 107.0,
    remote: Annotated[float, typer.Option(metavar="NS", help="Latency of the other's.")] = 188.0,
    cores: Annotated[int, typer.Option(help="Of one socket.")] = 48,
    as_json: Json = False,
) -> None:
    """Predict, without measuring, what local reads are worth on two sockets: yours, or some that are known.

    Exit codes: 0, 2 wrong usage.
    """
    with _clear_errors():
        from hina_ort.bench.numa_model import own_machine, run_numa

        result = run_numa(own_machine(memory, link, local, remote, cores))
    if as_json:
        _print_json(result)
    else:
        from rich.console import Console

        from hina_ort.numa.show import show_model

        show_model(result, Console())
