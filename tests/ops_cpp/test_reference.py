"""The oracle itself against code that others wrote: the MoE blocks of transformers 5, torch and ONNX Runtime's TopK.

A block is built with random weights in double precision; some of its routers compute in float32 whatever the type,
hence the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from graph_passes import reference
from graph_passes.moe_spec import MoeSpec
from tests.node import make_spec, random_node

pytestmark = pytest.mark.dynamo
torch = pytest.importorskip("torch")

H, INNER, E, K, T = 12, 10, 8, 3, 25
RTOL = 2e-6


def config(**fields: Any) -> SimpleNamespace:
    """What the blocks read from a config; they only get attributes, so one namespace serves them all."""
    names: dict[str, Any] = {
        "hidden_size": H,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_experts": E,
        "num_local_experts": E,
        "n_routed_experts": E,
        "num_experts_per_tok": K,
        "hidden_act": "silu",
        "mlp_bias": False,
        "router_jitter_noise": 0.0,
        "_experts_implementation": "eager",
    }
    return SimpleNamespace(**{**names, **fields})


def block(module: str, name: str, **fields: Any) -> Any:
    """Block `name` of transformers model `module`, in double precision, random weights and buffers, fixed seed."""
    kind = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    made = kind(config(**fields)).double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in [*made.parameters(), *made.buffers()]:
            fan_in = tensor.shape[-1] if tensor.dim() > 1 else 25
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in))
    return made


def tensors(made: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in made.state_dict().items()}


def standard(made: Any, shared: str | None = None) -> dict[str, np.ndarray]:
    """Weights of the blocks that hold gate_up_proj [E, 2I, H] and maybe an MLP called `shared`."""
    state = tensors(made)
    weights = {name: state[f"experts.{name}"] for name in ("gate_up_proj", "down_proj")}
    if shared:
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights[f"shared_{name}"] = state[f"{shared}.{name}.weight"]
    return weights


def fused(**fields: Any) -> MoeSpec:
    sizes = {"hidden_size": H, "intermediate_size": INNER, "num_experts": E, "top_k": K}
    return make_spec(**{**sizes, "mlp": "fused", **fields})


def softmax_block(module: str, name: str, router: str = "gate.weight", *, norm: bool, **fields: Any) -> tuple[Any, ...]:
    made = block(module, name, **fields)
    return made, fused(norm_topk_prob=norm), standard(made), {"router_weight": tensors(made)[router]}


def qwen2_moe() -> tuple[Any, ...]:
    made = block("qwen2_moe", "Qwen2MoeSparseMoeBlock", norm_topk_prob=False, shared_expert_intermediate_size=7)
    weights = standard(made, "shared_expert") | {"shared_expert_gate": tensors(made)["shared_expert_gate.weight"]}
    spec = fused(shared_intermediate_size=7, shared_expert_gate=True)
    return made, spec, weights, {"router_weight": tensors(made)["gate.weight"]}


def granitemoe() -> tuple[Any, ...]:
    made = block("granitemoe", "GraniteMoeMoE")
    router = {"router_weight": tensors(made)["router.weight"]}
    return made, fused(score_func="softmax_topk"), standard(made), router


def deepseek_v2() -> tuple[Any, ...]:
    made = block(
        "deepseek_v2",
        "DeepseekV2Moe",
        routed_scaling_factor=2.5,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
    )
    spec = fused(
        shared_intermediate_size=2 * INNER,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        group_mask_value=0.0,
        mixing_source="selection",
    )
    return made, spec, standard(made, "shared_experts"), {"router_weight": tensors(made)["gate.weight"]}


def sigmoid_groups(module: str, name: str, n_group: int) -> tuple[Any, ...]:
    topk_group = max(1, n_group // 2)
    made = block(
        module,
        name,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        n_group=n_group,
        topk_group=topk_group,
        n_shared_experts=1,
    )
    spec = fused(
        shared_intermediate_size=INNER,
        score_func="sigmoid",
        routed_scaling_factor=2.5,
        n_group=n_group,
        topk_group=topk_group,
        group_score_func="top2_sum",
        norm_topk_prob=True,
        norm_eps=1e-20,
    )
    state = tensors(made)
    router = {
        "router_weight": state["gate.weight"],
        "e_score_correction_bias": state["gate.e_score_correction_bias"],
    }
    return made, spec, standard(made, "shared_experts"), router


def gpt_oss() -> tuple[Any, ...]:
    made = block("gpt_oss", "GptOssMLP", swiglu_alpha=1.702, swiglu_limit=0.7)
    state = tensors(made)
    weights = {
        "gate_up_proj": state["experts.gate_up_proj"].swapaxes(1, 2),
        "down_proj": state["experts.down_proj"].swapaxes(1, 2),
        "gate_up_proj_bias": state["experts.gate_up_proj_bias"],
        "down_proj_bias": state["experts.down_proj_bias"],
    }
    spec = fused(
        bias=True,
        gate_up_interleaved=True,
        score_func="softmax_topk",
        activation_alpha=1.702,
        activation_beta=1.0,
        activation_limit=0.7,
    )
    return made, spec, weights, {"router_weight": state["router.weight"], "router_bias": state["router.bias"]}


def llama4() -> tuple[Any, ...]:
    made = block("llama4", "Llama4TextMoe", num_experts_per_tok=1)
    state = tensors(made)
    weights = {
        "gate_up_proj": state["experts.gate_up_proj"].swapaxes(1, 2),
        "down_proj": state["experts.down_proj"].swapaxes(1, 2),
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        weights[f"shared_{name}"] = state[f"shared_expert.{name}.weight"]
    spec = fused(top_k=1, shared_intermediate_size=INNER, score_func="sigmoid_topk", apply_weights_to="input")
    return made, spec, weights, {"router_weight": state["router.weight"]}


def phimoe() -> tuple[Any, ...]:
    noise = {"router_jitter_noise": 0.2, "input_jitter_noise": 0.0}
    made = block("phimoe", "PhimoeSparseMoeBlock", num_experts_per_tok=2, **noise)
    spec = fused(top_k=2, score_func="sparsemixer", sparsemixer_jitter_eps=0.2)
    return made, spec, standard(made), {"router_weight": tensors(made)["router.weight"]}


def ernie() -> tuple[Any, ...]:
    fields = {"moe_norm_min": 0.6, "moe_num_shared_experts": 2, "use_bias": False}
    made = block("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", **fields)
    spec = fused(shared_intermediate_size=2 * INNER, norm_topk_prob=True, norm_floor=0.6)
    state = tensors(made)
    router = {
        "router_weight": state["gate.weight"],
        "e_score_correction_bias": state["gate.moe_statics.e_score_correction_bias"].reshape(-1),
    }
    return made, spec, standard(made, "shared_experts"), router


def minimax_m2() -> tuple[Any, ...]:
    made = block("minimax_m2", "MiniMaxM2SparseMoeBlock")
    state = tensors(made)
    router = {"router_weight": state["gate.weight"], "e_score_correction_bias": state["e_score_correction_bias"]}
    return made, fused(score_func="sigmoid", norm_topk_prob=True), standard(made), router


def hunyuan() -> tuple[Any, ...]:
    made = block("hunyuan_v1_moe", "HunYuanMoEV1Moe", moe_topk=K)
    spec = fused(shared_intermediate_size=INNER, norm_topk_prob=True)
    return made, spec, standard(made, "shared_mlp"), {"router_weight": tensors(made)["gate.wg.weight"]}


def dbrx() -> tuple[Any, ...]:
    ffn = config(
        ffn_hidden_size=INNER,
        moe_num_experts=E,
        moe_top_k=K,
        moe_jitter_eps=None,
        moe_normalize_expert_weights=2,
        ffn_act_fn={"name": "silu"},
    )
    made = block("dbrx", "DbrxFFN", ffn_config=ffn)
    state = tensors(made)
    weights = {
        "gate_proj": state["experts.mlp.w1"].reshape(E, INNER, H),
        "up_proj": state["experts.mlp.v1"].reshape(E, INNER, H),
        "down_proj": state["experts.mlp.w2"].reshape(E, INNER, H).swapaxes(1, 2),
    }
    spec = make_spec(hidden_size=H, intermediate_size=INNER, num_experts=E, top_k=K, norm_topk_prob=True, norm_p=2.0)
    return made, spec, weights, {"router_weight": state["router.layer.weight"]}


BLOCKS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "qwen3_moe": lambda: softmax_block("qwen3_moe", "Qwen3MoeSparseMoeBlock", norm=True, norm_topk_prob=True),
    "olmoe": lambda: softmax_block("olmoe", "OlmoeSparseMoeBlock", norm=False, norm_topk_prob=False),
    "mixtral": lambda: softmax_block("mixtral", "MixtralSparseMoeBlock", norm=True),
    "jamba": lambda: softmax_block("jamba", "JambaSparseMoeBlock", "router.weight", norm=False),
    "qwen2_moe": qwen2_moe,
    "granitemoe": granitemoe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": lambda: sigmoid_groups("deepseek_v3", "DeepseekV3MoE", 4),
    "dots1": lambda: sigmoid_groups("dots1", "Dots1MoE", 2),
    "glm4_moe": lambda: sigmoid_groups("glm4_moe", "Glm4MoeMoE", 1),
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "phimoe": phimoe,
    "ernie4_5_moe": ernie,
    "minimax_m2": minimax_m2,
    "hunyuan_v1_moe": hunyuan,
    "dbrx": dbrx,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_equals_the_block_of_transformers(name: str) -> None:
    pytest.importorskip("transformers", "5.0")
    made, spec, weights, router = BLOCKS[name]()
    x = np.random.default_rng(3).standard_normal((1, T, H))
    with torch.no_grad():
        result = made(torch.from_numpy(x.copy()))
    want = (result[0] if isinstance(result, tuple) else result).numpy().reshape(1, T, H)
    got, counts = reference.hina_moe(spec, x, weights, **router)
    assert np.linalg.norm(got - want) <= RTOL * np.linalg.norm(want)
    assert counts.sum() == T * spec.top_k
    assert (counts > 0).sum() > 2, "the test says little when few experts are chosen"


ACTIVATIONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "silu": ({}, torch.nn.functional.silu),
    "quick_gelu": ({"activation": "silu", "activation_alpha": 1.702}, lambda g: g * torch.sigmoid(1.702 * g)),
    "gelu": ({"activation": "gelu"}, torch.nn.functional.gelu),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda g: torch.nn.functional.gelu(g, approximate="tanh")),
    "relu": ({"activation": "relu"}, torch.relu),
    "relu2": ({"activation": "relu2"}, lambda g: torch.relu(g) ** 2),
    "identity": ({"activation": "identity"}, lambda g: g),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["split", "gate_up", "up_gate", "interleaved", "interleaved_up_gate", "plain"])
def test_activation_and_layout_equal_torch(name: str, layout: str) -> None:
    fields, act = ACTIVATIONS[name]
    mlp = layout if layout in ("split", "plain") else "fused"
    spec = make_spec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=1,
        top_k=1,
        mlp=mlp,
        bias=True,
        gate_up_order="up_gate" if "up_gate" in layout else "gate_up",
        gate_up_interleaved="interleaved" in layout,
        router_input="topk_ids",
        **fields,
    )
    rng = np.random.default_rng(5)
    gate, up, down = rng.standard_normal((INNER, H)), rng.standard_normal((INNER, H)), rng.standard_normal((H, INNER))
    gate_bias, up_bias, down_bias = rng.standard_normal(INNER), rng.standard_normal(INNER), rng.standard_normal(H)
    x = torch.from_numpy(rng.standard_normal((T, H)))
    up_part = torch.nn.functional.linear(x, torch.from_numpy(up), torch.from_numpy(up_bias))
    gate_part = torch.nn.functional.linear(x, torch.from_numpy(gate), torch.from_numpy(gate_bias))
    inner = act(up_part) if mlp == "plain" else act(gate_part) * up_part
    want = 0.5 * torch.nn.functional.linear(inner, torch.from_numpy(down), torch.from_numpy(down_bias)).numpy()

    pair = [(gate, gate_bias), (up, up_bias)]
    if spec.gate_up_order == "up_gate":
        pair.reverse()
    if spec.gate_up_interleaved:
        both = [np.stack(parts, 1).reshape(2 * INNER, *parts[0].shape[1:]) for parts in zip(*pair, strict=True)]
    else:
        both = [np.concatenate(parts) for parts in zip(*pair, strict=True)]
    tensors_by_name = {"gate_proj": gate, "gate_proj_bias": gate_bias, "up_proj": up, "up_proj_bias": up_bias}
    tensors_by_name |= {"gate_up_proj": both[0], "gate_up_proj_bias": both[1]}
    tensors_by_name |= {"down_proj": down, "down_proj_bias": down_bias}
    got, _ = reference.hina_moe(
        spec,
        x.numpy(),
        {name: tensors_by_name[name][None] for name in spec.weight_inputs},
        topk_ids=np.zeros((T, 1), np.int64),
        topk_weights=np.full((T, 1), 0.5),
    )
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_ties_and_nan_go_where_onnx_topk_puts_them() -> None:
    rng = np.random.default_rng(11)
    scores = rng.integers(0, 4, (200, 16)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.05] = np.nan
    scores[:4] = np.array([[0.0], [np.inf], [-np.inf], [np.nan]])
    spec = fused(top_k=5)
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["v", "i"])],
        "topk",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [200, 16])],
        [helper.make_tensor_value_info("i", TensorProto.INT64, [200, 5])],
        [helper.make_tensor("k", TensorProto.INT64, [1], [5])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": scores})
    np.testing.assert_array_equal(reference.top_k(spec, scores.astype(np.float64), 5), want)


def test_highest_tie_break_mirrors_lowest() -> None:
    scores = np.random.default_rng(12).integers(0, 4, (50, 16)).astype(np.float64)
    lowest = reference.top_k(fused(), scores[:, ::-1], K)
    np.testing.assert_array_equal(reference.top_k(fused(tie_break="highest"), scores, K), 15 - lowest)


@pytest.mark.parametrize("matmul_nbits", [False, True])
@pytest.mark.parametrize("formats", [("int4:32", "int8"), ("mxfp4", "int4"), ("int8:16", "mxfp4")])
def test_quantised_projections_are_dequantised(formats: tuple[str, str], matmul_nbits: bool) -> None:
    """The output is that of a float layer with the dequantised weights, whatever the shapes of the tensors."""
    first, down = formats
    sizes: dict[str, Any] = {"hidden_size": 70, "intermediate_size": 33, "num_experts": 3, "top_k": 2}
    words = {"gate_up_proj": first, "down_proj": down, "shared_up_proj": down}
    layout: dict[str, Any] = {"mlp": "fused", "bias": True, "shared_intermediate_size": 5, "shared_mlp": "plain"}
    spec = make_spec(**sizes, **layout, formats=words, zero_points=True)
    plain = make_spec(**sizes, **layout)
    rng = np.random.default_rng(6)
    weights = random_node(spec, rng).weights
    values = {name: weights[name] for name in plain.weight_inputs}
    for name, form in spec.formats.items():
        shape, zeros = spec.matrix_shape(name), weights.get(f"{name}_zero_points")
        if name.startswith("shared_"):
            values[name] = form.dequantise(weights[name], weights[f"{name}_scales"], zeros, *shape)
        else:
            each = [
                (weights[name][e], weights[f"{name}_scales"][e], None if zeros is None else zeros[e]) for e in range(3)
            ]
            values[name] = np.stack([form.dequantise(*parts, *shape) for parts in each])
        if matmul_nbits:
            leading = weights[name].shape[:-1]
            weights[name] = weights[name].reshape(*leading, form.blocks(shape[1]), -1)
            weights[f"{name}_scales"] = weights[f"{name}_scales"].reshape(*leading[:-1], -1)
    x = rng.standard_normal((4, 70))
    router = {"router_weight": rng.standard_normal((3, 70))}
    got, _ = reference.hina_moe(spec, x, weights, **router)
    want, _ = reference.hina_moe(plain, x, values, **router)
    assert np.abs(want).max() > 0
    np.testing.assert_array_equal(got, want)
