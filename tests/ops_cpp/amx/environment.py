"""AMX for tests: this CPU's, where it has AMX, else the emulator's; any test can ask for the emulator.

A program that runs in `amx_environment()` uses AMX. `AMX_KIND` says how, and stands in the header that pytest prints;
with HINA_TEST_AMX=emulated it is the emulator everywhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.ops_cpp.isas import AMX, ISAS, cpu_features
from tests.ops_cpp.objects import ROOT

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("decode.c", "tiles.c", "counts.c", "sites.c", "trap.c", "entry.S")]

LOAD = np.dtype([("address", "u8"), ("stride", "i8"), ("rows", "u4"), ("row_bytes", "u4")])
"""A load of a tile as `Recorder` notes it: row r was read from address + r * stride."""


def _native() -> bool:
    """Whether CPU and kernel let this process use AMX; asking is harmless."""
    if platform.machine() != "x86_64" or not cpu_features() >= AMX:
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    granted: int = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
    return granted == 0


NATIVE = _native()
AMX_KIND = "native" if NATIVE and os.environ.get("HINA_TEST_AMX") != "emulated" else "emulated"

needs_amx = pytest.mark.skipif("avx2" not in ISAS, reason="AMX, and its emulator, need AVX2")
"""For tests that call `amx_environment` or `emulator`."""


@cache
def emulator() -> Path:
    """The emulator, compiled when its sources are newer."""
    library = ROOT / "build" / "amx" / "libamx_emulator.so"
    newest = max(source.stat().st_mtime for source in [*SOURCES, HERE / "emulator.h"])
    if library.is_file() and library.stat().st_mtime > newest:
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    flags = ["-mavx2", "-mfma", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden"]
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-shared", *SOURCES, "-o", made, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    made.replace(library)
    return library


def amx_environment(kind: str = AMX_KIND, counts: Path | None = None) -> dict[str, str]:
    """Variables with which a process can use AMX: "native" or "emulated".

    The emulator appends what each process executed to the file `counts`, see `read_counts`.
    """
    if kind == "native":
        return {}
    environment = {"LD_PRELOAD": str(emulator())}
    if counts is not None:
        environment["AMX_EMULATOR_COUNTS"] = str(counts)
    return environment


def read_counts(counts: Path) -> Counter[str]:
    """How often the processes that had `amx_environment("emulated", counts)` executed each instruction of AMX.

    The names are those of the instructions, in lower case, and "signals", of which there are few.
    """
    total: Counter[str] = Counter()
    if counts.is_file():
        for line in counts.read_text().splitlines():
            total.update(json.loads(line))
    return total


class Recorder:
    """Counts and loads of the process that it is made in, which has to run with the emulator.

    ::

        with Recorder(100_000) as recorder:
            session.run(...)
        recorder.counts["tdpbf16ps"], recorder.loads["address"]
    """

    NAMES = (
        *("ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored"),
        *("tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"),
    )

    def __init__(self, most_loads: int = 0) -> None:
        self._library = ctypes.CDLL(None)  # the emulator was preloaded
        self._library.amx_emulator_count.restype = ctypes.c_uint64
        self._library.amx_emulator_recorded.restype = ctypes.c_uint64
        self._loads = np.zeros(most_loads, LOAD)
        self.counts: Counter[str] = Counter()
        self.loads = self._loads[:0]

    def __enter__(self) -> Recorder:
        self._library.amx_emulator_reset()
        address = self._loads.ctypes.data if self._loads.size else None
        self._library.amx_emulator_record(ctypes.c_void_p(address), ctypes.c_uint64(self._loads.size))
        return self

    def __exit__(self, *_: object) -> None:
        recorded = self._library.amx_emulator_recorded()
        self._library.amx_emulator_record(None, ctypes.c_uint64(0))
        assert recorded <= self._loads.size or not self._loads.size, f"{recorded} loads, more than the recorder takes"
        self.loads = self._loads[:recorded]
        self.counts = Counter({name: self._library.amx_emulator_count(name.encode()) for name in self.NAMES})
