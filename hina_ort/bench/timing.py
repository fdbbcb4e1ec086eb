"""Time engines in turns, so that all of them see the same moods of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hina_ort.bench.engine import Engine
from hina_ort.bench.inputs import Router, distinct_experts

REST = 0.02
"""Seconds before a turn: threads of other pools than ONNX Runtime's spin for a while and would take cores from it."""
BURST = 3
"""Timed runs of a turn, each on inputs of its own, so that other experts are read."""
LONG = 0.05
"""A run of so many seconds is a turn, and needs no run before it that wakes the threads."""
CELL = 15.0
"""Seconds that a cell may take; turns are left out to keep to it, but for LEAST_TURNS."""
LEAST_TURNS = 3


@dataclass(frozen=True)
class Samples:
    """Of one engine at one token count: seconds of each run over all layers, and the experts that it had to read."""

    seconds: list[float]
    experts: list[int]

    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the seconds."""
        if len(self.seconds) == 1:
            return (self.seconds[0],) * 3
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, middle, high


def time_in_turns(
    engines: Sequence[Engine], router: Router, tokens: int, repeats: int, top_k: int, tick: Callable[[], None]
) -> list[Samples]:
    """Time all engines on inputs of `tokens` tokens in up to `repeats` turns each; every engine gets every input."""
    longest = [_first_run(engine, router, tokens) for engine in engines]
    burst = 1 if max(longest) > LONG else BURST
    turns = max(min(repeats, LEAST_TURNS), min(repeats, int(CELL / (sum(longest) * burst + len(engines) * REST))))
    samples = [Samples([], []) for _ in engines]
    for turn in range(turns):
        order = range(len(engines)) if turn % 2 else range(len(engines) - 1, -1, -1)
        for which in order:
            # Engines take the inputs in different turns: what one has read into the cache is not what the next reads.
            first = (turn + which) % turns * burst
            inputs = [router.draw(tokens, first + i) for i in range(burst)]
            bound = [engines[which].bind(one) for one in inputs]
            waker = engines[which].bind(router.draw(tokens, turns * burst + turn)) if longest[which] < LONG else None
            time.sleep(REST)
            if waker is not None:
                waker.run()
            for one, ready in zip(inputs, bound, strict=True):
                start = time.perf_counter()
                ready.run()
                samples[which].seconds.append(time.perf_counter() - start)
                samples[which].experts.append(distinct_experts(one, top_k))
        tick()
    return samples


def _first_run(engine: Engine, router: Router, tokens: int) -> float:
    """Seconds of a run, after one that allocates memory and maps pages."""
    bound = engine.bind(router.draw(tokens, 0))
    bound.run()
    start = time.perf_counter()
    bound.run()
    return time.perf_counter() - start
