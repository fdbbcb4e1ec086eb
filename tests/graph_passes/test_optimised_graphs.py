"""Graphs that ONNX Runtime has optimised and saved: the blocks in them are still seen, and still right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import fuse_model
from models.blocks import BLOCKS, HIDDEN
from tests.exports import dynamo_block
from tests.families import FAMILIES, tokens
from tests.graph_passes import test_batched_mm
from tests.graph_passes.test_batched_mm import ACTIVATIONS
from tests.graphs import copy_of, only_match, only_miss, run_original
from tests.optimised import LEVELS, optimised
from tests.quantised_graphs import Dequantised, NBits, with_dequantised, with_nbits
from tests.unrolled_graphs import Loop, model_of

every_level = pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.slow) if level == "extended" else level for level in LEVELS]
)
LOOPS: dict[str, dict[str, Any]] = {
    "gemm": {"weights": "gemm"},
    "transpose": {"weights": "transpose"},
    "left": {"weights": "left"},
    "gather": {"weights": "gather"},
    "large_gather": {"weights": "gather", "hidden": 64, "inter": 96},
    "bias": {"bias": True},
    "token_first": {"slot_first": False},
    "one_expert": {"width": 1, "top_k": 1},
    "one_of_four": {"top_k": 1},
    "scatter_add": {"scatter_add": True},
}


def check_fused(saved: ir.Model, x: np.ndarray) -> ir.Model:
    work = copy_of(saved)
    report = fuse_model(work)
    assert report.refused == []
    assert len(report.fused) == 1
    before, after = run_original(saved, x), run_original(work, x, options=hina_ort.session_options())
    assert relative_l2(before[0], after[0]) <= 1e-5
    return work


@every_level
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, level: str, tmp_path: Path) -> None:
    saved = optimised(FAMILIES[family](), level, tmp_path)
    check_fused(saved, tokens(saved, 2, 9))


@every_level
@pytest.mark.parametrize("spelling", LOOPS)
def test_every_loop(spelling: str, level: str, tmp_path: Path) -> None:
    loop = Loop(**LOOPS[spelling])
    saved = optimised(model_of(loop), level, tmp_path)
    check_fused(saved, np.random.default_rng(2).standard_normal((2, 9, loop.hidden)).astype(np.float32))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str, tmp_path: Path) -> None:
    text, _ = ACTIVATIONS[name]
    source = test_batched_mm.block(activation=text)
    saved = optimised(source, "all", tmp_path)
    plain, read = only_match(source).spec, only_match(copy_of(saved)).spec
    assert (read.activation, read.activation_alpha) == (plain.activation, plain.activation_alpha)
    check_fused(saved, tokens(saved, 2, 9))


def slow_but(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in sorted(BLOCKS)]


@pytest.mark.dynamo
@every_level
@pytest.mark.parametrize("architecture", slow_but("deepseek_v3"))
def test_blocks_of_transformers(architecture: str, level: str, tmp_path: Path) -> None:
    source = dynamo_block(architecture)
    saved = optimised(source, level, tmp_path)
    assert only_match(copy_of(saved)).spec == only_match(ir.load(source)).spec
    check_fused(saved, np.random.default_rng(3).standard_normal((2, 9, HIDDEN)).astype(np.float32))


MLP = {"hidden": 16, "inter": 8}
"""A loop whose middle is replaced below."""


def plain_loop(middle: str) -> ir.Model:
    """A loop of plain experts, with biases on the up projection; `middle` makes {q}h of {q}m, the product without."""

    class Plain(Loop):
        def _mlp(self, e: int) -> list[str]:
            q = f"e{e}_"
            return [
                f"{q}m = MatMul({q}x, up{e})",
                *middle.format(q=q, e=e).splitlines(),
                f"{q}d = MatMul({q}h, down{e})",
            ]

    loop = Plain(**MLP)
    bias = np.random.default_rng(5).standard_normal(loop.inter).astype(np.float32)
    loop.arrays |= {f"up_bias{e}": bias * (e + 1) for e in range(loop.width)}
    return model_of(loop)


@pytest.mark.parametrize(
    ("middle", "activation"),
    [
        ("{q}h = com.microsoft.BiasGelu({q}m, up_bias{e})", "gelu"),
        ("{q}h = com.microsoft.FastGelu({q}m, up_bias{e})", "gelu_tanh"),
        ("{q}n = Add({q}m, up_bias{e})\n{q}h = com.microsoft.Gelu({q}n)", "gelu"),
        ("{q}n = Add({q}m, up_bias{e})\n{q}h = Relu({q}n)", "relu"),
    ],
)
@every_level
def test_biased_activations(middle: str, activation: str, level: str, tmp_path: Path) -> None:
    source = plain_loop(middle)
    assert only_match(copy_of(source)).spec.activation == activation
    saved = optimised(source, level, tmp_path)
    match = only_match(copy_of(saved))
    assert (match.spec.activation, "up_proj_bias" in match.spec.weight_inputs) == (activation, True)
    check_fused(saved, tokens(saved, 2, 9))


def with_fused_matmul(model: ir.Model, **attributes: float) -> ir.Model:
    """The loop with its gates as FusedMatMul."""
    for node in model.graph:
        if node.op_type == "MatMul" and str(node.outputs[0].name).endswith("_g"):
            node.op_type, node.domain = "FusedMatMul", "com.microsoft"
            for name, value in attributes.items():
                node.attributes[name] = ir.convenience.convert_attribute(name, value)
    return model


def test_fused_matmul() -> None:
    model = with_fused_matmul(model_of(Loop()), alpha=1.0)
    check_fused(model, tokens(model, 2, 9))
    square = with_fused_matmul(model_of(Loop(hidden=8, inter=8)), transB=1)
    assert only_match(copy_of(square)).weights["gate_proj"][0].in_place
    check_fused(square, tokens(square, 2, 9))


@pytest.mark.parametrize("attributes", [{"alpha": 0.5}, {"transA": 1}, {"transBatchB": 1}], ids=str)
def test_fused_matmul_that_does_more_is_refused(attributes: dict[str, float]) -> None:
    miss = only_miss(with_fused_matmul(model_of(Loop()), **attributes))
    assert "FusedMatMul scales or transposes what it projects" in miss.reason


@every_level
def test_matmul_nbits(level: str, tmp_path: Path) -> None:
    source = with_nbits(model_of(Loop(hidden=40)), lambda n: NBits(4, 16) if n[:4] in ("gate", "down") else None)
    saved = optimised(source, level, tmp_path)
    assert only_match(copy_of(saved)).spec.weight_formats == ("gate_proj=int4:16", "down_proj=int4:16")
    check_fused(saved, tokens(saved, 2, 9))


def test_onnx_runtime_turns_dequantize_linear_into_matmul_nbits(tmp_path: Path) -> None:
    names = [f"{name}{e}" for name in ("gate", "up", "down") for e in range(4)]
    how = Dequantised("int4", axis=0, block=16)
    source = with_dequantised(model_of(Loop(hidden=32, inter=32)), names, how)
    saved = optimised(source, "extended", tmp_path)
    spec = only_match(copy_of(saved)).spec
    assert (spec.weight_formats[0], spec.accuracy_level) == ("gate_proj=int4:16", 4)
    check_fused(saved, tokens(saved, 2, 9))


def saved_loop(folder: Path) -> ir.Model:
    """A loop as ONNX Runtime saves it: one Split of the mask in the place of a Gather for each expert."""
    saved = optimised(model_of(Loop(weights="gemm", bias=True)), "all", folder)
    assert [len(node.outputs) for node in saved.graph if node.op_type == "Split"].count(4) == 1
    return saved


def entries(model: ir.Model) -> list[ir.Value]:
    """The mask of each expert."""
    return list(next(node for node in model.graph if node.op_type == "Split" and len(node.outputs) == 4).outputs)


def test_experts_that_change_places_are_another_model(tmp_path: Path) -> None:
    saved = saved_loop(tmp_path)
    x = tokens(saved, 2, 9)
    (before,) = run_original(saved, x)
    first, second = entries(saved)[0], entries(saved)[2]
    uses = [(list(value.uses()), other) for value, other in ((first, second), (second, first))]
    for found, other in uses:
        for node, place in found:
            node.replace_input_with(place, other)
    assert relative_l2(before, run_original(saved, x)[0]) > 1e-3
    check_fused(saved, x)


def test_an_expert_that_runs_twice_is_refused(tmp_path: Path) -> None:
    saved = saved_loop(tmp_path)
    first, second = entries(saved)[0], entries(saved)[2]
    for node, place in list(second.uses()):
        node.replace_input_with(place, first)
    assert "expert 2 is missing" in only_miss(saved).reason


def test_another_activation_in_one_expert_is_refused(tmp_path: Path) -> None:
    saved = saved_loop(tmp_path)
    for node in saved.graph:
        if node.op_type == "QuickGelu":
            node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.5)
            break
    assert "HinaMoE needs all experts alike" in only_miss(saved).reason
