"""What the benchmark asks of an engine: one runtime's way to compute the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hina_ort.bench.inputs import Floats, Inputs
from hina_ort.bench.weights import Reading, WeightFile


class Unavailable(Exception):
    """An engine cannot run here, or not this layer; the message says why and what to do."""


@dataclass(frozen=True)
class Arithmetic:
    """How an engine rounds, for the tolerance of its results.

    `type` is that of the activations, `roundings` how often a value is rounded to it on the way. `int8_block` is how
    many activations share a scale where they are quantised to int8: 0 all of a token, None where they stay floats.
    """

    type: str = "f32"
    roundings: int = 0
    int8_block: int | None = None


class Bound(Protocol):
    """Inputs made ready for an engine."""

    def run(self) -> None:
        """Compute all layers."""

    def outputs(self) -> list[Floats]:
        """What the last run computed, `[T, H]` for each layer."""


class Engine(ABC):
    """One runtime. Making it checks that it is there and can compute the layer (else Unavailable); `load` comes later.

    `label` names the kernel, `note` says what is not as asked for (empty when all is), `extra_bytes` is the memory that
    it needs for each layer beside the mapped file.
    """

    name: str
    label: str
    version: str
    note: str
    reading: Reading
    arithmetic: Arithmetic
    extra_bytes: int

    @abstractmethod
    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """Make everything ready to run; `folder` is a place for files."""

    @abstractmethod
    def bind(self, inputs: Inputs) -> Bound:
        """Make `inputs` ready, so that only the computation is left to be timed."""
