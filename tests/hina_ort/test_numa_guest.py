"""Weights spread by a real kernel with two nodes, and read by a session: an emulated machine with Python inside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import hina_ort
from hina_ort.bench.onnx_engines import HinaEngine
from hina_ort.bench.options import LayerOptions, parse_shape
from hina_ort.bench.weights import write_weights
from tests.ops_cpp.numa import guest

PACKAGE = Path(hina_ort.__file__).parent
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "__pycache__", "site-packages", "idlelib", "ensurepip", "lib2to3", "tkinter", "config-*", "*.a"
)
PAGES = 1024


def libraries(root: Path) -> set[str]:
    """The shared libraries that programs and libraries under `root` load from elsewhere."""
    binaries = [str(path) for path in (*root.rglob("*.so*"), root / "usr/bin/python3")]
    lines = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout.splitlines()
    paths = (line.split("=>")[-1].split("(")[0].strip() for line in lines if "(0x" in line)
    return {path for path in paths if path.startswith("/") and not path.startswith(str(root))}


def build(root: Path) -> dict[str, bytes]:
    """The files of the guest: the interpreter where it finds its library, numpy, and the package."""
    (root / "usr/bin").mkdir(parents=True)
    shutil.copy(Path(sys._base_executable), root / "usr/bin/python3")  # type: ignore[attr-defined]
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / "usr/lib" / library.name, ignore=LEFT_OUT)
    packages = Path(np.__file__).parents[1]
    for folder in (packages / "numpy", packages / "numpy.libs", Path(onnxruntime.__file__).parent):
        if folder.is_dir():
            shutil.copytree(folder, root / "site" / folder.name, ignore=LEFT_OUT)
    for name in ("__init__.py", "runtime.py", "session.py", "tables.py"):
        (root / "site/hina_ort").mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, root / "site/hina_ort" / name)
    for name in ("numa", "_lib"):
        shutil.copytree(PACKAGE / name, root / "site/hina_ort" / name, ignore=LEFT_OUT)
    for path in libraries(root):
        target = root / path.lstrip("/")
        # libpython may be beside an interpreter that was not installed by the system.
        target = target if path.startswith(("/lib", "/usr/lib")) else root / "lib" / Path(path).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    write_model(root / "model")
    shutil.copy(Path(__file__).with_name("numa_init.py"), root / "init")
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def write_model(folder: Path) -> None:
    """A model of one layer, hina.onnx, with its weights in layer.data."""
    folder.mkdir()
    options = LayerOptions(parse_shape("4,2,1024,512"), "bf16", peers=())
    engine = HinaEngine(options)
    engine.load(write_weights(folder / "layer.data", options, 1, [engine.reading]), 1, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the guest told, by what it is about."""
    try:
        guest.tools()
    except guest.NoGuestError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("guest")
    machine = guest.Machine(("0", "1"), cpus=2)
    told = guest.boot(build(folder / "root"), machine, ["numa"], folder)
    return {result["what"]: result for result in told}


pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * guest.TIMEOUT)]


def test_a_cached_file_is_spread(results: dict[str, dict[str, Any]]) -> None:
    assert results["nodes"]["usable"] == results["nodes"]["workers"] == [0, 1]
    assert results["cached"]["pattern"] == "one node" and PAGES in results["cached"]["counts"]
    spread = results["spread"]
    assert (spread["moved"], spread["fitting"]) == (PAGES // 2, PAGES)
    assert spread["pattern"] == "interleaved" and spread["counts"] == [PAGES // 2, PAGES // 2]


def test_files_and_memory_of_the_context_are_spread(results: dict[str, dict[str, Any]]) -> None:
    assert results["written inside"]["pattern"] == "interleaved"
    # The kernel's own pages take part in its round, so that huge pages do not alternate strictly.
    counts = results["memory"]["counts"]
    assert sum(counts) == results["memory"]["pages"] and min(counts) > sum(counts) / 4, counts


def test_threads_keep_the_policy_and_it_is_put_back(results: dict[str, dict[str, Any]]) -> None:
    assert results["policy"]["thread"] == [[0, 1]] and results["policy"]["back"] is True


def test_pages_of_other_programs_move_for_the_privileged_only(results: dict[str, dict[str, Any]]) -> None:
    assert results["unprivileged"]["moved"] == 0
    assert len(results["unprivileged"]["warnings"]) == 1 and "50% of /mapped" in results["unprivileged"]["warnings"][0]
    assert results["privileged"]["moved"] == PAGES // 2 and results["privileged"]["warnings"] == []


def test_a_program_starts_under_the_policy(results: dict[str, dict[str, Any]]) -> None:
    assert results["child"]["mode"] == "interleave" and results["child"]["mappings"] > 5


def test_a_session_reads_each_page_on_its_node(results: dict[str, dict[str, Any]]) -> None:
    """Its first run maps the pages, and by the second one the op knows where they are; results stay what they were."""
    told = results["sessions"]
    found = [
        re.search(r"numa interleave on nodes 0, 1.* ([\d.]+) % of the bytes local", line) for line in told["lines"]
    ]
    assert any(match and float(match[1]) >= 95 for match in found), told["lines"]
    assert told["apart"] < 1e-6
