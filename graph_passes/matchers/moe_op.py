"""com.microsoft::MoE and QMoE nodes, as onnxruntime-genai and transformers' fusions for CUDA write them.

A node is read as ONNX Runtime's CPU kernels compute it, not as its attributes promise:

- They ignore `use_sparse_mixer`, and QMoE ignores `normalize_routing_weights=0`: it takes the softmax of the k best.
- Equal scores go to the highest expert, and a token whose logits are not numbers gets zeros.
- `gelu` is the tanh form; `activation_alpha`, `activation_beta` and `swiglu_limit` are SwiGLU's alone.
- QMoE drops mixing weights up to 1e-8, which no float32 sum shows, and may round activations to int8, as
  `accuracy_level` says: an error of the kernel and no part of what the node means (see `cut`).

Nodes without a CPU kernel (FC3, SwiGLU that is not interleaved) are read as the schemas say, see `contrib_moe`; where
that and what CPU kernels do with other nodes are two things, they are refused.

A QMoE node with `router_weights` is read where these are the scores, and `router_probs` are the scores plus a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes.contrib_moe import is_contrib_moe, runs_on_cpu
from graph_passes.matchers.ends import check_routing
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.places import block_name, judge
from graph_passes.matchers.router import Router, router_projection
from graph_passes.matchers.views import (
    NoMatch,
    dim,
    is_last_axis,
    operand,
    produced_by,
    strip,
    weight,
)
from graph_passes.moe_spec import MoeSpec
from graph_passes.quantize.formats import WeightFormat

FAMILY = "moe_op"


@dataclass(frozen=True)
class _Places:
    """Which inputs of a node hold a projection."""

    weights: int
    bias: int
    scales: int | None = None
    zero_points: int | None = None


_PLACES = {
    "MoE": {"fc1": _Places(2, 3), "fc2": _Places(4, 5), "fc3": _Places(6, 7)},
    "QMoE": {"fc1": _Places(2, 4, 3, 11), "fc2": _Places(5, 7, 6, 12), "fc3": _Places(8, 10, 9, 13)},
}
_ROUTER_WEIGHTS = 14
_KNOWN = frozenset({"k", "normalize_routing_weights", "use_sparse_mixer"})
_KNOWN |= {"activation_type", "activation_alpha", "activation_beta", "swiglu_fusion", "swiglu_limit"}
_KNOWN |= {"expert_weight_bits", "block_size", "accuracy_level"}
_ONLY: Mapping[str, tuple[int | str, ...]] = {
    "swiglu_limit_after_activation": (0,),
    "quant_type": ("int",),
    "weights_prepacked": (-1, 0),
}
"""Attributes that may be there as long as they say nothing new; -1 is the default, and what CPU kernels read as 0."""

_SMALLEST_NORM = float(np.finfo(np.float32).tiny)
"""QMoE gives zeros where the mixing weights of a token add up to 0."""


def match_graph(graph: ir.Graph) -> list[MoeMatch | Miss]:
    """Find every node of this family in `graph`: a match, or a Miss that says why it is none."""
    return [judge(node, partial(_match, node), FAMILY) for node in find_places(graph)]


def find_places(graph: ir.Graph) -> list[ir.Node]:
    """The MoE and QMoE nodes of `graph`."""
    return [node for node in graph if is_contrib_moe(node)]


def _match(node: ir.Node) -> MoeMatch:
    _check_attributes(node)
    hidden_states, places = operand(node, 0), _PLACES[node.op_type]
    layout = _layout(node)
    bits = node.attributes.get_int("expert_weight_bits", 4) if node.op_type == "QMoE" else 0
    fc2 = _stored(node, places["fc2"].weights, "fc2_experts_weights")
    if fc2 is None or len(fc2.shape) != 3:
        raise NoMatch(node, f"fc2_experts_weights is {list(fc2.shape) if fc2 else 'absent'}, expected three axes")
    experts, hidden_size, columns = fc2.shape
    intermediate_size = columns * 8 // bits if bits else columns
    if dim(hidden_states, -1) not in (None, hidden_size):
        raise NoMatch(
            node, f"its input has {dim(hidden_states, -1)} columns, and fc2_experts_weights {hidden_size} rows"
        )
    form = WeightFormat(f"int{bits}", node.attributes.get_int("block_size", 0)) if bits else None
    reader = _Projections(node, experts, form)
    for name, field in layout.names.items():
        rows = {"gate_up_proj": 2 * intermediate_size, "down_proj": hidden_size}.get(field, intermediate_size)
        reader.read(name, field, rows, intermediate_size if field == "down_proj" else hidden_size)
    routing = _routing(node, experts, hidden_size)
    check_routing(replace(routing, inputs={}), hidden_states, experts, hidden_size)
    spec = MoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=experts,
        top_k=node.attributes.get_int("k", 1),
        weight_inputs=(*reader.weights, *reader.biases),
        weight_formats=tuple(f"{field}={form}" for field in layout.names.values()) if form else (),
        accuracy_level=node.attributes.get_int("accuracy_level", 0) if form else 0,
        tie_break="highest",
        nonfinite_router="zero" if runs_on_cpu(node) else "propagate",
        **layout.fields,
        **routing.fields,
    )
    has_path = "/" in (node.name or "")
    return MoeMatch(
        block_name(node, None if has_path else routing.constants.get("router_weight")),
        FAMILY,
        spec,
        hidden_states,
        node.outputs[0],
        routing.inputs,
        routing.constants,
        {**reader.weights, **reader.biases},
    )


def _check_attributes(node: ir.Node) -> None:
    """NoMatch for an attribute whose meaning is not read here."""
    bits = node.attributes.get_int("expert_weight_bits", 4)
    if node.op_type == "QMoE" and bits not in (4, 8):
        raise NoMatch(node, f"expert_weight_bits is {bits}; HinaMoE takes 4 or 8")
    only = {**_ONLY, **{f"{name}_expert_weight_bits": (bits,) for name in _PLACES["QMoE"]}}
    for name, attribute in node.attributes.items():
        if name not in _KNOWN and attribute.value not in only.get(name, ()):
            allowed = " or ".join(map(str, only.get(name, ()))) or "none, as its meaning is not known"
            raise NoMatch(node, f"the attribute {name} of {node.op_type} is {attribute.value!r}, expected {allowed}")
    for index, value in enumerate(node.inputs):
        if value is not None and index > (_ROUTER_WEIGHTS if node.op_type == "QMoE" else 7):
            raise NoMatch(node, f"{node.op_type} has input {index} ({value.name}), which quant_type int does not use")
    if not runs_on_cpu(node):
        # No CPU kernel shows what these do, and those of other providers follow the attributes.
        if node.attributes.get_int("use_sparse_mixer", 0):
            raise NoMatch(
                node, "use_sparse_mixer=1 beside FC3 or SwiGLU that is not interleaved: its constant is unknown"
            )
        if node.op_type == "QMoE" and not node.attributes.get_int("normalize_routing_weights", 0):
            raise NoMatch(
                node,
                "QMoE with normalize_routing_weights=0 beside FC3 or SwiGLU that is not interleaved: kernels disagree "
                "about its mixing weights; set normalize_routing_weights=1 if they add up to 1",
            )


@dataclass(frozen=True)
class _Layout:
    """The weight field of each of a node's projections, and the MoeSpec `fields` of the activation between them."""

    names: Mapping[str, str]
    fields: Mapping[str, Any]


def _layout(node: ir.Node) -> _Layout:
    activation = node.attributes.get_string("activation_type", "relu")
    fusion = node.attributes.get_int("swiglu_fusion", 0)
    has_fc3 = _input(node, _PLACES[node.op_type]["fc3"].weights) is not None
    gated = {"fc1": "gate_proj", "fc3": "up_proj", "fc2": "down_proj"}
    if activation == "swiglu":
        if fusion not in (0, 1, 2) or has_fc3 != (fusion == 0):
            raise NoMatch(
                node,
                f"swiglu_fusion is {fusion} {'with' if has_fc3 else 'without'} FC3, expected 0 with it, 1 or 2 without",
            )
        limit = _float(node, "swiglu_limit", float("inf"))
        if not limit >= 0.0:
            raise NoMatch(node, f"swiglu_limit is {limit:g}, expected 0 or more")
        fields = {
            "activation": "silu",
            "activation_alpha": _float(node, "activation_alpha", 1.0),
            "activation_beta": _float(node, "activation_beta", 0.0),
            "activation_limit": limit,
        }
        if has_fc3:
            return _Layout(gated, fields)
        return _Layout({"fc1": "gate_up_proj", "fc2": "down_proj"}, {**fields, "gate_up_interleaved": fusion == 1})
    plain = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
    if activation not in plain:
        raise NoMatch(node, f"activation_type is {activation}, expected swiglu, {', '.join(plain)}")
    if fusion:
        raise NoMatch(node, f"swiglu_fusion is {fusion} with activation_type {activation}, expected swiglu")
    fields = {"activation": plain[activation]}
    if not has_fc3:
        return _Layout({"fc1": "up_proj", "fc2": "down_proj"}, fields)
    scaled = [name for name in ("activation_alpha", "activation_beta", "swiglu_limit") if name in node.attributes]
    if activation != "silu" or any(_float(node, name, 0.0) != (name == "activation_alpha") for name in scaled):
        raise NoMatch(
            node,
            f"FC3 with activation_type {activation}{' and ' if scaled else ''}{', '.join(scaled)}: no schema says what "
            "it computes, expected silu or swiglu",
        )
    return _Layout(gated, fields)


def _float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute in its shortest decimal, so that 1.702 stays 1.702."""
    return float(str(np.float32(node.attributes.get_float(name, default))))


def _input(node: ir.Node, index: int | None) -> ir.Value | None:
    return node.inputs[index] if index is not None and index < len(node.inputs) else None


def _stored(node: ir.Node, index: int | None, name: str) -> WeightSource | None:
    """The initializer behind an input, None when the input is absent; NoMatch when the graph computes it."""
    value = _input(node, index)
    if value is None:
        return None
    source = weight(value)
    if source is None:
        raise NoMatch(node, f"{name} ({value.name}) is computed by the graph; store it as an initializer")
    return source


class _Projections:
    """Reads projections of a node; `weights` and `biases` grow in the order of the calls."""

    def __init__(self, node: ir.Node, experts: int, form: WeightFormat | None) -> None:
        self.weights: dict[str, tuple[WeightSource, ...]] = {}
        self.biases: dict[str, tuple[WeightSource, ...]] = {}
        self._node, self._experts, self._form = node, experts, form

    def read(self, name: str, field: str, rows: int, columns: int) -> None:
        """Read projection `name`, fc1, fc2 or fc3, of `rows` times `columns`, as the weight field `field`."""
        places, form = _PLACES[self._node.op_type][name], self._form
        if form is None:
            self._take(places.weights, f"{name}_experts_weights", field, ((rows, columns),))
        else:
            codes, scales, zeros = form.shapes(rows, columns)
            self._take(places.weights, f"{name}_experts_weights", field, (codes,))
            whole_rows = scales[1] == 1
            shapes: tuple[tuple[int, ...], ...] = (scales, (rows,)) if whole_rows else (scales,)
            self._take(places.scales, f"{name}_scales", f"{field}_scales", shapes)
            if _input(self._node, places.zero_points) is not None:
                if whole_rows and form.bits == 4:
                    raise NoMatch(
                        self._node,
                        f"{name}_zero_points hold two rows in a byte, HinaMoE takes one; quantise in blocks shorter "
                        "than a row, or without zero points",
                    )
                shapes = (zeros, (rows,)) if whole_rows else (zeros,)
                self._take(places.zero_points, f"{name}_zero_points", f"{field}_zero_points", shapes)
        if _input(self._node, places.bias) is not None:
            self._take(places.bias, f"{name}_experts_bias", f"{field}_bias", ((rows,),))

    def _take(self, index: int | None, name: str, field: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        source = _stored(self._node, index, name)
        expected = [(self._experts, *shape) for shape in shapes]
        if source is None or source.shape not in expected or (source.transpose and len(source.shape) != 3):
            raise NoMatch(
                self._node,
                f"{name} is {list(source.shape) if source else 'absent'}, expected "
                f"{' or '.join(str(list(shape)) for shape in expected)}",
            )
        if self._form is not None and (source.transpose or source.value is not _input(self._node, index)):
            raise NoMatch(
                self._node, f"{name} ({source.value.name}) is cast or transposed by the graph; store it as read"
            )
        (self.biases if field.endswith("_bias") else self.weights)[field] = (source,)


def _routing(node: ir.Node, experts: int, hidden_size: int) -> Router:
    """The router: its projection is drawn in where the logits come from one, else they stay an input."""
    fields: dict[str, Any] = {}
    constants: dict[str, WeightSource] = {}
    logits, normalised = operand(node, 1), bool(node.attributes.get_int("normalize_routing_weights", 0))
    if _input(node, _ROUTER_WEIGHTS) is not None:
        logits, fields["score_func"], constants = _scores_apart(node, experts)
        fields |= {"norm_topk_prob": True, "norm_floor": _SMALLEST_NORM} if normalised else {}
    elif node.op_type == "QMoE" and runs_on_cpu(node):
        fields["score_func"] = "softmax_topk"
    else:
        fields |= {"score_func": "softmax", "norm_topk_prob": normalised}
    width = dim(logits, -1) or experts
    drawn_in = router_projection(logits, operand(node, 0))
    if drawn_in is not None and drawn_in["router_weight"].shape == (experts, hidden_size):
        return Router({**fields, "router_input": "router_weight"}, {}, {**constants, **drawn_in}, width)
    return Router({**fields, "router_input": "router_logits"}, {"router_logits": logits}, constants, width)


def _scores_apart(node: ir.Node, experts: int) -> tuple[ir.Value, str, dict[str, WeightSource]]:
    """Logits, score function, and maybe e_score_correction_bias, of a node that mixes by other scores than it selects.

    Read is `router_weights` = Sigmoid or Softmax of the logits, and `router_probs` = the same, or that plus a bias.
    """
    if not runs_on_cpu(node):
        raise NoMatch(
            node, "router_weights beside FC3 or SwiGLU that is not interleaved: no CPU kernel shows what it does"
        )
    selection, scores = strip(operand(node, 1)), strip(operand(node, _ROUTER_WEIGHTS))
    function = produced_by(scores, "Sigmoid", "Softmax")
    if function is None or (
        function.op_type == "Softmax"
        and not (
            dim(operand(function, 0), -1) == experts
            and is_last_axis(function.attributes.get_int("axis", -1), operand(function, 0))
        )
    ):
        raise NoMatch(node, "router_weights are neither Sigmoid nor Softmax of logits over the experts")
    constants: dict[str, WeightSource] = {}
    if selection is not scores:
        addition = produced_by(selection, "Add")
        others = [] if addition is None else [v for v in addition.inputs if v is not None and strip(v) is not scores]
        bias = weight(others[0]) if len(others) == 1 else None
        if bias is None or bias.shape != (experts,):
            raise NoMatch(
                node, f"router_probs are neither the router_weights nor these plus a constant bias of {experts} numbers"
            )
        constants["e_score_correction_bias"] = bias
    return operand(function, 0), function.op_type.lower(), constants
