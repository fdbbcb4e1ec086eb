"""Numeric proof of a match: the block, cut out and run in ONNX Runtime, against its MoeSpec in `reference`.

A match proposes, the probe disposes: what cannot be cut out, cannot be run, or does not agree is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes import reference
from graph_passes.cut import Cut, CutError
from graph_passes.external_data import release
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.steering import Inputs, Unreachable, steer

SEED = 20240229
HALF_ROUNDOFF = 2.0**-11


@dataclass(frozen=True)
class ProbeResult:
    """`ok`, the worst relative L2 error over the token counts, and why it is not ok."""

    ok: bool
    worst_relative_l2: float
    reason: str = ""


def probe(model: ir.Model, match: MoeMatch, rtol: float = 1e-4) -> ProbeResult:
    """Compare the block of `match` with its spec; `model` is not changed.

    `rtol` bounds the relative L2 norm of the error at each token count. In float16 a value is rounded about 8 + k times
    on its way to the output (gate, sigmoid, two products, up, down, mixing weight, weighting, k sums); the bound is
    that many unit roundoffs where this is more. A block in bfloat16 is run in float32, see `cut`.
    """
    try:
        cut = Cut(model, match)
        inputs = steer(match, cut.dtype, np.random.default_rng(SEED))
        roundings = 8 + match.spec.top_k if cut.dtype == ir.DataType.FLOAT16 else 0
        return _compare(cut, match, inputs, max(rtol, roundings * HALF_ROUNDOFF))
    except (CutError, Unreachable) as error:
        return ProbeResult(False, math.inf, f"the block cannot be checked: {error}")
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
            return ProbeResult(False, math.inf, f"the block fails on {tokens} tokens: {error}")
        worst = max(worst, relative_l2(output, expected[batch].reshape(output.shape)))
        if not worst <= bound:
            return ProbeResult(
                False,
                worst,
                f"the block does not compute what it seems to ({match.spec.summary()}): relative L2 difference "
                f"{worst:.2g} on {tokens} tokens, allowed {bound:.2g}",
            )
    return ProbeResult(True, worst)


def relative_l2(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """||got - expected|| / ||expected||; infinite for NaN, the plain norm when `expected` is zero."""
    error = float(np.linalg.norm(got.astype(np.float64) - expected))
    norm = float(np.linalg.norm(expected))
    return math.inf if math.isnan(error) or math.isnan(norm) else error / norm if norm else error


class _Experts:
    """Weights of one field as `reference` indexes them, one expert at a time, so that nothing is stacked or copied."""

    def __init__(self, match: MoeMatch, name: str) -> None:
        self._sources = match.weights[name]
        self._experts = match.spec.num_experts
        self._shape = match.spec.field_shape(name)

    def __getitem__(self, expert: int) -> npt.NDArray[Any]:
        if len(self._sources) > 1:
            return _view(self._sources[expert]).reshape(self._shape)
        stacked = _view(self._sources[0]).reshape(self._experts, *self._shape)
        expert_weights: npt.NDArray[Any] = stacked[expert]
        return expert_weights

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """A shared field, which has no expert axis."""
        return _view(self._sources[0]).reshape(self._shape).astype(dtype)


def _view(source: WeightSource) -> npt.NDArray[Any]:
    array = source.stored.numpy()
    if source.index is not None:
        array = array[source.index]
    view: npt.NDArray[Any] = array.swapaxes(-1, -2) if source.transpose else array
    return view
