"""Hundreds of faulty models: each one gives a Python exception that says what is wrong, and none ends the process.

The models run in subprocesses, some dozens in each, so that a crash shows as a failure with the culprit named.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import node as harness
from tests.ops_cpp.mutants import Mutant, bases, mutants

BATCHES = 8
MUTANTS = mutants()
UNCLEAN = re.compile(r"std::|bad_alloc|_M_|length_error|Traceback|unknown failure|Segmentation")


def test_there_are_enough_mutants_and_the_bases_are_valid() -> None:
    assert len(MUTANTS) >= 200
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for base in bases():
        outputs = harness.run(harness.make_session(base.model), base.feeds)
        harness.assert_right(base.node, base.feeds, outputs)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_fault_is_a_clean_error(batch: int, tmp_path: Path) -> None:
    chosen = {f"{number:04}": mutant for number, mutant in enumerate(MUTANTS) if number % BATCHES == batch}
    for stem, mutant in chosen.items():
        (tmp_path / f"{stem}.onnx").write_bytes(mutant.model.SerializeToString())
        np.savez(tmp_path / f"{stem}.npz", **mutant.feeds)
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.ops_cpp.run_models", str(tmp_path)]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=240, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ended = {line["ended"]: line for line in lines if "ended" in line}
    if done.returncode:
        culprit = chosen[lines[-1]["started"]].name if lines and "started" in lines[-1] else "none of the models"
        pytest.fail(f"exit code {done.returncode} at {culprit}\n{done.stderr[-3000:]}")
    faults = [fault for stem, mutant in chosen.items() if (fault := fault_of(mutant, ended[stem]))]
    assert not faults, f"{len(faults)} of {len(chosen)}:\n" + "\n".join(faults)


def fault_of(mutant: Mutant, line: dict[str, str]) -> str | None:
    """What is wrong with how a mutant ended, if anything."""
    message = line["message"]
    if line["stage"] == "done":
        return f"{mutant.name}: accepted"
    if UNCLEAN.search(message):
        return f"{mutant.name}: unclean message: {message}"
    missing = [pattern for pattern in mutant.patterns if not re.search(pattern, message)]
    return f"{mutant.name}: no {missing[0]!r} in: {message}" if missing else None
