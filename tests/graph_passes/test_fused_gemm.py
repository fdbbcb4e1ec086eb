"""FusedGemm in front of matchers: two standard nodes with the same result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.normalize import normalize
from graph_passes.normalize.fused_gemm import split_fused_gemm
from tests.graphs import copy_of, parse, run_original

RNG = np.random.default_rng(3)
CONSTANTS = {"w": RNG.standard_normal((5, 8)).astype(np.float32), "b": RNG.standard_normal(5).astype(np.float32)}


def model(activation: str, bias: str = ", b") -> ir.Model:
    """y = activation(1.5 * x @ w.T + b), which is read again."""
    node = f'v = com.microsoft.FusedGemm<transB = 1, alpha = 1.5, activation = "{activation}">(x, w{bias})'
    return parse(f"(float[T, 8] x) => (float[T, 5] v, float[T, 5] y) {{ {node} y = Neg(v) }}", CONSTANTS)


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "Tanh"])
@pytest.mark.parametrize("bias", ["", ", b"])
def test_an_activation_becomes_a_node(activation: str, bias: str) -> None:
    source = model(activation, bias)
    made = copy_of(source)
    normalize(made)
    assert [node.op_type for node in made.graph] == ["Gemm", activation, "Neg"]
    assert [value.name for value in made.graph.outputs] == ["v", "y"]
    x = RNG.standard_normal((7, 8)).astype(np.float32)
    for before, after in zip(run_original(source, x), run_original(made, x), strict=True):
        np.testing.assert_array_equal(after, before)


def test_an_activation_with_numbers_of_its_own_stays() -> None:
    made = model("LeakyRelu")
    split_fused_gemm(made)
    assert [node.op_type for node in made.graph] == ["FusedGemm", "Neg"]
