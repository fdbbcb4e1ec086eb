"""What a model takes of memory, what decoding a token reads of it, and how fast that can be at most."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes.explain import Place
from graph_passes.external_data import ModelFileError
from hina_ort.bench import machine
from hina_ort.doctor import usable_cpus
from hina_ort.genai import axis_sizes
from hina_ort.generation.cache import cache_pairs
from hina_ort.generation.tokens import longest_text

_TABLES = {
    "Gather": (0,),
    "GatherBlockQuantized": (0, 2, 3),
    "RotaryEmbedding": (2, 3),
    "GroupQueryAttention": (7, 8),
}
"""Inputs of which a token reads one row: embeddings, and tables of positions."""
_MOST_MEASURED = 1 << 30
"""Bytes that are read to measure the memory."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a model's parts, and of what a token of decoding reads.

    `expert_bytes` and `shared_expert_bytes` are those of all MoE layers, `dense_bytes` all other weights. A sequence
    takes `cache_bytes_per_token`, and `state_bytes` whatever its length; `context` is its most tokens.
    `decode_bytes_per_token` counts weights alone: the experts chosen, one row of an embedding, and all of the rest.
    """

    expert_bytes: int
    shared_expert_bytes: int
    dense_bytes: int
    decode_bytes_per_token: int
    cache_bytes_per_token: int
    state_bytes: int
    context: int | None
    available_bytes: int | None
    read_bytes_per_second: float | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.expert_bytes + self.shared_expert_bytes + self.dense_bytes

    @property
    def ceiling_tokens_per_second(self) -> float | None:
        """Tokens of one sequence, at most: what memory gives in a second by what a token reads."""
        if self.read_bytes_per_second is None or not self.decode_bytes_per_token:
            return None
        return self.read_bytes_per_second / self.decode_bytes_per_token

    @property
    def warnings(self) -> list[str]:
        """What does not fit into the memory that is available, in words."""
        from hina_ort.tables import size

        if self.available_bytes is None:
            return []
        left = self.available_bytes - self.weight_bytes
        if left < 0:
            return [
                f"the weights take {size(self.weight_bytes)}, and {size(self.available_bytes)} of memory are "
                "available: experts will be read from the disk again and again; `hina-ort convert --weights int4` "
                "makes them smaller"
            ]
        full = (self.context or 0) * self.cache_bytes_per_token + self.state_bytes
        if full > left:
            most = max(left - self.state_bytes, 0) // max(self.cache_bytes_per_token, 1)
            return [
                f"the cache of a text of {self.context} tokens takes {size(full)}, and {size(left)} of memory are "
                f"left beside the weights: keep texts below {most} tokens"
            ]
        return []

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {
            **vars(self),
            "ceiling_tokens_per_second": self.ceiling_tokens_per_second,
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Sizes:
    """Bytes of all weights of a graph, of the rows of its tables that a token does not read, and of its cache."""

    weights: int
    rows_not_read: int
    cache_per_token: int
    states: int

    @classmethod
    def of(cls, model: ir.Model, folder: Path) -> Sizes:
        """Those of the inlined `model` from `folder`, which normalisation has not changed yet."""
        values = [value for graph in model.graphs() for value in graph.initializers.values()]
        total = sum(value.const_value.nbytes for value in values if value.const_value is not None)
        return cls(total, sum(_rows_not_read(value) for value in values), *_cache(model, axis_sizes(folder)))


def plan(sizes: Sizes, places: Sequence[Place], folder: Path, *, measure: bool = False) -> MemoryPlan:
    """The plan of a model of these `sizes` and MoE blocks, with its configuration in `folder`.

    A block that was refused counts as dense. With `measure` the memory's bandwidth is measured, in some seconds; that
    raises CheckError when it fails.
    """
    routed, shared, active = 0, 0, 0.0
    for place in places:
        if place.spec is not None:
            parts = {True: 0, False: 0}
            for stored in place.weights:
                parts[stored.field.startswith("shared_")] += stored.bytes
            routed, shared = routed + parts[False], shared + parts[True]
            active += parts[False] * place.spec.top_k / place.spec.num_experts
    context = None
    with suppress(ModelFileError):
        context = longest_text(folder)
    return MemoryPlan(
        expert_bytes=routed,
        shared_expert_bytes=shared,
        dense_bytes=sizes.weights - routed - shared,
        decode_bytes_per_token=round(sizes.weights - sizes.rows_not_read - routed + active),
        cache_bytes_per_token=sizes.cache_per_token,
        state_bytes=sizes.states,
        context=context,
        available_bytes=machine.available_memory(),
        read_bytes_per_second=_bandwidth() if measure else None,
    )


def _rows_not_read(value: ir.Value) -> int:
    """Bytes of a table of which a token reads one row only, without that row; 0 for other weights."""
    tensor = value.const_value
    uses = list(value.uses())
    is_table = tensor is not None and len(tensor.shape) == 2 and bool(uses)
    if tensor is None or not is_table or any(index not in _TABLES.get(node.op_type, ()) for node, index in uses):
        return 0
    rows = int(tensor.shape.numpy()[0])
    return tensor.nbytes - tensor.nbytes // max(rows, 1)


def _cache(model: ir.Model, sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes of the cache of one sequence: for each token, and whatever its length."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    growing, fixed = 0, 0
    for name in cache_pairs(inputs, (str(value.name) for value in model.graph.outputs)):
        value = inputs[name]
        if value.shape is None or value.dtype is None:
            continue
        axes = [axis if isinstance(axis, int) else sizes.get(str(axis.value)) for axis in value.shape][1:]
        count = math.ceil(math.prod(axis for axis in axes if axis is not None) * value.dtype.itemsize)
        growing, fixed = (growing + count, fixed) if None in axes else (growing, fixed + count)
    return growing, fixed


def _bandwidth() -> float:
    """Bytes per second that all usable CPUs read together from memory, beyond the caches."""
    available = machine.available_memory() or _MOST_MEASURED
    with tempfile.NamedTemporaryFile(prefix="hina-memory-") as file:
        file.truncate(min(4 * machine.last_level_cache(), _MOST_MEASURED, available // 4))
        return machine.measure_limits(Path(file.name), usable_cpus()).read_bytes_per_second
