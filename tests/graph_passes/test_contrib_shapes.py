"""Shapes behind the operators that ONNX Runtime puts into graphs: those that it computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.normalize import normalize
from graph_passes.normalize.shapes import infer_shapes
from tests.graphs import parse, run_original
from tests.quantised_graphs import NBits, with_nbits

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 16)).astype(np.float32)
CONSTANTS = {
    "scale": RNG.standard_normal(16).astype(np.float32),
    "w": RNG.standard_normal((16, 5)).astype(np.float32),
    "wt": RNG.standard_normal((5, 16)).astype(np.float32),
    "rows": np.array([-1, 16]),
}
CASES = {
    "QuickGelu": "y = com.microsoft.QuickGelu(x)",
    "Gelu": "y = com.microsoft.Gelu(x)",
    "FastGelu": "y = com.microsoft.FastGelu(x)",
    "FastGelu with a bias": "y = com.microsoft.FastGelu(x, scale)",
    "BiasGelu": "y = com.microsoft.BiasGelu(x, scale)",
    "SimplifiedLayerNormalization": "y = SimplifiedLayerNormalization<axis = -1, epsilon = 0.001>(x, scale)",
    "FusedMatMul": "y = com.microsoft.FusedMatMul<alpha = 0.5>(x, w)",
    "FusedMatMul transB": "y = com.microsoft.FusedMatMul<transB = 1>(x, wt)",
    "FusedMatMul transA": "y = com.microsoft.FusedMatMul<transA = 1>(x, x)",
    "FusedGemm": 'x2 = Reshape(x, rows) y = com.microsoft.FusedGemm<transB = 1, activation = "Relu">(x2, wt)',
    "MatMulNBits": "y = MatMul(x, w)",
}


@pytest.mark.parametrize("name", CASES)
def test_the_shape_is_the_one_that_onnx_runtime_computes(name: str) -> None:
    model = parse(f"(float[B, S, 16] x) => (float[U, V, W] z) {{ {CASES[name]} z = Identity(y) }}", CONSTANTS)
    if name == "MatMulNBits":
        model = with_nbits(model, lambda weight: NBits())
    else:
        model.graph.opset_imports["com.microsoft"] = 1
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
    before = [(node.domain, node.op_type, len(node.inputs), dict(node.attributes)) for node in model.graph]
    (computed,) = run_original(_without_output_shape(model), X, ["y"])
    infer_shapes(model)
    assert [(node.domain, node.op_type, len(node.inputs), dict(node.attributes)) for node in model.graph] == before
    value = next(v for node in model.graph for v in node.outputs if v.name == "y")
    assert value.dtype == ir.DataType.FLOAT and value.shape is not None
    assert len(value.shape) == computed.ndim
    known = [(d, size) for d, size in zip(value.shape, computed.shape, strict=True) if isinstance(d, int)]
    assert known and all(d == size for d, size in known)
    assert isinstance(value.shape[-1], int)


def _without_output_shape(model: ir.Model) -> ir.Model:
    model.graph.outputs[0].shape = None
    return model


def test_shapes_behind_them_are_known() -> None:
    """One such node does not hide the shapes of all that follows."""
    text = "n = SimplifiedLayerNormalization<axis = -1>(x, scale) q = com.microsoft.QuickGelu(n) y = MatMul(q, w)"
    model = parse(f"(float[B, S, 16] x) => (float[B, S, 5] z) {{ {text} z = Neg(y) }}", CONSTANTS)
    normalize(model)
    shapes = {value.name: str(value.shape) for node in model.graph for value in node.outputs}
    assert shapes == {"n": "[B,S,16]", "q": "[B,S,16]", "y": "[B,S,5]", "z": "[B,S,5]"}


def test_scales_behind_a_cast() -> None:
    """ONNX Runtime casts the scales of float16 models where it computes in float32."""
    text = "y = MatMul(x, w) n = Neg(y)"
    model = with_nbits(parse(f"(float[B, S, 16] x) => (float[B, S, 5] z) {{ {text} z = Neg(n) }}", CONSTANTS), _in_half)
    node = next(node for node in model.graph if node.op_type == "MatMulNBits")
    cast = ir.Node("", "Cast", [node.inputs[2]], [ir.AttrInt64("to", 1)], name="cast")
    model.graph.insert_before(node, cast)
    node.replace_input_with(2, cast.outputs[0])
    for value in (*node.outputs, *node.outputs[0].consumers()[0].outputs):
        value.shape = value.type = None
    infer_shapes(model)
    assert {str(v.shape) for n in model.graph for v in n.outputs if v.name in "yn"} == {"[B,S,5]"}


def _in_half(name: str) -> NBits:
    return NBits(scale_type="float16")
