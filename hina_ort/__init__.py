"""Mixture-of-Experts for ONNX Runtime on CPU: fuse exported MoE blocks into one fast operator and run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_passes.moe_spec import MoeSpec
    from hina_ort.conversion import convert
    from hina_ort.runtime import cpu_info, get_library_path
    from hina_ort.session import register, session_options
    from hina_ort.unfusing import unfuse

__version__ = "0.1.0"
__all__ = ["MoeSpec", "__version__", "convert", "cpu_info", "get_library_path", "register", "session_options", "unfuse"]

# Names are imported on first use, so that `import hina_ort` costs nothing and needs no ONNX Runtime.
_HOMES = {
    "MoeSpec": "graph_passes.moe_spec",
    "convert": "hina_ort.conversion",
    "cpu_info": "hina_ort.runtime",
    "get_library_path": "hina_ort.runtime",
    "register": "hina_ort.session",
    "session_options": "hina_ort.session",
    "unfuse": "hina_ort.unfusing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hina_ort' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
