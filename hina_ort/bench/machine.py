"""What this machine is and what it can do at most."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hina_ort import __version__
from hina_ort.comparison import CheckError
from hina_ort.doctor import diagnose
from hina_ort.runtime import cpu_info, query

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE = 32 << 20
"""Taken as the size of the last-level cache where the system does not say one."""


@dataclass(frozen=True)
class Limits:
    """Rates of all threads together: bytes read from memory, and operations (a multiply-add is two), per second."""

    read_bytes_per_second: float
    float32_flops: float
    bfloat16_flops: float | None
    int8_ops: float

    def best(self, other: Limits) -> Limits:
        """The higher of both for each rate."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return Limits(**{name: a if b is None else b if a is None else max(a, b) for name, a, b in pairs})


def measure_limits(path: Path, threads: int) -> Limits:
    """Measure with the compiled library, reading the mapped file `path`; CheckError when that fails."""
    answer: dict[str, Any] = query(f"machine {threads} {path}")
    if "error" in answer:
        raise CheckError(answer["error"])
    return Limits(**{name: answer[name] for name in Limits.__dataclass_fields__})


def last_level_cache() -> int:
    """Bytes of the largest cache of the first CPU."""
    sizes = [_bytes((folder / "size").read_text()) for folder in _CACHES.glob("index*") if (folder / "size").exists()]
    return max(sizes, default=DEFAULT_CACHE)


def _bytes(text: str) -> int:
    text = text.strip()
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    return int(text.rstrip("KMG")) << unit


def available_memory() -> int | None:
    """Bytes that this process may still take, its container's limit included; None when the system does not say."""
    found = diagnose()
    sizes = [found["memory"]["available_bytes"], found["container"]["memory_bytes"]]
    return min((size for size in sizes if size is not None), default=None)


def describe() -> dict[str, Any]:
    """The CPU's model, the instruction set in use, and the cache's size."""
    info = cpu_info()
    return {"cpu": info["model"], "isa": info["isa"], "last_level_cache_bytes": last_level_cache()}


def versions() -> dict[str, str]:
    """Of this package, Python and its libraries; engines name their own."""
    found = {"hina-ort": __version__, "python": platform.python_version()}
    for name in ("onnxruntime", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
