"""What the library reads of NUMA nodes, from folders that look like /sys and /proc of other machines."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hina_ort.runtime import query


@dataclass
class Machine:
    """Nodes by their numbers with their CPUs, as the kernel writes lists; 4 GiB on each, 1 GiB of it free."""

    nodes: dict[int, str]
    distances: list[list[int]] | None = None
    online: str = "0-63"
    allowed_cpus: str | None = "0-63"
    allowed_memory: str | None = "0-63"
    without_memory: set[int] = field(default_factory=set)

    def write(self, root: Path) -> dict[str, Any]:
        """Put the files into `root`; return what the library reads there."""
        node_folder, cpu_folder = root / "sys/devices/system/node", root / "sys/devices/system/cpu"
        status_folder, huge_folder = root / "proc/self", root / "sys/kernel/mm/transparent_hugepage"
        for folder in (node_folder, cpu_folder, status_folder, huge_folder):
            folder.mkdir(parents=True)
        (node_folder / "online").write_text(",".join(map(str, self.nodes)) + "\n")
        (cpu_folder / "online").write_text(self.online + "\n")
        (huge_folder / "enabled").write_text("always [madvise] never\n")
        for index, (node, cpus) in enumerate(self.nodes.items()):
            folder = node_folder / f"node{node}"
            folder.mkdir()
            (folder / "cpulist").write_text(cpus + "\n")
            total = 0 if node in self.without_memory else 4 << 20
            lines = [f"Node {node} MemTotal:       {total} kB", f"Node {node} MemFree:        {total // 4} kB", ""]
            (folder / "meminfo").write_text("\n".join(lines))
            if self.distances:
                (folder / "distance").write_text(" ".join(map(str, self.distances[index])) + "\n")
        lines = ["Name:\tpython"]
        lines += [f"Cpus_allowed_list:\t{self.allowed_cpus}"] if self.allowed_cpus is not None else []
        lines += [f"Mems_allowed_list:\t{self.allowed_memory}"] if self.allowed_memory is not None else []
        (status_folder / "status").write_text("\n".join(lines) + "\n")
        answer: dict[str, Any] = query(f"topology {root}")
        return answer


def square(count: int, remote: int = 21) -> list[list[int]]:
    return [[10 if i == j else remote for j in range(count)] for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_nodes_of_eight_cpus(count: int, tmp_path: Path) -> None:
    nodes = {n: f"{n * 8}-{n * 8 + 7}" for n in range(count)}
    answer = Machine(nodes, square(count)).write(tmp_path)
    assert [node["id"] for node in answer["nodes"]] == list(range(count))
    for node in answer["nodes"]:
        assert node["cpus"] == node["allowed_cpus"] == list(range(node["id"] * 8, node["id"] * 8 + 8))
        assert node["memory_bytes"] == 4 << 30 and node["free_bytes"] == 1 << 30 and node["memory_allowed"]
    assert answer["distances"] == square(count)
    assert answer["workers"] == answer["usable"] == list(range(count))
    assert answer["near"] == [[n] for n in range(count)]
    assert answer["huge_pages"] == "madvise" and answer["page_bytes"] == mmap.PAGESIZE
    assert (answer["mode"], bool(answer["mode_reason"])) == (("auto", False) if count > 1 else ("off", True))


def test_hyperthreads_are_listed_apart(tmp_path: Path) -> None:
    answer = Machine({0: "0-3,8-11", 1: "4-7,12-15"}).write(tmp_path)
    assert answer["nodes"][1]["cpus"] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert answer["distances"] == []


def test_sub_numa_clusters_are_near(tmp_path: Path) -> None:
    near = [[10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]]
    answer = Machine({n: str(n) for n in range(4)}, near).write(tmp_path)
    assert answer["near"] == [[0, 1], [2, 3]]
    assert answer["workers"] == [0, 1, 2, 3]


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    answer = Machine({0: "0-3", 1: "4-7"}, online="0-4,6").write(tmp_path)
    assert [node["cpus"] for node in answer["nodes"]] == [[0, 1, 2, 3], [4, 6]]


def test_a_node_of_memory_alone_is_no_worker(tmp_path: Path) -> None:
    answer = Machine({0: "0-3", 1: "4-7", 2: ""}, [[10, 21, 24], [21, 10, 14], [24, 14, 10]]).write(tmp_path)
    assert answer["workers"] == [0, 1] and answer["usable"] == [0, 1, 2]
    assert answer["near"] == [[0], [1, 2]]


def test_a_node_of_cpus_alone(tmp_path: Path) -> None:
    answer = Machine({0: "0-3", 1: "4-7"}, without_memory={1}).write(tmp_path)
    assert answer["workers"] == [0, 1] and answer["usable"] == [0]


def test_numbers_with_gaps_and_unequal_nodes(tmp_path: Path) -> None:
    answer = Machine({0: "0-2", 8: "3"}).write(tmp_path)
    assert [(node["id"], node["cpus"]) for node in answer["nodes"]] == [(0, [0, 1, 2]), (8, [3])]


def test_a_cpuset_that_leaves_a_node_out(tmp_path: Path) -> None:
    machine = Machine({n: f"{2 * n}-{2 * n + 1}" for n in range(4)}, allowed_cpus="0-3,6-7", allowed_memory="0,3")
    answer = machine.write(tmp_path)
    assert answer["workers"] == [0, 1, 3] and answer["usable"] == [0, 3]
    assert answer["nodes"][2]["allowed_cpus"] == [] and answer["mode"] == "auto"


def test_one_allowed_node_turns_it_off(tmp_path: Path) -> None:
    answer = Machine({0: "0-3", 1: "4-7"}, allowed_cpus="5").write(tmp_path)
    assert answer["workers"] == [1] and answer["mode"] == "off"
    assert answer["mode_reason"] == "this process may run on one node alone"


def test_more_nodes_than_are_supported(tmp_path: Path) -> None:
    answer = Machine({n: str(n) for n in range(17)}).write(tmp_path)
    assert answer["mode"] == "off" and "more than 16 nodes" in answer["mode_reason"]


@pytest.mark.parametrize(
    "gone",
    ["sys", "sys/devices/system/node", "sys/devices/system/cpu", "sys/kernel", "proc", "sys/devices/system/node/node1"],
)
def test_files_may_be_missing(gone: str, tmp_path: Path) -> None:
    Machine({0: "0-3", 1: "4-7"}, square(2), online="0-7", allowed_cpus="0-5").write(tmp_path)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    answer = query(f"topology {tmp_path}")
    cpus = [node["cpus"] for node in answer["nodes"]]
    if gone in ("sys", "sys/devices/system/node"):
        assert cpus == [list(range(6 if gone == "sys" else 8))] and answer["workers"] == [0]
        assert answer["mode"] == "off"
    elif gone.endswith("node1"):
        assert cpus == [[0, 1, 2, 3], []] and answer["workers"] == [0] and answer["distances"] == []
    else:
        assert cpus == [[0, 1, 2, 3], [4, 5, 6, 7]] and answer["workers"] == [0, 1]
    assert (answer["huge_pages"] == "unknown") == (gone in ("sys", "sys/kernel"))


@pytest.mark.parametrize("text", ["", "\n", "x", "-", "0-", "0-99999999999999", "3-1", "1,,2", "\0\0", "9" * 400])
def test_no_text_leads_astray(text: str, tmp_path: Path) -> None:
    answer = Machine({0: text, 1: "4-7"}, online=text, allowed_cpus=text, allowed_memory=text).write(tmp_path)
    assert len(answer["nodes"]) == 2 and len(answer["workers"]) >= 1


def test_this_machine() -> None:
    answer = query("topology")
    allowed = sorted(cpu for node in answer["nodes"] for cpu in node["allowed_cpus"])
    assert set(allowed) <= os.sched_getaffinity(0) and allowed
    assert answer["error"] is None


def test_a_mode_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINA_NUMA", "on")
    answer = query("topology")
    assert answer["mode"] == "off"
    assert answer["error"] == "HINA_NUMA is 'on', expected one of: off auto interleave bind copy"


def test_placement_of_pages_in_memory_and_not() -> None:
    size = 8 << 20
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = query(f"placement {address} {size}")
    if before["pattern"] == "refused":
        assert before["reason"].startswith("the kernel refused move_pages")
        pytest.skip(before["reason"])
    assert (before["pattern"], before["nodes"], before["resident"]) == ("not resident", [], 0)
    memory.write(b"1" * size)
    after = query(f"placement {address} {size}")
    assert after["resident"] == after["sampled"] > 32
    if len(query("topology")["usable"]) == 1:
        assert after["pattern"] == "one node" and after["nodes"] == query("topology")["usable"]


@pytest.mark.parametrize("range_text", ["", "x", "4096", "4096 0", "4096 -5"])
def test_placement_of_nothing(range_text: str) -> None:
    assert query(f"placement {range_text}") is None
