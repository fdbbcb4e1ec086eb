"""What local reads are worth on two sockets: a model of bandwidth, predicted and not measured.

A layer's weights are read once, by the cores of both sockets at the same time. What takes longest counts: the memory of
a socket, a direction of the link between the sockets, or the cores of a socket, which wait for so many cache lines at
once (Little's law). docs/numa.md has the sources of the rates, and what the model leaves out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hina_ort.files import UsageError

NOTE = "predicted by a model, not measured"
LINE = 64
LOCALITY = 0.95
"""Share of the bytes that workers read from their own node: the least that the tests ask of the partition."""
_STEPS = 1000

Traffic = tuple[tuple[float, float], tuple[float, float]]
"""[i][j]: share of all bytes that socket i reads from the memory of socket j."""


@dataclass(frozen=True)
class Sockets:
    """Two equal sockets: GB/s that the memory of one gives, and a direction of the link; latencies; cores of one.

    `lines` is how many cache lines a core waits for at once: 48 is the superqueue of Golden Cove's L2 cache.
    """

    name: str
    memory: float
    link: float
    local_ns: float
    remote_ns: float
    cores: int
    lines: int = 48

    def __post_init__(self) -> None:
        given = {"memory": self.memory, "link": self.link, "local": self.local_ns, "remote": self.remote_ns}
        for name, value in (given | {"cores": self.cores}).items():
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name} is {value:g}, expected a number above 0")

    def gigabytes_per_second(self, traffic: Traffic) -> float:
        """Of both sockets together, if every resource is as busy as `traffic` says, and all work at the same time."""
        seconds = [sum(column) / self.memory for column in zip(*traffic, strict=True)]
        for i, shares in enumerate(traffic):
            seconds.append(shares[1 - i] / self.link)
            waiting = shares[i] * self.local_ns + shares[1 - i] * self.remote_ns
            seconds.append(waiting / (self.cores * self.lines * LINE))  # bytes / ns are GB/s
        return 1 / max(seconds)


def one_node(sockets: Sockets) -> float:
    """All weights on node 0, cores of both sockets: each takes as much of the work as it can."""
    shares = (step / _STEPS for step in range(_STEPS + 1))
    return max(sockets.gigabytes_per_second(((share, 0.0), (1 - share, 0.0))) for share in shares)


def interleaved(sockets: Sockets, locality: float = 0.5) -> float:
    """Weights half and half; of what a socket reads, the share `locality` is its own: half when workers are unaware."""
    near, far = locality / 2, (1 - locality) / 2
    return sockets.gigabytes_per_second(((near, far), (far, near)))


def predict(sockets: Sockets, locality: float = LOCALITY) -> dict[str, float]:
    """GB/s by where weights lie and how work is dealt out."""
    return {
        "one socket": sockets.gigabytes_per_second(((1.0, 0.0), (0.0, 0.0))),
        "one node": one_node(sockets),
        "interleaved": interleaved(sockets),
        "interleaved, HinaMoE": interleaved(sockets, locality),
        "bind or copy": interleaved(sockets, 1.0),
    }


# Measured with Intel's Memory Latency Checker by others, but for the links of the last three and the memory of Genoa,
# which are derived: see docs/numa.md.
MACHINES = (
    Sockets("2 x Ice Lake, 3 links", memory=175.8, link=55.7, local_ns=89.1, remote_ns=142.8, cores=36),
    Sockets("2 x Sapphire Rapids, 3 links", memory=246.0, link=95.5, local_ns=107.3, remote_ns=187.8, cores=48),
    Sockets("2 x Sapphire Rapids, 4 links", memory=246.0, link=127.3, local_ns=107.3, remote_ns=187.8, cores=48),
    Sockets("2 x EPYC Genoa, 3 links", memory=369.0, link=127.3, local_ns=107.3, remote_ns=187.8, cores=96),
)


def run_numa(machine: Sockets | None) -> dict[str, Any]:
    """The predictions for `machine`, else for those that are known here; the keys are those of docs/cli.md."""
    machines = MACHINES if machine is None else (machine,)
    return {
        "note": NOTE,
        "locality": LOCALITY,
        "machines": [asdict(m) | {"gigabytes_per_second": predict(m)} for m in machines],
    }


def own_machine(
    memory: float | None, link: float | None, local_ns: float, remote_ns: float, cores: int
) -> Sockets | None:
    """The machine that options describe, None where they describe none; UsageError for half a description."""
    if memory is None and link is None:
        return None
    if memory is None or link is None:
        raise UsageError("--memory and --link go together; Intel's mlc --bandwidth_matrix measures both")
    return Sockets("this machine", memory, link, local_ns, remote_ns, cores)
