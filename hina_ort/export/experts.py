"""Experts of transformers as a symbolic HinaMoE node: an implementation for its registry of experts functions.

Modules of the registry hold stacked `gate_up_proj` and `down_proj` (with `is_transposed` as `[E, in, out]`), maybe
biases, and are called with tokens `[T, H]`, expert ids `[T, k]` and mixing weights `[T, k]`. The node takes all these;
the router before it, and what is stacked here and lies expert by expert in the checkpoint, are seen to afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from graph_passes import reference
from graph_passes.external_data import ModelFileError
from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE, OPSET_VERSION

NAME = "hina"
"""Of the implementation in the registry of transformers."""

_PLAIN = {"has_gate": True, "has_bias": False, "is_concatenated": True}
_UNREGISTERED: dict[str, dict[str, Any]] = {"Llama4TextExperts": {**_PLAIN, "is_transposed": True}}
"""Experts that are not in the registry but have its parameters, and what the registry would say of them."""
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")


def is_experts(part: Any) -> bool:
    """Whether a module holds experts of the registry, or such as can be treated alike."""
    return hasattr(part, "is_concatenated") or type(part).__name__ in _UNREGISTERED


@contextmanager
def symbolic(module: Any) -> Iterator[None]:
    """Have the experts of `module` traced as HinaMoE nodes while the body runs."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    registry: Any = ALL_EXPERTS_FUNCTIONS

    for part in filter(is_experts, module.modules()):
        part.__dict__.update(_UNREGISTERED.get(type(part).__name__, {}))
        part.hina_activation = _activation(part)  # by trying it out, which cannot be done while it is traced
    registry[NAME] = symbolic_experts
    before = module.get_experts_implementation()
    try:
        module.set_experts_implementation(NAME)
        yield
    finally:
        module.set_experts_implementation(before)
        del registry[NAME]


def symbolic_experts(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any, **fields: Any) -> Any:
    """The output `[T, H]` of a HinaMoE node that is only traced; it takes the parameters of the module `experts`.

    `fields` are more fields of its MoeSpec.
    """
    import torch

    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    weights = [getattr(experts, name) for name in names]
    if experts.is_transposed:
        weights = [weight.transpose(1, 2) for weight in weights]
    if experts.has_bias:
        biases = [f"{name}_bias" for name in names]
        weights += [getattr(experts, name) for name in biases]
        names += biases
    count, hidden, inner = weights[1].shape
    spec = MoeSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=count,
        top_k=top_k_index.shape[-1],
        weight_inputs=tuple(names),
        router_input="topk_ids",
        gate_up_interleaved=not experts.is_concatenated,
        **experts.hina_activation,
        **fields,
    )
    attributes: dict[str, Any] = {**spec.attributes()}
    inputs: dict[str, Any] = dict.fromkeys(item.name for item in INPUTS)
    inputs |= {"hidden_states": hidden_states, "topk_ids": top_k_index, "topk_weights": top_k_weights}
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_TYPE}",
        [*inputs.values(), *weights],
        attrs=attributes,
        dtype=hidden_states.dtype,
        shape=hidden_states.shape,
        version=OPSET_VERSION,
    )


def _activation(experts: Any) -> dict[str, Any]:
    """The activation that the module `experts` computes, as fields of a MoeSpec; each is tried on a few numbers.

    ModelFileError when it is none that the op knows.
    """
    import torch

    rng = np.random.default_rng(0)
    projected = (rng.standard_normal((64, 16)) * 6).astype(np.float32)  # beyond the usual limits, too
    with torch.no_grad():
        apply = getattr(experts, "_apply_gate", partial(_gated, experts)) if experts.has_gate else experts.act_fn
        expected = apply(torch.from_numpy(projected)).numpy()
    limit = getattr(experts, "limit", None)
    variants: list[dict[str, Any]] = [{"activation": name} for name in _ACTIVATIONS]
    if limit is not None:
        shape = {"activation_alpha": float(getattr(experts, "alpha", 1.0)), "activation_limit": float(limit)}
        variants = [{**shape, "activation_beta": beta} for beta in (1.0, 0.0)]
    for variant in variants:
        spec = _one_expert(16, experts.has_gate, gate_up_interleaved=not experts.is_concatenated, **variant)
        if np.allclose(_activated(spec, projected), expected, rtol=1e-4, atol=1e-5):
            return variant
    raise ModelFileError(f"the activation of {type(experts).__name__} is none that HinaMoE knows; report this model")


def _gated(experts: Any, projected: Any) -> Any:
    gate, up = projected.chunk(2, -1)
    return experts.act_fn(gate) * up


def _one_expert(width: int, gated: bool, **fields: Any) -> MoeSpec:
    """A block of one expert whose first projection has `width` rows, as many as it has columns."""
    return MoeSpec(
        hidden_size=width,
        intermediate_size=width // 2 if gated else width,
        num_experts=1,
        top_k=1,
        weight_inputs=("gate_up_proj" if gated else "up_proj", "down_proj"),
        router_input="topk_ids",
        **fields,
    )


def _activated(spec: MoeSpec, projected: Any) -> Any:
    """What `spec` makes of the rows of its first projection: all matrices are identities."""
    width, inner = spec.hidden_size, spec.intermediate_size
    weights: Any = {spec.weight_inputs[0]: np.eye(width)[None], "down_proj": np.eye(width, inner)[None]}
    rows = len(projected)
    routing: Any = {"topk_ids": np.zeros((rows, 1), np.int64), "topk_weights": np.ones((rows, 1))}
    output, _ = reference.hina_moe(spec, projected.astype(np.float64), weights, **routing)
    return output[:, :inner]
