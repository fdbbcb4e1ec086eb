"""What `hina-ort bench layer` is asked to do: sizes of the layer, type of its weights, and how to time it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graph_passes.quantize.formats import BLOCKS, WeightFormat
from hina_ort.doctor import usable_cpus
from hina_ort.files import UsageError

WEIGHTS = ("f32", "f16", "bf16", "int8", "int4", "mxfp4")
ACTIVATIONS = ("f32", "f16", "bf16")
PEERS = ("ort", "torch", "vllm", "vectors", "numa-off")
MAX_TOKENS = 1 << 16
MAX_THREADS_PER_CPU = 4
"""More than any CPU runs at once: such a benchmark measures the scheduler, or runs out of threads."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE layer: E experts, k for each token, hidden size H, intermediate size I, shared expert's size S.

    The activation is `silu(gate)` with `sigmoid(alpha * gate)`, `up + beta` and both clipped at `limit`.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gated: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def expert_values(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def shared_values(self) -> int:
        """Weights of the shared expert; 0 without one."""
        return 3 * self.hidden_size * self.shared_intermediate_size

    def operations(self, tokens: int) -> int:
        """Operations of the products of `tokens` tokens; a multiply-add is two."""
        return 2 * tokens * (self.top_k * self.expert_values + self.shared_values)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("qwen3.6-35b-a3b", 256, 8, 2048, 512, shared_intermediate_size=512, shared_gated=True),
        Shape("olmoe", 64, 8, 2048, 1024),
        Shape("mixtral-8x7b", 8, 2, 4096, 14336),
        Shape("gpt-oss-20b", 32, 4, 2880, 2880, alpha=1.702, beta=1.0, limit=7.0),
        Shape("deepseek-v2-lite", 64, 6, 2048, 1408, shared_intermediate_size=2816),
    )
}
"""Layers of models that people run; gpt-oss without its biases."""


def parse_shape(text: str) -> Shape:
    """The shape of that name, or of `E,k,H,I` or `E,k,H,I,shared`; UsageError for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) not in (4, 5) or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--shape is {text!r}, expected E,k,H,I or E,k,H,I,shared or one of {', '.join(SHAPES)}")
    experts, top_k, hidden, inner, shared = (*map(int, parts), 0)[:5]
    if min(experts, top_k, hidden, inner) < 1 or top_k > experts:
        raise UsageError(f"--shape is {text!r}, expected E >= k >= 1 and sizes of at least 1")
    return Shape(text, experts, top_k, hidden, inner, shared)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Token counts, separated by commas; UsageError unless each is in 1..MAX_TOKENS."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_TOKENS for part in parts):
        raise UsageError(f"--tokens is {text!r}, expected numbers from 1 to {MAX_TOKENS}, separated by commas")
    return tuple(int(part) for part in dict.fromkeys(parts))


def parse_peers(text: str) -> tuple[str, ...]:
    """Names of peers, separated by commas, none for an empty text; UsageError for one that is not known."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in PEERS]:
        raise UsageError(f"--vs names {unknown[0]!r}, expected some of {', '.join(PEERS)}, separated by commas")
    return names


@dataclass(frozen=True)
class LayerOptions:
    """The arguments of `bench_layer`. UsageError for a value that does not exist or does not apply.

    `block` None is 32 for quantised weights, 0 one scale per row; `accuracy_level` None is 4 for them.
    """

    shape: Shape
    weights: str = "f32"
    tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    threads: int = 1
    peers: tuple[str, ...] = ("ort",)
    skew: float = 0.0
    block: int | None = None
    accuracy_level: int | None = None
    zero_points: bool = False
    activations: str = "f32"
    repeats: int = 9

    def __post_init__(self) -> None:
        for name, value, known in (("weights", self.weights, WEIGHTS), ("activations", self.activations, ACTIVATIONS)):
            if value not in known:
                raise UsageError(f"--{name} is {value!r}, expected one of {', '.join(known)}")
        for name, number in (("threads", self.threads), ("repeats", self.repeats)):
            if number < 1:
                raise UsageError(f"--{name} is {number}, expected at least 1")
        if self.threads > MAX_THREADS_PER_CPU * (cpus := usable_cpus()):
            raise UsageError(
                f"--threads is {self.threads}, expected at most {MAX_THREADS_PER_CPU * cpus}, "
                f"{MAX_THREADS_PER_CPU} for each usable CPU"
            )
        if not 0 <= self.skew <= 10:
            raise UsageError(f"--skew is {self.skew}, expected a Zipf exponent from 0 (uniform) to 10")
        if self.accuracy_level not in (None, 0, 4):
            raise UsageError(f"--accuracy-level is {self.accuracy_level}, expected 0 (float) or 4 (int8 activations)")
        if self.block not in (None, 0, *BLOCKS):
            raise UsageError(f"--block is {self.block}, expected 0 (a row) or one of {', '.join(map(str, BLOCKS))}")
        given = {"--block": self.block is not None, "--zero-points": self.zero_points}
        if self.weights not in ("int8", "int4"):
            for name in (name for name, present in given.items() if present):
                raise UsageError(f"{name} is for int8 and int4 weights, not for {self.weights}; leave it out")
        if self.accuracy_level is not None and self.format is None:
            raise UsageError(f"--accuracy-level is for quantised weights, not for {self.weights}; leave it out")

    @property
    def format(self) -> WeightFormat | None:
        """The format of quantised weights; None for plain floats."""
        if self.weights in ACTIVATIONS:
            return None
        return WeightFormat(self.weights, 32 if self.block is None or self.weights == "mxfp4" else self.block)

    @property
    def int8_activations(self) -> bool:
        """Whether tokens are quantised to int8 before each product."""
        return self.format is not None and self.accuracy_level != 0
