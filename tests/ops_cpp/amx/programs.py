"""The programs of this folder, compiled and run with AMX of either kind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.ops_cpp.amx.environment import HERE
from tests.ops_cpp.objects import ROOT

_SOURCES = {"latch": ["runtime/amx.cc", "runtime/isa.cc"]}
"""What programs need of ops_cpp beside headers."""


def compiled(name: str, folder: Path, *flags: str) -> Path:
    """NAME.cc, a program; with the flag -shared, a library."""
    sources = [HERE / f"{name}.cc", *(ROOT / "ops_cpp" / source for source in _SOURCES.get(name, []))]
    command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-I", str(ROOT / "ops_cpp"), *map(str, sources), "-o", str(folder / name), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / name


def run(*command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A program in the environment of this process, to which `env` comes."""
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )
