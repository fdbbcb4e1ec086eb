"""Normalisation: what it removes, what it leaves, and that results stay the same."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.normalize import normalize
from graph_passes.normalize.constants import LIMIT
from graph_passes.streaming import ChunkedTensor
from tests.graphs import copy_of, parse, run_original

X = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
CONSTANTS = {
    "by_h": np.array([-1, 8]),
    "one": np.array([1]),
    "two": np.array([2]),
    "i": np.array([1, 0]),
    "column": np.arange(200)[:, None],
    "row": np.arange(200)[None],
    "many": np.zeros(200, np.int64),
    "w": np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32),
    "tenth": np.array([0.1], np.float32),
    "last": np.array([-1]),
    "zero": np.array([0]),
    "eight": np.array([8]),
    "depth": np.array(2),
    "one_three": np.array([1, 3]),
    "end": np.array([2**63 - 1]),
    "by_four": np.array([-1, 4]),
    "five_by_h": np.array([5, 8]),
    "keep_by_h": np.array([0, 8]),
}


def normalised(body: str, outputs: str = "float[T, N] y") -> ir.Model:
    """The normalised model, after checking that it computes what it computed before."""
    model = parse(f"(float[T, 8] x) => ({outputs}) {{ {body} }}", CONSTANTS)
    before = copy_of(model)
    normalize(model)
    for old, new in zip(run_original(before, X), run_original(model, X), strict=True):
        np.testing.assert_array_equal(new, old)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


CASES = {
    "Identity": ("a = Identity(x) y = Relu(a)", ["Relu"]),
    "Cast to the same type": ("a = Cast<to = 1>(x) y = Relu(a)", ["Relu"]),
    "Cast to another type stays": ("a = Cast<to = 10>(x) b = Cast<to = 1>(a) y = Relu(b)", ["Cast", "Cast", "Relu"]),
    "Constant node": ("c = Constant<value_float = 2.0>() y = Mul(x, c)", ["Mul"]),
    "shape arithmetic": (
        "d = Mul(two, two) e = Add(d, d) m = Neg(one) s = Concat<axis = 0>(m, e) y = Reshape(x, s)",
        ["Reshape"],
    ),
    "Shape of an initializer": (
        "s = Shape(w) g = Gather(s, i) y0 = Reshape(w, g) y = MatMul(x, y0)",
        ["MatMul"],
    ),
    "a known axis of a shape, by Slice": (
        "s = Shape(x) h = Slice(s, last, end) m = Neg(one) t = Concat<axis = 0>(m, h) y = Reshape(x, t)",
        ["Reshape"],
    ),
    "a known axis of a shape, by attributes": (
        "h = Shape<start = 1, end = 2>(x) m = Neg(one) t = Concat<axis = 0>(m, h) y = Reshape(x, t)",
        ["Reshape"],
    ),
    "an unknown axis of a shape, by Slice": (
        "s = Shape(x) h = Slice(s, zero, one) t = Concat<axis = 0>(h, last) y = Reshape(x, t)",
        ["Shape", "Slice", "Concat", "Reshape"],
    ),
    "repeats by OneHot": ("o = OneHot(one, depth, one_three) r = Reshape(o, last) y = Tile(x, r)", ["Tile"]),
    "sizes that follow from other sizes": (
        "o = OneHot(one, depth, one_three) r = Reshape(o, last) t = Tile(x, r) s = Shape(t) g = Gather(s, one) "
        "n = Concat<axis = 0>(last, g) u = Neg(t) y = Reshape(u, n)",
        ["Tile", "Neg", "Reshape"],
    ),
    "reshapes there and back": (
        "a = Reshape(x, by_four) b = Unsqueeze(a, one) c = Reshape(b, by_h) d = Reshape(c, by_four) y = Relu(d)",
        ["Reshape", "Relu"],
    ),
    "a reshape to a fixed number of tokens stays": (
        "a = Reshape(x, by_four) b = Reshape(a, five_by_h) c = Reshape(b, by_four) y = Relu(c)",
        ["Reshape", "Reshape", "Reshape", "Relu"],
    ),
    "reshapes that keep an axis of their input stay": (
        "a = Reshape(x, keep_by_h) b = Unsqueeze(a, one) c = Squeeze(b, one) d = Reshape(c, keep_by_h) y = Relu(d)",
        ["Reshape", "Unsqueeze", "Squeeze", "Reshape", "Relu"],
    ),
    "equal constants, one of them computed": (
        "m = Neg(one) c = Concat<axis = 0>(m, eight) a = Reshape(x, by_h) b = Reshape(x, c) y = Add(a, b)",
        ["Reshape", "Add"],
    ),
    "arithmetic on floats stays": ("c = Mul(tenth, tenth) y = Mul(x, c)", ["Mul", "Mul"]),
    "constants of other types stay": (
        "n = Cast<to = 8>(by_h) c = Cast<to = 7>(n) y = Reshape(x, c)",
        ["Cast", "Cast", "Reshape"],
    ),
    "equal nodes": ("a = Sigmoid(x) b = Sigmoid(x) y = Mul(a, b)", ["Sigmoid", "Mul"]),
    "unused nodes": ("a = Tanh(x) y = Relu(x)", ["Relu"]),
    "dynamic shapes stay": (
        "s = Shape<start = 0, end = 1>(x) e = Mul(two, two) f = Mul(two, e) t = Concat<axis = 0>(s, f) "
        "y = Reshape(x, t)",
        ["Shape", "Concat", "Reshape"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_canonical_shape(name: str) -> None:
    body, expected = CASES[name]
    assert operators(normalised(body)) == expected


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("d = Sub(column, row) y = Abs(d)", ["Sub", "Abs"]),
        ("d = Gather<axis = 0>(row, many) y = Abs(d)", ["Gather", "Abs"]),
        ("d = Sub(row, row) y = Abs(d)", ["Abs"]),
        ("d = Gather<axis = 0>(column, i) y = Abs(d)", ["Abs"]),
    ],
)
def test_small_constants_are_not_made_large(body: str, kept: list[str]) -> None:
    assert operators(normalised(body, "int64[A, B] y")) == kept


def test_an_invalid_node_is_left_for_the_runtime_to_name() -> None:
    model = parse("(float[T, 8] x) => (float[T, N] y) { r = Concat<axis = 1>(one, two) y = Reshape(x, r) }", CONSTANTS)
    normalize(model)
    assert operators(model) == ["Concat", "Reshape"]


def test_a_reshape_of_an_old_opset_is_left_alone() -> None:
    model = parse("(float[T, 8] x) => (float[N] y) { y = Reshape<shape = [-1]>(x) }", {}, opset=4)
    normalize(model)
    assert operators(model) == ["Reshape"]


def test_reshapes_are_not_merged_through_an_operator_of_another_domain() -> None:
    model = parse(
        "(float[T, 8] x) => (float[M, 4] y) "
        "{ a = Reshape(x, s) b = com.microsoft.Flatten(a) c = Reshape(b, s) y = Relu(c) }",
        {"s": np.array([-1, 4])},
    )
    normalize(model)
    assert operators(model) == ["Reshape", "Flatten", "Reshape", "Relu"]


def test_outputs_keep_their_names() -> None:
    model = normalised("a = Relu(x) y = Identity(a) z = Relu(x)", "float[T, 8] y, float[T, 8] z")
    assert [output.name for output in model.graph.outputs] == ["y", "z"]


def unread() -> NoReturn:
    pytest.fail("a tensor was read")  # a BaseException, which is not taken for that of an invalid node


ROWS = LIMIT // 32 + 1


@pytest.mark.parametrize(
    "weight",
    [
        ir.LazyTensor(unread, dtype=ir.DataType.FLOAT, shape=ir.Shape((ROWS, 8)), name="w"),  # large
        ChunkedTensor(lambda: iter([np.ones((2, 8))]), ir.DataType.FLOAT, ir.Shape((2, 8)), "w"),  # computed
    ],
)
def test_weights_are_not_folded(weight: ir.LazyTensor) -> None:
    model = parse("(float[T, 8] x) => (float[T, N] y) { t = Transpose(w) y = MatMul(x, t) }", CONSTANTS)
    value = model.graph.initializers["w"]
    value.const_value, value.shape = weight, ir.Shape(weight.shape.numpy())
    normalize(model)
    assert operators(model) == ["Transpose", "MatMul"]


def test_functions_are_inlined() -> None:
    text = """<ir_version: 9, opset_import: ["": 20, "local": 1]>
    test (float[T, 8] x) => (float[T, 8] y) { y = local.twice(x) }
    <domain: "local", opset_import: ["": 20]> twice (a) => (b) { c = Relu(a) b = Relu(c) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    before = copy_of(model)
    normalize(model)
    assert operators(model) == ["Relu", "Relu"]
    np.testing.assert_array_equal(run_original(model, X)[0], run_original(before, X)[0])


@pytest.mark.parametrize("opset", [13, 14, 20])
def test_sizes_go_through_a_computed_reshape_at_opset_13_too(opset: int) -> None:
    nodes = "s = Shape(x) t = Gather(s, zero) by = Concat<axis = 0>(t, two, last) a = Reshape(x, by) y = Relu(a)"
    model = parse(f"(float[T, 8] x) => (float[T, M, N] y) {{ {nodes} }}", CONSTANTS, opset=opset)
    normalize(model)
    (reshape,) = (node for node in model.graph if node.op_type == "Reshape")
    assert reshape.outputs[0].shape is not None
    assert reshape.outputs[0].shape[1] == 2
    assert model.opset_imports[""] == opset
