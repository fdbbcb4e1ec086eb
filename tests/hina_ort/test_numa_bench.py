"""What local reads are worth on two sockets: the model, its page, and the peer that is not aware of nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs import generate_numa
from hina_ort.bench import layer, onnx_engines
from hina_ort.bench.engine import Unavailable
from hina_ort.bench.numa_model import MACHINES, Sockets, interleaved, one_node, predict
from hina_ort.bench.options import LayerOptions, parse_shape
from hina_ort.cli import app
from tests.hina_ort.numa import topology

# Rates that never bind unless a test lowers them.
FREE = {"memory": 1e9, "link": 1e9, "local_ns": 100.0, "remote_ns": 200.0, "cores": 10**9}


def sockets(**rates: float) -> Sockets:
    return Sockets("tested", **(FREE | rates))  # type: ignore[arg-type]


def test_memory_binds() -> None:
    machine = sockets(memory=200.0)
    assert one_node(machine) == predict(machine)["one socket"] == pytest.approx(200.0)
    assert interleaved(machine) == interleaved(machine, 1.0) == pytest.approx(400.0)


def test_the_link_binds() -> None:
    # Each direction carries a quarter of all bytes when half of what a socket reads is remote.
    machine = sockets(memory=200.0, link=60.0)
    assert interleaved(machine) == pytest.approx(240.0)
    assert interleaved(machine, 0.95) == interleaved(machine, 1.0) == pytest.approx(400.0)
    # With all weights on a node its own cores take what the link does not let through.
    assert one_node(machine) == pytest.approx(200.0)
    assert interleaved(sockets(link=10.0), 0.75) == pytest.approx(80.0)


def test_cores_bind() -> None:
    # 10 cores with 48 lines of 64 bytes each, every 100 ns: 307.2 GB/s for a socket; a remote line takes twice as long.
    machine = sockets(cores=10)
    assert interleaved(machine, 1.0) == pytest.approx(2 * 307.2)
    assert interleaved(machine) == pytest.approx(2 * 307.2 / 1.5)
    assert one_node(machine) == pytest.approx(307.2 + 153.6, rel=1e-3)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_local_reads_never_lose(machine: Sockets) -> None:
    rates = predict(machine)
    assert rates["one socket"] <= rates["one node"] <= 2 * machine.memory
    assert rates["interleaved"] <= rates["interleaved, HinaMoE"] <= rates["bind or copy"] <= 2 * machine.memory + 1e-6


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["bench", "numa", "--memory", "200", "--link", "60", "--cores", "40", "--json"])
    found = json.loads(result.stdout)
    assert found["note"] == "predicted by a model, not measured"
    assert found["machines"][0]["gigabytes_per_second"]["interleaved"] == pytest.approx(240.0)
    table = CliRunner().invoke(app, ["bench", "numa"], env={"COLUMNS": "160"}).stdout
    assert "not measured" in table and all(machine.name in table for machine in MACHINES)
    for arguments, words in ((["--memory", "200"], "go together"), (["--memory", "0", "--link", "1"], "above 0")):
        result = CliRunner().invoke(app, ["bench", "numa", *arguments])
        assert result.exit_code == 2 and words in result.output


def test_the_page_is_up_to_date() -> None:
    assert generate_numa.PAGE.read_text(encoding="utf-8") == generate_numa.page(), "run python -m docs.generate_numa"


def options() -> LayerOptions:
    return LayerOptions(parse_shape("8,2,64,96"), tokens=(1,), peers=("numa-off",))


def test_the_peer_is_left_out_where_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    one = topology([0, 1], mode="off", mode_reason="one node is allowed")
    monkeypatch.setattr(onnx_engines, "topology", lambda: one)
    with pytest.raises(Unavailable, match="one node is allowed"):
        layer.PEERS["numa-off"](options())


def test_the_peer_is_made_without_numa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(onnx_engines, "topology", lambda: topology([0], [1]))
    monkeypatch.setattr(onnx_engines.OnnxEngine, "load", lambda *_: seen.append(os.environ["HINA_NUMA"]))
    monkeypatch.setenv("HINA_NUMA", "copy")
    for engine in (onnx_engines.HinaEngine(options()), layer.PEERS["numa-off"](options())):
        engine.load(None, 1, tmp_path)  # type: ignore[arg-type]
    assert seen == ["copy", "off"] and os.environ["HINA_NUMA"] == "copy"
