"""Random tokens and router logits: what every engine is given, the same numbers to all."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hina_ort.bench.options import Shape

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Inputs:
    """`x` `[T, H]`, exact in bfloat16 and so in every type of activations, and the logits `[T, E]` of each layer."""

    x: Floats
    logits: tuple[Floats, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.x)

    def with_token(self, index: int, token: Inputs) -> Inputs:
        """The same but for the token `index`, which is the only one of `token`."""
        changed = Inputs(self.x.copy(), tuple(logits.copy() for logits in self.logits))
        changed.x[index] = token.x[0]
        for logits, new in zip(changed.logits, token.logits, strict=True):
            logits[index] = new[0]
        return changed


class Router:
    """Draws tokens, and logits whose top k are k experts drawn one after another by popularity (Plackett-Luce).

    Popularity is Zipf's: the r-th most popular of a layer's experts has the weight r ** -skew. Logits are
    log(weight) + Gumbel noise: the order of such sums is the order of drawing without replacement.
    """

    def __init__(self, shape: Shape, layers: int, skew: float) -> None:
        self._shape, rng = shape, np.random.default_rng(0)
        ranks = np.arange(1, shape.num_experts + 1)
        self._log_weights = [rng.permutation(-skew * np.log(ranks)) for _ in range(layers)]

    def draw(self, tokens: int, index: int) -> Inputs:
        """Inputs of `tokens` tokens; the same for the same `index`."""
        rng, shape = np.random.default_rng((tokens, index)), self._shape
        x = rng.standard_normal((tokens, shape.hidden_size), np.float32)
        logits = (weights + rng.gumbel(size=(tokens, shape.num_experts)) for weights in self._log_weights)
        return Inputs(x.astype(ml_dtypes.bfloat16).astype(np.float32), tuple(v.astype(np.float32) for v in logits))


def distinct_experts(inputs: Inputs, top_k: int) -> int:
    """How many experts the layers read for these inputs, all layers together."""
    chosen = (np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k] for logits in inputs.logits)
    return sum(len(np.unique(ids)) for ids in chosen)
