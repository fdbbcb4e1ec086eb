"""The states that a decoder carries from step to step: as tensors of a graph, and as a cache of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graph_passes.external_data import ModelFileError
from hina_ort.export import delta_net

BATCH, SEQUENCE, PAST = "batch_size", "sequence_length", "past_sequence_length"
TOTAL = f"{PAST} + {SEQUENCE}"


@dataclass(frozen=True)
class State:
    """A tensor of a layer's cache: `part` of `layer`, its `sizes` (of a batch of 1), and names of axes that vary."""

    layer: int
    part: str
    sizes: tuple[int, ...]
    dims: dict[int, str]

    @property
    def past(self) -> str:
        """Name of the input."""
        group = "past" if self.part in delta_net.PARTS else "past_key_values"
        return f"{group}.{self.layer}.{self.part}"

    @property
    def present(self) -> str:
        """Name of the output."""
        return f"present.{self.layer}.{self.part}"

    def shape(self, batch: int, past: int) -> tuple[int, ...]:
        """Its shape for `batch` sequences after `past` tokens."""
        sizes = {BATCH: batch, PAST: past}
        return tuple(sizes[self.dims[axis]] if axis in self.dims else size for axis, size in enumerate(self.sizes))


def layout(config: Any, tensors: list[Any]) -> list[State]:
    """The states of a decoder, from those that it gave, two of each layer.

    They are keys and values `[batch, heads, tokens, width]`, or those of a Gated DeltaNet, whose sizes are fixed.
    """
    states = []
    for layer, pair in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
        linear = delta_net.is_linear(config, layer)
        dims = {0: BATCH} if linear else {0: BATCH, 2: PAST}
        for part, tensor in zip(delta_net.PARTS if linear else ("key", "value"), pair, strict=True):
            states.append(State(layer, part, tuple(map(int, tensor.shape)), dims))
    return states


def filled(config: Any, states: list[Any]) -> Any:
    """A cache of transformers that holds `states`; an empty one when there are none.

    Layers with a sliding window keep all tokens: the window is in the attention mask.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache()
    for index in range(config.get_text_config().num_hidden_layers):
        pair = states[2 * index : 2 * index + 2]
        if delta_net.is_linear(config, index):
            cache.layers.append(delta_net.layer(*pair))
            continue
        layer: Any = DynamicLayer()  # type: ignore[no-untyped-call]  # transformers gives no types
        if pair:
            layer.update(*pair)
        cache.layers.append(layer)
    return cache


def tensors(cache: Any) -> list[Any]:
    """The states in `cache`, layer by layer."""
    return [tensor for layer in cache.layers for tensor in _pair(layer)]


def _pair(layer: Any) -> tuple[Any, Any]:
    if hasattr(layer, "recurrent_states"):
        return layer.conv_states[0], layer.recurrent_states[0]
    if getattr(layer, "keys", None) is None:
        raise ModelFileError(f"layers of the kind {type(layer).__name__} cannot be exported yet")
    return layer.keys, layer.values
