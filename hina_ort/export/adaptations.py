"""What some architectures of transformers compute in a way that cannot be exported, said in another."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from hina_ort.export import delta_net
from hina_ort.export.experts import symbolic_experts

_COMPLEX_ROTARY = {"deepseek_v2": 1, "llama4": 2}
"""Modules whose `apply_rotary_emb` multiplies complex numbers, and the axis of heads of what it turns."""


@contextmanager
def adapted(module: Any) -> Iterator[None]:
    """Have the parts of `module` that need it computed by the functions below while the body runs."""
    with ExitStack() as stack:
        for name in {part.__module__ for part in map(type, module.modules())}:
            family = name.rpartition(".modeling_")[2]
            for owner, attribute, function in _replacements(family, name):
                stack.enter_context(mock.patch.object(owner, attribute, function))
        yield


def _replacements(family: str, modeling: str) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is replaced in the file `modeling` of an architecture: owner, attribute, and the function in its place."""
    if family in _COMPLEX_ROTARY:
        yield importlib.import_module(modeling), "apply_rotary_emb", partial(_rotate, _COMPLEX_ROTARY[family])
    if family in ("qwen3_next", "qwen3_5_moe"):
        yield importlib.import_module(modeling), "causal_conv1d_fn", delta_net.convolution
        yield importlib.import_module(modeling), "torch_chunk_gated_delta_rule", delta_net.delta_rule
    if family == "phimoe":
        yield importlib.import_module(modeling).PhimoeRotaryEmbedding, "forward", _phimoe_rotary
    if family == "llama4":
        yield importlib.import_module(modeling).Llama4TextMoe, "forward", _llama4_moe


def _rotate(heads: int, queries: Any, keys: Any, turns: Any) -> tuple[Any, Any]:
    """Queries and keys `[.., .., .., D]` turned pair by pair by the complex `turns` `[B, S, D / 2]`."""
    import torch

    parts = torch.view_as_real(turns).unsqueeze(heads)
    cos, sin = parts[..., 0], parts[..., 1]

    def turned(rows: Any) -> Any:
        pairs = rows.float().reshape(*rows.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(3).type_as(rows)

    return turned(queries), turned(keys)


def _phimoe_rotary(self: Any, hidden_states: Any, position_ids: Any) -> tuple[Any, Any]:
    """PhimoeRotaryEmbedding.forward: its scale for long texts, or that for short ones, as the positions say."""
    import torch

    parameters, scale = self.config.rope_parameters, self.attention_scaling
    if parameters["rope_type"] != "default":
        is_long = position_ids.max() + 1 > parameters["original_max_position_embeddings"]
        scale = torch.where(is_long, float(parameters["long_mscale"]), float(parameters["short_mscale"]))
    angles = position_ids[..., None].float() * self.inv_freq
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * scale).to(hidden_states.dtype), (both.sin() * scale).to(hidden_states.dtype)


def _llama4_moe(self: Any, hidden_states: Any) -> tuple[Any, Any]:
    """Llama4TextMoe.forward: each expert is given its tokens times the sigmoid of their logits, k per token."""
    import torch

    tokens = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(tokens, self.router.weight)
    chosen, ids = torch.topk(logits, self.top_k, dim=1)
    routed = symbolic_experts(self.experts, tokens, ids, torch.sigmoid(chosen), apply_weights_to="input")
    return self.shared_expert(tokens) + routed, logits
