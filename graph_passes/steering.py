"""Inputs that make a MoE block show all it does.

Every expert is chosen with a weight that matters, no choice hangs on a rounding, and each token is a row of its own, so
that the same rows can be run in batches of several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes import reference
from graph_passes.cut import BATCH
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.moe_spec import MoeSpec

Array = npt.NDArray[np.float64]

TOKEN_COUNTS = (1, 2, 7, 33)
"""The last count grows when 33 tokens cannot reach every expert, and is split where a run may not be that large."""

GATHER_BYTES = 1 << 29
"""A run may gather copies of this much of the experts' weights, or as much as `BATCH` tokens need."""

MARGIN = {ir.DataType.FLOAT: 1e-4, ir.DataType.DOUBLE: 1e-6, ir.DataType.FLOAT16: 1e-2}
"""Logits may move by this much (relative and absolute) without changing a token's experts: some 20 roundoffs."""

_POOL = 256
_VISIBLE = 0.1
_TRIALS = 6


class Unreachable(Exception):
    """No inputs were found that reach every expert by a clear margin; the message names the experts."""


@dataclass(frozen=True)
class Inputs:
    """Rows of tokens: `hidden [T, H]`, `router` op inputs `[T, n]`, `constants` of the router as float64.

    `batches` slices the rows into runs; `overrides` are initializers to be replaced by other values in the block.
    """

    hidden: npt.NDArray[Any]
    router: Mapping[str, npt.NDArray[Any]]
    constants: Mapping[str, npt.NDArray[Any]]
    batches: tuple[slice, ...]
    overrides: Mapping[ir.Value, npt.NDArray[Any]] = field(default_factory=dict)


def steer(match: MoeMatch, dtype: ir.DataType, rng: np.random.Generator) -> Inputs:
    """Find inputs for the block of `match`, whose hidden states have type `dtype`.

    When the router's own constants keep some expert from being chosen (a strongly negative correction bias, say), they
    are replaced by random ones, in the block and in the reference alike. Raises Unreachable.
    """
    constants = {name: _read(source, name, match.spec) for name, source in match.constants.items()}
    if "topk_ids" in match.inputs:
        return _explicit(match, dtype, rng)
    try:
        return _routed(match, dtype, constants, {}, rng)
    except Unreachable:
        if not constants:
            raise
    overrides = {}
    for name, source in match.constants.items():
        if source.index is not None:
            raise Unreachable("the router does not reach every expert, and its weights are part of a larger tensor")
        constants[name] = _random_constant(constants[name].shape, rng).astype(source.dtype.numpy())
        stored = constants[name].swapaxes(-1, -2) if source.transpose else constants[name]
        overrides[source.value] = np.ascontiguousarray(stored).reshape(source.stored.shape.numpy())
    return _routed(match, dtype, constants, overrides, rng)


def _read(source: WeightSource, name: str, spec: MoeSpec) -> npt.NDArray[Any]:
    array = source.tensor().numpy()
    return array.reshape(spec.num_experts, spec.hidden_size) if name == "router_weight" else array.reshape(-1)


def _random_constant(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A small bias, or a router whose rows lie on a sphere, so that each wins for inputs that point its way."""
    random = rng.standard_normal(shape)
    if len(shape) == 1:
        return 0.05 * random
    rows: Array = 2.0 * random / np.linalg.norm(random, axis=1, keepdims=True)
    return rows


def _explicit(match: MoeMatch, dtype: ir.DataType, rng: np.random.Generator) -> Inputs:
    """Ids and weights are inputs: token t takes the next k experts of a random order."""
    spec = match.spec
    batches = token_batches(-(-spec.num_experts // spec.top_k), _most_tokens(match))
    tokens = np.arange(batches[-1].stop)[:, None]
    order = rng.permutation(spec.num_experts)
    ids = order[(tokens * spec.top_k + np.arange(spec.top_k)) % spec.num_experts]
    ids_value, weights_value = match.inputs["topk_ids"], match.inputs["topk_weights"]
    weights = rng.uniform(0.2, 1.0, ids.shape).astype((weights_value.dtype or dtype).numpy())
    router = {"topk_ids": ids.astype((ids_value.dtype or ir.DataType.INT64).numpy()), "topk_weights": weights}
    hidden = rng.standard_normal((len(ids), spec.hidden_size)).astype(dtype.numpy())
    return Inputs(hidden, router, {}, batches)


def _most_tokens(match: MoeMatch) -> int:
    """Tokens that one run may have: a block whose experts are stacked copies those of each token to multiply them.

    All fields may be copied before the first product. Weights of 16 bits are there in float32 as well.
    """
    copied = 0
    for name, sources in match.weights.items():
        if len(sources) == 1:
            copied += math.prod(match.spec.field_shape(name)) * (4 if sources[0].dtype == ir.DataType.FLOAT else 2 + 4)
    return max(BATCH, GATHER_BYTES // max(1, match.spec.top_k * copied))


def token_batches(needed: int, most: int) -> tuple[slice, ...]:
    """Runs of at most `most` tokens; those behind the first three hold `needed` tokens at least, in whole batches."""
    most -= most % BATCH
    rest = max(TOKEN_COUNTS[-1], needed)
    runs = -(-rest // most)
    size = -(-rest // (runs * BATCH)) * BATCH
    sizes = [*(min(count, most) for count in TOKEN_COUNTS[:-1]), *([size] * runs)]
    ends = np.cumsum(sizes)
    return tuple(slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True))


def _routed(
    match: MoeMatch,
    dtype: ir.DataType,
    constants: Mapping[str, npt.NDArray[Any]],
    overrides: Mapping[ir.Value, npt.NDArray[Any]],
    rng: np.random.Generator,
) -> Inputs:
    """The block routes by itself: choose among many random rows by what the reference's router does with them."""
    spec, margin = match.spec, MARGIN.get(dtype, MARGIN[ir.DataType.FLOAT])
    logits_dtype = dtype
    if "router_logits" in match.inputs:
        logits_dtype = match.inputs["router_logits"].dtype or dtype
        pool = 2.0 * rng.standard_normal((2 * _POOL, spec.num_experts))
        directions = np.eye(spec.num_experts)
    else:
        weight = constants["router_weight"].astype(np.float64)
        pool = _hidden_pool(weight, rng)
        centred = weight - weight.mean(0)
        directions = centred / np.maximum((centred**2).sum(1, keepdims=True), 1e-12)

    def route(rows: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        rows = rows.astype(logits_dtype.numpy()).astype(np.float64)
        return rows, _clear_choices(spec, _logits(rows, constants), constants, margin, rng)

    rows, reached = route(pool)
    for scale in (2.0, 4.0, 8.0, 16.0):
        missing = np.flatnonzero(~reached.any(0))
        if not len(missing):
            break
        pushed = np.repeat(missing, 8)
        more, also = route(rows[rng.integers(0, len(pool), len(pushed))] + scale * directions[pushed])
        rows, reached = np.concatenate([rows, more]), np.concatenate([reached, also])
    missing = np.flatnonzero(~reached.any(0))
    if len(missing):
        raise Unreachable(
            f"no input makes the router clearly choose experts {', '.join(map(str, missing))} (are their weights in it "
            "zero?)"
        )
    chosen = _cover(reached)
    clear = np.flatnonzero(reached.any(1))
    batches = token_batches(len(chosen), _most_tokens(match))
    filler = rng.choice(clear, batches[-1].stop - len(chosen))
    picked = rows[np.concatenate([filler, np.array(chosen)])]
    if "router_logits" in match.inputs:
        hidden = rng.standard_normal((len(picked), spec.hidden_size)).astype(dtype.numpy())
        return Inputs(hidden, {"router_logits": picked.astype(logits_dtype.numpy())}, constants, batches, overrides)
    return Inputs(picked.astype(dtype.numpy()), {}, constants, batches, overrides)


def _hidden_pool(weight: Array, rng: np.random.Generator) -> Array:
    """Random hidden states, half of them scaled so that even a router with tiny weights decides clearly."""
    pool = rng.standard_normal((2 * _POOL, weight.shape[1]))
    spread = float(np.std(pool @ weight.T))
    pool[_POOL:] *= np.clip(2.0 / max(spread, 1e-12), 1.0, 32.0)
    return pool


def _logits(rows: Array, constants: Mapping[str, npt.NDArray[Any]]) -> Array:
    if "router_weight" not in constants:
        return rows
    logits: Array = rows @ constants["router_weight"].astype(np.float64).T
    return logits + constants["router_bias"].astype(np.float64) if "router_bias" in constants else logits


def _clear_choices(
    spec: MoeSpec, logits: Array, constants: Mapping[str, npt.NDArray[Any]], margin: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """`[T, E]`: experts that each row chooses with a visible weight; all False where a small change could alter it."""
    bias, score_margin = np.zeros(spec.num_experts), 0.0
    if "e_score_correction_bias" in constants or spec.score_func == "sigmoid":
        # Scores saturate where logits do not; softmax scores are about 1 / E.
        score_margin = margin / 5.0 if spec.score_func == "sigmoid" else margin / spec.num_experts
    if "e_score_correction_bias" in constants:
        bias = constants["e_score_correction_bias"].astype(np.float64)
    ids, mixing = _sorted_route(spec, logits, bias)
    stable: npt.NDArray[np.bool_] = np.all(np.isfinite(mixing), axis=-1)
    for _ in range(_TRIALS):
        moved = logits * (1.0 + margin * rng.standard_normal(logits.shape))
        moved += margin * rng.standard_normal(logits.shape)
        moved_ids, moved_mixing = _sorted_route(spec, moved, bias + score_margin * rng.standard_normal(bias.shape))
        largest = np.abs(mixing).max(-1, keepdims=True)
        near = (np.abs(moved_mixing - mixing) <= 50.0 * margin * largest).all(-1)
        stable &= (moved_ids == ids).all(-1) & near
    visible: npt.NDArray[np.bool_] = np.abs(mixing) >= _VISIBLE * np.abs(mixing).max(-1, keepdims=True)
    reached = np.zeros(logits.shape, bool)
    np.put_along_axis(reached, ids, visible & stable[:, None], -1)
    return reached


def _sorted_route(spec: MoeSpec, logits: Array, bias: Array) -> tuple[reference.Ids, Array]:
    """reference.route with the k experts of each row in ascending order."""
    ids, mixing = reference.route(replace(spec, tie_break="lowest"), logits, bias)
    order = np.argsort(ids, -1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(mixing, order, -1)


def _cover(reached: npt.NDArray[np.bool_]) -> list[int]:
    """Rows that together reach every expert, chosen greedily."""
    chosen: list[int] = []
    left = np.arange(reached.shape[1])
    while len(left):
        best = int(reached[:, left].sum(1).argmax())
        chosen.append(best)
        left = left[~reached[best, left]]
    return chosen
