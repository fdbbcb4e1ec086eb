"""From a checkpoint to its traced decoder, by way of transformers; errors say what a user can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir

from graph_passes.external_data import ModelFileError
from hina_ort.export import architectures
from hina_ort.export.cache import State
from hina_ort.export.shards import CONFIG_NAME, Checkpoint
from hina_ort.export.weight_map import Source
from hina_ort.files import UsageError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Decoder:
    """A traced decoder: its graph, the `states` it carries, its text configuration, and where its parameters lie."""

    model: ir.Model
    states: list[State]
    config: Any
    sources: dict[str, Source]


def load(checkpoint: Checkpoint, opset: int) -> Decoder:
    """Trace the decoder of `checkpoint`.

    Raises UsageError when transformers 5 is missing, ModelFileError when the architecture cannot be exported.
    """
    _require_transformers()
    from hina_ort.export import tracing, weight_map

    kind = checkpoint.config.get("model_type")
    config = _config(checkpoint, kind)
    module = _trying(f"transformers makes no language model of {kind}", lambda: tracing.build(config))
    if not tracing.has_experts(module):
        raise ModelFileError(
            f"{checkpoint.folder} is a model of type {kind}, without experts that can be exported; these types can be: "
            f"{architectures.known()}"
        )
    sources = weight_map.sources(module, checkpoint)
    traced = _trying(f"{kind} cannot be traced", lambda: tracing.trace(module, opset))
    return Decoder(traced.model, traced.states, module.config.get_text_config(), sources)


def _require_transformers() -> None:
    try:
        import onnxscript  # noqa: F401  # only whether it is there
        import torch  # noqa: F401  # likewise
        import transformers
    except ImportError as error:
        raise UsageError(
            f"export needs torch, transformers 5 and onnxscript ({error}); install hina-ort[export]"
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UsageError(
            f"export needs transformers 5 and found {transformers.__version__}; install hina-ort[export] into an "
            "environment of its own"
        )


def _config(checkpoint: Checkpoint, kind: object) -> Any:
    """The configuration, as an object of transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = checkpoint.folder / CONFIG_NAME
    if reason := architectures.objection(kind):
        raise ModelFileError(f"{path}: {reason}; these can be exported: {architectures.known()}")
    if kind not in CONFIG_MAPPING:
        raise ModelFileError(
            f"{path} says model_type {kind}, which transformers does not know; these can be exported: "
            f"{architectures.known()}"
        )
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4"):
        raise ModelFileError(
            f"{path} says that the weights are quantised by {method}, and only mxfp4 is read; download or make a "
            "checkpoint in bfloat16"
        )
    return _trying(f"{path} is no valid configuration", lambda: AutoConfig.from_pretrained(checkpoint.folder))


def _trying(what: str, step: Callable[[], _T]) -> _T:
    """The result of `step`; errors of other libraries become a ModelFileError that says `what` failed."""
    try:
        return step()
    except (ModelFileError, UsageError, MemoryError):
        raise
    except Exception as error:  # torch and transformers raise many types
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelFileError(f"{what}: {first.strip()}; report this model") from error
