"""Models larger than the memory that a command may take."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from onnx import TensorProto

import hina_ort
from hina_ort.comparison import compare_models
from hina_ort.files import UsageError, refuse_weights_as_target, resolve
from tests.hina_ort import sparse, tiny

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30

CLI = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hina_ort.cli import app
try:
    app(sys.argv[1:], prog_name="hina-ort")
finally:
    print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0], file=sys.stderr)
"""

MEDIUM = {"hidden": 1024, "experts": 128, "intermediate": 512, "top_k": 2, "vocabulary": 32000}
"""Experts of 805 MB in float32."""


def invoke(*arguments: object) -> tuple[int, str, int]:
    """Exit code and standard output of the command, in a process of its own, and its peak memory."""
    command = [sys.executable, "-c", CLI, *(str(argument) for argument in arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout, 1024 * int(result.stderr.split()[-1])


def files(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_size for path in folder.rglob("*")}


def test_experts_larger_than_the_peak(tmp_path: Path) -> None:
    path = sparse.save_model(tmp_path / "model.onnx", 1, dtype=TensorProto.FLOAT, **MEDIUM)
    (tmp_path / "out").mkdir()
    code, out, peak = invoke("convert", path, tmp_path / "out" / "fused.onnx", "--json")
    assert code == 0 and len(json.loads(out)["fused"]) == 1
    assert json.loads(out)["bytes_after"] > 1e9 > 900e6 > peak, "of which 600 MB are code and what a proof gathers"


@pytest.mark.parametrize("command", [("inspect",), ("unfuse",), ("convert", "--weights", "f16")])
def test_commands_on_a_converted_model(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = sparse.save_model(tmp_path / "model.onnx", 1, exported=0, dtype=TensorProto.FLOAT, **MEDIUM)
    targets = [tmp_path / "out.onnx"] if command[0] != "inspect" else []
    code, _, peak = invoke(command[0], path, *targets, *command[1:])
    assert code == 0 and peak < 450 * MIB


def test_an_interrupt_while_weights_are_copied(tmp_path: Path) -> None:
    path = sparse.save_model(tmp_path / "model.onnx", 2, exported=0)
    (tmp_path / "out").mkdir()
    before = files(tmp_path)
    command = [sys.executable, "-c", CLI, "unfuse", str(path), str(tmp_path / "out" / "model.onnx")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size for p in tmp_path.glob("out/.*/*.data")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        message = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert message.startswith("error: interrupted; nothing was written\n")
    assert files(tmp_path) == before


def test_the_weights_of_a_neighbour_are_no_target(tmp_path: Path) -> None:
    old = tiny.save_model(tmp_path / "old.onnx", external=True)
    (tmp_path / "old.onnx_data").rename(tmp_path / "dst.onnx.data")
    old.write_bytes(old.read_bytes().replace(b"old.onnx_data", b"dst.onnx.data"))
    new = tiny.save_model(tmp_path / "new.onnx")
    paths = resolve(new, tmp_path / "dst.onnx", overwrite=True)
    with pytest.raises(UsageError, match=r"dst.onnx.data holds weights of .*old.onnx as well; name another DST"):
        refuse_weights_as_target(paths, set())
    old.unlink()
    refuse_weights_as_target(paths, set())


def test_models_with_data_files_of_one_name_go_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, experts in (("one", 4), ("two", 8)):
        (tmp_path / name).mkdir()
        tiny.save_model(tmp_path / name / "model.onnx", external=True, experts=experts)
        hina_ort.convert(tmp_path / name / "model.onnx", tmp_path / "out" / f"{name}.onnx")
    for name in ("one", "two"):
        worst = compare_models(tmp_path / name / "model.onnx", tmp_path / "out" / f"{name}.onnx", 1)[0].relative_l2
        assert worst < 1e-5


def copy(source: Path, target: Path, count: int) -> float:
    """Copy as dd would, and return bytes per second."""
    start = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        for _ in range(count // (8 * MIB)):
            writer.write(reader.read(8 * MIB))
    return count / (time.perf_counter() - start)


@pytest.mark.slow
def test_a_model_of_20_gb(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's shapes in bfloat16, 17 of its layers, one of them to be fused."""
    if (free := shutil.disk_usage(tmp_path).free) < 45e9:
        pytest.skip(f"it needs 45 GB of free disk, and there are {free / 1e9:.0f}")
    path = sparse.save_model(tmp_path / "model.onnx", 17, exported=1)
    data = tmp_path / "model.onnx_data"
    speed = copy(data, tmp_path / "copy", 2 * GIB)
    os.unlink(tmp_path / "copy")
    (tmp_path / "out").mkdir()
    proving = json.loads(invoke("convert", path, tmp_path / "out" / "model.onnx", "--dry-run", "--json")[1])["seconds"]
    code, out, peak = invoke("convert", path, tmp_path / "out" / "model.onnx", "--json")
    report = json.loads(out)
    assert code == 0 and len(report["fused"]) == 1 and report["already_fused"] == 16
    written = (tmp_path / "out" / "model.onnx.data").stat().st_size
    shutil.rmtree(tmp_path / "out")
    ours = written / (report["seconds"] - proving)
    print(f"peak {peak / MIB:.0f} MiB, {ours / 1e6:.0f} MB/s, a plain copy {speed / 1e6:.0f} MB/s")
    assert written > 20e9
    assert peak < GIB + 2 * 2 * 768 * 2048, "1 GiB and the largest slice, gate and up of an expert"
    assert ours > speed / 3
