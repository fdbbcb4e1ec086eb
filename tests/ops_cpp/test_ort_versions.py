"""The library under other ONNX Runtime releases, and what the binary may need and show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from hina_ort import cpu_info, get_library_path
from tests import node as harness
from tests.node import Node, Tensors, make_spec

RELEASES = ("1.20.0", "1.23.2", "1.32.0")
TOO_OLD = "1.16.3"
NEWEST_GLIBC = (2, 28)
"""That of manylinux_2_28."""

# Needs nothing but numpy and the release of ONNX Runtime on PYTHONPATH.
PROGRAM = """
import sys
import numpy as np
import onnxruntime as ort

version, library, model, inputs, output = sys.argv[1:]
assert ort.__version__ == version, ort.__version__
options = ort.SessionOptions()
options.intra_op_num_threads = 2
options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
np.save(output, session.run(["sum"], dict(np.load(inputs)))[0])
"""


def release(version: str) -> Path:
    """Folder with ONNX Runtime `version` from PyPI, fetched once into build/ort-versions."""
    folder = harness.ROOT / "build" / "ort-versions" / version
    if not folder.is_dir():
        partial = folder.with_name(f"{version}.{os.getpid()}")
        packages = [f"onnxruntime=={version}", *(["numpy==1.26.4"] if version == TOO_OLD else [])]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), *packages]
        subprocess.run(command, check=True)
        partial.rename(folder)
    return folder


@pytest.fixture
def problem(tmp_path: Path) -> tuple[Node, Tensors]:
    """A float32 node with its residual, written to `tmp_path` with inputs: type inference has to carry on."""
    spec = make_spec(num_experts=16, top_k=4, norm_topk_prob=True, shared_intermediate_size=20, experts_stacked=False)
    node = harness.random_node(spec, np.random.default_rng(1))
    feeds = harness.random_feeds(node, np.random.default_rng(2), (2, 9))
    model = harness.make_model(node, leading=["B", "S"])
    model.graph.node.append(helper.make_node("Add", ["hidden_states", "output"], ["sum"]))
    model.graph.output[0].name = "sum"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "inputs.npz", **feeds)
    return node, feeds


def run_with(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [folder / "model.onnx", folder / "inputs.npz", folder / "output.npy"]
    command = [sys.executable, "-c", PROGRAM, version, get_library_path(), *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": str(release(version))}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("version", RELEASES)
def test_release(version: str, problem: tuple[Node, Tensors], tmp_path: Path) -> None:
    done = run_with(version, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    node, feeds = problem
    want = feeds["hidden_states"] + harness.expected(node, feeds)[0]
    harness.assert_close(node, np.load(tmp_path / "output.npy"), want)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason=f"ONNX Runtime {TOO_OLD} has no wheel for this Python")
def test_too_old_a_release_is_told_both_versions(problem: tuple[Node, Tensors], tmp_path: Path) -> None:
    done = run_with(TOO_OLD, tmp_path)
    assert done.returncode == 1, done.stderr[-3000:]
    message = done.stderr.strip().splitlines()[-1]
    assert TOO_OLD in message and f"1.{cpu_info()['minimum_ort_api']}" in message, done.stderr[-3000:]


def test_without_the_library_the_op_is_named(problem: tuple[Node, Tensors], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="HinaMoE") as caught:
        ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert "hina" in str(caught.value)


def tool(name: str, *arguments: str) -> str:
    """What a binutils program says about the library."""
    if not shutil.which(name):
        pytest.skip(f"{name} (binutils) is not installed")
    return subprocess.run([name, *arguments, get_library_path()], capture_output=True, text=True, check=True).stdout


def test_links_no_onnxruntime() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d"))
    assert any(name.startswith("libc.so") for name in needed), needed
    assert not [name for name in needed if "onnx" in name]
    assert not re.findall(r"\((?:RPATH|RUNPATH)\)", tool("readelf", "-d"))


def test_exports_two_symbols() -> None:
    names = {line.split()[-1].split("@")[0] for line in tool("nm", "-D", "--defined-only").splitlines()}
    assert names == {"RegisterCustomOps", "HinaQuery"}


def test_needs_no_new_glibc() -> None:
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", tool("objdump", "-T"))}
    assert versions
    assert max(versions)[:2] <= NEWEST_GLIBC
