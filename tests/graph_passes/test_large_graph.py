"""A graph of 340,000 nodes is converted in minutes, and a small one of the same kind is converted right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import fuse_model
from tests.graphs import run_original
from tests.large_graphs import HIDDEN, large_model

GIB = 1 << 30


def test_the_small_model_is_converted_right() -> None:
    model = ir.from_proto(large_model(layers=2, experts=6))
    x = np.random.default_rng(0).standard_normal((2, 9, HIDDEN)).astype(np.float32)
    (before,) = run_original(model, x)
    report = fuse_model(model)
    assert len(report.fused) == 2 and report.refused == []
    (after,) = run_original(model, x, options=hina_ort.session_options())
    assert relative_l2(before, after) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_graph_of_340_000_nodes(tmp_path: Path) -> None:
    """48 layers of 128 experts, through the command line, by the CPU seconds and the memory of that process alone."""
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    model = large_model(layers=48, experts=128)
    assert len(model.graph.node) >= 339_000
    onnx.save(model, source)
    del model
    command = [
        sys.executable,
        "-c",
        "from hina_ort.cli import app; app()",
        "convert",
        str(source),
        str(target),
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    report = json.loads(output)
    assert len(report["fused"]) == 48 and report["refused"] == [] and report["nodes_after"] < 1000
    seconds, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    print(f"{report['nodes_before']} nodes: {seconds:.0f} s of CPU, {memory / GIB:.2f} GiB")
    assert seconds < 300.0 and memory < 4 * GIB
