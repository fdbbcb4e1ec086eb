"""ONNX Runtime session options that know HinaMoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hina_ort.runtime import get_library_path

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

# ONNX Runtime refuses to make a session whose options hold the same library twice; the options remember it here.
_REGISTERED_KEY = "hina_ort.registered_library"


def register(session_options: SessionOptions) -> SessionOptions:
    """Make HinaMoE known to sessions made with `session_options`; return the same object.

    A second call on the same object changes nothing. Raises FileNotFoundError when the library is missing and
    RuntimeError, from ONNX Runtime, when it cannot be loaded there.
    """
    if not is_registered(session_options):
        path = get_library_path()
        session_options.register_custom_ops_library(path)
        session_options.add_session_config_entry(_REGISTERED_KEY, path)
    return session_options


def is_registered(session_options: SessionOptions) -> bool:
    """Whether `register` was called on `session_options`."""
    try:
        session_options.get_session_config_entry(_REGISTERED_KEY)
    except RuntimeError:
        return False
    return True


def session_options(numa: str | None = None) -> SessionOptions:
    """New `onnxruntime.SessionOptions` with HinaMoE registered; errors are those of `register`.

    `numa` is off, auto, interleave, bind or copy, see docs/numa.md; the variable HINA_NUMA counts more. It is the
    config entry hina.numa, which has to be there before HinaMoE is registered.
    """
    from onnxruntime import SessionOptions

    options = SessionOptions()
    if numa is not None:
        options.add_session_config_entry("hina.numa", numa)
    return register(options)
