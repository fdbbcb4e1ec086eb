"""Time one float32 MoE layer against ONNX Runtime's own `com.microsoft::MoE`, in turns, on the same weight file.

Run it as `python -m hina_ort.bench`. The results of both are compared before anything is timed; the machine's limits
(memory bandwidth on the mapped weights, matrix-multiply rate) are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import DOMAIN, OP_TYPE, OPSET_VERSION
from hina_ort.session import register

Floats = npt.NDArray[np.float32]
PAGE = 4096
REST = 0.02
"""Seconds before a turn: the threads of the other session's pool spin for a while and would take a core from it."""
BURST = 3
"""Timed runs of a turn, each on fresh inputs, so that other experts are read; one run before them wakes the threads."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE layer, as Hugging Face configs name them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of the float32 weights of one expert."""
        return 3 * 4 * self.hidden_size * self.intermediate_size


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "olmoe": Shape(64, 8, 2048, 1024),
    "tiny": Shape(8, 2, 64, 32),
}


@dataclass(frozen=True)
class Cell:
    """Medians of one token count: milliseconds, the ratio to the peer, and what share of the machine's limits it is."""

    tokens: int
    hina_ms: float
    ort_ms: float
    speedup: float
    gigabytes_per_second: float
    bandwidth_share: float
    gigaflops: float
    compute_share: float


def write_weights(shape: Shape, path: Path) -> tuple[int, int]:
    """Write gate/up rows interleaved `[E, 2I, H]`, then down `[E, H, I]`, page-aligned; return the two offsets."""
    rng = np.random.default_rng(0)
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    with path.open("wb") as file:
        for _ in range(e):
            (rng.standard_normal((2 * i, h), np.float32) / np.float32(h**0.5)).tofile(file)
        down = -(-file.tell() // PAGE) * PAGE
        file.seek(down)
        for _ in range(e):
            (rng.standard_normal((h, i), np.float32) / np.float32(i**0.5)).tofile(file)
    return 0, down


def _external(name: str, dims: Sequence[int], data: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", data), ("offset", offset), ("length", 4 * int(np.prod(dims)))):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def make_model(shape: Shape, node: NodeProto, data: str, offsets: tuple[int, int]) -> ModelProto:
    """One-node model with inputs x `[T, H]` and logits `[T, E]` over the weights of `write_weights`."""
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    graph = helper.make_graph(
        [node],
        "layer",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", h]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["T", e]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", h])],
        [_external("fc1", (e, 2 * i, h), data, offsets[0]), _external("fc2", (e, h, i), data, offsets[1])],
    )
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 20), ("com.microsoft", 1), (DOMAIN, OPSET_VERSION))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def hina_node(shape: Shape) -> NodeProto:
    """The layer as a HinaMoE node."""
    spec = MoeSpec(
        **asdict(shape),
        weight_inputs=("gate_up_proj", "down_proj"),
        router_input="router_logits",
        gate_up_interleaved=True,
        norm_topk_prob=True,
    )
    inputs = ["x", "", "", "logits", "", "", "", "fc1", "fc2"]
    node = helper.make_node(OP_TYPE, inputs, ["y"], domain=DOMAIN, name="hina")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in spec.attributes().items())
    return node


def ort_node(shape: Shape) -> NodeProto:
    """The layer as ONNX Runtime's own MoE node, in the one form that its CPU kernel runs."""
    return helper.make_node(
        "MoE",
        ["x", "logits", "fc1", "", "fc2"],
        ["y"],
        domain="com.microsoft",
        k=shape.top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=1,
    )


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_bandwidth(path: Path, threads: int, passes: int = 3) -> float:
    """Bytes per second of reading the mapped file with `threads` threads; the best pass."""
    pages = np.memmap(path, np.float32, "r")
    parts = np.array_split(pages, threads)

    def read_all() -> None:
        workers = [threading.Thread(target=part.max) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return float(pages.nbytes / min(_seconds(read_all) for _ in range(passes)))


def matmul_rate(size: int = 2048, passes: int = 5) -> float:
    """Floating-point operations per second of numpy's float32 matrix product; the best pass."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    a @ a
    return float(2 * size**3 / min(_seconds(lambda: a @ a) for _ in range(passes)))


def bench_layer(
    shape: Shape, tokens: Sequence[int], threads: int, repeats: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Time both layers in turns; return the machine's limits and a `Cell` for each token count.

    Raises RuntimeError when the two results differ by more than 1e-5 relative L2.
    """
    with tempfile.TemporaryDirectory(prefix="hina-bench-") as folder:
        data = Path(folder) / "layer.data"
        progress(f"writing {shape.num_experts * shape.expert_bytes / 2**30:.1f} GiB of weights")
        offsets = write_weights(shape, data)
        sessions = []
        for node in (hina_node(shape), ort_node(shape)):
            path = Path(folder) / f"{node.op_type}.onnx"
            path.write_bytes(make_model(shape, node, data.name, offsets).SerializeToString())
            options = ort.SessionOptions()
            options.intra_op_num_threads = threads
            register(options)
            sessions.append(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
        progress("measuring the machine")
        bandwidth, flops = memory_bandwidth(data, threads), matmul_rate()
        cells = []
        for count in tokens:
            progress(f"timing {count} tokens")
            cells.append(_bench_tokens(shape, count, repeats, sessions, bandwidth, flops))
    return {
        "shape": asdict(shape),
        "threads": threads,
        "onnxruntime": ort.__version__,
        "bandwidth_gigabytes_per_second": bandwidth / 1e9,
        "matmul_gigaflops": flops / 1e9,
        "cells": [asdict(cell) for cell in cells],
    }


def _random_feeds(shape: Shape, tokens: int, rng: np.random.Generator) -> dict[str, Floats]:
    return {
        "x": rng.standard_normal((tokens, shape.hidden_size), np.float32),
        "logits": rng.standard_normal((tokens, shape.num_experts), np.float32),
    }


def _bench_tokens(
    shape: Shape,
    tokens: int,
    repeats: int,
    sessions: Sequence[ort.InferenceSession],
    bandwidth: float,
    flops: float,
) -> Cell:
    rng = np.random.default_rng(tokens)
    seconds: tuple[list[float], list[float]] = ([], [])
    used = []
    for turn in range(repeats):
        burst = [_random_feeds(shape, tokens, rng) for _ in range(BURST)]
        results: list[list[Floats]] = [[], []]
        for which in (0, 1) if turn % 2 else (1, 0):
            time.sleep(REST)
            sessions[which].run(None, burst[-1])
            for feeds in burst:
                start = time.perf_counter()
                results[which].append(sessions[which].run(None, feeds)[0])
                seconds[which].append(time.perf_counter() - start)
        for feeds, ours, theirs in zip(burst, *results, strict=True):
            error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
            if error > 1e-5:
                raise RuntimeError(f"the two layers differ by {error:.1e} (relative L2) at {tokens} tokens")
            used.append(len(np.unique(np.argsort(-feeds["logits"], axis=1)[:, : shape.top_k])))
    hina, peer = (statistics.median(s) for s in seconds)
    byte_rate = statistics.mean(used) * shape.expert_bytes / hina
    flop_rate = tokens * shape.top_k * 6 * shape.hidden_size * shape.intermediate_size / hina
    return Cell(
        tokens,
        1e3 * hina,
        1e3 * peer,
        peer / hina,
        byte_rate / 1e9,
        byte_rate / bandwidth,
        flop_rate / 1e9,
        flop_rate / flops,
    )


def _show(result: dict[str, Any], console: Console) -> None:
    console.print(
        f"float32 layer {result['shape']}, {result['threads']} threads, ONNX Runtime {result['onnxruntime']}; limits: "
        f"{result['bandwidth_gigabytes_per_second']:.1f} GB/s, {result['matmul_gigaflops']:.0f} GFLOP/s"
    )
    table = Table("tokens", "HinaMoE ms", "MoE ms", "speed-up", "GB/s", "of bandwidth", "GFLOP/s", "of matmul")
    for cell in result["cells"]:
        table.add_row(
            str(cell["tokens"]),
            f"{cell['hina_ms']:.2f}",
            f"{cell['ort_ms']:.2f}",
            f"{cell['speedup']:.2f}x",
            f"{cell['gigabytes_per_second']:.1f}",
            f"{cell['bandwidth_share']:.0%}",
            f"{cell['gigaflops']:.0f}",
            f"{cell['compute_share']:.0%}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the benchmark and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(
        prog="python -m hina_ort.bench", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,16,256", help="token counts, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="turns; each times three runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    tokens = [int(t) for t in options.tokens.split(",")]
    with Progress(console=Console(stderr=True), transient=True, disable=options.json) as progress:
        task = progress.add_task("", total=None)
        result = bench_layer(
            SHAPES[options.shape],
            tokens,
            options.threads,
            options.repeats,
            lambda text: progress.update(task, description=text),
        )
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
