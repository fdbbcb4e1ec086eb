"""Formats of quantised weights: against a scalar implementation, and against ONNX Runtime's own MatMulNBits."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from graph_passes.moe_spec import MoeSpec
from graph_passes.quantize.formats import BLOCKS, E2M1, WeightFormat, e8m0, pack, unpack

WORDS = ["int8", "int4", "mxfp4", *(f"{name}:{block}" for name in ("int8", "int4") for block in BLOCKS)]


def slow_value(form: WeightFormat, parts: tuple[Any, ...], n: int, k: int) -> float:
    """Value `[n, k]` by its definition, one bit of text at a time; `parts` are codes, scales, zero points or None."""
    codes, scales, zeros = parts
    place = k // form.block if form.block else 0
    scale = scales[n, place]
    if form.name == "int8":
        code, zero = int(codes[n, k]), 0 if codes.dtype == np.int8 else 128
        if zeros is not None:
            zero = int(zeros[n, place])
        return (code - zero) * float(scale)
    byte = f"{int(codes[n, k // 2]):08b}"
    bits = byte[4:] if k % 2 == 0 else byte[:4]
    if form.name == "mxfp4":
        sign, exponent, mantissa = int(bits[0]), int(bits[1:3], 2), int(bits[3])
        magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        return (-1) ** sign * magnitude * (math.nan if scale == 255 else 2.0 ** (int(scale) - 127))
    zero_point = 8.0
    if zeros is not None and zeros.dtype == np.uint8:
        pair = f"{int(zeros[n, place // 2]):08b}"
        zero_point = int(pair[4:] if place % 2 == 0 else pair[:4], 2)
    elif zeros is not None:
        zero_point = float(zeros[n, place])
    return (int(bits, 2) - zero_point) * float(scale)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[WeightFormat, tuple[Any, ...], int, int]:
    """A format with random codes, scales and zero points of each kind, for a matrix `[n, k]`."""
    form = WeightFormat.parse(draw(st.sampled_from(WORDS)))
    n, k = draw(st.integers(1, 4)), draw(st.integers(1, 70) | st.sampled_from([128, 255, 256, 257, 544]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    code_shape, scale_shape, zero_shape = form.shapes(n, k)
    codes = rng.integers(0, 256, code_shape, np.uint8)
    if form.name == "mxfp4":
        return form, (codes, rng.integers(0, 256, scale_shape, np.uint8), None), n, k
    scale_type = draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    scales = rng.standard_normal(scale_shape).astype(scale_type)
    zeros = draw(st.sampled_from(["none", "whole", "float"]))
    if form.name == "int8":
        codes = codes.view(draw(st.sampled_from([np.uint8, np.int8])))
        zero_points = rng.integers(0, 256, zero_shape, np.uint8).view(codes.dtype)
    elif zeros == "float":
        zero_points = rng.uniform(0, 15, scale_shape).astype(scale_type)
    else:
        zero_points = rng.integers(0, 256, zero_shape, np.uint8)
    return form, (codes, scales, None if zeros == "none" else zero_points), n, k


@given(matrices())
def test_values_equal_their_definition(matrix: tuple[WeightFormat, tuple[Any, ...], int, int]) -> None:
    form, parts, n, k = matrix
    got = form.dequantise(*parts, n, k)
    want = np.array([[slow_value(form, parts, row, column) for column in range(k)] for row in range(n)])
    assert got.dtype == np.float64 and got.shape == (n, k)
    np.testing.assert_array_equal(got, want)
    codes, scales, zeros = parts
    by_block = codes.reshape(n, form.blocks(k), -1)
    flat_zeros = None if zeros is None else zeros.ravel()
    np.testing.assert_array_equal(form.dequantise(by_block, scales.ravel(), flat_zeros, n, k), want)


@given(st.binary(min_size=1, max_size=20), st.integers(1, 3))
def test_packing_is_undone_by_unpacking(content: bytes, rows: int) -> None:
    packed = np.tile(np.frombuffer(content, np.uint8), (rows, 1))
    codes = unpack(packed)
    assert codes.max() < 16 and codes.shape == (rows, 2 * len(content))
    np.testing.assert_array_equal(pack(codes), packed)
    np.testing.assert_array_equal(unpack(pack(codes[:, :-1]))[:, :-1], codes[:, :-1])
    assert (unpack(pack(codes[:, :-1]))[:, -1] == 0).all()


def test_tables_are_those_of_the_standard() -> None:
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(E2M1, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    assert np.signbit(E2M1[8]) and not np.signbit(E2M1[0])
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e8m0(every), every.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


@pytest.mark.parametrize("word", WORDS)
def test_words_are_read_back(word: str) -> None:
    form = WeightFormat.parse(word)
    assert str(form) == word and WeightFormat.parse(str(form)) == form
    assert form.block == (32 if word == "mxfp4" else int(word.partition(":")[2] or 0))


@pytest.mark.parametrize(
    "word", ["", "int3", "int8:", "int4:24", "int4:0", "int4:032", "int4:-32", "mxfp4:32", "INT4", "int4:32:3", "int4 "]
)
def test_other_words_are_errors(word: str) -> None:
    with pytest.raises(ValueError, match="weight format"):
        WeightFormat.parse(word)


def test_blocks_that_do_not_exist_are_errors() -> None:
    for name, block in (("int4", 24), ("int8", -1), ("mxfp4", 0), ("mxfp4", 64)):
        with pytest.raises(ValueError, match="block"):
            WeightFormat(name, block)


def matmul_nbits(form: WeightFormat, parts: tuple[Any, ...], n: int, k: int) -> np.ndarray:
    """The matrix `[n, k]` as MatMulNBits multiplies it: its product with the identity."""
    codes, scales, zeros = parts
    initializers = {"codes": codes.reshape(n, form.blocks(k), -1), "scales": scales.ravel()}
    if zeros is not None:
        initializers["zeros"] = zeros.ravel()
    attributes = {"K": k, "N": n, "bits": form.bits, "block_size": form.block, "accuracy_level": 0}
    node = helper.make_node("MatMulNBits", ["x", *initializers], ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [k, k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [k, n])],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(k, dtype=np.float32)})[0].T


@pytest.mark.parametrize("zero_points", ["none", "whole", "float"])
@pytest.mark.parametrize(("name", "block"), [(name, block) for name in ("int4", "int8") for block in BLOCKS])
@pytest.mark.parametrize("k", [1, 33, 97, 128, 288])
def test_bytes_lie_as_in_matmul_nbits(name: str, block: int, k: int, zero_points: str) -> None:
    if zero_points == "float" and name == "int8":
        zero_points = "whole"  # int8 has no float zero points
    form, n, rng = WeightFormat(name, block), 5, np.random.default_rng(k * block)
    code_shape, scale_shape, zero_shape = form.shapes(n, k)
    codes = rng.integers(0, 256, code_shape, np.uint8)
    scales = rng.uniform(0.5, 2.0, scale_shape).astype(np.float32)
    zeros: Any = None
    if zero_points == "whole":
        zeros = rng.integers(0, 256, zero_shape, np.uint8)
    elif zero_points == "float":
        zeros = rng.uniform(0, 15, scale_shape).astype(np.float32)
    got = matmul_nbits(form, (codes, scales, zeros), n, k)
    want = form.dequantise(codes, scales, zeros, n, k)
    # A float32 value is rounded at most three times, as code * scale - zero * scale, each product below 2^bits * scale:
    # a ten-thousandth of a step at most, so that one wrong bit anywhere is seen.
    assert np.abs(got - want).max() <= 3 * 2.0**-24 * 2**form.bits * scales.max()


def spec(names: str, formats: str = "", **fields: Any) -> MoeSpec:
    shared = 8 if "shared" in names else 0
    return MoeSpec(
        hidden_size=48,
        intermediate_size=33,
        num_experts=4,
        top_k=2,
        shared_intermediate_size=shared,
        weight_inputs=tuple(names.split()),
        weight_formats=tuple(formats.split()),
        **fields,
    )


QUANTISED = "gate_up_proj gate_up_proj_scales gate_up_proj_zero_points down_proj down_proj_scales gate_up_proj_bias"
FORMATS = "gate_up_proj=int4:32 down_proj=int8"


def test_a_spec_with_formats_is_read_back_and_says_its_shapes() -> None:
    made = spec(QUANTISED, FORMATS, accuracy_level=4)
    attributes = made.attributes()
    assert attributes["weight_formats"] == FORMATS and attributes["accuracy_level"] == 4
    assert MoeSpec.from_attributes(attributes, hidden_size=48, intermediate_size=33) == made
    assert made.formats == {"gate_up_proj": WeightFormat("int4", 32), "down_proj": WeightFormat("int8")}
    shapes = {name: made.field_shape(name) for name in made.weight_inputs}
    assert shapes == {
        "gate_up_proj": (66, 32),
        "gate_up_proj_scales": (66, 2),
        "gate_up_proj_zero_points": (66, 1),
        "down_proj": (48, 33),
        "down_proj_scales": (48, 1),
        "gate_up_proj_bias": (66,),
    }
    assert made.matrix_shape("gate_up_proj") == (66, 48)
    assert made.to_dict()["weight_formats"] == FORMATS.split()
    assert FORMATS in made.summary() and "accuracy_level=4" in made.summary()
    assert "weight_formats" not in spec("up_proj down_proj").attributes()
    alike = spec("up_proj up_proj_scales down_proj down_proj_scales", "up_proj=mxfp4 down_proj=mxfp4")
    assert "mxfp4 weights" in alike.summary()


@pytest.mark.parametrize(
    ("names", "formats", "words"),
    [
        ("up_proj down_proj", "up_proj=int4", "must hold up_proj_scales"),
        ("up_proj up_proj_scales down_proj", "", "no format for up_proj"),
        ("up_proj up_proj_zero_points down_proj", "", "no format for up_proj"),
        ("up_proj up_proj_scales down_proj gate_proj_scales", "up_proj=int4", "no format for gate_proj"),
        ("up_proj up_proj_scales down_proj", "up_proj=int4 gate_proj=int4", "not in weight_inputs"),
        ("up_proj up_proj_scales up_proj_zero_points down_proj", "up_proj=mxfp4", "no zero points"),
        ("up_proj up_proj_scales down_proj", "up_proj=int5", "weight format 'int5'"),
        ("up_proj up_proj_scales down_proj", "up_proj=int4:24", "weight format 'int4:24'"),
        ("up_proj up_proj_scales down_proj", "up_proj", "weight format ''"),
        ("up_proj up_proj_scales down_proj", "up_proj=int4 up_proj=int8", "twice"),
        ("up_proj up_proj_bias down_proj", "up_proj_bias=int8", "field that is a projection"),
        (
            "up_proj down_proj shared_up_proj shared_down_proj shared_expert_gate",
            "shared_expert_gate=int8",
            "field that is a projection",
        ),
    ],
)
def test_contradictions_in_a_spec_are_errors(names: str, formats: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(names, formats)


@pytest.mark.parametrize("level", [-1, 5])
def test_other_accuracy_levels_are_errors(level: int) -> None:
    with pytest.raises(ValueError, match="accuracy_level"):
        spec("up_proj down_proj", accuracy_level=level)
