"""The generation loop: read the prompt, then choose a token and read it, until the text ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_passes.external_data import ModelFileError
from hina_ort.generation.decoder import Decoder
from hina_ort.generation.sampling import Sampler

Array = npt.NDArray[Any]


@dataclass
class Generated:
    """New tokens, why they ended ("stop", "length" or "interrupted"), seconds, and the sums of further outputs.

    Prefill reads the prompt and gives the first token; each later token takes a step of decoding. The token that ends
    a text is not among `tokens`.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = "length"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    totals: list[Array] = field(default_factory=list)


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    most: int,
    stop: Collection[int] = (),
    also: Sequence[str] = (),
    emit: Callable[[int], None] = lambda token: None,
) -> Generated:
    """Generate at most `most` tokens after `prompt`, or up to one of `stop`; `emit` is called with each of them.

    `also` are outputs whose values are added up. Ctrl-C ends the text where it is. Raises ModelFileError when the model
    fails, or computes no numbers.
    """
    made = Generated()
    try:
        logits, made.totals = _timed(made, decoder, prompt, also)
        while True:
            token = _choose(decoder, sampler, logits)
            if token in stop:
                made.finish = "stop"
                break
            made.tokens.append(token)
            emit(token)
            if len(made.tokens) == most:
                break
            logits, values = _timed(made, decoder, [token], also)
            made.totals = [a + b for a, b in zip(made.totals, values, strict=True)]
    except KeyboardInterrupt:
        made.finish = "interrupted"
    return made


def _timed(made: Generated, decoder: Decoder, tokens: Sequence[int], also: Sequence[str]) -> tuple[Array, list[Array]]:
    begin = time.perf_counter()
    result = decoder.read(tokens, also)
    seconds = time.perf_counter() - begin
    if made.tokens:
        made.decode_seconds += seconds
        made.decode_steps += 1
    else:
        made.prefill_seconds = seconds
    return result


def _choose(decoder: Decoder, sampler: Sampler, logits: Array) -> int:
    if not np.isfinite(logits.max()):  # NaN spreads, and -inf alone rules a token out
        raise ModelFileError(f"{decoder.source} computes NaN or infinite logits; check the model in ONNX Runtime")
    return sampler.choose(logits)
