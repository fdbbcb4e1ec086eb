"""Numeric proof of a match: the block, cut out and run in ONNX Runtime, against its MoeSpec in `reference`.

A match proposes, the probe disposes: what cannot be cut out, cannot be run, or does not agree is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes import reference
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.cut import Cut, CutError
from graph_passes.external_data import release
from graph_passes.matchers.match import MoeMatch
from graph_passes.steering import Inputs, Unreachable, steer

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
    try:
        cut = Cut(model, match)
        inputs = steer(match, cut.dtype, np.random.default_rng(SEED))
        rounding = float16_bound(match.spec.top_k) if cut.dtype == ir.DataType.FLOAT16 else 0.0
        return _compare(cut, match, inputs, max(rtol, rounding))
    except (CutError, Unreachable) as error:
        return ProbeResult(math.inf, f"the block cannot be checked: {error}")
    except Exception as error:  # a block is proven, or refused
        return ProbeResult(math.inf, f"the block cannot be checked: {type(error).__name__}: {error}")
    finally:
        for source in (*match.constants.values(), *(s for sources in match.weights.values() for s in sources)):
            release(source.value.const_value)


def _compare(cut: Cut, match: MoeMatch, inputs: Inputs, bound: float) -> ProbeResult:
    router: dict[str, Any] = {**inputs.router, **inputs.constants}
    weights: Any = {name: _Experts(match, name) for name in match.spec.weight_inputs}
    expected, _ = reference.hina_moe(match.spec, inputs.hidden, weights, **router)
    feeds = {match.hidden_states: inputs.hidden} | {match.inputs[name]: rows for name, rows in inputs.router.items()}
    worst = 0.0
    for batch in inputs.batches:
        tokens = batch.stop - batch.start
        rows = {value: array[batch] for value, array in feeds.items()}
        try:
            output = cut.run({**rows, **inputs.overrides}, tokens)
        except CutError as error:
            return ProbeResult(math.inf, f"the block fails on {tokens} tokens: {error}")
        worst = max(worst, relative_l2(expected[batch].reshape(output.shape), output.astype(np.float64)))
        if not worst <= bound:
            return ProbeResult(
                worst,
                f"the block does not compute what it seems to ({match.spec.summary()}): relative L2 difference "
                f"{worst:.2g} on {tokens} tokens, allowed {bound:.2g}",
            )
    return ProbeResult(worst)


class _Experts:
    """Weights of one field as `reference` indexes them: one expert is read at a time."""

    def __init__(self, match: MoeMatch, name: str) -> None:
        sources, experts = match.weights[name], match.spec.num_experts
        stacked = len(sources) < experts
        self._sources = [replace(sources[0], index=e) for e in range(experts)] if stacked else sources
        self._shape = match.spec.field_shape(name)

    def __getitem__(self, expert: int) -> npt.NDArray[Any]:
        weights: npt.NDArray[Any] = self._sources[expert].tensor().numpy().reshape(self._shape)
        return weights
