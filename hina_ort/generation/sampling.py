"""The choice of the next token."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from hina_ort.files import UsageError

Array = npt.NDArray[Any]


def probabilities(logits: Array, temperature: float, top_k: int | None, top_p: float) -> Array:
    """Chances of all tokens, float64 [V], for `logits` [V].

    As in transformers: softmax(logits / temperature) of the `top_k` largest logits (and those equal to the last one);
    of these, the fewest most likely ones whose chances reach `top_p` together (arXiv:1904.09751), scaled to sum 1.
    """
    scaled = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -top_k)[-top_k]] = -np.inf
    chances: Array = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    if top_p < 1.0:
        order = np.argsort(-chances, kind="stable")
        count = int(np.searchsorted(np.cumsum(chances[order]), top_p)) + 1
        chances[order[count:]] = 0.0
        chances /= chances.sum()
    return chances


class Sampler:
    """Chooses tokens: the likeliest for temperature 0, else by chance; the same for the same `seed`."""

    def __init__(
        self, temperature: float = 0.0, top_k: int | None = None, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        if not 0.0 <= temperature < np.inf:
            raise UsageError(f"--temperature is {temperature:g}, expected 0 (the likeliest token) or a number above it")
        if top_k is not None and top_k < 1:
            raise UsageError(f"--top-k is {top_k}, expected 1 or more; leave it out to choose among all tokens")
        if not 0.0 < top_p <= 1.0:
            raise UsageError(f"--top-p is {top_p:g}, expected a number above 0, and at most 1")
        if seed is not None and seed < 0:
            raise UsageError(f"--seed is {seed}, expected 0 or more")
        given = {"--top-k": top_k is not None, "--top-p": top_p != 1.0, "--seed": seed is not None}
        if temperature == 0.0 and any(given.values()):
            option = next(name for name, is_given in given.items() if is_given)
            raise UsageError(f"{option} needs --temperature above 0: at 0 the likeliest token is taken")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.seed = None if temperature == 0.0 else secrets.randbits(32) if seed is None else seed
        self._random = np.random.default_rng(self.seed)

    def choose(self, logits: Array) -> int:
        """The next token for float `logits` [V]."""
        if self.temperature == 0.0:
            return int(np.argmax(logits))
        sums = np.cumsum(probabilities(logits, self.temperature, self.top_k, self.top_p))
        return int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
