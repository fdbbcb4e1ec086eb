"""HinaMoE against the reference over everything a node can say."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_passes.moe_spec import ROUTER_INPUTS, MoeSpec, default_of
from graph_passes.op_schema import ATTRIBUTES, FLOAT_TYPES, INDEX_TYPES, PROJECTIONS
from graph_passes.quantize.formats import BLOCKS
from tests import node as harness
from tests.node import Node, Tensors, make_spec

SIZES = (1, 2, 7, 16, 33, 48, 60, 64, 127, 544)
EXPERTS = (1, 2, 3, 4, 5, 8, 16, 33, 60, 64)
TOKENS = (0, 1, 2, 3, 7, 16, 33)
MOST_WEIGHTS = 1 << 20
"""Experts x hidden x intermediate of one example: keeps the float64 reference fast, not the op."""

WORDS = {attribute.name: attribute.values for attribute in ATTRIBUTES if attribute.values}


@st.composite
def routers(draw: st.DrawFn, experts: int) -> dict[str, Any]:
    """Router fields of a MoeSpec with `experts` experts."""
    if draw(st.sampled_from(ROUTER_INPUTS)) == "topk_ids":
        return {"router_input": "topk_ids", "top_k": draw(st.integers(1, experts))}
    functions = [word for word in WORDS["score_func"] if experts > 1 or word != "sparsemixer"]
    fields: dict[str, Any] = {
        "router_input": draw(st.sampled_from(["router_weight", "router_logits"])),
        "score_func": draw(st.sampled_from(functions)),
        "top_k": draw(st.integers(1, min(experts, 8)) | st.just(experts)),
        "norm_topk_prob": draw(st.booleans()),
        "norm_p": draw(st.sampled_from([1.0, 2.0, 3.5])),
        "norm_eps": draw(st.sampled_from([0.0, 1e-20, 1e-6, 0.1])),
        "norm_floor": draw(st.sampled_from([0.0, 1e-12, 0.6])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "tie_break": draw(st.sampled_from(WORDS["tie_break"])),
        "nonfinite_router": draw(st.sampled_from(WORDS["nonfinite_router"])),
        "mixing_source": draw(st.sampled_from(WORDS["mixing_source"])),
    }
    if fields["score_func"] == "sparsemixer":
        return fields | {"top_k": 2, "sparsemixer_jitter_eps": draw(st.sampled_from([0.01, 0.2]))}
    if fields["score_func"] in ("softmax", "sigmoid"):
        groups = draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
        fields |= {
            "n_group": groups,
            "topk_group": draw(st.integers(1, groups)),
            "group_score_func": draw(st.sampled_from(WORDS["group_score_func"])),
            "group_mask_value": draw(st.sampled_from([default_of("group_mask_value"), 0.0])),
        }
    return fields


@st.composite
def activations(draw: st.DrawFn, mlp: str, has_shared: bool) -> dict[str, Any]:
    """Activation fields; those of a gated MLP only where some MLP of the node is gated."""
    fields: dict[str, Any] = {"activation": draw(st.sampled_from(WORDS["activation"]))}
    if fields["activation"] == "silu":
        fields["activation_alpha"] = draw(st.sampled_from([1.0, 1.702]))
    if mlp != "plain":
        fields["activation_beta"] = draw(st.sampled_from([0.0, 1.0]))
        fields["activation_limit"] = draw(st.sampled_from([default_of("activation_limit"), 7.0, 0.5]))
    if mlp == "fused" or has_shared:
        fields["gate_up_order"] = draw(st.sampled_from(WORDS["gate_up_order"]))
        fields["gate_up_interleaved"] = draw(st.booleans())
    return fields


@st.composite
def quantisation(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of quantised weights; half of the nodes have none, the others leave some projections plain."""
    if draw(st.booleans()):
        return {}
    words = [None, "mxfp4", "int4", "int8", *(f"{name}:{block}" for name in ("int4", "int8") for block in BLOCKS)]
    drawn = {name: draw(st.sampled_from(words)) for name in PROJECTIONS}
    return {
        "formats": {name: word for name, word in drawn.items() if word},
        "zero_points": draw(st.booleans()),
        "accuracy_level": draw(st.sampled_from([0, 4])),
    }


def types_of(draw: st.DrawFn, spec: MoeSpec) -> dict[str, str]:
    """A type for each weight field, of those that it may have."""
    types = {name: draw(st.sampled_from(FLOAT_TYPES)) for name in spec.weight_inputs}
    for name, form in spec.formats.items():
        types[name] = draw(st.sampled_from(["uint8", "int8"])) if form.name == "int8" else "uint8"
        zero_types = ["uint8", *FLOAT_TYPES] if form.name == "int4" else [types[name]]
        types[f"{name}_zero_points"] = draw(st.sampled_from(zero_types))
    return types


@st.composite
def specs(draw: st.DrawFn) -> MoeSpec:
    """Any node that the op accepts, within `MOST_WEIGHTS`."""
    hidden = draw(st.sampled_from(SIZES))
    intermediate = draw(st.sampled_from(SIZES))
    experts = draw(st.sampled_from([e for e in EXPERTS if e * hidden * intermediate <= MOST_WEIGHTS]))
    mlp = draw(st.sampled_from(["split", "fused", "plain"]))
    shared = draw(st.sampled_from([0, 0, 1, 20, 48]))
    shared_fields: dict[str, Any] = {}
    if shared:
        gated = ["split", "fused"] if mlp != "plain" else ["plain"]
        shared_fields = {
            "shared_mlp": draw(st.sampled_from(gated)),
            "shared_bias": draw(st.booleans()),
            "shared_expert_gate": draw(st.booleans()),
        }
    return make_spec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        mlp=mlp,
        bias=draw(st.booleans()),
        shared_intermediate_size=shared,
        **shared_fields,
        experts_stacked=draw(st.booleans()),
        apply_weights_to=draw(st.sampled_from(WORDS["apply_weights_to"])),
        **draw(routers(experts)),
        **draw(activations(mlp, bool(shared))),
        **draw(quantisation()),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Node, Tensors, dict[str, Any]]:
    """A node, the inputs of one run, and the options of its model."""
    spec = draw(specs())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    types = st.sampled_from(FLOAT_TYPES)
    activation = draw(types)
    mixed = draw(st.booleans())
    constants = ("router_weight", "router_bias", "e_score_correction_bias")
    weight_types = {name: draw(types) for name in constants} | types_of(draw, spec) if mixed else {}
    scored = spec.router_input != "topk_ids" and spec.score_func != "sparsemixer"
    node = harness.random_node(
        spec,
        rng,
        activation_type=activation,
        types=weight_types,
        router_bias=spec.router_input == "router_weight" and draw(st.booleans()),
        correction_bias=scored and draw(st.booleans()),
    )
    router_type = draw(types) if mixed else activation
    options = {"router_type": router_type, "index_type": draw(st.sampled_from(INDEX_TYPES))}
    feeds = harness.random_feeds(node, rng, (draw(st.sampled_from(TOKENS)),), **options)
    return node, feeds, options


@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(problem=problems(), threads=st.sampled_from([1, 2, 4]))
def test_op_equals_reference(problem: tuple[Node, Tensors, dict[str, Any]], threads: int) -> None:
    node, feeds, options = problem
    harness.check(node, feeds, threads=threads, **options)
