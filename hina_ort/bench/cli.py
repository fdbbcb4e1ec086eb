"""The commands `hina-ort bench`. One function per command; what is heavy to import is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hina_ort.terminal import Json, clear_errors, exit_when_killed, print_json, progress_bars

bench = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)


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
    exit_when_killed()
    with clear_errors(), progress_bars(shown=not quiet) as progress:
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
    exit_when_killed()
    with clear_errors(), progress_bars(shown=not (quiet or as_json)) as progress:
        from hina_ort.bench.tune import tune
        from hina_ort.doctor import usable_cpus

        result = tune(usable_cpus() if threads is None else threads, progress, keep=not dry_run)
    if as_json:
        print_json(result)
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
    with clear_errors():
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
    with clear_errors():
        from hina_ort.bench.numa_model import own_machine, run_numa

        result = run_numa(own_machine(memory, link, local, remote, cores))
    if as_json:
        print_json(result)
    else:
        from rich.console import Console

        from hina_ort.numa.show import show_model

        show_model(result, Console())
