"""Weights spread over NUMA nodes, programs started so, and reports of where weights are."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes import external_data
from hina_ort.cli import app
from hina_ort.files import UsageError
from hina_ort.numa import NumaWarning, command, files, interleave, interleaving, kernel, placement, show
from hina_ort.numa.files import MappedFile, spread
from hina_ort.numa.kernel import MPOL_INTERLEAVE, PAGE, Kernel, Policy
from tests.hina_ort.numa import FakeKernel, topology

Machine = Callable[..., None]
PAGES = 40
CLI = [sys.executable, "-c", "from hina_ort.cli import app; app()"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine look like another one."""

    def become(*cpus: Any, **more: Any) -> None:
        monkeypatch.setattr(interleaving, "topology", lambda: topology(*cpus, **more))

    return become


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data file whose last page is not full."""
    path = tmp_path / "weights.data"
    path.write_bytes(os.urandom(PAGES * PAGE - 100))
    return path


def one_real_node() -> int:
    """A node that this process may use; skips the test where the kernel's calls are refused, as in some containers."""
    try:
        Kernel().set_policy(Kernel().policy())
        page = np.zeros(2 * PAGE, np.uint8)
        address = -(-page.ctypes.data // PAGE) * PAGE
        return int(Kernel().nodes_of(np.array([address], np.uint64))[0])
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"the kernel refuses NUMA calls here: {error}")


def test_the_policy_holds_in_the_context_and_is_put_back(machine: Machine) -> None:
    machine([0, 1], [2, 3], [4, 5])
    calls = FakeKernel()
    calls.policy = (2 | 1 << 14, (70,))  # bound, with a flag of the mode, to a node of the second word
    with interleave(kernel=Kernel(calls)) as done:
        assert calls.policy == (MPOL_INTERLEAVE, (0, 1, 2)) and done == []
    assert calls.policy == (2 | 1 << 14, (70,))
    with pytest.raises(ZeroDivisionError), interleave(nodes=[2, 0], kernel=Kernel(calls)):
        assert calls.policy == (MPOL_INTERLEAVE, (0, 2))
        raise ZeroDivisionError
    assert calls.policy == (2 | 1 << 14, (70,))


@pytest.mark.parametrize(
    "shape",
    [
        {"cpus": [[0, 1]]},
        {"cpus": [[0, 1], [2, 3]], "memory": [1]},  # --cpuset-mems
        {"cpus": [[0, 1], [2, 3]], "allowed": [0, 1]},  # --cpuset-cpus
        {"cpus": [[0, 1], []]},  # a node of memory alone, CXL for example
    ],
    ids=["one", "memory", "CPUs", "memory alone"],
)
def test_nothing_is_done_where_one_node_serves(machine: Machine, shape: dict[str, Any], data: Path) -> None:
    machine(*shape.pop("cpus"), **shape)
    calls = FakeKernel(refuses=["get_mempolicy", "set_mempolicy", "move_pages"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with interleave(data, kernel=Kernel(calls)) as done:
            assert done == []
    assert calls.policies == []


def test_a_node_that_may_not_be_used_is_refused(machine: Machine) -> None:
    machine([0, 1], [2, 3], [4], memory=[0, 1])
    for nodes, words in (([0, 2], "node 2"), ([], "no node")):
        with pytest.raises(UsageError, match=rf"{words} was asked for.*\[0, 1\]"), interleave(nodes=nodes):
            pytest.fail("the context was entered")


def test_a_refusal_is_one_warning(machine: Machine, data: Path) -> None:
    machine([0, 1], [2, 3])
    calls = FakeKernel(refuses=["set_mempolicy"])
    with pytest.warns(NumaWarning, match="refuses.*SYS_NICE.*numactl") as told, interleave(data, kernel=Kernel(calls)):
        assert calls.policy == (0, ())
    assert len(told) == 1 and told[0].filename == __file__


def test_the_kernel_knows_the_policy_and_threads_and_programs_inherit_it() -> None:
    node = one_real_node()
    before, here = Kernel().policy(), []
    program = "from hina_ort.numa.kernel import Kernel; print(Kernel().policy())"
    Kernel().set_policy(Policy(MPOL_INTERLEAVE, (node,)))
    try:
        thread = threading.Thread(target=lambda: here.append(Kernel().policy()))
        thread.start()
        thread.join()
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    finally:
        Kernel().set_policy(before)
    assert here == [Policy(MPOL_INTERLEAVE, (node,))] and child.strip() == str(here[0])
    assert Kernel().policy() == before
    with pytest.raises(OSError, match="Invalid argument"):
        Kernel().set_policy(Policy(MPOL_INTERLEAVE, (1000,)))


def test_a_cold_file_is_read_into_the_page_cache(data: Path) -> None:
    with data.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with MappedFile(data) as file:
        assert file.pages == PAGES and file.tells
        if file.resident(0, PAGES).any():
            pytest.skip("this file system keeps files in memory")
        file.read(3, 2)
        assert np.flatnonzero(file.resident(0, PAGES)).tolist() == [3, 4]
        file.map(np.array([3]))
        # What is not read stays on the disk, the page that ends the file included.
        assert not file.resident(5, PAGES - 5).any()
        file.read(0, PAGES)
        assert file.resident(0, PAGES).all()


def test_real_pages_are_where_the_kernel_says(data: Path) -> None:
    node = one_real_node()
    done = spread(data, (node,), Kernel())
    assert done.fitting == done.pages == PAGES and done.done
    with MappedFile(data) as file:
        assert (Kernel().nodes_of(file.addresses(0, PAGES)) < 0).all()  # cached, but not mapped
        file.map(np.arange(PAGES))
        assert (Kernel().nodes_of(file.addresses(0, PAGES)) == node).all()


@pytest.mark.parametrize(("chunk", "capable"), [(1 << 20, True), (7, False)])
def test_pages_that_are_cached_elsewhere_are_moved(
    machine: Machine, data: Path, chunk: int, capable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(*[[i] for i in range(4)])
    monkeypatch.setattr(files, "CHUNK", chunk)
    calls = FakeKernel(lambda address: 3, capable=capable)
    with interleave(data, nodes=[3, 1], kernel=Kernel(calls)) as done:
        pass
    assert [(one.pages, one.moved, one.fitting) for one in done] == [(PAGES, PAGES // 2, PAGES)]
    # Every second page, from the second on, is on node 1 now.
    first = min(calls.moved) - PAGE
    assert calls.moved == {first + i * PAGE: 1 for i in range(1, PAGES, 2)}


def test_a_round_may_begin_with_any_node(machine: Machine, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([0], [1], [2])
    monkeypatch.setattr(files, "CHUNK", 7)
    first: list[int] = []

    def turn(address: int) -> int:
        first[:] = first or [address]
        page = (address - first[0]) // PAGE
        return 0 if page == 20 else (page + 2) % 3  # but for page 20, which is on node 1 then

    calls = FakeKernel(turn)
    with interleave(data, kernel=Kernel(calls)) as done:
        pass
    assert done[0].fitting == PAGES and calls.moved == {first[0] + 20 * PAGE: 1}


def test_pages_that_stay_are_told_with_what_to_do(machine: Machine, data: Path) -> None:
    machine([0], [1])
    calls = FakeKernel(stuck=lambda address: True)
    words = rf"50% of {data} are interleaved.*dd if={data} iflag=nocache count=0"
    with pytest.warns(NumaWarning, match=words), interleave(data, kernel=Kernel(calls)) as done:
        pass
    assert done[0].fitting == PAGES // 2 and done[0].moved == 0


def test_without_move_pages_the_file_is_read_and_the_rest_is_told(
    machine: Machine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([0], [1])
    monkeypatch.setattr(files, "CHUNK", 7)
    read: list[int] = []
    monkeypatch.setattr(MappedFile, "resident", lambda self, first, count: np.zeros(count, np.bool_))
    monkeypatch.setattr(MappedFile, "read", lambda self, first, count: read.append(count))
    calls = FakeKernel(refuses=["move_pages"])
    with pytest.warns(NumaWarning, match="refuses move_pages.*seccomp"), interleave(data, kernel=Kernel(calls)) as done:
        assert calls.policy == (MPOL_INTERLEAVE, (0, 1))
    assert done[0].refused == "Operation not permitted" and sum(read) == done[0].read == PAGES
    with pytest.raises(FileNotFoundError), interleave(data.parent / "missing", kernel=Kernel(calls)):
        pytest.fail("the context was entered")
    assert calls.policy == (0, ())


def test_the_data_of_a_model_is_spread(machine: Machine, exported: Path) -> None:
    machine([0], [1])
    for path in (exported, exported / "model.onnx"):
        with interleave(path, kernel=Kernel(FakeKernel())) as done:
            pass
        assert [Path(one.path).name for one in done] == ["model.onnx_data"]


# Reports: doctor --model.


@pytest.fixture
def fused(model: Path, tmp_path: Path) -> Path:
    """A model of two HinaMoE nodes with its weights beside it."""
    path = tmp_path / "fused.onnx"
    hina_ort.convert(model, path)
    return path


class Library:
    """What the library would say of a matrix; keeps the bytes that it was asked about."""

    def __init__(self, *patterns: str) -> None:
        self.patterns, self.seen = patterns, list[bytes]()

    def __call__(self, address: int, size: int) -> dict[str, Any]:
        pattern = self.patterns[len(self.seen) % len(self.patterns)]
        self.seen.append(ctypes.string_at(address, size))
        nodes = [1, 0] if pattern == "interleaved" else []
        return {
            "pattern": pattern,
            "nodes": nodes,
            "page_bytes": 4096,
            "huge_pages": False,
            "reason": f"it is {pattern}",
        }


def matrices(path: Path) -> set[bytes]:
    """The matrices of the experts of a model, one by one."""
    found = set()
    for value in external_data.load(path).graph.initializers.values():
        if value.const_value is not None and "experts" in str(value.name):
            array = value.const_value.numpy()
            found |= {matrix.tobytes() for matrix in (array if array.ndim == 3 else [array])}
    return found


def test_each_matrix_is_looked_at_where_it_is_mapped(fused: Path) -> None:
    library = Library("interleaved")
    found = placement.model_placement(fused, kernel=Kernel(FakeKernel(lambda at: at // PAGE % 2)), look=library)
    assert set(library.seen) == matrices(fused) and len(library.seen) == len(matrices(fused)) > 8
    assert [layer["layer"] for layer in found["layers"]] == ["layers.0", "layers.1"]
    for layer in found["layers"]:
        assert layer["pattern"] == "interleaved" and layer["node_order"] == [1, 0] and layer["page_bytes"] == 4096
        assert layer["bytes"] == layer["resident_bytes"] == sum(layer["nodes"].values())
        assert set(layer["nodes"]) == {0, 1}
        assert layer["patterns"] == {"interleaved": len(library.seen) // 2}
    assert found["bytes"] == found["resident_bytes"] == sum(map(len, library.seen)) and found["refused"] is None


def test_matrices_that_differ_make_a_mixed_layer(fused: Path) -> None:
    found = placement.model_placement(fused, kernel=Kernel(FakeKernel()), look=Library("interleaved", "one node"))
    layer = found["layers"][0]
    assert layer["pattern"] == "mixed" and set(layer["patterns"]) == {"interleaved", "one node"}
    assert "4 interleaved, 4 one node" in show.pattern(layer)


def test_a_refusal_and_files_of_others_are_told(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Kernel(FakeKernel(refuses=["move_pages"]))
    found = placement.model_placement(fused, kernel=refusing, look=Library("refused"))
    assert "refuses move_pages (Operation not permitted)" in found["refused"]
    assert all(layer["nodes"] == {} and layer["resident_bytes"] for layer in found["layers"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    library = Library("interleaved")
    found = placement.model_placement(fused, kernel=Kernel(FakeKernel()), look=library)
    assert library.seen == [] and {layer["pattern"] for layer in found["layers"]} == {"unknown"}


def test_weights_in_the_model_file_are_placed_later(fused: Path, tmp_path: Path) -> None:
    onnx.save(onnx.load(fused), tmp_path / "whole.onnx")
    found = placement.model_placement(tmp_path / "whole.onnx", kernel=Kernel(FakeKernel()), look=Library("none"))
    assert {layer["pattern"] for layer in found["layers"]} == {"in the model file"} and found["resident_bytes"] == 0


def test_doctor_shows_the_placement(fused: Path, model: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--model", str(fused), "--json"]).stdout)
    assert found["placement"]["bytes"] == sum(map(len, matrices(fused)))
    assert found["placement"]["resident_bytes"] == found["placement"]["bytes"]  # it was just written
    table = CliRunner().invoke(app, ["doctor", "--model", str(fused)], env={"COLUMNS": "200"}).stdout
    assert "layers.1" in table and "100% of" in table
    result = CliRunner().invoke(app, ["doctor", "--model", str(model)])
    assert result.exit_code == 2 and "convert" in result.output


def test_doctor_shows_the_nodes() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    numa = json.loads(result.stdout)["numa"]
    assert set(numa) == set(topology([0]))
    cpus = {cpu for node in numa["nodes"] for cpu in node["allowed_cpus"]}
    assert cpus == os.sched_getaffinity(0)
    assert numa["page_bytes"] == PAGE
    assert "NUMA nodes" in CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout


def test_words_about_a_machine() -> None:
    near, distances = [[0, 1], [2, 3]], [[10, 12, 21, 21]] * 4
    found = topology(range(8), range(8, 16), [16, 18], [], allowed=[*range(12), 16], near=near, distances=distances)
    rows = dict(show.rows(found | {"error": "HINA_NUMA is 'x'"}))
    lines = rows["NUMA nodes"].splitlines()
    assert lines[0] == "node 0: CPUs 0-7; 60.0 GiB free of 64.0 GiB"
    assert "CPUs 8-15, allowed 8-11;" in lines[1] and "CPUs 16,18, allowed 16;" in lines[2] and "no CPUs;" in lines[3]
    assert rows["sub-NUMA clusters"] == "nodes 0-1 and 2-3 share a socket each"
    assert rows["HINA_NUMA"] == "auto: HINA_NUMA is 'x'" and len(rows["distances"].splitlines()) == 4
    assert "sub-NUMA clusters" not in dict(show.rows(topology([0], [1])))


def test_advice_is_given_where_nodes_are_left_idle(fused: Path) -> None:
    def advice(pattern: str, *cpus: list[int]) -> str:
        found = placement.model_placement(fused, kernel=Kernel(FakeKernel()), look=Library(pattern))
        return show.advise(found, topology(*cpus))

    assert f"hina-ort run --numa interleave --model {fused} -- COMMAND" in advice("one node", [0], [1])
    assert advice("interleaved", [0], [1]) == advice("one node", [0]) == advice("one node", [0], []) == ""


# hina-ort run.


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run([*CLI, "run", *arguments], env=env, capture_output=True, text=True, check=False)


def test_the_program_gets_the_mode_and_its_own_arguments(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, sys; print(os.environ['HINA_NUMA'], sys.argv[1:]); sys.exit(7)"
    done = run("--numa", "copy", "--", sys.executable, "-c", program, "--model", "x", HINA_NUMA="off")
    assert done.stdout == "copy ['--model', 'x']\n" and done.returncode == 7, done
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    machine([0])
    for options, mode in ((["--numa=auto"], "auto"), ([], "interleave")):
        CliRunner().invoke(app, ["run", *options, "program", "--numa", "-v"])  # without --
        name, arguments, environment = started.pop()
        assert (name, arguments) == ("program", ["program", "--numa", "-v"]) and environment["HINA_NUMA"] == mode


def test_a_pipe_that_is_closed_ends_the_program_silently() -> None:
    program = "kill -PIPE $$; echo ignored"
    assert run("--numa", "off", "--", "sh", "-c", program).returncode == -signal.SIGPIPE


def test_what_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    for arguments, code, words in (
        (["--numa", "off", "--", "no-such-program"], 127, "no-such-program was not found"),
        (["--numa", "off", "--", str(tmp_path / "data")], 126, "cannot be run: Permission denied"),
        (["--numa", "both", "--", "true"], 2, "expected one of off, auto, interleave, bind, copy"),
        (["--numa", "off", "--model", "m.onnx", "--", "true"], 2, "--model is for --numa interleave"),
        (["--model", "none.onnx", "--", "true"], 1, "none.onnx does not exist"),
        (["--numa", "off"], 2, "COMMAND"),
    ):
        result = CliRunner().invoke(app, ["run", *arguments])
        assert result.exit_code == code and words in result.output, result.output


def test_a_program_starts_under_the_policy_with_its_model_spread(
    machine: Machine, fused: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    machine([0], [1])
    for refuses, warned in (([], 0), (["move_pages"], 1), (["set_mempolicy"], 1)):
        calls, told = FakeKernel(refuses=refuses), list[str]()
        command.run("interleave", [fused], ["program", "x"], told.append, Kernel(calls))
        name, arguments, environment = started.pop()
        assert (name, arguments, environment["HINA_NUMA"]) == ("program", ["program", "x"], "interleave")
        assert len(told) == warned and calls.policies == ([] if "set_mempolicy" in refuses else [(3, (0, 1))])
        assert bool(calls.moved) == (not refuses)


def test_other_processors_have_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "machine", lambda: "sparc")
    with pytest.raises(OSError, match="Function not implemented"):
        Kernel().policy()
