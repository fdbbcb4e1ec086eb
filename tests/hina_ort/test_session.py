"""Registration, the view of the library, and the import of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import hina_ort
from hina_ort import runtime
from hina_ort.session import is_registered
from tests.hina_ort import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fused(model: Path, tmp_path: Path) -> Path:
    hina_ort.convert(model, tmp_path / "fused.onnx")
    return tmp_path / "fused.onnx"


def test_sessions_know_the_operator(fused: Path) -> None:
    for options in (hina_ort.session_options(), hina_ort.register(onnxruntime.SessionOptions())):
        session = onnxruntime.InferenceSession(str(fused), options, providers=["CPUExecutionProvider"])
        assert session.run(None, {"input_ids": np.array([[1, 2]])})[0].shape == (1, 2, tiny.VOCABULARY)


def test_options_may_name_a_numa_mode(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HINA_NUMA", raising=False)
    right = hina_ort.session_options(numa="off")
    onnxruntime.InferenceSession(str(fused), right, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match=r"hina\.numa is 'none', expected one of"):
        hina_ort.session_options(numa="none")


def test_registering_twice_is_harmless(fused: Path) -> None:
    options = onnxruntime.SessionOptions()
    assert not is_registered(options)
    assert hina_ort.register(hina_ort.register(options)) is options
    assert is_registered(options)
    for _ in range(2):
        onnxruntime.InferenceSession(str(fused), options, providers=["CPUExecutionProvider"])


def test_without_registration_the_error_names_the_operator(fused: Path) -> None:
    with pytest.raises(Exception, match="HinaMoE"):
        onnxruntime.InferenceSession(str(fused), providers=["CPUExecutionProvider"])


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LIBRARY_NAME", "libnot_there.so")
    for call in (hina_ort.get_library_path, hina_ort.session_options, hina_ort.cpu_info):
        with pytest.raises(FileNotFoundError, match="make library"):
            call()


def test_a_broken_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF and nothing more")
    monkeypatch.setattr(runtime, "get_library_path", lambda: str(broken))
    with pytest.raises(OSError, match=r"broken\.so"):
        hina_ort.cpu_info()


def test_cpu_info_says_what_was_chosen_and_why() -> None:
    info = hina_ort.cpu_info()
    names = "vendor model features isa isa_reason amx amx_reason isa_cap minimum_ort_api"
    assert set(names.split()) <= set(info)
    assert info["isa"] in ("portable", "avx2", "avx512", "avx512_vnni") and info["isa_reason"]
    assert runtime.query("version") == hina_ort.__version__
    with pytest.raises(KeyError):
        runtime.query("no such topic")


def test_the_package_is_light_to_import() -> None:
    script = (
        "import sys, hina_ort; hina_ort.__version__\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import hina_ort.conversion\n"
        "assert all(callable(getattr(hina_ort, n)) for n in hina_ort.__all__ if n != '__version__')\n"
        "assert set(hina_ort.__all__) <= set(dir(hina_ort))\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hina_ort.no_such_name
