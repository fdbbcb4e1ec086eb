"""`hina-ort bench tune`: what times mean, the file that is kept, and sessions that read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from graph_passes.op_schema import PROJECTIONS
from hina_ort.bench import tune as module
from hina_ort.bench.onnx_engines import NEVER
from hina_ort.cli import app
from tests import node as harness
from tests.node import make_spec
from tests.ops_cpp.amx.environment import amx_environment, needs_amx
from tests.ops_cpp.scenarios import start

CPU = {"amx": True, "amx_reason": "", "model": "A CPU"}


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([0.5, 0.9, 1.0, 1.2, 2.0, 3.0], 4),
        ([1.1, 1.1, 1.1, 1.1, 1.1, 1.1], 1),
        ([1.1, 0.9, 1.1, 0.9, 1.1, 1.2], 16),
        ([2.0, 2.0, 2.0, 2.0, 2.0, 0.99], NEVER),
    ],
)
def test_threshold_is_where_amx_stays_ahead(ratios: list[float], found: int) -> None:
    assert module.threshold((1, 2, 4, 8, 16, 32), ratios) == found


def test_thresholds_that_kernels_begin_with_are_within_reach() -> None:
    """int4 uses AMX from 48 tokens of an expert on: larger numbers are tried as well."""
    assert max(module.TOKENS) >= 2 * 48 and list(module.TOKENS) == sorted(set(module.TOKENS))


def tuned(monkeypatch: pytest.MonkeyPatch, cpu: dict[str, Any], *arguments: str) -> Any:
    """The command, on a layer that is not timed: AMX is ahead from four tokens of an expert on."""

    def timed(options: Any, progress: Any, references: int) -> dict[str, Any]:
        cells = [{"engines": {"vectors": {"ratio": 0.5 if count < 4 else 1.5}}} for count in options.tokens]
        return {"cells": cells}

    monkeypatch.setattr(module, "cpu_info", lambda: cpu)
    monkeypatch.setattr(module, "bench_layer", timed)
    return CliRunner().invoke(app, ["bench", "tune", *arguments], env={"COLUMNS": "200"})


def test_result_is_kept_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = CPU | {"tuning": str(tmp_path / "cache" / "tuning")}
    done = tuned(monkeypatch, cpu, "--json")
    assert done.exit_code == 0, done.output
    assert [case["amx_from"] for case in json.loads(done.stdout)["cases"]] == [4] * len(module.CASES)
    lines = Path(cpu["tuning"]).read_text().splitlines()
    assert lines == ["cpu A CPU", *(f"{case.key} 4" for case in module.CASES)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tuning"]
    shown = tuned(monkeypatch, CPU | {"tuning": str(tmp_path / "other")}, "--dry-run")
    assert shown.exit_code == 0 and "4 tokens" in shown.stdout and "nothing was kept" in shown.stdout
    assert not (tmp_path / "other").exists()


def test_an_interrupt_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "tuning"
    kept.write_text("cpu A CPU\nbf16 3\n")
    timed: list[str] = []

    def interrupted(options: Any, progress: Any, references: int) -> dict[str, Any]:
        if timed:
            raise KeyboardInterrupt
        timed.append(options.weights)
        return {"cells": [{"engines": {"vectors": {"ratio": 1.5}}} for _ in options.tokens]}

    monkeypatch.setattr(module, "cpu_info", lambda: CPU | {"tuning": str(kept)})
    monkeypatch.setattr(module, "bench_layer", interrupted)
    done = CliRunner().invoke(app, ["bench", "tune"])
    assert done.exit_code != 0 and timed == ["bf16"]
    assert kept.read_text() == "cpu A CPU\nbf16 3\n" and list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("cpu", "text"),
    [
        ({"amx": False, "amx_reason": "the CPU lacks amx_tile", "tuning": "x"}, "the CPU lacks amx_tile"),
        ({"tuning": ""}, "set HOME, XDG_CACHE_HOME or HINA_TUNING"),
    ],
)
def test_nothing_to_tune_is_said_in_a_sentence(cpu: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tuned(monkeypatch, CPU | cpu)
    assert done.exit_code == 2 and text in done.stderr and "Traceback" not in done.output


@needs_amx
def test_sessions_read_the_file_of_their_own_cpu(tmp_path: Path) -> None:
    """HINA_VERBOSE says from how many tokens on a kernel is used."""
    rng = np.random.default_rng(3)
    spec = make_spec(
        hidden_size=64, intermediate_size=32, formats=dict.fromkeys(PROJECTIONS, "int4:32"), accuracy_level=4
    )
    node = harness.random_node(spec, rng)
    (tmp_path / "one.onnx").write_bytes(harness.make_model(node).SerializeToString())
    np.savez(tmp_path / "one.npz", **harness.random_feeds(node, rng, (3,)))

    def verbose(text: bytes | None, **variables: str) -> str:
        file = tmp_path / "tuning"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_bytes(text)
        env = amx_environment() | {"HINA_VERBOSE": "1", "HINA_ISA": "amx", "HINA_TUNING": str(file)} | variables
        done = start("outputs", tmp_path, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stderr

    model = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["cpu"]["model"].encode()
    assert ", from 77 tokens on tile_int4_" in verbose(b"cpu " + model + b"\nint8 5\nint4 77\n")
    assert ", from 9 tokens on tile_int4_" in verbose(b"cpu " + model + b"\nint4 77\n", HINA_AMX_FROM="9")
    usual = verbose(None).split("; isa")[0]
    for other in (b"cpu another\nint4 77\n", b"cpu " + model + b"\nint4 x\n", b"\xff" * 9000, b""):
        assert verbose(other).split("; isa")[0] == usual
