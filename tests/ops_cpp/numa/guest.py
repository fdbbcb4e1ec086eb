"""Guests with NUMA nodes, in QEMU's emulation: the kernel, the one program inside, and a boot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests import node as harness

FOLDER = harness.ROOT / "build" / "numa-vm"
TIMEOUT = 1200
"""Seconds; a boot takes 5 and most runs a minute or two on an idle machine."""


class NoGuestError(Exception):
    """Why there can be no guest on this machine."""


@dataclass(frozen=True)
class Tools:
    qemu: tuple[str, ...]
    """The command, up to the machine's own arguments."""
    environment: dict[str, str]
    kernel: Path


@cache
def tools() -> Tools:
    """QEMU, from this machine or else from Debian, and Debian's kernel; fetched once into build/numa-vm.

    Raises NoGuestError with the reason where neither can be had.
    """
    found = shutil.which("qemu-system-x86_64")
    fetched = FOLDER / "qemu"
    if not (FOLDER / "vmlinuz").is_file() or not (found or fetched.is_dir()):
        script = Path(__file__).with_name("packages.sh")
        done = subprocess.run(["bash", str(script), str(FOLDER)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoGuestError(f"QEMU or a kernel for the guest is missing: {done.stderr.strip()}")
    if found:
        return Tools((found,), {}, FOLDER / "vmlinuz")
    libraries = [str(path) for path in (fetched / "usr/lib/x86_64-linux-gnu", fetched / "lib/x86_64-linux-gnu")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "QEMU_MODULE_DIR": str(fetched / "usr/lib/x86_64-linux-gnu/qemu"),
    }
    firmware = ("-L", str(fetched / "usr/share/seabios"), "-L", str(fetched / "usr/share/qemu"))
    return Tools((str(fetched / "usr/bin/qemu-system-x86_64"), *firmware), environment, FOLDER / "vmlinuz")


def archive(files: Mapping[str, bytes]) -> bytes:
    """An initramfs with these files, /init among them, their folders, and the folders that /init mounts on.

    Source of the format: the kernel's Documentation/driver-api/early-userspace/buffer-format.rst ("newc").
    """
    out = bytearray()
    folders = {str(parent) for name in (*files, "proc/x", "sys/x", "dev/x") for parent in Path(name).parents} - {"."}
    entries = [(name, 0o40755, b"") for name in sorted(folders)]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")]):
        fields = (number + 1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(f"{value:08x}".encode() for value in fields) + name.encode() + b"\0"
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)


@dataclass(frozen=True)
class Machine:
    """CPUs of each node, as "0-2"; the memory is shared alike, and nodes 2n and 2n + 1 are near to each other."""

    nodes: tuple[str, ...]
    cpus: int = 4
    memory_mib: int = 1024

    def arguments(self) -> list[str]:
        out = ["-smp", str(self.cpus), "-m", f"{self.memory_mib}M"]
        for i, cpus in enumerate(self.nodes):
            out += ["-object", f"memory-backend-ram,size={self.memory_mib // len(self.nodes)}M,id=m{i}"]
            out += ["-numa", f"node,nodeid={i},cpus={cpus},memdev=m{i}"]
        for i in range(len(self.nodes)):
            for j in range(i + 1, len(self.nodes)):
                out += ["-numa", f"dist,src={i},dst={j},val={12 if i // 2 == j // 2 and len(self.nodes) > 2 else 21}"]
        return out


def boot(
    program: Path | Mapping[str, bytes], machine: Machine, scenarios: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Run the scenarios in a guest, which writes its console to `folder`; return their results, which all must end.

    `program` is the guest's one program, or all its files.
    """
    tool = tools()
    initrd, log = folder / "initrd", folder / "console"
    initrd.write_bytes(archive({"init": program.read_bytes()} if isinstance(program, Path) else program))
    quiet = (
        "console=ttyS0 quiet no5lvl mitigations=off nokaslr no_timer_check nowatchdog numa_balancing=disable panic=-1"
    )
    command = [*tool.qemu, "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", *machine.arguments()]
    command += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", f"file:{log}"]
    command += ["-kernel", str(tool.kernel), "-initrd", str(initrd), "-append", f"{quiet} hina={','.join(scenarios)}"]
    environment = os.environ | tool.environment
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        console = log.read_text(errors="replace") if log.exists() else ""
        raise AssertionError(f"the guest did not end in {TIMEOUT} s:\n{console[-4000:]}") from error
    console = log.read_text(errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.strip() for line in console.splitlines()]
    for scenario in scenarios:
        assert f"ENDED {scenario} 0" in lines, console[-4000:]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
