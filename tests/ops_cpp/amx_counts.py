"""What layers load into tiles, under the emulator: `python -m tests.ops_cpp.amx_counts FOLDER JSON`, where JSON is a
list of arguments of `count`; prints a list of its results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from graph_passes.op_schema import PROJECTIONS
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.amx.environment import Recorder
from tests.tensors import save_external

BUSY = 1  # the one of three experts that gets all tokens
STEP = 64  # bytes of a row that a tile has


def addresses(path: Path) -> Iterator[tuple[str, int]]:
    """The tensors in the external data of `path`, and where they are mapped in this process."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{path}.data" in line]
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        place = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
        for extent, _, offset, *_ in maps:
            first, last = (int(address, 16) for address in extent.split("-"))
            if first <= first + place - int(offset, 16) < last:
                yield tensor.name, first + place - int(offset, 16)
                break


def rows_of(loads: np.ndarray) -> np.ndarray:
    """The address of each row of each tile that was loaded."""
    first, stride = (np.repeat(loads[name].astype(np.int64), loads["rows"]) for name in ("address", "stride"))
    return first + stride * np.concatenate([np.arange(0), *(np.arange(n) for n in loads["rows"])])


def bytes_of(loads: np.ndarray) -> np.ndarray:
    """The address of each byte that was loaded, once."""
    loads = np.unique(loads)
    ends = zip(rows_of(loads), np.repeat(loads["row_bytes"], loads["rows"]), strict=True)
    return np.unique(np.concatenate([np.arange(0), *(np.arange(row, row + n) for row, n in ends)]))


def count(folder: Path, word: str, activation_type: str, sizes: list[int], tokens: list[int]) -> list[dict[str, Any]]:
    """Loads, products, stores and configurations of a run with each number of tokens. `sizes` are H and I; gate and up
    lie in two tensors.

    "weights" has, for each tensor, how often a whole step of a row of the expert was loaded, least and most often.
    "strays" are rows of tiles that begin in a tensor and are no such step. All other loads are of panels, or of what
    was prepared as they are: "elsewhere" counts the bytes, "tokens" those of them in hidden_states. Of "loads", "sums"
    are one row for all rows of a tile: what sums of products begin with.
    """
    plain = word == "bfloat16"
    formats = {} if plain else dict.fromkeys(PROJECTIONS, word)
    fields = {"hidden_size": sizes[0], "intermediate_size": sizes[1], "num_experts": 3, "top_k": 1}
    spec = make_spec(**fields, router_input="topk_ids", accuracy_level=4, formats=formats)
    rng = np.random.default_rng(1)
    types = dict.fromkeys(PROJECTIONS, "bfloat16") if plain else {}
    node = harness.random_node(spec, rng, activation_type=activation_type, types=types)
    save_external(harness.make_model(node), folder / "model.onnx")
    session = harness.make_session(folder / "model.onnx")
    found = []
    for n in tokens:
        feeds = harness.random_feeds(node, rng, (n,))
        feeds["topk_ids"][:] = BUSY
        with Recorder(200_000) as recorder:
            outputs = harness.run(session, feeds)
        harness.assert_right(node, feeds, outputs)
        found.append(loads_of(recorder, node, feeds, dict(addresses(folder / "model.onnx"))))
    return found


def loads_of(recorder: Recorder, node: Node, feeds: Tensors, tensors: dict[str, int]) -> dict[str, Any]:
    """What `count` says of one run; `tensors` are the addresses of the weights."""
    weights, strays, rest = {}, 0, recorder.loads
    for name in node.spec.projections:
        at = tensors[name]
        _, n_rows, row_bytes = node.weights[name].view(np.uint8).shape
        first = rest["address"].astype(np.int64) - at
        mine = (first >= 0) & (first < node.weights[name].nbytes)
        assert np.all(rest[mine]["row_bytes"] == STEP)
        row, byte = np.divmod(rows_of(rest[mine]) - at, row_bytes)
        rest = rest[~mine]
        steps = row_bytes // STEP
        stray = (row // n_rows != BUSY) | (byte % STEP != 0) | (byte // STEP >= steps)
        strays += int(stray.sum())
        places = (row % n_rows * steps + byte // STEP)[~stray]
        times = np.bincount(places, minlength=n_rows * steps)
        weights[name] = [int(times.min()), int(times.max())]
    elsewhere = bytes_of(rest) - feeds["hidden_states"].ctypes.data
    return {
        "products": sum(n for name, n in recorder.counts.items() if name.startswith("tdp")),
        "loads": recorder.counts["tileloadd"] + recorder.counts["tileloaddt1"],
        "sums": int((recorder.loads["stride"] == 0).sum()),
        "stores": recorder.counts["tilestored"],
        "configurations": recorder.counts["ldtilecfg"],
        "weights": weights,
        "strays": strays,
        "elsewhere": elsewhere.size,
        "tokens": int(((elsewhere >= 0) & (elsewhere < feeds["hidden_states"].nbytes)).sum()),
    }


def main() -> None:
    folder, arguments = sys.argv[1:]
    print(json.dumps([count(Path(folder), *one) for one in json.loads(arguments)]))


if __name__ == "__main__":
    main()
