"""The native tests, and the op inside ONNX Runtime, under the sanitizers; each build keeps its own folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hina_ort import get_library_path
from tests import node as harness
from tests.ops_cpp.amx.environment import amx_environment
from tests.ops_cpp.isas import ISAS
from tests.ops_cpp.mutants import bases, mutants
from tests.ops_cpp.test_ort_versions import release

BUILD = harness.ROOT / "build"


def build(name: str, sanitizers: str, *targets: str) -> Path:
    """Build the library and its native tests under `sanitizers`, or only `targets`; return the build folder."""
    folder = BUILD / name
    tools = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    ninja = shutil.which("ninja", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert cmake and ninja, "cmake and ninja come with the extra `dev`"
    configure = [cmake, "-S", str(harness.ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DHINA_BUILD_TESTS=ON", f"-DHINA_SANITIZE={sanitizers}"]
    configure += ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    headers = BUILD / "release" / "onnxruntime_headers" / "debian" / "usr"
    if headers.is_dir():  # found by the main build: no second download
        configure.append(f"-DHINA_ORT_INCLUDE_DIR={headers}")
    compile_command = [cmake, "--build", str(folder), *(f"--target={target}" for target in targets)]
    for command in (configure, compile_command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def run_native(folder: Path, name: str, *arguments: str, leaks: bool = True) -> str:
    done = subprocess.run(
        [str(folder / "tests" / "ops_cpp" / "native" / f"{name}_test"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={
            **os.environ,
            **(amx_environment() if "avx2" in ISAS else {}),  # the emulator comes before the sanitizer's runtime
            "ASAN_OPTIONS": f"detect_leaks={int(leaks)}:verify_asan_link_order=0",
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def address_build() -> Path:
    return build("address", "address,undefined")


@pytest.mark.parametrize(
    "name", ["kernels", "placement", "qdot", "route", "scatter", "partition", "tile_bf16", "tile_int8"]
)
def test_kernels_under_address_and_undefined(address_build: Path, name: str) -> None:
    assert f"{name}: passed" in run_native(address_build, name)


def test_layers_under_address_and_undefined(address_build: Path) -> None:
    assert "forward: passed, 150 layers" in run_native(address_build, "forward", "150")


def test_layers_by_nodes_under_address_and_undefined(address_build: Path) -> None:
    assert "numa: passed, 30 layers" in run_native(address_build, "numa", "30")


def test_op_under_address_and_undefined(address_build: Path, tmp_path: Path) -> None:
    """Valid and faulty models in ONNX Runtime with the instrumented library: parsing, shape checks, runs."""
    chosen = {f"base{i}": (base.model, base.feeds) for i, base in enumerate(bases())}
    chosen |= {f"mutant{i:04}": (m.model, m.feeds) for i, m in enumerate(mutants()) if i % 5 == 0}
    for stem, (model, feeds) in chosen.items():
        (tmp_path / f"{stem}.onnx").write_bytes(model.SerializeToString())
        np.savez(tmp_path / f"{stem}.npz", **feeds)
    # Python itself is not instrumented: the sanitizer's runtime must come first, and find the C++ runtime to wrap.
    preload = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        # Python and ONNX Runtime keep memory for the life of the process, and catch their own exceptions.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "HINA_TEST_LIBRARY": str(address_build / "ops_cpp" / "libhina_ort.so"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops_cpp.run_models", str(tmp_path)],
        cwd=harness.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    ended = {line["ended"]: line for line in map(json.loads, done.stdout.splitlines()) if "ended" in line}
    assert set(ended) == set(chosen)
    assert all(line["stage"] == "done" for stem, line in ended.items() if stem.startswith("base")), ended


@pytest.mark.parametrize("newest_first", [False, True])
def test_two_runtimes_in_one_process(address_build: Path, tmp_path: Path, newest_first: bool) -> None:
    node = harness.random_node(harness.make_spec(), np.random.default_rng(1))
    model = tmp_path / "model.onnx"
    model.write_bytes(harness.make_model(node).SerializeToString())
    packages = [release("1.20.0"), release("1.32.0")]
    runtimes = [str(next(package.glob("onnxruntime/capi/libonnxruntime.so.*"))) for package in packages]
    library = str(address_build / "ops_cpp" / "libhina_ort.so")
    order = reversed(runtimes) if newest_first else runtimes
    # The tables of the op live as long as the process, by design; so do threads of ONNX Runtime.
    out = run_native(
        address_build, "two_runtimes", library, str(model), str(node.spec.hidden_size), *order, leaks=False
    )
    assert "ok 1.20.0" in out and "ok 1.32.0" in out


@pytest.mark.slow
def test_layers_under_thread_sanitizer() -> None:
    folder = build("thread", "thread")
    assert "forward: passed, 150 layers" in run_native(folder, "forward", "150")
    assert "numa: passed, 60 layers" in run_native(folder, "numa", "60")


def test_the_release_library_is_not_instrumented() -> None:
    symbols = subprocess.run(["nm", "-D", get_library_path()], capture_output=True, text=True, check=True).stdout
    assert "__asan" not in symbols and "__tsan" not in symbols
