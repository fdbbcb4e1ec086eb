"""HinaMoE inputs, attributes and outputs: the one table of the op.

The C++ side (`ops_cpp/op/schema.cc`) must equal this table; `tests/ops_cpp/test_schema.py` compares the two.

A node has seven named inputs, of which only the first is required, followed by a variadic list of weight
tensors. The attribute `weight_inputs` names the tensors of that list, in order, by the names of
`WEIGHT_FIELDS`. With `experts_stacked=1` every routed-expert field is one tensor with a leading expert axis;
with `experts_stacked=0` it is `num_experts` consecutive tensors, expert 0 first. A `shared_*` field is always
one tensor. All weights are row-major `[N, K]`, as `nn.Linear.weight` is.

A projection that `weight_formats` names is quantised: its tensor holds codes, and `<name>_scales` is present too. A
value is (code - zero point) * scale; `quantize/formats.py` says how codes, scales and zero points lie.

ONNX Runtime does not tell a custom op which attributes a node has: one that is not in this table, a misspelt one too,
is not seen by the library. `MoeSpec.from_attributes` refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DOMAIN = "hina"
OP_TYPE = "HinaMoE"
OPSET_VERSION = 1
SPEC_VERSION = 1

FLOAT_TYPES = ("float32", "float16", "bfloat16")
INDEX_TYPES = ("int64", "int32")


@dataclass(frozen=True)
class Input:
    """One fixed input: position is its place in `INPUTS`; shapes use the symbols of the module docstring."""

    name: str
    types: tuple[str, ...]
    shape: str
    required: bool
    constant: bool
    doc: str


@dataclass(frozen=True)
class Attribute:
    """One attribute: `default` None means required; `values` lists what a string attribute may say."""

    name: str
    type: str
    default: int | float | str | None
    values: tuple[str, ...]
    doc: str


@dataclass(frozen=True)
class WeightField:
    """One tensor (or, per expert, one group of tensors) of the variadic list; `shape` is that of one expert."""

    name: str
    shape: str
    shared: bool
    doc: str


INPUTS: tuple[Input, ...] = (
    Input("hidden_states", FLOAT_TYPES, "[..., H]", True, False, "tokens; every leading axis is a token axis"),
    Input("router_weight", FLOAT_TYPES, "[E, H]", False, True, "logits = x @ router_weight.T + router_bias"),
    Input("router_bias", FLOAT_TYPES, "[E]", False, True, "only together with router_weight"),
    Input("router_logits", FLOAT_TYPES, "[..., E]", False, False, "logits computed by the graph"),
    Input("topk_ids", INDEX_TYPES, "[..., k]", False, False, "expert ids chosen by the graph"),
    Input("topk_weights", FLOAT_TYPES, "[..., k]", False, False, "mixing weights; with topk_ids only"),
    Input(
        "e_score_correction_bias",
        FLOAT_TYPES,
        "[E]",
        False,
        True,
        "added to the scores for selection, never for mixing (DeepSeek-V3, arXiv:2412.19437)",
    ),
)
"""Exactly one of router_weight, router_logits and topk_ids is present."""


def _projection(name: str, rows: str, columns: str, doc: str) -> tuple[WeightField, ...]:
    """The fields of one projection: weights, and what they have beside them when they are quantised."""
    shared, blocks = name.startswith("shared_"), f"[{rows}, ceil({columns}/block)]"
    return (
        WeightField(name, f"[{rows}, {columns}]", shared, doc),
        WeightField(f"{name}_scales", blocks, shared, f"of a quantised {name}"),
        WeightField(f"{name}_zero_points", blocks, shared, "optional; int4 and int8 only"),
    )


WEIGHT_FIELDS: tuple[WeightField, ...] = (
    *_projection("gate_proj", "I", "H", "gate of a gated MLP"),
    *_projection("up_proj", "I", "H", "up projection; alone (no gate) it makes a plain MLP"),
    *_projection("gate_up_proj", "2I", "H", "gate and up in one tensor, see gate_up_order"),
    *_projection("down_proj", "H", "I", "down projection"),
    WeightField("gate_proj_bias", "[I]", False, ""),
    WeightField("up_proj_bias", "[I]", False, ""),
    WeightField("gate_up_proj_bias", "[2I]", False, "rows in the order of gate_up_proj"),
    WeightField("down_proj_bias", "[H]", False, ""),
    *_projection("shared_gate_proj", "S", "H", "shared expert, intermediate size S"),
    *_projection("shared_up_proj", "S", "H", ""),
    *_projection("shared_gate_up_proj", "2S", "H", ""),
    *_projection("shared_down_proj", "H", "S", ""),
    WeightField("shared_gate_proj_bias", "[S]", True, ""),
    WeightField("shared_up_proj_bias", "[S]", True, ""),
    WeightField("shared_gate_up_proj_bias", "[2S]", True, ""),
    WeightField("shared_down_proj_bias", "[H]", True, ""),
    WeightField("shared_expert_gate", "[1, H]", True, "shared output times sigmoid(x @ gate.T) (Qwen2-MoE)"),
)

PROJECTIONS: tuple[str, ...] = tuple(field.name for field in WEIGHT_FIELDS if field.name.endswith("_proj"))
"""The fields that may be quantised."""

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("spec_version", "int", None, (), "version of this table"),
    Attribute("num_experts", "int", None, (), "E, routed experts"),
    Attribute("top_k", "int", None, (), "k, experts per token, 1 <= k <= E"),
    Attribute("weight_inputs", "string", None, (), "space-separated WEIGHT_FIELDS names of the variadic list"),
    Attribute(
        "weight_formats",
        "string",
        "",
        (),
        "space-separated `field=format` or `field=format:block` of the quantised projections; format: int8, int4, "
        "mxfp4; block: 16, 32, 64, 128, 256, without it one scale per row (mxfp4: always 32, not written)",
    ),
    Attribute(
        "accuracy_level",
        "int",
        0,
        (),
        "0 to 4, as in MatMulNBits; 4: quantised projections take their activations as int8; 0 to 3: as float32",
    ),
    Attribute("experts_stacked", "int", 1, (), "1: one tensor [E, ...] per field; 0: E tensors per field"),
    Attribute("gate_up_order", "string", "gate_up", ("gate_up", "up_gate"), "which half of gate_up_proj comes first"),
    Attribute("gate_up_interleaved", "int", 0, (), "0: two halves; 1: rows alternate"),
    Attribute(
        "score_func",
        "string",
        "softmax",
        ("softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer"),
        "softmax/sigmoid over all experts, then top-k; *_topk: top-k of the logits, then the function over the k",
    ),
    Attribute("n_group", "int", 1, (), "expert groups of equal size (DeepSeek-V2, arXiv:2405.04434)"),
    Attribute("topk_group", "int", 1, (), "groups a token may choose from, at most n_group"),
    Attribute("group_score_func", "string", "max", ("max", "top2_sum"), "score of a group"),
    Attribute("group_mask_value", "float", -math.inf, (), "selection score of an expert in a group not chosen"),
    Attribute(
        "mixing_source",
        "string",
        "scores",
        ("scores", "selection"),
        "mixing weights are the scores, or the scores after bias and group mask (DeepSeek-V2)",
    ),
    Attribute("norm_topk_prob", "int", 0, (), "divide the k mixing weights by their norm"),
    Attribute("norm_p", "float", 1.0, (), "norm = sum(|w|^p)^(1/p); 1.0 is the plain sum (DBRX has others)"),
    Attribute("norm_eps", "float", 0.0, (), "added to the norm"),
    Attribute("norm_floor", "float", 0.0, (), "the norm is at least this (0.0: no floor)"),
    Attribute("routed_scaling_factor", "float", 1.0, (), "multiplies the mixing weights, last"),
    Attribute("sparsemixer_jitter_eps", "float", 0.01, (), "threshold is twice this (Phi-3.5-MoE)"),
    Attribute("tie_break", "string", "lowest", ("lowest", "highest"), "expert id that wins among equal scores"),
    Attribute(
        "nonfinite_router",
        "string",
        "propagate",
        ("propagate", "zero"),
        "a token whose logits hold NaN, +inf or nothing finite: NaN spreads, as in ONNX operators, or it gets zeros",
    ),
    Attribute("apply_weights_to", "string", "output", ("output", "input"), "Llama-4 scales the expert input"),
    Attribute(
        "activation",
        "string",
        "silu",
        ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"),
        "silu(g) = g * sigmoid(activation_alpha * g); gelu is the erf form; relu2 = relu squared",
    ),
    Attribute("activation_alpha", "float", 1.0, (), "silu only; 1.702 for gpt-oss and QuickGELU"),
    Attribute("activation_beta", "float", 0.0, (), "added to up (gpt-oss: 1.0); gated MLP only"),
    Attribute(
        "activation_limit",
        "float",
        math.inf,
        (),
        "gate = min(gate, limit), up = clip(up, -limit, limit); inf: no limit",
    ),
)

OUTPUTS: tuple[tuple[str, str, str], ...] = (
    ("output", "as hidden_states", "as hidden_states"),
    ("tokens_per_expert", "int64", "[E], optional"),
)
