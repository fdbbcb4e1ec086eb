"""The AMX emulator: what it computes, against a reference and this CPU; its counts; the ways into it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops_cpp.amx.environment import AMX_KIND, NATIVE, amx_environment, needs_amx, read_counts
from tests.ops_cpp.amx.programs import compiled, run
from tests.ops_cpp.isas import hiding_library

pytestmark = needs_amx


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("calls", tmp_path_factory.mktemp("calls"), "-shared", "-fPIC")


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("check", tmp_path_factory.mktemp("check"))


@pytest.mark.skipif(not NATIVE, reason="this machine has no AMX")
def test_this_cpu_is_as_the_reference_says(check: Path) -> None:
    done = run(check, "2000", env={})
    assert (done.returncode, done.stdout) == (0, "all is right\n"), done


@pytest.mark.parametrize("way", ["jumps", "signals", "an older CPU"])
def test_the_emulator_is_as_the_reference_says(way: str, check: Path, tmp_path: Path) -> None:
    """By jumps, by signals alone, and by jumps where AVX-512 is hidden."""
    environment = amx_environment("emulated", tmp_path / "counts")
    if way == "signals":
        environment["AMX_EMULATOR_SIGNALS"] = "1"
    if way == "an older CPU":
        environment["LD_PRELOAD"] += f" {hiding_library(tmp_path)}"
    done = run(check, "300", env=environment)
    assert (done.returncode, done.stdout) == (0, "all is right\n"), done
    counts = read_counts(tmp_path / "counts")
    products = {name: number for name, number in counts.items() if name.startswith("tdp")}
    bytes_products = {name: number for name, number in products.items() if name != "tdpbf16ps"}
    assert bytes_products == dict.fromkeys(("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"), 300)
    assert products["tdpbf16ps"] == 3 * 300 + 2  # and two that tests of faults execute without one
    executed = sum(counts.values()) - counts["signals"]
    # Some 40; more where other threads come by while a busy machine keeps one from finishing its jump.
    assert (counts["signals"] < executed / 10) == (way != "signals")
    assert counts["signals"] <= executed


def test_refused_permission(check: Path) -> None:
    done = run(check, env=amx_environment("emulated") | {"AMX_EMULATOR_REFUSE": "1"})
    assert done.returncode == 77 and "no permission for tiles" in done.stderr


@pytest.mark.parametrize(
    "kind", ["emulated", pytest.param("native", marks=pytest.mark.skipif(not NATIVE, reason="this machine has no AMX"))]
)
@pytest.mark.parametrize("handler", [False, True])
@pytest.mark.parametrize("sizes", [["0x64"], ["16x64", "17x64"], ["0x0"], ["16x64", "0x0"]])
def test_a_fault_ends_the_program(sizes: list[str], handler: bool, kind: str, calls: Path) -> None:
    """With the signal that a CPU raises: when an instruction is executed for the first time, and for the second."""
    script = (
        f"import ctypes, faulthandler, sys; library = ctypes.CDLL({str(calls)!r})\n"
        f"if {handler}: faulthandler.enable()\n"
        "ctypes.CDLL(None).syscall(158, 0x1023, 18)\n"
        "for size in sys.argv[1:]: library.load_tiles(bytes(1024), 0, *map(int, size.split('x')), 1)\n"
    )
    done = run(sys.executable, "-c", script, *sizes, env=amx_environment(kind))
    assert done.returncode == -(signal.SIGILL if sizes[-1] == "0x0" else signal.SIGSEGV), done
    assert ("Fatal Python error" in done.stderr) == handler


# Loads in threads that end before they are counted, some that are recorded, and a library that is loaded twice.
COUNTING = """
import _ctypes, ctypes, json, sys, threading
import numpy as np
from tests.ops_cpp.amx.environment import Recorder

library = ctypes.CDLL(sys.argv[1])
rows = np.zeros((20, 256), np.uint8)

def load(first, n_rows, row_bytes, times, stride=256):
    library.load_tiles(ctypes.c_void_p(rows.ctypes.data + first), ctypes.c_int64(stride), n_rows, row_bytes, times)

load(0, 16, 64, 5)
with Recorder() as threads:
    workers = [threading.Thread(target=load, args=(0, 16, 64, 100 + i)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
with Recorder(3) as few:
    load(64, 9, 36, 2)
    load(256, 3, 64, 1, 512)
try:
    with Recorder(3):
        load(0, 16, 64, 4)
    overflow = ""
except AssertionError as error:
    overflow = str(error)
_ctypes.dlclose(library._handle)
library = ctypes.CDLL(sys.argv[1])
with Recorder() as again:
    load(0, 9, 64, 7)
loads = [[int(one["address"]) - rows.ctypes.data, *map(int, list(one)[1:])] for one in few.loads]
print(json.dumps({"threads": threads.counts, "few": few.counts, "loads": loads, "overflow": overflow,
                  "again": again.counts}))
load(0, 16, 64, 4)
"""


@pytest.fixture(scope="module")
def counting(calls: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What COUNTING prints, and the file of its counts at the end."""
    counts = tmp_path_factory.mktemp("counting") / "counts"
    done = run(sys.executable, "-c", COUNTING, calls, env=amx_environment("emulated", counts))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), counts


def test_counts_are_those_of_all_threads(counting: tuple[dict[str, Any], Path]) -> None:
    found, _ = counting
    assert found["threads"]["tileloadd"] == 100 + 101 + 102 + 103
    assert found["threads"]["ldtilecfg"] == found["threads"]["tilerelease"] == 4
    assert found["threads"]["tilestored"] == 0


def test_a_library_that_is_loaded_again_is_emulated_as_before(counting: tuple[dict[str, Any], Path]) -> None:
    found, _ = counting
    assert (found["again"]["ldtilecfg"], found["again"]["tileloadd"], found["again"]["tilerelease"]) == (1, 7, 1)


def test_loads_are_recorded(counting: tuple[dict[str, Any], Path]) -> None:
    found, _ = counting
    assert found["loads"] == [[64, 256, 9, 36], [64, 256, 9, 36], [256, 512, 3, 64]]
    assert found["few"]["tileloadd"] == 3
    assert "4 loads" in found["overflow"]


def test_counts_are_written_at_the_end(counting: tuple[dict[str, Any], Path]) -> None:
    """Those since the last reset; a process without AMX, such as this one's child, writes none."""
    _, file = counting
    assert read_counts(file)["tileloadd"] == 7 + 4
    before = file.read_text()
    assert run("true", env=amx_environment("emulated", file)).returncode == 0
    assert file.read_text() == before
    assert not read_counts(file.with_name("none"))


def test_the_header_says_whose_amx_it_is() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-v", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"AMX: {AMX_KIND}" in done.stdout.splitlines()
