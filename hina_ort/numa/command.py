"""`hina-ort run --numa MODE -- COMMAND`: start a program under a memory policy, for people without numactl."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from hina_ort.files import UsageError, find_model
from hina_ort.numa.interleaving import NumaWarning, chosen_nodes, place, start
from hina_ort.numa.kernel import Kernel

MODES = ("off", "auto", "interleave", "bind", "copy")
"""Of HINA_NUMA, which the program gets."""
CANNOT_RUN, NOT_FOUND = 126, 127
"""Exit codes, as shells give them."""


class CommandError(Exception):
    """The program cannot be started; `code` is the exit code for it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(
    mode: str, models: Sequence[Path], command: Sequence[str], warn: Callable[[str], None], kernel: Kernel | None = None
) -> NoReturn:
    """Become `command`, with HINA_NUMA set to `mode`; with "interleave", under that policy and on `models` spread so.

    What the kernel refuses is told to `warn`, a sentence each, and the program is started all the same. Raises
    UsageError for an unknown mode, models without "interleave" or an empty command, CommandError when it cannot be
    started, and ModelFileError or OSError when a model is missing (on one node, too) or cannot be read.
    """
    if mode not in MODES:
        raise UsageError(f"--numa is {mode!r}, expected one of {', '.join(MODES)}")
    if models and mode != "interleave":
        raise UsageError(f"--model is for --numa interleave, which reads the model's weights; leave it out for {mode}")
    if not command:
        raise UsageError("there is no command to run; write hina-ort run --numa interleave -- COMMAND ARGUMENTS")
    for model in models:
        find_model(model)
    nodes = chosen_nodes(None) if mode == "interleave" else ()
    if len(nodes) > 1:
        kernel = kernel or Kernel()
        try:
            start(nodes, kernel)
            problems = place(models, nodes, kernel)[1]
        except NumaWarning as refusal:
            problems = [str(refusal)]
        for problem in problems:
            warn(problem)
    # Python ignores these, and what is ignored when a program starts stays so.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        os.execvpe(command[0], list(command), os.environ | {"HINA_NUMA": mode})
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]} was not found", NOT_FOUND) from error
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run: {error.strerror}", CANNOT_RUN) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
