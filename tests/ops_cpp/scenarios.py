"""Programs that tests run in a process of their own, under a watchdog: `python -m tests.ops_cpp.scenarios NAME ARGS`.

A scenario prints one JSON object. When it hangs, faulthandler prints every thread's stack and ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from tests import node as harness
from tests.node import Node, make_spec
from tests.tensors import restored

NO_SPIN = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
"""ONNX Runtime's own threads sleep at once, so that CPU time after a run is the library's."""

QUANTISED = {
    "formats": {"gate_proj": "int4:32", "up_proj": "int8", "down_proj": "int4:16", "shared_down_proj": "mxfp4"},
    "zero_points": True,
}
"""Fields of a node whose projections take their inputs in different forms."""


def scenario(
    name: str,
    *arguments: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Any:
    """Run a scenario in a subprocess and return what it printed; AssertionError, with its stderr, when it fails."""
    done = start(name, *arguments, timeout=timeout, env=env, prefix=prefix)
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


def start(
    name: str,
    *arguments: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a scenario in a subprocess, however it ends."""
    command = [*prefix, sys.executable, "-m", "tests.ops_cpp.scenarios", name, str(timeout), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HINA_")}
    return subprocess.run(
        command,
        cwd=harness.ROOT,
        env=environment | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout + 60,
        check=False,
    )


class Problem:
    """A node, 64 tokens, and the output of each token when it is alone: what any batch must repeat bit by bit."""

    def __init__(self, seed: int, **fields: Any) -> None:
        sizes = {"hidden_size": 60, "intermediate_size": 33, "num_experts": 16, "top_k": 4}
        spec = make_spec(**{**sizes, "norm_topk_prob": True, "shared_intermediate_size": 20, **fields})
        rng = np.random.default_rng(seed)
        self.node: Node = harness.random_node(spec, rng)
        self.model = harness.make_model(self.node)
        self.feeds = harness.random_feeds(self.node, rng, (64,))
        session = harness.make_session(self.model)
        self.output = np.concatenate([self.run(session, np.array([row])) for row in range(64)])
        harness.assert_right(self.node, self.feeds, {"output": self.output})

    def run(self, session: ort.InferenceSession, rows: np.ndarray) -> np.ndarray:
        return harness.run(session, {name: value[rows] for name, value in self.feeds.items()})["output"]

    def check(self, session: ort.InferenceSession, rng: np.random.Generator) -> None:
        """Run a random batch of 0 to 64 tokens and compare every bit."""
        rows = rng.integers(0, 64, rng.integers(0, 65))
        assert self.run(session, rows).tobytes() == self.output[rows].tobytes(), f"wrong bits, rows {rows.tolist()}"


def random_calls(calls: str) -> dict[str, int]:
    """Random batches, in turn on sessions of 1, 2 and 4 threads of two nodes."""
    rng = np.random.default_rng(1)
    problems = [Problem(1), Problem(2, mlp="plain", shared_intermediate_size=0, num_experts=60, top_k=7)]
    problems += [Problem(8 + level, **QUANTISED, accuracy_level=level) for level in (0, 4)]
    pairs = [(p, harness.make_session(p.model, threads)) for p in problems for threads in (1, 2, 4)]
    for call in range(int(calls)):
        problem, session = pairs[call % len(pairs)]
        problem.check(session, rng)
    return {"calls": int(calls)}


def shared_session(threads: str, python_threads: str, calls: str) -> dict[str, int]:
    """Python threads that use one session at once."""
    problem = Problem(3)
    session = harness.make_session(problem.model, int(threads))
    return at_once([(problem, session)] * int(python_threads), int(calls))


def two_sessions(calls: str) -> dict[str, int]:
    """Two sessions of different nodes at once, two threads each."""
    problems = [Problem(4), Problem(5, mlp="fused", num_experts=8, top_k=1)]
    return at_once([(p, harness.make_session(p.model, 2)) for p in problems], int(calls))


def at_once(pairs: Sequence[tuple[Problem, ort.InferenceSession]], calls: int) -> dict[str, int]:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        problem, session = pairs[number]
        rng = np.random.default_rng(number)
        try:
            for _ in range(calls):
                problem.check(session, rng)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(pairs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return {"calls": calls * len(pairs)}


def idle_after_run(threads: str) -> dict[str, float]:
    """CPU seconds of the whole process in one second after a run."""
    problem = Problem(6)
    session = harness.make_session(problem.model, int(threads), NO_SPIN)
    for _ in range(100):
        problem.run(session, np.arange(64))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1.0)
    return {"cpu_seconds": time.process_time() - before}


def affinity(threads: str) -> dict[str, list[list[int]]]:
    """The CPUs that each thread of the process may use, after runs."""
    problem = Problem(7)
    session = harness.make_session(problem.model, int(threads))
    rng = np.random.default_rng(8)
    for _ in range(50):
        problem.check(session, rng)
    return {"cpus": [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]}


def anonymous_memory(model: str, feeds: str, output: str) -> dict[str, int]:
    """Anonymous memory, in bytes, before a session of `model`, with it, and after a run; the output goes to a file."""
    warm = Problem(9)
    harness.make_session(warm.model)
    inputs = dict(np.load(feeds))
    before = rss_anon()
    session = harness.make_session(Path(model))
    made = rss_anon()
    np.save(output, harness.run(session, inputs)["output"])
    return {"before": before, "made": made, "run": rss_anon()}


def many_tokens(model: str, tokens: str) -> dict[str, Any]:
    """Anonymous memory, in bytes, with a session of `model` and after a run of `tokens` tokens; the last 5 rows."""
    session = harness.make_session(Path(model), threads=2)
    size = session.get_inputs()[0].shape[-1]
    hidden = np.random.default_rng(1).standard_normal((int(tokens), size), np.float32)
    made = rss_anon()
    output = harness.run(session, {"hidden_states": hidden})["output"]
    run = rss_anon()
    alone = harness.run(session, {"hidden_states": hidden[-5:]})["output"]
    return {"made": made, "run": run, "same": output[-5:].tobytes() == alone.tobytes()}


def rss_anon() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def outputs(folder: str) -> dict[str, Any]:
    """Run the models of a folder on their inputs, write `NAME.out.npy`; says what the library chose."""
    from hina_ort import cpu_info

    for path in sorted(Path(folder).glob("*.onnx")):
        session = harness.make_session(path, threads=2)
        feeds = {name: restored(value) for name, value in np.load(path.with_suffix(".npz")).items()}
        np.save(path.with_suffix(".out.npy"), harness.run(session, feeds)["output"])
    return {name: cpu_info()[name] for name in ("isa", "amx")}


SCENARIOS: tuple[Callable[..., Any], ...] = (
    random_calls,
    shared_session,
    two_sessions,
    idle_after_run,
    affinity,
    anonymous_memory,
    many_tokens,
    outputs,
)


def main() -> None:
    name, timeout, *arguments = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    print(json.dumps(next(s for s in SCENARIOS if s.__name__ == name)(*arguments)))


if __name__ == "__main__":
    main()
