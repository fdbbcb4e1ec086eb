"""Models exported by optimum-onnx: fused, or refused for what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from graph_passes import external_data, reference
from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import INPUTS, WEIGHT_FIELDS
from graph_passes.pipeline import fuse_model
from models.qwen3_moe import build as qwen3_moe

pytestmark = pytest.mark.optimum

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
TOKEN_COUNTS = (1, 2, 7, 33)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class HinaMoE(OpRun):
    """The op, computed by the reference."""

    op_domain = "hina"

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        fixed = dict(zip((item.name for item in INPUTS), inputs[: len(INPUTS)], strict=True))
        given = {name: value for name, value in fixed.items() if value is not None and name != "hidden_states"}
        hidden = fixed["hidden_states"]
        weights = list(inputs[len(INPUTS) :])
        names = attributes["weight_inputs"].split()
        stacked = {}
        for name in names:
            shared = next(f.shared for f in WEIGHT_FIELDS if f.name == name)
            single = shared or attributes.get("experts_stacked", 1)
            taken = 1 if single else attributes["num_experts"]
            stacked[name] = weights.pop(0) if single else np.stack([weights.pop(0) for _ in range(taken)])
        down = stacked["down_proj"]
        spec = MoeSpec.from_attributes(
            {k: v for k, v in attributes.items() if v is not None},
            hidden_size=down.shape[1],
            intermediate_size=down.shape[2],
            router_input=next(n for n in ("router_weight", "router_logits", "topk_ids") if n in given),
        )
        output, _ = reference.hina_moe(spec, hidden, stacked, **given)
        return (output.astype(hidden.dtype),)


def past_inputs(session: ort.InferenceSession, tokens: int) -> dict[str, Any]:
    """Inputs of a first step: `tokens` ids and an empty cache."""
    rng = np.random.default_rng(tokens)
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        if item.name.startswith("past_key_values"):
            dtype = np.float16 if item.type == "tensor(float16)" else np.float32
            feeds[item.name] = np.zeros((1, TINY["num_key_value_heads"], 0, TINY["head_dim"]), dtype)
    feeds["input_ids"] = rng.integers(0, 300, (1, tokens))
    feeds["attention_mask"] = np.ones((1, tokens), np.int64)
    feeds["position_ids"] = np.arange(tokens)[None]
    return feeds


def export(folder: Path, *, dtype: str | None = None, **overrides: Any) -> Path:
    checkpoint = qwen3_moe.build(
        folder / "checkpoint", dtype="float16" if dtype == "fp16" else "float32", **{**TINY, **overrides}
    )
    return qwen3_moe.export(checkpoint, folder / "onnx", dtype=dtype)


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype", "bound"),
    [(8, 2, None, 1e-5), (8, 2, "fp16", 5e-3), (64, 8, None, 1e-5), (128, 8, None, 1e-5)],
)
def test_qwen3_moe_is_fused(tmp_path: Path, experts: int, top_k: int, dtype: str | None, bound: float) -> None:
    source = export(tmp_path, dtype=dtype, num_experts=experts, num_experts_per_tok=top_k)
    model = external_data.load(source)
    report = fuse_model(model)
    assert report.refused == []
    assert len(report.fused) == TINY["num_hidden_layers"]
    for block in report.fused:
        # The probe has run this block on 1, 2, 7 and 33 or more tokens against the float64 reference.
        assert block.worst_relative_l2 <= bound
        assert (block.spec.num_experts, block.spec.top_k, block.spec.norm_topk_prob) == (experts, top_k, True)
    nodes = [node for node in model.graph if node.op_type == "HinaMoE"]
    assert len(nodes) == TINY["num_hidden_layers"]
    assert not any(node.op_type in ("NonZero", "OneHot", "TopK", "ScatterElements") for node in model.graph)
    assert report.nodes_after == sum(1 for _ in model.graph)


def test_fused_model_gives_the_logits_of_the_exported_one(tmp_path: Path) -> None:
    source = export(tmp_path)
    model = external_data.load(source)
    assert fuse_model(model).applied
    fused = tmp_path / "fused.onnx"
    external_data.save(model, fused)
    session = ort.InferenceSession(source)
    evaluator = ReferenceEvaluator(onnx.load(fused), new_ops=[HinaMoE])
    for tokens in TOKEN_COUNTS:
        feeds = past_inputs(session, tokens)
        expected = session.run(["logits"], feeds)[0]
        got = evaluator.run(["logits"], feeds)[0]
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


def test_dense_and_moe_layers(tmp_path: Path) -> None:
    model = external_data.load(export(tmp_path, mlp_only_layers=[0]))
    report = fuse_model(model)
    assert [block.name for block in report.fused] == ["model.layers.1.mlp"]
    assert report.refused == []


def test_default_model_matches_its_spec_file(tmp_path: Path) -> None:
    source = qwen3_moe.export(qwen3_moe.build(tmp_path / "checkpoint"), tmp_path / "onnx")
    report = fuse_model(external_data.load(source))
    expected = json.loads((Path(qwen3_moe.__file__).parent / "spec.json").read_text())
    assert [block.spec.to_dict() for block in report.fused] == [expected] * qwen3_moe.CONFIG["num_hidden_layers"]
    assert (source.parent / "tokenizer.json").is_file()


def test_deepseek_v3_without_all_experts_is_refused(tmp_path: Path) -> None:
    """optimum traces this loop with a short dummy input, and the experts which that does not reach are gone."""
    import torch
    from optimum.exporters.onnx import main_export
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = 64
    config = DeepseekV3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=experts,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).eval().save_pretrained(tmp_path / "checkpoint")
    main_export(str(tmp_path / "checkpoint"), str(tmp_path / "onnx"), task="text-generation", do_validation=False)
    model = external_data.load(tmp_path / "onnx" / "model.onnx")
    names = [node.name or "" for node in model.graph]
    exported = {e for e in range(experts) if any(f"/experts.{e}/" in name for name in names)}
    missing = sorted(set(range(experts)) - exported)
    assert missing, "this export holds every expert, so it shows nothing"
    before = [node.name for node in model.graph]
    report = fuse_model(model)
    assert not report.applied
    assert len(report.refused) == 1
    assert f"router width {experts} but experts {', '.join(map(str, missing))} are missing" in report.refused[0].reason
    assert [node.name for node in model.graph] == before


def torchscript_block(path: Path, module: str, block: str, config: str, tokens: int, **settings: Any) -> Path:
    """One MoE block, exported by torch's TorchScript exporter from a trace of `tokens` tokens."""
    import importlib

    import torch
    import transformers

    class Plain(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.inner(x)
            return result[0] if isinstance(result, tuple) else result

    torch.manual_seed(0)
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts_per_tok": 2}
    inner = getattr(source, block)(getattr(transformers, config)(**sizes, **settings)).eval()
    for parameter in inner.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    axes = {"x": {0: "batch", 1: "sequence"}, "y": {0: "batch", 1: "sequence"}}
    torch.onnx.export(
        Plain(inner), (torch.randn(1, tokens, 64),), path, dynamo=False, opset_version=18,
        input_names=["x"], output_names=["y"], dynamic_axes=axes,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("module", "block", "config", "settings"),
    [
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", {"num_experts": 8}),
        ("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig", {"num_local_experts": 8}),
        ("jamba", "JambaSparseMoeBlock", "JambaConfig", {"num_experts": 8}),
    ],
)
def test_complete_torchscript_blocks(
    tmp_path: Path, module: str, block: str, config: str, settings: dict[str, Any]
) -> None:
    """A trace of many tokens reaches every expert; then the export is complete and right."""
    path = torchscript_block(tmp_path / "block.onnx", module, block, config, 128, **settings)
    report = fuse_model(external_data.load(path))
    assert report.refused == []
    assert len(report.fused) == 1
    assert report.fused[0].worst_relative_l2 <= 1e-5


def test_torchscript_block_with_fixed_weights_is_refused(tmp_path: Path) -> None:
    """The loop over the experts that were hit: ids are computed, weights are those of the trace."""
    settings = {"num_local_experts": 8}
    path = torchscript_block(tmp_path / "b.onnx", "mixtral", "MixtralSparseMoeBlock", "MixtralConfig", 3, **settings)
    report = fuse_model(external_data.load(path))
    assert not report.applied
    assert "expert id is computed" in report.refused[0].reason
