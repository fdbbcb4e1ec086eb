#!/usr/bin/python3 -B
"""The first program of a guest with two NUMA nodes: spreads files and memory there, and prints what came of it.

The packages that hina_ort.numa needs to read models are not there.
"""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

FOLDERS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"))
POWER_OFF = 0x4321FEDC  # linux/reboot.h
libc = ctypes.CDLL(None, use_errno=True)
for kind, folder in FOLDERS:
    libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, None)
console = os.open("/dev/ttyS0", os.O_RDWR)
for descriptor in range(3):
    os.dup2(console, descriptor)
sys.stdout = os.fdopen(1, "w", buffering=1)

sys.path.insert(0, "/site")
files: Any = types.ModuleType("hina_ort.files")
files.UsageError, files.external_bytes, files.find_model = ValueError, None, None
passes: Any = types.ModuleType("graph_passes")
passes.external_data = None
sys.modules |= {"graph_passes": passes, "hina_ort.files": files}

import numpy as np

from hina_ort.numa import command, interleave
from hina_ort.numa.files import MappedFile
from hina_ort.numa.kernel import MPOL_MF_MOVE_ALL, PAGE, Addresses, Kernel, Nodes
from hina_ort.runtime import placement, topology

PAGES = 1024
CHILD = """
import json, os
found = {"mode": os.environ["HINA_NUMA"], "mappings": open("/proc/self/numa_maps").read().count("interleave:0-1")}
print("RESULT", json.dumps({"what": "child"} | found))
"""


class Unprivileged(Kernel):
    """Without CAP_SYS_NICE, which the first program has."""

    def _move_pages(self, pages: Addresses, nodes: Nodes | None, flags: int) -> Nodes:
        if flags == MPOL_MF_MOVE_ALL:
            raise PermissionError
        return super()._move_pages(pages, nodes, flags)


def written(name: str) -> Path:
    """A new file, cached where this thread's policy wants it."""
    path = Path(name)
    path.write_bytes(os.urandom(PAGES * PAGE))
    return path


def seen(path: Path) -> dict[str, Any]:
    """What the library says about a matrix in the middle of the file, and how many pages are on each node."""
    with MappedFile(path) as file:
        file.map(np.arange(PAGES))
        nodes = Kernel().nodes_of(file.addresses(0, PAGES))
        found = placement(file.address + 100 * PAGE, 700 * PAGE)
    return {"pattern": found["pattern"], "counts": np.bincount(nodes).tolist()}


def tell(what: str, **values: Any) -> None:
    print("RESULT", json.dumps({"what": what} | values))


def main() -> None:
    before = Kernel().policy()
    tell("nodes", usable=topology()["usable"], workers=topology()["workers"])
    cached = written("/cached")
    tell("cached", **seen(cached))
    policies: list[Any] = []
    with interleave(cached) as done:
        thread = threading.Thread(target=lambda: policies.append(Kernel().policy().nodes))
        thread.start()
        thread.join()
        memory = np.ones(32 << 20, np.uint8)
        tell("written inside", **seen(written("/inside")))
    tell("spread", moved=done[0].moved, fitting=done[0].fitting, **seen(cached))
    tell("policy", thread=policies, back=Kernel().policy() == before)
    first = -(-memory.ctypes.data // PAGE) * PAGE
    pages = np.arange(first, memory.ctypes.data + memory.nbytes, PAGE, dtype=np.uint64)
    tell("memory", pages=len(pages), counts=np.bincount(Kernel().nodes_of(pages)).tolist())

    mapped = written("/mapped")
    other = os.fork()
    if other == 0:
        with MappedFile(mapped) as file:
            file.map(np.arange(PAGES))
            Path("/ready").touch()
            signal.pause()
    while not Path("/ready").exists():
        signal.sigtimedwait([], 0.1)
    for name, kernel in (("unprivileged", Unprivileged()), ("privileged", Kernel())):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with interleave(mapped, kernel=kernel) as done:
                pass
        tell(name, moved=done[0].moved, warnings=[str(warning.message) for warning in told])
    os.kill(other, signal.SIGKILL)

    child = os.fork()
    if child == 0:
        command.run("interleave", [], [sys.executable, "-c", CHILD], print)
    os.waitpid(child, 0)


def sessions() -> None:
    """Run a layer whose weights are interleaved, with and without knowledge of nodes."""
    import onnxruntime

    from hina_ort.session import session_options

    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 1024), np.float32), "logits0": rng.standard_normal((3, 4), np.float32)}
    outputs, said = {}, "/said"
    os.environ["HINA_VERBOSE"] = "1"
    for mode in ("off", "auto"):
        os.environ["HINA_NUMA"] = mode
        os.dup2(os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
        with interleave("/model/layer.data"):
            session = onnxruntime.InferenceSession("/model/hina.onnx", session_options())
        for _ in range(3):
            outputs[mode] = session.run(None, feeds)[0]
    os.dup2(1, 2)
    apart = np.linalg.norm(outputs["auto"] - outputs["off"]) / np.linalg.norm(outputs["off"])
    tell("sessions", apart=float(apart), lines=Path(said).read_text().splitlines())


try:
    main()
    sessions()
    print("ENDED numa 0")
except BaseException:  # nobody else would tell
    traceback.print_exc(file=sys.stdout)
libc.reboot(POWER_OFF)
