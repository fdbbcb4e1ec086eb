"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5) as two operators of ONNX Runtime that carry a state from step to step.

com.microsoft CausalConvWithState is the short convolution `[B, C, S]` with the last K - 1 columns of the step before;
LinearAttention is the gated delta rule (Yang et al. 2024, arXiv:2412.06464) with a recurrent state `[B, H, dk, dv]`.
The code of transformers cuts the sequence into chunks, whose number a graph of any length cannot know. States of zeros
are those before the first token. Names and shapes are those of onnxruntime-genai.
"""

from __future__ import annotations

from typing import Any

LAYER_TYPE = "linear_attention"
PARTS = ("conv", "recurrent")
_DOMAIN = "com.microsoft"


def is_linear(config: Any, layer: int) -> bool:
    """Whether `layer` of the decoder with `config` is one of these."""
    types = getattr(config.get_text_config(), "layer_types", None)
    return types is not None and types[layer] == LAYER_TYPE


def layer(*states: Any) -> Any:
    """The layer of a transformers cache that holds `states`, conv and recurrent, or none before the first token."""
    from transformers.cache_utils import LinearAttentionLayer

    class Layer(LinearAttentionLayer):
        def update_conv_state(self, conv_states: Any, *_: Any, **__: Any) -> Any:
            _waiting.append(self)
            return conv_states

        def update_recurrent_state(self, recurrent_states: Any, *_: Any, **__: Any) -> Any:
            self.recurrent_states[0] = recurrent_states
            return recurrent_states

    made = Layer()
    if states:
        made.conv_states[0], made.recurrent_states[0] = states
        made.has_previous_state[0] = True
    return made


_waiting: list[Any] = []
"""The layer whose convolution is traced next."""


def convolution(hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any) -> Any:
    """`hidden_states` `[B, C, S]` convolved with `weight` `[C, K]`; the state of the layer that waits moves on."""
    import torch

    waiting = _waiting.pop()
    past = waiting.conv_states[0]
    shape = (hidden_states.shape[0], hidden_states.shape[1], weight.shape[1] - 1)
    output, present = torch.onnx.ops.symbolic_multi_out(
        f"{_DOMAIN}::CausalConvWithState",
        [hidden_states, weight.unsqueeze(1), bias, hidden_states.new_zeros(shape) if past is None else past],
        attrs={"activation": activation or "none", "ndim": 1},
        dtypes=[hidden_states.dtype] * 2,
        shapes=[hidden_states.shape, shape],
        version=1,
    )
    waiting.conv_states[0] = present
    return output


def delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None, **options: Any
) -> tuple[Any, Any]:
    """The gated delta rule on `query`, `key` `[B, S, H, dk]`, `value` `[B, S, Hv, dv]`, `g` and `beta` `[B, S, Hv]`."""
    import torch

    batch, length, heads, width = value.shape
    if options.get("use_qk_l2norm_in_kernel"):
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] != heads else x for x in (query, key))
    shape = (batch, heads, key.shape[-1], width)
    rows = (batch, length, -1)
    output, present = torch.onnx.ops.symbolic_multi_out(
        f"{_DOMAIN}::LinearAttention",
        [
            *(x.reshape(rows) for x in (query, key, value)),
            value.new_zeros(shape) if initial_state is None else initial_state,
            g,
            beta,
        ],
        attrs={
            "q_num_heads": heads,
            "kv_num_heads": heads,
            "update_rule": "gated_delta",
            "scale": float(key.shape[-1] ** -0.5),
        },
        dtypes=[value.dtype] * 2,
        shapes=[(batch, length, heads * width), shape],
        version=1,
    )
    return output.reshape(value.shape), present
