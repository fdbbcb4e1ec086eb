"""What hina-ort finds on this machine: its own library, ONNX Runtime, the CPU, and what a container allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from hina_ort import __version__
from hina_ort.runtime import cpu_info, get_library_path, query, topology
from hina_ort.session import session_options

# cgroup v1 says "no limit" with the largest multiple of a page below 2^63.
_V1_UNLIMITED = 1 << 62


def diagnose(model: Path | None = None) -> dict[str, Any]:
    """Everything that `hina-ort doctor` shows; `problems` lists in words what keeps hina-ort from running.

    Raises what `model_placement` does, when the weights of `model` are to be looked for.
    """
    problems: list[str] = []
    affinity = sorted(os.sched_getaffinity(0))
    container = _container()
    return {
        "version": __version__,
        "library": _library(problems),
        "onnxruntime": _onnxruntime(problems),
        "cpu": _asked(cpu_info),
        "threads": {
            "cpus": os.cpu_count(),
            "affinity": affinity,
            "usable": usable_cpus(),
        },
        "container": container,
        "memory": _memory(Path("/proc/meminfo")),
        "numa": _numa(problems),
        "placement": _placement(model),
        "problems": problems,
    }


def usable_cpus() -> int:
    """CPUs that affinity and quota leave to this process."""
    affinity, quota = len(os.sched_getaffinity(0)), _container()["cpus"]
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _container() -> dict[str, Any]:
    return container_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def container_limits(membership: Path, mount: Path) -> dict[str, Any]:
    """CPU and memory limits of this process's control group and of those above it; None means no limit.

    `membership` is /proc/self/cgroup, `mount` /sys/fs/cgroup. Returns `cgroup` (1, 2 or None), `cpus` (a float, the
    quota in CPUs) and `memory_bytes`. Both versions are documented in the Linux kernel's cgroup guides.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    groups = {name: path for _, names, path in lines for name in names.split(",")}
    if (mount / "cgroup.controllers").exists():
        found = [_limits_v2(folder) for folder in _upwards(mount, groups.get("", "/"))]
        version: int | None = 2
    elif (mount / "cpu").is_dir() or (mount / "memory").is_dir():
        found = [(_quota_v1(folder), None) for folder in _upwards(mount / "cpu", groups.get("cpu", "/"))]
        found += [(None, _memory_v1(folder)) for folder in _upwards(mount / "memory", groups.get("memory", "/"))]
        version = 1
    else:
        found, version = [], None
    return {
        "cgroup": version,
        "cpus": min((cpus for cpus, _ in found if cpus is not None), default=None),
        "memory_bytes": min((size for _, size in found if size is not None), default=None),
    }


def _library(problems: list[str]) -> dict[str, Any]:
    try:
        path = get_library_path()
        version = query("version")
    except OSError as error:
        problems.append(str(error))
        return {"path": None, "version": None}
    if version != __version__:
        problems.append(f"the library is of version {version}, hina-ort of {__version__}: build the library again")
    return {"path": path, "version": version}


def _onnxruntime(problems: list[str]) -> dict[str, Any]:
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    packages = {name: metadata.version(name) for name in sorted(n for n in names if n and n.startswith("onnxruntime"))}
    try:
        import onnxruntime
    except ImportError as error:
        problems.append(f"ONNX Runtime cannot be imported: {error}")
        return {"packages": packages, "version": None, "api_version": None, "providers": [], "registers": False}
    registers = True
    try:
        session_options()
    except FileNotFoundError:
        registers = False  # the missing library is told already
    except Exception as error:  # the exceptions of ONNX Runtime have no base class of their own
        registers = False
        problems.append(f"ONNX Runtime {onnxruntime.__version__} refuses the library: {error}")
    return {
        "packages": packages,
        "version": onnxruntime.__version__,
        "api_version": int(onnxruntime.__version__.split(".")[1]),  # release 1.N offers API version N
        "providers": onnxruntime.get_available_providers(),
        "registers": registers,
    }


def _asked(question: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """The library's answer."""
    try:
        return question()
    except (OSError, KeyError):
        return None  # it is missing, or of a version that does not know the question: told already


def _numa(problems: list[str]) -> dict[str, Any] | None:
    found = _asked(topology)
    if found is not None and found["error"]:
        problems.append(found["error"])
    return found


def _placement(model: Path | None) -> dict[str, Any] | None:
    if model is None:
        return None
    from hina_ort.numa.placement import model_placement

    return model_placement(model)


def _memory(meminfo: Path) -> dict[str, int | None]:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:
        lines = {}
    sizes = {key: int(text.split()[0]) * 1024 for key, text in lines.items() if text.strip().endswith("kB")}
    return {"total_bytes": sizes.get("MemTotal"), "available_bytes": sizes.get("MemAvailable")}


def _upwards(mount: Path, group: str) -> list[Path]:
    """Folders of `group` and of the groups above it, as far as they are visible here, `mount` included."""
    folder = mount / group.strip("/")
    return [path for path in (folder, *folder.parents) if path.is_relative_to(mount) and path.is_dir()]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _limits_v2(folder: Path) -> tuple[float | None, int | None]:
    quota, memory = _words(folder / "cpu.max"), _words(folder / "memory.max")
    cpus = int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0] != "max" else None
    return cpus, int(memory[0]) if memory and memory[0] != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _memory_v1(folder: Path) -> int | None:
    limit = _words(folder / "memory.limit_in_bytes")
    return int(limit[0]) if limit and int(limit[0]) < _V1_UNLIMITED else None
