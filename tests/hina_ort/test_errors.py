"""Wrong input gives one sentence on stderr and the right exit code, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import external_data_helper
from typer.testing import CliRunner

import hina_ort
from hina_ort.cli import app
from tests.hina_ort import tiny

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr; stdout must be empty, and stderr one line."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return result.exit_code, lines[0]


def no_file(folder: Path) -> Path:
    return folder / "missing.onnx"


def no_model(folder: Path) -> Path:
    path = folder / "text.onnx"
    path.write_text("This is not a model.\n" * 20)
    return path


def empty(folder: Path) -> Path:
    path = folder / "empty.onnx"
    path.touch()
    return path


def truncated(folder: Path) -> Path:
    path = tiny.save_model(folder / "model.onnx")
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def no_data(folder: Path) -> Path:
    path = tiny.save_model(folder / "model.onnx", external=True)
    (folder / "model.onnx_data").unlink()
    return path


def short_data(folder: Path) -> Path:
    path = tiny.save_model(folder / "model.onnx", external=True)
    os.truncate(folder / "model.onnx_data", 1000)
    return path


def data_outside(folder: Path) -> Path:
    path = tiny.save_model(folder / "model.onnx", external=True)
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if external_data_helper.uses_external_data(t))
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = "../model.onnx_data"
    path.write_bytes(model.SerializeToString())
    return path


def folder_without_model(folder: Path) -> Path:
    path = folder / "exported"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


BROKEN: list[tuple[Callable[[Path], Path], str]] = [
    (no_file, "does not exist"),
    (no_model, "no ONNX model"),
    (empty, "no ONNX model"),
    (truncated, "cut off"),
    (no_data, "model.onnx_data"),
    (short_data, "cut off"),
    (data_outside, "outside"),
    (folder_without_model, "model.onnx"),
]


@pytest.mark.parametrize(("make", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_broken_source(tmp_path: Path, command: str, make: Callable[[Path], Path], words: str) -> None:
    source = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, message = invoke(command, source, *([tmp_path / "out"] if command == "convert" else []))
    assert code == 1
    assert words in message and source.name in message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_target_where_nothing_can_be_made_is_named(exported: Path) -> None:
    code, message = invoke("convert", exported, "/proc/fused")  # not even root can make a folder there
    assert code == 1
    assert message.startswith("error: /proc/fused cannot be used: ")


def test_source_and_target_may_not_be_the_same(model: Path, exported: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    alias = tmp_path / "alias.onnx"
    alias.symlink_to(model)
    for source, target in (
        (model, model),
        (model, tmp_path / "exported" / ".." / model.name),
        (model, alias),
        (exported, exported),
        (exported / "model.onnx", exported / "model.onnx"),
    ):
        code, message = invoke("convert", source, target, "--overwrite")
        assert code == 2 and "same" in message
    assert model.read_bytes() == content


def test_the_weights_of_the_source_are_no_target(exported: Path) -> None:
    data = exported / "model.onnx_data"
    content = data.read_bytes()
    code, message = invoke("convert", exported / "model.onnx", data, "--overwrite")
    assert code == 2 and "weights" in message
    assert data.read_bytes() == content


def test_the_weights_of_the_source_are_no_target_behind_a_link(exported: Path, tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    home.mkdir()
    real = home / "fused.onnx.data"
    for path, target in ((exported / "model.onnx", home / "m"), (exported / "model.onnx_data", real)):
        path.rename(target)
        path.symlink_to(target)
    content = real.read_bytes()
    code, message = invoke("convert", exported / "model.onnx", home / "fused.onnx", "--overwrite")
    assert code == 2 and "holds the weights" in message
    assert real.read_bytes() == content


def test_source_and_target_are_of_one_kind(model: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert invoke("convert", model, tmp_path / "folder", "--overwrite")[0] == 2
    assert invoke("convert", exported, tmp_path / "fused.onnx")[0] == 2
    assert invoke("convert", exported, model, "--overwrite")[0] == 2


def test_a_target_that_is_no_file_is_not_replaced(model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, error = invoke("convert", model, pipe, "--overwrite")
    assert code == 2 and "device or a pipe" in error and pipe.is_fifo()


def test_a_target_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    code, message = invoke("convert", model, tmp_path / "no" / "such" / "fused.onnx")
    assert code == 1 and "does not exist" in message
    code, message = invoke("convert", model, model / "fused.onnx")
    assert code == 1 and "does not exist" in message
    code, message = invoke("convert", model, "/proc/fused.onnx")  # no one can make a file there, root neither
    assert code == 1 and "/proc" in message


@pytest.mark.parametrize(
    "options",
    [
        ["--check", "-1"],
        ["--check", "1.5"],
        ["--check", "FULL"],
        ["--check", "x"],
        ["--rtol", "0"],
        ["--rtol", "nan"],
        ["--rtol", "2"],
        ["--unknown"],
    ],
)
def test_bad_options_are_usage_errors(model: Path, tmp_path: Path, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out.onnx"), *options])
    assert result.exit_code == 2 and "rror" in result.stderr
    assert not (tmp_path / "out.onnx").exists()


def test_missing_arguments_are_usage_errors(model: Path) -> None:
    for arguments in (["convert"], ["convert", str(model)], ["inspect"], ["no-such-command"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_bad_values_are_errors_in_the_api(model: Path, tmp_path: Path) -> None:
    for values in ({"check": -1}, {"check": "some"}, {"rtol": 0.0}, {"rtol": float("nan")}):
        with pytest.raises(ValueError, match=f"--{next(iter(values))} is"):
            hina_ort.convert(model, tmp_path / "out.onnx", **values)


def test_options_are_checked_before_paths(tmp_path: Path) -> None:
    code, message = invoke("convert", tmp_path / "missing.onnx", tmp_path / "out.onnx", "--block", 32)
    assert code == 2 and "--block is for int8 and int4 weights" in message


SLOW_CLI = """
import signal, sys, time
from graph_passes import external_data
from graph_passes.quantize import tensors
from hina_ort import conversion
from hina_ort.cli import app

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore Ctrl-C

def stop(*_, **__):
    print("ready", flush=True)
    time.sleep(60)

save = external_data.save
match sys.argv.pop(1):
    case "writing":
        external_data.save = lambda model, path, progress=None: save(model, path, stop)
    case "quantising":
        tensors.quantise = stop
    case "checking":
        conversion.compare_models = stop
app()
"""


@pytest.mark.parametrize(
    ("kind", "stage", "number", "code"),
    [
        ("file", "writing", signal.SIGINT, 130),
        ("file", "checking", signal.SIGINT, 130),
        ("folder", "writing", signal.SIGINT, 130),
        ("folder", "checking", signal.SIGTERM, 143),
        ("file", "quantising", signal.SIGTERM, 143),
        ("folder", "quantising", signal.SIGINT, 130),
    ],
)
def test_an_interrupt_leaves_nothing(
    model: Path, exported: Path, tmp_path: Path, kind: str, stage: str, number: int, code: int
) -> None:
    source, target = (model, tmp_path / "fused.onnx") if kind == "file" else (exported, tmp_path / "fused")
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-c", SLOW_CLI, stage, "convert", str(source), str(target), "--check", "1"]
    command += ["--weights", "int4"] if stage == "quantising" else []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_runs_as_a_program(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from hina_ort.cli import app; app()"]
    good = subprocess.run([*command, "convert", model, tmp_path / "a.onnx", "--quiet"], cwd=ROOT, capture_output=True)
    assert (good.returncode, good.stdout, good.stderr) == (0, b"", b"")
    bad = subprocess.run([*command, "convert", model, tmp_path / "a.onnx"], cwd=ROOT, capture_output=True)
    assert bad.returncode == 1 and bad.stderr.count(b"\n") == 1


def without_an_input(node: onnx.NodeProto) -> None:
    del node.input[1:]


def without_a_type(node: onnx.NodeProto) -> None:
    node.op_type = "Cast"
    del node.input[1:]
    node.attribute.append(onnx.helper.make_attribute("to", -1))  # which onnx.checker does not mind


@pytest.mark.parametrize("spoil", [without_an_input, without_a_type])
@pytest.mark.parametrize("command", ["convert", "inspect", "explain"])
def test_an_invalid_graph_is_one_sentence(
    tmp_path: Path, command: str, spoil: Callable[[onnx.NodeProto], None]
) -> None:
    path = tiny.save_model(tmp_path / "model.onnx")
    proto = onnx.load(path)
    products = [node for node in proto.graph.node if node.op_type == "MatMul"]
    spoil(products[-1])
    onnx.save(proto, path)
    arguments = {
        "convert": ["convert", path, tmp_path / "fused.onnx"],
        "inspect": ["inspect", path],
        "explain": ["inspect", path, "--explain", products[0].output[0]],
    }
    code, line = invoke(*arguments[command])
    assert code == 1 and "cannot be read as a graph" in line and "check that ONNX Runtime loads it" in line
    assert not (tmp_path / "fused.onnx").exists()


def test_an_interrupt_while_onnxruntime_is_imported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bindings make an ImportError of it."""

    def fail(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    monkeypatch.setattr("hina_ort.inspection.inspect_model", fail)
    assert invoke("inspect", model) == (130, "error: interrupted; nothing was written")
    missing = ImportError("no module")
    monkeypatch.setattr("hina_ort.inspection.inspect_model", lambda *_, **__: (_ for _ in ()).throw(missing))
    assert CliRunner().invoke(app, ["inspect", str(model)]).exception is missing
