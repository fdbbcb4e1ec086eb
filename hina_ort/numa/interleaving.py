"""Spread the weights of a model over the NUMA nodes that this process may use."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hina_ort.files import UsageError
from hina_ort.numa.files import Spread, data_files, spread
from hina_ort.numa.kernel import MPOL_INTERLEAVE, Kernel, Policy
from hina_ort.runtime import topology

HOW_TO_ALLOW = (
    "give a container --cap-add SYS_NICE, or start the program under numactl --interleave=all; see docs/numa.md"
)


class NumaWarning(UserWarning):
    """Weights are not where they were asked to be; everything works, but slower."""


def usable_nodes() -> tuple[int, ...]:
    """Nodes, by the kernel's numbers, that have memory and CPUs that this process may use; errors as of `topology`."""
    nodes = topology()["nodes"]
    return tuple(n["id"] for n in nodes if n["memory_allowed"] and n["memory_bytes"] and n["allowed_cpus"])


def chosen_nodes(nodes: Sequence[int] | None) -> tuple[int, ...]:
    """`nodes`, or by default all that can be used; UsageError for one whose memory this process may not use."""
    if nodes is None:
        return usable_nodes()
    allowed = topology()["usable"]
    if not nodes or (unknown := [node for node in nodes if node not in allowed]):
        asked = f"node {unknown[0]}" if nodes else "no node"
        raise UsageError(f"{asked} was asked for, expected some of the nodes whose memory may be used here: {allowed}")
    return tuple(dict.fromkeys(nodes))


def start(nodes: tuple[int, ...], kernel: Kernel) -> Policy:
    """Let the calling thread take memory from `nodes` in turn; return the policy that it had.

    NumaWarning is raised, as an error, when the kernel refuses.
    """
    try:
        before = kernel.policy()
        kernel.set_policy(Policy(MPOL_INTERLEAVE, nodes))
    except OSError as error:
        raise NumaWarning(f"the kernel refuses an interleave policy ({error.strerror}): {HOW_TO_ALLOW}") from error
    return before


def place(paths: Sequence[Path], nodes: tuple[int, ...], kernel: Kernel) -> tuple[list[Spread], list[str]]:
    """Spread the data files of `paths`; return what was done, and a sentence for each file that is not interleaved.

    ModelFileError or OSError when a file cannot be read.
    """
    done, problems = [], []
    for file in (file for path in paths for file in data_files(path)):
        if not file.stat().st_size:
            continue
        result = spread(file, nodes, kernel)
        done.append(result)
        if result.refused:
            problems.append(
                f"{file} was read, but what was cached before stays where it is, as the kernel refuses move_pages "
                f"({result.refused}): allow that call in the container's seccomp profile; see docs/numa.md"
            )
        elif not result.done:
            forget = f"dd if={shlex.quote(str(file))} iflag=nocache count=0"
            problems.append(
                f"only {result.fitting / result.pages:.0%} of {file} are interleaved, the rest is cached elsewhere and "
                f"stays there: end the programs that use it, run {forget}, and start again"
            )
    return done, problems


@contextmanager
def interleave(
    *paths: str | os.PathLike[str], nodes: Sequence[int] | None = None, kernel: Kernel | None = None
) -> Iterator[list[Spread]]:
    """Make sessions inside of this context, so that weights are spread page by page over the NUMA nodes.

    Memory that the calling thread uses first in the context comes from `nodes` in turn (the kernel's numbers; by
    default all nodes with memory and CPUs that this process may use); the old policy is put back at the end. Threads
    that start in the context, those of ONNX Runtime for example, keep its policy for their whole life.

    `paths` are models, folders of models, or data files. Their external data is read here, which brings it into the
    page cache as the policy wants; what was cached elsewhere is moved, but for pages that another process or session
    maps, where the user lacks CAP_SYS_NICE. Yielded is what was done to each file.

    Does nothing where there is one node. Issues a NumaWarning when the kernel refuses, or when a file could not be
    spread. Raises ModelFileError or OSError when a file cannot be read, UsageError for a node that may not be used.
    """
    chosen, kernel = chosen_nodes(nodes), kernel or Kernel()
    if len(chosen) < 2:
        yield []
        return
    try:
        before = start(chosen, kernel)
    except NumaWarning as refusal:
        warnings.warn(refusal, stacklevel=3)
        yield []
        return
    try:
        done, problems = place([Path(path) for path in paths], chosen, kernel)
        for problem in problems:
            warnings.warn(problem, NumaWarning, stacklevel=3)
        yield done
    finally:
        kernel.set_policy(before)
