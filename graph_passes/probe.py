"""Numeric proof of a match: the block, cut out and run in ONNX Runtime, against its MoeSpec in `reference`.

A match proposes, the probe disposes: what cannot be cut out, cannot be run, or does not agree is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes import reference
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.cut import Cut, CutError
from graph_passes.external_data import release
from graph_passes.matchers.match import MoeMatch
from graph_passes.moe_spec import FIELDS, MoeSpec
from graph_passes.steering import TOKEN_COUNTS, Unreachable, steer, token_batches

SEED = 20240229


@dataclass(frozen=True)
class ProbeResult:
    """The worst relative L2 error over the token counts, and why the match is refused; no reason, no refusal."""

    worst_relative_l2: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the match is proven."""
        return not self.reason


def probe(model: ir.Model, match: MoeMatch, rtol: float = 1e-4) -> ProbeResult:
    """Compare the block of `match`, which must pass `fuse_moe.check`, with its spec; `model` is not changed.

    `rtol` bounds the relative L2 norm of the error at each token count; for a block in float16 it is
    `accuracy.float16_bound` where that is more. A block in bfloat16 is run in float32, see `cut`. Whatever goes wrong
    is a result with a reason, never an exception. No bound allows for a kernel that rounds the activations of quantised
    weights: the block runs without it, see `cut`.

    A constant that no ordinary input shows is not proven but taken from the graph as it stands there: an epsilon or a
    floor under the sum of the mixing weights that is small beside every sum, and a limit that no activation reaches.
    """

    def prepare(cut: Cut) -> _Trial:
        inputs = steer(match, cut.dtype, np.random.default_rng(SEED))
        router: dict[str, Any] = {**inputs.router, **inputs.constants}
        weights: Any = {name: _Experts(match, name) for name in match.spec.weight_inputs}
        expected, _ = reference.hina_moe(match.spec, inputs.hidden, weights, **router)
        rows = {match.hidden_states: inputs.hidden} | {match.inputs[name]: a for name, a in inputs.router.items()}
        return _Trial(rows, expected, inputs.batches, inputs.overrides)

    return _probe(model, match, rtol, prepare)


def probe_shared_expert(model: ir.Model, match: MoeMatch, rtol: float = 1e-4) -> ProbeResult:
    """Compare what `match` adds to its `routed_only`, which `probe` has proven, with its spec; else as `probe`.

    What the routed experts give is an input here, of the size of what is added to it: so neither is too small beside
    the other to be seen.
    """
    before = match.routed_only
    assert before is not None
    shared = {name: sources for name, sources in match.weights.items() if FIELDS[name].shared}
    gate = {name: sources[0] for name, sources in shared.items() if name == "shared_expert_gate"}
    beside = replace(match, inputs={"routed": before.output}, constants=gate, weights=shared)

    def prepare(cut: Cut) -> _Trial:
        rng, tokens = np.random.default_rng(SEED), sum(TOKEN_COUNTS)
        hidden = rng.standard_normal((tokens, match.spec.hidden_size)).astype(cut.dtype.numpy())
        weights = {name: sources[0].tensor().numpy() for name, sources in shared.items()}
        added = reference.shared_expert(match.spec, hidden.astype(np.float64), weights)
        routed = (rng.standard_normal(added.shape) * np.sqrt(np.mean(added**2))).astype(cut.dtype.numpy())
        rows = {match.hidden_states: hidden, beside.inputs["routed"]: routed}
        scale = match.spec.routed_scaling_factor / before.spec.routed_scaling_factor
        return _Trial(rows, scale * routed.astype(np.float64) + added, token_batches(0, tokens))

    return _probe(model, beside, rtol, prepare)


@dataclass(frozen=True)
class _Trial:
    """Rows to feed, the `expected` output as float64, the slices of rows to be run, and initializers to be replaced."""

    rows: Mapping[ir.Value, npt.NDArray[Any]]
    expected: npt.NDArray[np.float64]
    batches: tuple[slice, ...]
    overrides: Mapping[ir.Value, npt.NDArray[Any]] = field(default_factory=dict)


def _probe(model: ir.Model, match: MoeMatch, rtol: float, prepare: Callable[[Cut], _Trial]) -> ProbeResult:
    try:
        cut = Cut(model, match)
        rounding = float16_bound(match.spec.top_k) if cut.dtype == ir.DataType.FLOAT16 else 0.0
        return _compare(cut, match.spec, prepare(cut), max(rtol, rounding))
    except (CutError, Unreachable) as error:
        return ProbeResult(math.inf, f"the block cannot be checked: {error}")
    except Exception as error:  # a block is proven, or refused
        return ProbeResult(math.inf, f"the block cannot be checked: {type(error).__name__}: {error}")
    finally:
        for source in (*match.constants.values(), *(s for sources in match.weights.values() for s in sources)):
            release(source.value.const_value)


def _compare(cut: Cut, spec: MoeSpec, trial: _Trial, bound: float) -> ProbeResult:
    worst, finite = 0.0, False
    for batch in trial.batches:
        tokens = batch.stop - batch.start
        rows = {value: array[batch] for value, array in trial.rows.items()}
        try:
            output = cut.run({**rows, **trial.overrides}, tokens)
        except CutError as error:
            return ProbeResult(math.inf, f"the block fails on {tokens} tokens: {error}")
        worst = max(worst, relative_l2(trial.expected[batch].reshape(output.shape), output.astype(np.float64)))
        if not worst <= bound:
            return ProbeResult(
                worst,
                f"the block does not compute what it seems to ({spec.summary()}): relative L2 difference "
                f"{worst:.2g} on {tokens} tokens, allowed {bound:.2g}",
            )
        finite = finite or bool(np.isfinite(output).any())
    if not finite:
        return ProbeResult(
            math.inf, "nothing that the block computes is finite: look for NaN or infinity in its weights"
        )
    return ProbeResult(worst)


class _Experts:
    """Weights of one field as `reference` indexes them: one expert is read at a time."""

    def __init__(self, match: MoeMatch, name: str) -> None:
        sources, experts = match.weights[name], match.spec.num_experts
        stacked = len(sources) < experts
        self._sources = [replace(sources[0], index=e) for e in range(experts)] if stacked else sources
        self._shape = match.field_shape(name)

    def __getitem__(self, expert: int) -> npt.NDArray[Any]:
        source = self._sources[expert]
        weights: npt.NDArray[Any] = np.array(source.tensor().numpy()).reshape(self._shape)
        release(source.value.const_value)
        return weights
