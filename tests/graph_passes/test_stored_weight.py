"""Weights behind lookups, views and casts: what is read is what the graph computes, and what is computed is none."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.matchers.stored_weight import stored_weight
from tests.graphs import array_of, parse, run_original

E, N, K = 3, 4, 5
RNG = np.random.default_rng(0)
CONSTANTS: dict[str, np.ndarray] = {
    "stack": RNG.standard_normal((E, N, K)).astype(np.float32),
    "half": RNG.standard_normal((E, N, K)).astype(np.float16),
    "matrix": RNG.standard_normal((N, K)).astype(np.float32),
    "rows": RNG.standard_normal((E, N)).astype(np.float32),
    "zero": np.array(0),
    "two": np.array(2),
    "three": np.array(3),
    "last_one": np.array(-1),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i2": np.array([2]),
    "i3": np.array([3]),
    "i01": np.array([0, 1]),
    "ones": np.array([1, 1, 1]),
    "one_and_two": np.array([1, 2]),
    "n_k": np.array([N, K]),
    "minus_k": np.array([-1, K]),
    "k_n": np.array([K, N]),
    "unit_n_k": np.array([1, N, K]),
    "flat": np.array([E * N, K]),
}

READ = {
    "an initializer": "w = Identity(matrix)",
    "Transpose": "w = Transpose<perm = [1, 0]>(matrix)",
    "Gather by a scalar": "w = Gather(stack, two)",
    "Gather by a list, and Squeeze": "a = Gather(stack, i2) w = Squeeze(a, i0)",
    "Gather from the end": "w = Gather(stack, last_one)",
    "Gather, then Transpose": "a = Gather(stack, two) w = Transpose<perm = [1, 0]>(a)",
    "Transpose, then Gather": "a = Transpose<perm = [0, 2, 1]>(stack) w = Gather(a, two)",
    "Gather and Transpose, twice": "a = Transpose<perm = [0, 2, 1]>(stack) b = Gather(a, i1) c = Squeeze(b, i0) "
    "w = Transpose<perm = [1, 0]>(c)",
    "Slice and Squeeze": "a = Slice(stack, i1, i2, i0) w = Squeeze(a, i0)",
    "Slice with a step, and Reshape": "a = Slice(stack, i1, i2, i0, i1) w = Reshape(a, n_k)",
    "Reshape with a size left open": "a = Slice(stack, i1, i2, i0) w = Reshape(a, minus_k)",
    "Split and Squeeze": "a, b, c = Split<axis = 0>(stack, ones) w = Squeeze(b, i0)",
    "Split by its number of outputs": "a, b, c = Split<axis = 0, num_outputs = 3>(stack) w = Squeeze(c, i0)",
    "Unsqueeze and Squeeze": "a = Unsqueeze(matrix, i01) b = Squeeze(a, i0) w = Squeeze(b, i0)",
    "Reshape to a unit axis and back": "a = Reshape(matrix, unit_n_k) b = Transpose<perm = [0, 2, 1]>(a) "
    "w = Squeeze(b, i0)",
    "Cast of float16": "a = Gather(half, two) w = Cast<to = 1>(a)",
    "Cast of float16, then Gather": "a = Cast<to = 1>(half) w = Gather(a, two)",
    "a row of a matrix": "w = Gather(rows, two)",
    "the stack": "w = Transpose<perm = [0, 2, 1]>(stack)",
}

NOT_READ = {
    "arithmetic": "w = Neg(matrix)",
    "an index outside": "w = Gather(stack, three)",
    "another axis": "w = Gather<axis = 1>(stack, two)",
    "two entries": "w = Gather(stack, i01)",
    "a unit axis left": "w = Gather(stack, i2)",
    "half of the entries": "a, b = Split<axis = 0>(stack, one_and_two) w = Squeeze(a, i0)",
    "Split along rows": "a, b = Split<axis = 1, num_outputs = 2>(stack) w = Squeeze(a, last_one)",
    "Slice along rows": "w = Slice(matrix, i1, i2, i0)",
    "two slices": "a = Slice(stack, i1, i3, i0) b = Slice(a, i0, i1, i0) w = Squeeze(b, i0)",
    "a Reshape of elements": "w = Reshape(matrix, k_n)",
    "a flattened stack": "w = Reshape(stack, flat)",
    "a column of a matrix": "a = Transpose<perm = [1, 0]>(rows) w = Gather(a, two)",
    "a Transpose of experts": "w = Transpose<perm = [1, 0, 2]>(stack)",
    "a narrowing Cast": "w = Cast<to = 10>(matrix)",
    "a computed index": "xs = Shape(x) i = Gather(xs, zero) w = Gather(stack, i)",
}


def value_of(text: str, opset: int = 20) -> tuple[ir.Model, ir.Value]:
    model = parse(f"(float[T] x) => (float y) {{ {text} s = Shape(w) y = Cast<to = 1>(s) }}", CONSTANTS, opset=opset)
    return model, next(value for node in model.graph for value in node.outputs if value.name == "w")


@pytest.mark.parametrize("spelling", READ)
def test_what_is_read_is_what_the_graph_computes(spelling: str) -> None:
    model, value = value_of(READ[spelling])
    source = stored_weight(value)
    assert source is not None
    (computed,) = run_original(model, np.zeros(2, np.float32), ["w"])
    assert source.shape == computed.shape
    np.testing.assert_array_equal(array_of(source), computed)


@pytest.mark.parametrize("spelling", NOT_READ)
def test_what_is_computed_is_no_stored_weight(spelling: str) -> None:
    source = stored_weight(value_of(NOT_READ[spelling])[1])
    assert source is None


def test_a_graph_input_is_no_constant() -> None:
    model, value = value_of("w = Gather(stack, two)")
    model.graph.inputs.append(model.graph.initializers["stack"])
    assert stored_weight(value) is None


@pytest.mark.parametrize(
    ("text", "opset"),
    [("w = Slice<axes = [0], starts = [1], ends = [2]>(stack)", 9), ("w = Reshape<shape = [4, 5]>(matrix)", 4)],
)
def test_nodes_of_old_opsets_are_no_stored_weight(text: str, opset: int) -> None:
    assert stored_weight(value_of(text, opset)[1]) is None


def test_long_ways_are_followed() -> None:
    turns = " ".join(f"t{i + 1} = Transpose<perm = [1, 0]>(t{i})" for i in range(2001))
    _, value = value_of(f"t0 = Gather(stack, two) {turns} w = Identity(t2001)")
    source = stored_weight(value)
    assert source is not None
    np.testing.assert_array_equal(array_of(source), CONSTANTS["stack"][2].T)
