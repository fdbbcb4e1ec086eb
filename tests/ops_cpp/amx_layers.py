"""Layers in ONNX Runtime, for tests of AMX: `python -m tests.ops_cpp.amx_layers NAME ARGS` prints one JSON object.

A process of its own has the variables that choose AMX, and maybe the emulator, from its start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from graph_passes import reference
from graph_passes.accuracy import relative_l2
from graph_passes.moe_spec import FIELDS, split_field
from graph_passes.op_schema import FLOAT_TYPES, PROJECTIONS
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.amx.environment import Recorder
from tests.ops_cpp.scenarios import at_once

TOKENS = (0, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 257)

INTEGERS = tuple(f"{name}{block}" for name in ("int8", "int4") for block in ("", ":32", ":64", ":128"))
QUANTISED = (*INTEGERS, "mxfp4")
FLOATS = ("bfloat16", *QUANTISED)

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"mlp": "split", "hidden_size": 145, "intermediate_size": 33, "bias": True},
    {"mlp": "fused", "hidden_size": 160, "intermediate_size": 97},
    {"mlp": "fused", "gate_up_interleaved": True, "hidden_size": 65, "intermediate_size": 41, "bias": True},
    {"mlp": "split", "hidden_size": 96, "intermediate_size": 48, "shared_intermediate_size": 35},
    {"mlp": "fused", "gate_up_order": "up_gate", "apply_weights_to": "input", "hidden_size": 160},
    {"mlp": "plain", "hidden_size": 64, "shared_intermediate_size": 31, "shared_expert_gate": True},
)


@dataclass(frozen=True)
class Case:
    """A layer of 4 experts and 257 tokens, all of which the first expert gets, and each of the others a third."""

    word: str  # "bfloat16", or a format; of FC1 and of FC2, as in "int8/bfloat16", where they differ
    zero_points: bool
    accuracy_level: int
    activation_type: str
    layout: int
    node: Node = field(init=False)
    feeds: Tensors = field(init=False)

    def __post_init__(self) -> None:
        words = self.word.split("/")
        types = {name: words[-1] if "down" in name else words[0] for name in PROJECTIONS}
        spec = make_spec(
            num_experts=4,
            top_k=2,
            router_input="topk_ids",
            formats={name: word for name, word in types.items() if word != "bfloat16"},
            zero_points=self.zero_points,
            accuracy_level=self.accuracy_level,
            **LAYOUTS[self.layout],
        )
        rng = np.random.default_rng(self.layout)
        types = {name: word for name, word in types.items() if word == "bfloat16"}
        node = harness.random_node(spec, rng, activation_type=self.activation_type, types=types)
        feeds = harness.random_feeds(node, rng, (TOKENS[-1],))
        feeds["topk_ids"][:] = np.stack([np.zeros(TOKENS[-1]), rng.integers(1, 4, TOKENS[-1])], 1)
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "feeds", feeds)

    @property
    def name(self) -> str:
        zeros = " with zero points" if self.zero_points else ""
        return f"{self.word}{zeros}, level {self.accuracy_level}, {self.activation_type}, layout {self.layout}"


def cases(words: tuple[str, ...], level: int, layout: str, every: str) -> Iterator[Case]:
    """Each format, with and without zero points, with each activation type; they take the layouts in turn, from
    `layout` on. Of all these, every so-many-th.
    """
    formats = [(word, zeros) for word in words for zeros in ((False, True) if word[:3] == "int" else (False,))]
    kinds = enumerate(itertools.product(formats, FLOAT_TYPES))
    for number, ((word, zeros), kind) in itertools.islice(kinds, 0, None, int(every)):
        yield Case(word, zeros, level, kind, (int(layout) + number + number // 6) % len(LAYOUTS))


def in_bfloat16(node: Node) -> Node:
    """The node with quantised weights replaced by their values, rounded to bfloat16."""
    spec, values = node.spec, {}
    for name in spec.weight_inputs:
        if name in spec.formats:
            experts: list[int | None] = [None] if FIELDS[name].shared else list(range(spec.num_experts))
            exact = np.array([reference.values_of(spec, node.weights, name, expert) for expert in experts])
            values[name] = exact.astype(np.float32).astype(ml_dtypes.bfloat16).reshape(-1, *exact.shape[-2:])
            values[name] = values[name][0] if FIELDS[name].shared else values[name]
        elif not split_field(name)[1]:
            values[name] = node.weights[name]
    plain = replace(spec, weight_inputs=tuple(values), weight_formats=(), accuracy_level=0)
    return Node(plain, node.activation_type, node.constants, values)


def bound(node: Node) -> float:
    """Of the relative L2 error, where experts are multiplied in tiles: twice the sum of what roundings leave.

    An element in [1, 2) is rounded to bfloat16 by at most 2^-8, so by 2^-8 / sqrt(3) in the root mean square, and the
    elements themselves have one of sqrt(7 / 3): together 2^-8 / sqrt(7) < 2^-9. Of two terms, the second one is what
    the first one misses, and is rounded as well: 2^-9 of 2^-8 at most, 2^-17. A product with independent weights
    passes on relative errors, and so does the activation of values of order one. They come from

    - FC1's inputs, for gate and for up: none of bfloat16, unless mixing weights multiply them;
    - FC2's inputs;
    - weights of the three projections, where they are quantised and not exact in bfloat16, as mxfp4 is;
    - the output's own type, and float32 sums of n products, 2^-24 sqrt(n).

    Parts add up at worst; a sample of a hundred terms differs from its expectation by less than the factor 2.
    """
    spec = node.spec
    narrow = node.activation_type == "bfloat16"
    inputs = 2.0**-9 if narrow else 2.0**-17
    parts = inputs * (1 + 2 * (not narrow or spec.apply_weights_to == "input"))
    if any(form.name != "mxfp4" for form in spec.formats.values()):
        parts += 3 * 2.0**-9
    parts += harness.UNIT_ROUNDOFF[node.activation_type]
    parts += 2.0**-24 * (2 * math.sqrt(spec.hidden_size) + math.sqrt(spec.intermediate_size))
    return 2 * parts


class Layer:
    """A case with the output of all its tokens, whose bits any batch must repeat."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = harness.make_model(case.node)
        self.output = self.run(self.session(1), np.arange(TOKENS[-1]))

    def session(self, threads: int) -> ort.InferenceSession:
        return harness.make_session(self.model, threads)

    def run(self, session: ort.InferenceSession, rows: np.ndarray) -> np.ndarray:
        return harness.run(session, {name: value[rows] for name, value in self.case.feeds.items()})["output"]

    def check_batch(self, session: ort.InferenceSession, rows: np.ndarray) -> None:
        got = self.run(session, rows)
        assert got.tobytes() == self.output[rows].tobytes(), f"wrong bits of {self.case.name}, rows {rows.tolist()}"

    def check(self, session: ort.InferenceSession, rng: np.random.Generator) -> None:
        """Any batch, as `at_once` wants it."""
        self.check_batch(session, rng.permutation(TOKENS[-1])[: rng.integers(0, 80)])

    def check_batches(self) -> None:
        """Every number of tokens, on 1 to 4 threads."""
        rng = np.random.default_rng(5)
        sessions = [self.session(threads) for threads in (1, 2, 3, 4)]
        for number, tokens in enumerate(TOKENS):
            self.check_batch(sessions[number % 4], rng.permutation(TOKENS[-1])[:tokens])

    def check_accuracy(self, node: Node) -> None:
        """Against the reference of `node`."""
        want, _ = harness.expected(node, self.case.feeds)
        error, allowed = relative_l2(want, self.output.astype(np.float64)), bound(node)
        assert error <= allowed, f"relative L2 error {error:.3g}, allowed {allowed:.3g}: {self.case.name}"

    def digest(self) -> str:
        return hashlib.sha256(self.output.tobytes()).hexdigest()


def layer_in_tiles(case: Case) -> Layer:
    """Made with AMX, as the emulator, where there is one, can tell."""
    if "HINA_AMX_EMULATOR" not in os.environ:
        return Layer(case)
    with Recorder() as recorder:
        layer = Layer(case)
    product = "tdpbf16ps" if case.accuracy_level < 4 else "tdpbusd" if case.word[:4] == "int8" else "tdpb"
    assert sum(n for name, n in recorder.counts.items() if name.startswith(product)), (case.name, recorder.counts)
    return layer


def right(layout: str, every: str) -> dict[str, int]:
    """Layers of float activations, against the reference, with weights as they are and as tiles take them; every batch
    has their bits.
    """
    number = 0
    for case in cases(FLOATS, 0, layout, every):
        layer = layer_in_tiles(case)
        layer.check_accuracy(case.node)
        layer.check_accuracy(in_bfloat16(case.node))
        layer.check_batches()
        number += 1
    return {"layers": number}


def right_in_part(layout: str, every: str) -> dict[str, int]:
    """Where tiles compute some experts only: against the reference."""
    number = 0
    for case in cases(FLOATS, 0, layout, every):
        layer_in_tiles(case).check_accuracy(case.node)
        number += 1
    return {"layers": number}


def right_int8(layout: str, every: str) -> dict[str, str]:
    """Digests of layers of int8 activations that tiles compute; every batch has their bits."""
    found = {}
    for case in cases(QUANTISED, 4, layout, every):
        layer = layer_in_tiles(case)
        layer.check_batches()
        found[case.name] = layer.digest()
    return found


def right_mixtures() -> dict[str, int]:
    """FC1 and FC2 of different types, which take their tokens in different forms."""
    pairs = itertools.permutations(("bfloat16", "int8", "int4:32", "mxfp4"), 2)
    number = 0
    for (first, down), level in itertools.product(pairs, (0, 4)):
        case = Case(f"{first}/{down}", False, level, FLOAT_TYPES[number % 3], number // 2 % len(LAYOUTS))
        layer = layer_in_tiles(case)
        harness.assert_right(case.node, case.feeds, {"output": layer.output})
        layer.check_batches()
        number += 1
    return {"layers": number}


def digests(level: str, layout: str, every: str) -> dict[str, str]:
    """Of layers with quantised weights, whatever computes them."""
    words = QUANTISED if level == "4" else INTEGERS
    return {case.name: Layer(case).digest() for case in cases(words, int(level), layout, every)}


def chosen() -> list[Layer]:
    """One term and two, of bfloat16; int8 codes as they lie, and unpacked ones."""
    cases = [
        Case("bfloat16", False, 0, "bfloat16", 0),
        Case("bfloat16", False, 0, "float32", 3),
        Case("int4:32", True, 4, "float32", 1),
        Case("int8", False, 4, "float16", 2),
    ]
    return [layer_in_tiles(case) for case in cases]


def sessions_at_once(calls: str) -> dict[str, int]:
    """Four sessions of different layers, two threads each, and two Python threads on each of them."""
    return at_once([(layer, layer.session(2)) for layer in chosen()] * 2, int(calls))


def bad_tokens() -> dict[str, int]:
    """NaN and infinities stay with their token, whatever tile it shares with others."""
    runs = 0
    for layer, tokens, value in itertools.product(chosen(), (5, 16, 40), (np.nan, np.inf, -np.inf)):
        feeds = {name: tensor[:tokens].copy() for name, tensor in layer.case.feeds.items()}
        feeds["hidden_states"][3, 60] = value
        got = harness.run(layer.session(2), feeds)["output"]
        others = np.arange(tokens) != 3
        assert got[others].tobytes() == layer.output[:tokens][others].tobytes(), layer.case.name
        assert not np.isfinite(got[3].astype(np.float32)).any(), layer.case.name
        runs += 1
    return {"runs": runs}


def main() -> None:
    name, *arguments = sys.argv[1:]
    functions = (right, right_in_part, right_int8, right_mixtures, digests, sessions_at_once, bad_tokens)
    print(json.dumps(next(f for f in functions if f.__name__ == name)(*arguments)))


if __name__ == "__main__":
    main()
