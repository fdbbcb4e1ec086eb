"""A ctypes view of the compiled library: where it lies and what it says about itself and the CPU."""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY_NAME = "libhina_ort.so"


def get_library_path() -> str:
    """Path of the library to give to `SessionOptions.register_custom_ops_library`.

    Raises FileNotFoundError, saying how to build it, when the package holds no compiled library.
    """
    path = Path(__file__).resolve().parent / "_lib" / LIBRARY_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"the compiled library {path} is missing: run `make library` in a source checkout, "
            "or install a hina-ort wheel built for this platform"
        )
    return str(path)


@cache
def _library(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
        library.HinaQuery.argtypes = [ctypes.c_char_p]
        library.HinaQuery.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise OSError(f"the compiled library {path} cannot be used on this machine: {error}") from error
    return library


def query(topic: str) -> Any:
    """What the library says about `topic`: "cpu_info", "op_schema", "kernels", "topology" or "version".

    Raises FileNotFoundError when the library is missing, OSError when it cannot be loaded, KeyError for an unknown
    topic.
    """
    text: bytes | None = _library(get_library_path()).HinaQuery(topic.encode())
    if not text:
        raise KeyError(topic)
    return json.loads(text)


def cpu_info() -> dict[str, Any]:
    """CPU vendor, model and features, the instruction set chosen (`isa`), whether AMX is used beside it (`amx`), why or
    why not (`isa_reason`, `amx_reason`), and the cap if any.

    Errors are those of `query`.
    """
    answer: dict[str, Any] = query("cpu_info")
    return answer


def topology() -> dict[str, Any]:
    """NUMA nodes with their CPUs and memory, what this process may use of them, and how `HINA_NUMA` is understood.

    The keys are those of `numa` in docs/cli.md, errors those of `query`.
    """
    answer: dict[str, Any] = query("topology")
    return answer


def placement(address: int, size: int) -> dict[str, Any]:
    """Where `size` bytes of this process from `address` on are, as the library sees a matrix of weights.

    Keys: `pattern` ("interleaved", "one node", "none", "not resident" or "refused"), `nodes` in the order of the pages,
    `page_bytes` that are together on a node, `huge_pages`, `sampled`, `resident` and `fits` (pages), and `reason`.
    """
    answer: dict[str, Any] = query(f"placement {address} {size}")
    return answer
