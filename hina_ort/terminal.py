"""What the commands share: errors and exit codes, JSON and progress on a terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from hina_ort.files import Progress

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOTHING_TO_FUSE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (see docs/cli.md).")]


def exit_when_killed() -> None:
    """Let SIGTERM pass through the clean-up of half-written files, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def clear_errors() -> Iterator[None]:
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
        fail(str(error), EXIT_USAGE)
    except (ModelFileError, WeightError, UnfuseError, CheckError) as error:
        fail(str(error), EXIT_ERROR)
    except BrokenPipeError:
        raise  # who reads the output has enough: click ends the program without a word
    except OSError as error:
        # Errors of the operating system carry a number and a file name; our own are sentences already.
        text = f"{error.filename or 'a file'} cannot be used: {error.strerror}" if error.strerror else str(error)
        fail(text, EXIT_ERROR)
    except MemoryError:
        fail("there is not enough memory for this model", EXIT_ERROR)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C led to `error`: during its import, ONNX Runtime makes an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def fail(message: str, code: int) -> NoReturn:
    """Print `message` as an error and end with the exit `code`."""
    from hina_ort.tables import printable

    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(code)


def print_json(value: dict[str, Any]) -> None:
    """Print `value` for machines."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[Progress | None]:
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
