"""Layers on machines with several NUMA nodes, which QEMU emulates: how many bytes of weights workers of the owning node
read, by what the guest's kernel says of each page and by the list of what each task read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ops_cpp.numa.guest import TIMEOUT, Machine, NoGuestError, boot, tools
from tests.ops_cpp.test_native import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]

SHAPES = ("Qwen3.6-35B", "Qwen3-30B", "DeepSeek-V3", "Mixtral")
WEIGHTS = ("bf16", "int8", "int4")
LOCAL = 0.95
# Sums of ranges of rows are added up in another order; most of a thousand float32 terms each.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        tools()
    except NoGuestError as error:
        pytest.skip(str(error))
    return build("guest", "", "numa_guest") / "tests" / "ops_cpp" / "numa" / "numa_guest"


def by_scenario(results: list[dict[str, Any]], scenario: str) -> list[dict[str, Any]]:
    found = [result for result in results if result["scenario"] == scenario]
    assert found
    return found


def expect_local(result: dict[str, Any], nodes: str, mode: str = "interleave") -> None:
    assert result["text"].startswith(f"numa {mode} on nodes {nodes}, "), result
    assert result["local"] >= LOCAL * result["possible"], result
    expect_right(result)


def expect_right(result: dict[str, Any]) -> None:
    """Every byte of the chosen experts was read once, and the result is that of the plain plan."""
    assert result["complete"] and result["error"] <= CLOSE, result


def expect_all_shapes(results: list[dict[str, Any]], nodes: str) -> None:
    shapes = {(result["shape"], result["weights"]): result for result in by_scenario(results, "shapes")}
    assert len(shapes) == len(SHAPES) * len(WEIGHTS) + len(WEIGHTS)
    for (shape, _), result in shapes.items():
        if shape in SHAPES:
            assert result["possible"] > 0.99, result
            expect_local(result, nodes)
        elif result["text"].startswith("numa off"):  # gpt-oss: rows that fit no pages
            assert result["error"] == 0, result
        else:
            expect_local(result, nodes)


def test_two_nodes(program: Path, tmp_path: Path) -> None:
    scenarios = ("shapes", "bind", "copy", "skewed", "one_node", "offline", "affinity", "seccomp")
    results = boot(program, Machine(("0-1", "2-3")), scenarios, tmp_path)
    expect_all_shapes(results, "0, 1")
    for result in by_scenario(results, "bind"):
        expect_local(result, "0, 1", "bind")
    (skewed,) = by_scenario(results, "skewed")
    expect_right(skewed)
    assert skewed["text"].startswith("numa interleave") and skewed["possible"] == 0.5, skewed
    assert skewed["workers"] == 4 and skewed["least"] >= 0.9, skewed
    (one_node,) = by_scenario(results, "one_node")
    assert one_node["text"] == "numa off because all weights are on node 1", one_node
    for scenario in ("offline", "affinity"):
        (result,) = by_scenario(results, scenario)
        assert result["workers"] == 3 and result["possible"] < 0.9, result  # one CPU reads more than its share
        expect_local(result, "0, 1")
    refused = "numa off because the kernel refused move_pages (Operation not permitted)"
    assert [(result["text"], result["complete"]) for result in by_scenario(results, "seccomp")] == [(refused, True)] * 3
    (copy,) = by_scenario(results, "copy")  # that pages are on the copies' nodes, the guest itself checks
    expect_local(copy, "0, 1", "copy")


def test_four_nodes(program: Path, tmp_path: Path) -> None:
    results = boot(program, Machine(("0", "1", "2", "3")), ("shapes", "bind", "copy", "affinity", "cpuset"), tmp_path)
    expect_all_shapes(results, "0, 1, 2, 3")
    for result in by_scenario(results, "bind"):
        expect_local(result, "0, 1, 2, 3", "bind")
    for scenario in ("affinity", "cpuset"):
        (result,) = by_scenario(results, scenario)
        assert result["workers"] == 3, result
        expect_local(result, "0, 1, 3")
    assert by_scenario(results, "cpuset")[0]["possible"] > 0.99  # its memory, too, is that of three nodes
    (copy,) = by_scenario(results, "copy")
    expect_local(copy, "0, 1, 2, 3", "copy")


def test_unequal_nodes(program: Path, tmp_path: Path) -> None:
    results = boot(program, Machine(("0-2", "3")), ("few", "skewed"), tmp_path)
    for result in by_scenario(results, "few"):
        assert 0.74 < result["possible"] < 0.76, result
        expect_local(result, "0, 1")
        assert result["least"] >= 0.9, result
