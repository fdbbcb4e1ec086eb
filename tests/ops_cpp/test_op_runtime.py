"""Sessions, threads and CPUs: each scenario in its own process, so that a hang is a failure with stacks in it."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.ops_cpp.scenarios import scenario


def test_two_thousand_random_calls() -> None:
    assert scenario("random_calls", 2000)["calls"] == 2000


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_eight_python_threads_share_a_session(threads: int) -> None:
    assert scenario("shared_session", threads, 8, 100)["calls"] == 800


def test_two_sessions_at_once() -> None:
    assert scenario("two_sessions", 300)["calls"] == 600


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_nothing_spins_after_a_run(threads: int) -> None:
    assert scenario("idle_after_run", threads)["cpu_seconds"] < 0.1


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_taskset_is_honoured(threads: int) -> None:
    taskset = shutil.which("taskset")
    if not taskset:
        pytest.skip("taskset is not installed")
    cpu = min(os.sched_getaffinity(0))
    cpus = scenario("affinity", threads, prefix=(taskset, "-c", str(cpu)))["cpus"]
    assert cpus == [[cpu]] * len(cpus)
