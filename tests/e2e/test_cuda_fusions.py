"""Blocks that transformers fuses into com.microsoft::MoE for CUDA, which ONNX Runtime's CPU kernel refuses: FC3."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import float16_bound, relative_l2
from graph_passes.pipeline import fuse_model
from models import blocks
from models.blocks import HIDDEN, TOP_K
from tests.graphs import copy_of, find, run_original

pytestmark = pytest.mark.dynamo

TOKEN_COUNTS = {1: (1, 1), 2: (2, 1), 7: (1, 7), 33: (3, 11)}


@functools.cache
def exported(architecture: str, dtype: str) -> tuple[Any, ir.Model]:
    """The block of `architecture` as a torch module, and as transformers exports it for CUDA."""
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    block = blocks.build(architecture).to(getattr(torch, dtype))
    axes = {"hidden_states": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}}
    tokens = torch.randn(2, 3, HIDDEN, dtype=getattr(torch, dtype))
    config = OnnxConfig(dynamic=True, dynamic_shapes=axes, ort_fusions="cuda")
    return block, OnnxExporter().export_program(block, {"hidden_states": tokens}, config)[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("architecture", ["granitemoe", "mixtral", "olmoe", "qwen3_moe"])
def test_the_node_is_fused_and_right(architecture: str, dtype: str) -> None:
    import torch

    block, source = exported(architecture, dtype)
    assert [node.op_type for node in source.graph if node.domain == "com.microsoft"] == ["MoE"]
    model = copy_of(source)
    (match,) = find(copy_of(source))
    assert getattr(match, "family", match) == "moe_op"
    report = fuse_model(model)
    assert len(report.fused) == 1, report.refused
    assert report.fused[0].spec.weight_inputs == ("gate_proj", "up_proj", "down_proj")
    assert report.fused[0].spec.router_input == "router_weight"
    for count, shape in TOKEN_COUNTS.items():
        tokens = np.random.default_rng(count).standard_normal((*shape, HIDDEN)).astype(np.float32).astype(dtype)
        with torch.no_grad():
            expected = block(torch.from_numpy(tokens)).numpy()
        (output,) = run_original(model, tokens, options=hina_ort.session_options())
        assert relative_l2(expected, output) <= (float16_bound(TOP_K) if dtype == "float16" else 1e-5), (
            f"{count} tokens"
        )
