"""The benchmark of one layer: HinaMoE and its peers on the same weights and inputs, and the machine's limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hina_ort.bench import machine
from hina_ort.bench.accuracy import reference, relative_l2, tolerance
from hina_ort.bench.engine import Engine, Unavailable
from hina_ort.bench.inputs import Inputs, Router
from hina_ort.bench.onnx_engines import HinaEngine, OrtEngine, UnawareEngine, VectorsEngine
from hina_ort.bench.options import LayerOptions
from hina_ort.bench.timing import Samples, time_in_turns
from hina_ort.bench.torch_engine import TorchEngine
from hina_ort.bench.vllm_engine import VllmEngine
from hina_ort.bench.weights import WeightFile, layer_bytes, matrices, matrix_bytes, write_weights
from hina_ort.comparison import CheckError
from hina_ort.numa import interleave
from hina_ort.runtime import cpu_info

PEERS: dict[str, Callable[[LayerOptions], Engine]] = {
    "ort": OrtEngine,
    "torch": TorchEngine,
    "vllm": VllmEngine,
    "vectors": VectorsEngine,
    "numa-off": UnawareEngine,
}
CACHES = 4
"""The layers' bytes are this many times those of the last-level cache, so that weights come from memory."""
MAX_LAYERS = 16
_TOUCHES = 8
"""Tokens per expert that leave few experts out: exp(-8) of them."""
MEMORY_SHARE = 0.75
"""Of the memory that is available, for weights and the engines' copies of them."""

Progress = Callable[[str, int, int], None]


@dataclass
class _Bench:
    """A benchmark in progress."""

    options: LayerOptions
    layers: int
    file: WeightFile
    engines: list[Engine]
    progress: Progress

    @property
    def router(self) -> Router:
        return Router(self.options.shape, self.layers, self.options.skew)


def bench_layer(
    options: LayerOptions, progress: Progress | None = None, references: int | None = None
) -> dict[str, Any]:
    """Check and time one layer; the keys of the result are those of docs/cli.md.

    So many layers are compared with the exact `references`, which take long to compute: all of them unless given.
    `progress` gets a stage, how much of it is done, and its size. Raises CheckError, and times nothing, when results
    differ by more than the tolerance, or when not even one layer fits the memory.
    """
    tell = progress or (lambda stage, done, total: None)
    engines: list[Engine] = [HinaEngine(options)]
    missing = []
    for name in options.peers:
        try:
            engines.append(PEERS[name](options))
        except Unavailable as reason:
            missing.append({"name": name, "reason": str(reason)})
    layers = choose_layers(
        layer_bytes(options),
        sum(engine.extra_bytes for engine in engines),
        machine.last_level_cache(),
        machine.available_memory(),
    )
    with tempfile.TemporaryDirectory(prefix="hina-bench-") as folder:
        tell("writing weights", 0, 1)
        file = write_weights(Path(folder) / "layers.data", options, layers, [engine.reading for engine in engines])
        # Whoever is aware of nodes is compared on weights that are spread over them.
        spread = interleave(file.path) if any(e.name == UnawareEngine.name for e in engines) else nullcontext()
        with spread:
            for done, engine in enumerate(engines):
                tell(f"loading {engine.name}", done, len(engines))
                _load(engine, file, layers, Path(folder))
        bench = _Bench(options, layers, file, engines, tell)
        checks = _check(bench, layers if references is None else min(references, layers))
        _touch(bench)
        tell("measuring the machine", 0, 1)
        before = machine.measure_limits(file.path, options.threads)
        samples = [_time(bench, tokens) for tokens in options.tokens]
        # What else runs on the machine slows one measurement or the other.
        limits = before.best(machine.measure_limits(file.path, options.threads))
    return {
        "shape": asdict(options.shape) | {"limit": str(options.shape.limit)},
        "weights": options.weights,
        "block": options.format.block if options.format else None,
        "zero_points": options.zero_points,
        "activations": options.activations,
        "accuracy_level": 4 if options.int8_activations else 0,
        "skew": options.skew,
        "threads": options.threads,
        "layers": layers,
        "layer_bytes": layer_bytes(options),
        "machine": machine.describe() | asdict(limits),
        "versions": machine.versions(),
        "engines": [{key: getattr(e, key) for key in ("name", "label", "version", "note")} for e in engines],
        "missing": missing,
        "checks": checks,
        "cells": [rates(bench, limits, tokens, times) for tokens, times in zip(options.tokens, samples, strict=True)],
    }


def _load(engine: Engine, file: WeightFile, layers: int, folder: Path) -> None:
    try:
        engine.load(file, layers, folder)
    except Exception as error:  # the exceptions of ONNX Runtime have no base class of their own
        raise CheckError(f"{engine.label} refuses the layer, leave it out of --vs: {error}") from error


def choose_layers(own_bytes: int, extra_bytes: int, cache: int, available: int | None) -> int:
    """How many layers of `own_bytes`, each with `extra_bytes` of the engines, make CACHES times the cache.

    Fewer where the memory `available` does not hold them, and at most MAX_LAYERS; CheckError when it holds none.
    """
    wanted = min(-(-CACHES * cache // own_bytes), MAX_LAYERS)
    if available is None:
        return wanted
    fitting = int(MEMORY_SHARE * available) // (own_bytes + extra_bytes)
    if fitting < 1:
        raise CheckError(
            f"a layer and the copies of all engines take {(own_bytes + extra_bytes) / 2**30:.1f} GiB of the "
            f"{available / 2**30:.1f} GiB of memory available: choose fewer peers or a smaller --shape"
        )
    return min(wanted, fitting)


def _check(bench: _Bench, references: int) -> list[dict[str, Any]]:
    """Compare each engine with the exact result of one token of so many layers, and with HinaMoE on all tokens."""
    shape, checks = bench.options.shape, []
    token = bench.router.draw(1, 1 << 20)
    exact: dict[str, list[Any]] = {}
    for done, engine in enumerate(bench.engines):
        bench.progress("computing the reference", done, len(bench.engines))
        if engine.reading.values not in exact:
            exact[engine.reading.values] = [
                reference(shape, bench.file, engine.reading, i, token) for i in range(references)
            ]
    for done, tokens in enumerate(bench.options.tokens):
        bench.progress("checking results", done, len(bench.options.tokens))
        place = tokens // 2
        inputs = bench.router.draw(tokens, 0).with_token(place, token)
        ours = None
        for engine in bench.engines:
            outputs = np.stack(_outputs(engine, inputs)).astype(np.float64)
            allowed = tolerance(shape, engine.arithmetic)
            checks.append(
                _compared(
                    engine,
                    "reference",
                    tokens,
                    np.stack(exact[engine.reading.values])[:, 0],
                    outputs[:references, place],
                    allowed,
                )
            )
            if ours is None:
                ours, own = outputs, engine
            elif engine.reading.values == own.reading.values:
                allowed += tolerance(shape, own.arithmetic)
                checks.append(_compared(engine, "hina", tokens, ours, outputs, allowed))
    return checks


def _outputs(engine: Engine, inputs: Inputs) -> list[Any]:
    bound = engine.bind(inputs)
    bound.run()
    return bound.outputs()


def _compared(engine: Engine, other: str, tokens: int, expected: Any, got: Any, allowed: float) -> dict[str, Any]:
    """The worst relative L2 error of a layer; CheckError when it is more than `allowed`, or no number."""
    error = max(relative_l2(e, g) for e, g in zip(expected, got, strict=True))
    if not error <= allowed:
        against = "the float64 reference" if other == "reference" else "HinaMoE"
        raise CheckError(
            f"{engine.label} differs from {against} by {error:.1e} (relative L2) at {tokens} tokens, where rounding "
            f"explains {allowed:.1e}; nothing was timed"
        )
    return {"engine": engine.name, "against": other, "tokens": tokens, "relative_l2": error, "tolerance": allowed}


def _touch(bench: _Bench) -> None:
    """Let every engine read nearly all weights once: the first reading of a mapped page costs more than later ones."""
    shape = bench.options.shape
    inputs = bench.router.draw(-(-_TOUCHES * shape.num_experts // shape.top_k), 0)
    for done, engine in enumerate(bench.engines):
        bench.progress("reading all weights", done, len(bench.engines))
        engine.bind(inputs).run()


def _time(bench: _Bench, tokens: int) -> list[Samples]:
    """Time all engines at one token count."""
    options, done = bench.options, 0
    stage = f"timing {tokens} tokens"

    def tick() -> None:
        nonlocal done
        done += 1
        bench.progress(stage, done, options.repeats)

    bench.progress(stage, 0, options.repeats)
    samples = time_in_turns(bench.engines, bench.router, tokens, options.repeats, options.shape.top_k, tick)
    bench.progress(stage, options.repeats, options.repeats)
    return samples


def rates(bench: _Bench, limits: machine.Limits, tokens: int, samples: Sequence[Samples]) -> dict[str, Any]:
    """What times mean: rates, shares of the machine's limits, and ratios to HinaMoE, all for one layer.

    Work is the same for all engines: the bytes of the experts chosen, as HinaMoE stores them, and the operations of
    the products. The least time is what the machine needs to read those bytes or to do those operations, whichever is
    longer.
    """
    options, layers = bench.options, bench.layers
    routed, shared = (
        sum(matrix_bytes(options, m) for m in matrices(options.shape) if m.name.startswith("shared_") == is_shared)
        for is_shared in (False, True)
    )
    operations = options.shape.operations(tokens)
    peak = limits.int8_ops if options.int8_activations else limits.float32_flops
    if options.weights == "bf16" and (options.activations == "bf16" or cpu_info()["amx"]):
        # With AMX activations of other types are multiplied as two bfloat16 numbers each.
        peak = max(peak, (limits.bfloat16_flops or 0.0) / (1 if options.activations == "bf16" else 2))
    experts = [count / layers for count in samples[0].experts]
    read = sum(experts) / len(experts) * routed + shared
    least = max(read / limits.read_bytes_per_second, operations / peak)
    engines = {}
    for engine, times in zip(bench.engines, samples, strict=True):
        low, median, high = (seconds / layers for seconds in times.quartiles())
        engines[engine.name] = {
            "median_ms": 1e3 * median,
            "lower_ms": 1e3 * low,
            "upper_ms": 1e3 * high,
            "ratio": median * layers / samples[0].quartiles()[1],
            "gigabytes_per_second": read / median / 1e9,
            "bandwidth_share": read / median / limits.read_bytes_per_second,
            "gigaops_per_second": operations / median / 1e9,
            "compute_share": operations / median / peak,
            "limit_share": least / median,
        }
    return {
        "tokens": tokens,
        "runs": len(samples[0].seconds),
        "distinct_experts": sum(experts) / len(experts),
        "bytes": round(read),
        "operations": operations,
        "least_ms": 1e3 * least,
        "engines": engines,
    }
