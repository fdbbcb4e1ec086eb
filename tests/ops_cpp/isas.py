"""The instruction sets of HINA_ISA that this CPU has, by /proc/cpuinfo, and how to hide the newer ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ops_cpp.objects import ROOT

NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
}
"""By name, oldest first; each needs what those before it need, too. The word "amx" of HINA_ISA is newer than all."""

AMX = {"amx_tile", "amx_bf16", "amx_int8"}
"""What AMX needs of a CPU; that does not make it usable, see tests/ops_cpp/amx/environment.py."""


def cpu_features() -> set[str]:
    """What the kernel says that the CPU has."""
    return set(Path("/proc/cpuinfo").read_text().split())


def _found() -> tuple[str, ...]:
    features = cpu_features()
    names = list(NEEDS)
    return tuple(name for n, name in enumerate(names) if all(NEEDS[older] <= features for older in names[: n + 1]))


ISAS = _found()


def hiding_library(folder: Path) -> Path:
    """tools/hide_isa.c, compiled into `folder`: preloaded, it hides what is newer than AVX2. Skips where it cannot."""
    library = folder / "hide_isa.so"
    source = ROOT / "tools" / "hide_isa.c"
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    if subprocess.run(["true"], env=environment, capture_output=True, check=False).returncode:
        pytest.skip("this CPU or kernel cannot fault on CPUID")
    return library
