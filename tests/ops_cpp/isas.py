"""The instruction sets of HINA_ISA that this CPU has, by what /proc/cpuinfo says of it."""

from __future__ import annotations

from pathlib import Path

NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
}
"""By name, oldest first; each needs what those before it need, too."""


def _found() -> tuple[str, ...]:
    features = set(Path("/proc/cpuinfo").read_text().split())
    names = list(NEEDS)
    return tuple(name for n, name in enumerate(names) if all(NEEDS[older] <= features for older in names[: n + 1]))


ISAS = _found()
