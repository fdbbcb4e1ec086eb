"""HinaMoE in numpy: the readable definition of the op and the oracle of every test. Slow and obvious on purpose.

Everything is computed in float64 from the values the tensors hold, so a kernel's error can be stated as a relative
L2 norm against it. Weights are always stacked here: `weights["gate_proj"]` is `[E, I, H]`, `weights["down_proj"]`
`[E, H, I]`, `weights["shared_up_proj"]` `[S, H]`; the names are those of `op_schema.WEIGHT_FIELDS`. Projections that
`spec.weight_formats` names hold codes, in any shape that the op takes, and have scales and zero points beside them.
Quantised activations (`accuracy_level`) are not modelled: they are an error of the op, not a part of its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_passes.moe_spec import MoeSpec, split_field

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Tensors = Mapping[str, npt.NDArray[Any]]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def hina_moe(
    spec: MoeSpec,
    hidden_states: npt.NDArray[Any],
    weights: Tensors,
    *,
    router_weight: npt.NDArray[Any] | None = None,
    router_bias: npt.NDArray[Any] | None = None,
    router_logits: npt.NDArray[Any] | None = None,
    topk_ids: npt.NDArray[Any] | None = None,
    topk_weights: npt.NDArray[Any] | None = None,
    e_score_correction_bias: npt.NDArray[Any] | None = None,
) -> tuple[Array, Ids]:
    """Compute one node: `hidden_states [..., H]` -> (output `[..., H]` float64, tokens_per_expert `[E]` int64).

    Exactly one of `router_weight [E, H]`, `router_logits [..., E]` and `topk_ids [..., k]` (with `topk_weights`)
    must be given, else ValueError; ValueError too for an id outside 0..E-1.
    """
    if sum(v is not None for v in (router_weight, router_logits, topk_ids)) != 1:
        raise ValueError("give exactly one of router_weight, router_logits and topk_ids")
    x = np.asarray(hidden_states, np.float64).reshape(-1, spec.hidden_size)
    with np.errstate(all="ignore"):
        if topk_ids is not None:
            if topk_weights is None:
                raise ValueError("topk_ids needs topk_weights")
            ids = np.asarray(topk_ids, np.int64).reshape(-1, spec.top_k)
            mixing = np.asarray(topk_weights, np.float64).reshape(-1, spec.top_k)
            if ids.size and (ids.min() < 0 or ids.max() >= spec.num_experts):
                raise ValueError(f"topk_ids holds an id outside 0..{spec.num_experts - 1}")
        else:
            if router_weight is not None:
                logits = x @ np.asarray(router_weight, np.float64).T
                if router_bias is not None:
                    logits = logits + np.asarray(router_bias, np.float64)
            else:
                logits = np.asarray(router_logits, np.float64).reshape(-1, spec.num_experts)
            ids, mixing = route(spec, logits, e_score_correction_bias)
        output = _routed_experts(spec, x, ids, mixing, weights)
        if spec.has_shared_expert:
            output = output + shared_expert(spec, x, weights)
    counts = np.bincount(ids.ravel(), minlength=spec.num_experts).astype(np.int64)
    return output.reshape(np.shape(hidden_states)), counts


def route(spec: MoeSpec, logits: Array, correction_bias: npt.NDArray[Any] | None = None) -> tuple[Ids, Array]:
    """Choose experts: `logits [T, E]` -> (ids `[T, k]`, mixing weights `[T, k]`), best expert first."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(all="ignore"):
        if spec.score_func == "sparsemixer":
            ids, mixing = _sparsemixer(spec, logits)
        else:
            ids, mixing = _top_k_router(spec, logits, correction_bias)
        if spec.norm_topk_prob:
            norm = mixing.sum(-1, keepdims=True)
            if spec.norm_p != 1.0:
                norm = (np.abs(mixing) ** spec.norm_p).sum(-1, keepdims=True) ** (1.0 / spec.norm_p)
            norm = norm + spec.norm_eps
            if spec.norm_floor:
                norm = np.maximum(norm, spec.norm_floor)
            mixing = mixing / norm
        mixing = mixing * spec.routed_scaling_factor
        if spec.nonfinite_router == "zero":
            bad = (np.isnan(logits) | (logits == np.inf)).any(-1) | (logits == -np.inf).all(-1)
            mixing = np.where(bad[:, None], 0.0, mixing)
    return ids, mixing


def top_k(spec: MoeSpec, scores: Array, k: int) -> Ids:
    """Ids `[T, k]` of the k largest of `scores [T, n]`, largest first; NaN is larger than any number.

    Equal scores go to the lowest id (ONNX TopK) or the highest (com.microsoft MoE), as `tie_break` says.
    """
    n = scores.shape[-1]
    order = np.arange(n) if spec.tie_break == "lowest" else np.arange(n)[::-1]
    chosen = np.empty((len(scores), k), np.int64)
    for row, values in enumerate(scores[:, order]):
        is_number = ~np.isnan(values)
        ranked = np.lexsort((np.where(is_number, -values, 0.0), is_number))
        chosen[row] = order[ranked[:k]]
    return chosen


def softmax(x: Array) -> Array:
    """Softmax over the last axis; a row with NaN, +inf or nothing but -inf is all NaN, as in ONNX Runtime."""
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), elementwise."""
    result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


def _top_k_router(spec: MoeSpec, logits: Array, bias: npt.NDArray[Any] | None) -> tuple[Ids, Array]:
    scores = {"softmax": softmax, "sigmoid": sigmoid}.get(spec.score_func, lambda v: v)(logits)
    selection = scores if bias is None else scores + np.asarray(bias, np.float64)
    if spec.n_group > 1:
        selection = _mask_groups(spec, selection)
    ids = top_k(spec, selection, spec.top_k)
    mixing = np.take_along_axis(selection if spec.mixing_source == "selection" else scores, ids, -1)
    if spec.score_func == "softmax_topk":
        mixing = softmax(mixing)
    elif spec.score_func == "sigmoid_topk":
        mixing = sigmoid(mixing)
    return ids, mixing


def _mask_groups(spec: MoeSpec, selection: Array) -> Array:
    """Group-limited selection (DeepSeek-V2, arXiv:2405.04434; two best per group in DeepSeek-V3)."""
    tokens, experts = selection.shape
    groups = selection.reshape(tokens, spec.n_group, experts // spec.n_group)
    group_scores = groups.max(-1) if spec.group_score_func == "max" else np.sort(groups, -1)[..., -2:].sum(-1)
    kept = np.zeros((tokens, spec.n_group), bool)
    np.put_along_axis(kept, top_k(spec, group_scores, spec.topk_group), True, -1)
    return np.where(kept[..., None], groups, spec.group_mask_value).reshape(tokens, experts)


def _sparsemixer(spec: MoeSpec, logits: Array) -> tuple[Ids, Array]:
    """Sparsemixer routing at inference (Phi-3.5-MoE, arXiv:2409.12136): two masked softmaxes, one expert each."""
    ids, mixing, left = [], [], logits
    for _ in range(2):
        best = left.max(-1, keepdims=True)
        far = (best - logits) / np.maximum(np.abs(logits), best) > 2 * spec.sparsemixer_jitter_eps
        masked = np.where(far, -np.inf, left)
        chosen = top_k(spec, left, 1)
        ids.append(chosen)
        mixing.append(np.take_along_axis(softmax(masked), chosen, -1))
        left = left.copy()
        np.put_along_axis(left, chosen, -np.inf, -1)
    return np.concatenate(ids, -1), np.concatenate(mixing, -1)


def _activate(spec: MoeSpec, g: Array) -> Array:
    match spec.activation:
        case "silu":
            return g * sigmoid(spec.activation_alpha * g)
        case "gelu":
            cdf: Array = 0.5 * (1.0 + _erf(g / math.sqrt(2.0)))
            return g * cdf
        case "gelu_tanh":
            return 0.5 * g * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3)))
        case "relu" | "relu2":
            positive: Array = np.maximum(g, 0.0)
            return positive if spec.activation == "relu" else positive**2
        case _:
            return g


def _mlp(spec: MoeSpec, x: Array, w: Mapping[str, Array]) -> Array:
    """One expert: `x [t, H]` -> `[t, H]`; `w` holds the fields of that expert without prefix."""

    def project(name: str, value: Array) -> Array:
        result: Array = value @ w[name].T
        if name + "_bias" in w:
            result = result + w[name + "_bias"]
        return result

    if "gate_up_proj" in w:
        both = project("gate_up_proj", x)
        half = both.shape[-1] // 2
        first, second = (both[:, ::2], both[:, 1::2]) if spec.gate_up_interleaved else (both[:, :half], both[:, half:])
        gate, up = (first, second) if spec.gate_up_order == "gate_up" else (second, first)
    elif "gate_proj" in w:
        gate, up = project("gate_proj", x), project("up_proj", x)
    else:
        return project("down_proj", _activate(spec, project("up_proj", x)))
    if not math.isinf(spec.activation_limit):
        gate = np.minimum(gate, spec.activation_limit)
        up = np.clip(up, -spec.activation_limit, spec.activation_limit)
    return project("down_proj", _activate(spec, gate) * (up + spec.activation_beta))


def _value_fields(spec: MoeSpec) -> list[str]:
    """The weight fields that are not merely scales or zero points of another."""
    return [name for name in spec.weight_inputs if not split_field(name)[1]]


def values_of(spec: MoeSpec, weights: Tensors, name: str, expert: int | None = None) -> Array:
    """The values of weight field `name` of one expert, or of the shared expert, dequantised if need be: `[N, K]`."""

    def read(field: str) -> npt.NDArray[Any]:
        return np.asarray(weights[field] if expert is None else weights[field][expert])

    form = spec.formats.get(name)
    if form is None:
        return read(name).astype(np.float64)
    n, k = spec.matrix_shape(name)
    zeros = f"{name}_zero_points"
    return form.dequantise(
        read(name), read(f"{name}_scales"), read(zeros) if zeros in spec.weight_inputs else None, n, k
    )


def _routed_experts(spec: MoeSpec, x: Array, ids: Ids, mixing: Array, weights: Tensors) -> Array:
    output = np.zeros_like(x)
    names = [n for n in _value_fields(spec) if not n.startswith("shared_")]
    for expert in range(spec.num_experts):
        tokens, slots = np.nonzero(ids == expert)
        if not len(tokens):
            continue
        w = {n: values_of(spec, weights, n, expert) for n in names}
        scale = mixing[tokens, slots][:, None]
        if spec.apply_weights_to == "input":
            np.add.at(output, tokens, _mlp(spec, x[tokens] * scale, w))
        else:
            np.add.at(output, tokens, _mlp(spec, x[tokens], w) * scale)
    return output


def shared_expert(spec: MoeSpec, x: Array, weights: Tensors) -> Array:
    """What the shared expert adds, its gate included: `x [T, H]` float64 -> `[T, H]`."""
    names = [n for n in _value_fields(spec) if n.startswith("shared_") and n != "shared_expert_gate"]
    result = _mlp(spec, x, {n.removeprefix("shared_"): values_of(spec, weights, n) for n in names})
    if "shared_expert_gate" in spec.weight_inputs:
        result = result * sigmoid(x @ np.asarray(weights["shared_expert_gate"], np.float64).reshape(1, -1).T)
    return result
