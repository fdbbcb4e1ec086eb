"""Shared experts: an MLP that every token goes through, added to the output of the routed experts.

    moe(x) + mlp(x)                           (DeepSeek, GLM-4.5, dots1, Ernie-4.5, Hunyuan, Llama-4, Nemotron-H)
    moe(x) + sigmoid(x @ gate.T) * mlp(x)     (Qwen2-MoE, Qwen3-Next, Qwen3.5; also as com.microsoft::GatedAdd)

The matchers of all families leave it as a branch beside the block. `draw_in` looks at what is added to the block's
output, and makes it part of the match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from graph_passes.matchers import expert_mlp
from graph_passes.matchers.ends import ends, only_reader, views_after
from graph_passes.matchers.expert_mlp import ExpertMlp
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.places import node_name
from graph_passes.matchers.products import check_shape, matrix_shape
from graph_passes.matchers.projection import Projection, projection
from graph_passes.matchers.quantised_weights import QuantisedWeight, as_floats, with_parts
from graph_passes.matchers.views import (
    RESHAPES,
    NoMatch,
    dim,
    follow,
    is_standard,
    is_view,
    operand,
    produced_by,
    rank,
    strip,
    with_scalar,
)
from graph_passes.moe_spec import MoeSpec, default_of

_STEPS = 64
"""How many values are looked at to see whether a branch reads nothing but the tokens."""


@dataclass(frozen=True)
class _Sum:
    """`node` adds `added`, or `gate` * `added` (GatedAdd), to `scale` times the output of the routed experts.

    `values` are that output and what views, and the scaling, make of it on its way to `node`.
    """

    node: ir.Node
    values: list[ir.Value]
    scale: float
    added: ir.Value
    gate: ir.Value | None = None


def draw_in(match: MoeMatch) -> MoeMatch:
    """`match` with the shared expert beside it, if there is one; what it was becomes `routed_only`.

    Where something computed from the same tokens is added and cannot be drawn in, `note` says why.
    """
    found = _sum_behind(match.output)
    if found is None or strip(found.added) is strip(match.hidden_states):
        return match
    branch = _values_from(strip(match.hidden_states), [v for v in (found.added, found.gate) if v is not None])
    if not branch:
        return match
    try:
        return with_parts(_extended(match, found, branch))
    except (NoMatch, ValueError) as problem:
        return replace(match, note=left_out(str(problem)))


def left_out(reason: str) -> str:
    """The note on a match whose shared expert stays in the graph."""
    return f"what is added to its output was not drawn in as a shared expert, and stays as it is: {reason}"


def _sum_behind(output: ir.Value) -> _Sum | None:
    values, scale = views_after(output), 1.0
    node = only_reader(values[-1])
    if node is not None and (scaled := with_scalar(node.outputs[0], "Mul")) is not None:
        scale = scaled[1]
        values += views_after(node.outputs[0])
        node = only_reader(values[-1])
    routed = values[-1]
    if node is None:
        return None
    if node.op_type == "Add" and is_standard(node):
        first, second = operand(node, 0), operand(node, 1)
        return _Sum(node, values, scale, second if first is routed else first)
    if node.op_type == "GatedAdd" and node.domain == "com.microsoft" and node.inputs[0] is routed:
        _, added, gate, weight = [*node.inputs, None, None][:4]
        if added is not None and gate is not None and weight is None:  # with a weight: a form for CUDA alone
            return _Sum(node, values, scale, added, gate)
    return None


def _values_from(tokens: ir.Value, ends_of_branch: Iterable[ir.Value]) -> set[ir.Value]:
    """The values on the way from `tokens` (no view) to the end of a branch; none when it reads other values as well."""
    found: set[ir.Value] = set()
    pending, reached = list(ends_of_branch), False
    while pending:
        value = pending.pop()
        if strip(value) is tokens:
            reached = True
            continue
        if value in found or value.is_initializer():
            continue
        node = value.producer()
        if node is None or len(found) == _STEPS:
            return set()
        found.add(value)
        pending.extend(v for v in (node.inputs[:1] if is_view(node) else node.inputs) if v is not None)
    return found if reached else set()


def _extended(match: MoeMatch, found: _Sum, branch: set[ir.Value]) -> MoeMatch:
    spec = match.spec
    if found.scale != 1.0 and (spec.router_input == "topk_ids" or spec.apply_weights_to == "input"):
        which = "that the graph computes" if spec.router_input == "topk_ids" else "of the experts' inputs"
        raise NoMatch(
            found.node,
            f"the output of the routed experts is multiplied by {found.scale:g}, which weights {which} cannot say",
        )
    down, mlp, gate = _read(found)
    _check_activation(found.node, mlp, spec)
    halves = [half.source for half in (mlp.gate, mlp.up) if half is not None]
    inner = {name: projection(half, follow) for name, half in zip(mlp.layout, halves, strict=False)}
    size = down.weight.shape[-1]
    weights = _weights({**inner, "down_proj": down}, gate, spec.hidden_size, size)
    readers = [*inner.values(), *([gate] if gate is not None else [])]
    for part in readers:
        if strip(follow(part.x)) is not strip(match.hidden_states):
            raise NoMatch(part.node, f"{node_name(part.node)} does not read the tokens {match.hidden_states.name}")
    _check_rounding(found.node, [*readers, down], spec)
    _check_private([match.output, *(p.node.outputs[0] for p in readers)], {*branch, *found.values}, found)
    hidden_states, output = _ends(match, found, readers, branch)
    fields: dict[str, Any] = {
        "shared_intermediate_size": size,
        "routed_scaling_factor": spec.routed_scaling_factor * found.scale,
        **_layout_fields(found.node, mlp, spec),
    }
    return replace(
        match,
        spec=replace(spec, weight_inputs=(*spec.weight_inputs, *weights), **fields),
        hidden_states=hidden_states,
        output=output,
        weights={**match.weights, **weights},
        routed_only=match,
    )


def _check_rounding(node: ir.Node, parts: Iterable[Projection], spec: MoeSpec) -> None:
    """NoMatch when only one of the shared and the routed experts rounds activations to int8: a node has one level."""
    shared = {part.weight.accuracy_level for part in parts if isinstance(part.weight, QuantisedWeight)}
    routed = {spec.accuracy_level} if spec.weight_formats else set()
    if len({level == 4 for level in shared | routed}) > 1:
        raise NoMatch(
            node,
            f"its accuracy_level is {', '.join(map(str, sorted(shared)))} and that of the routed experts "
            f"{spec.accuracy_level}, but HinaMoE has one for both; quantise them with the same (onnxruntime-genai's "
            "builder: accuracy_level=1)",
        )


def _weights(
    projections: dict[str, Projection], gate: Projection | None, hidden_size: int, size: int
) -> dict[str, tuple[WeightSource, ...]]:
    """The weight fields of the shared expert, of the shapes that its sizes ask for."""
    weights: dict[str, tuple[WeightSource, ...]] = {}
    biases: dict[str, tuple[WeightSource, ...]] = {}
    for name, part in projections.items():
        expected = matrix_shape(name, hidden_size, size)
        _check_shape(part.node, name, part.weight, expected)
        weights[f"shared_{name}"] = (part.weight,)
        if part.bias is not None:
            _check_shape(part.node, f"{name}_bias", part.bias, expected[:1])
            biases[f"shared_{name}_bias"] = (part.bias,)
    if gate is not None:
        if gate.bias is not None:
            raise NoMatch(gate.node, f"its gate has a bias ({gate.bias.value.name}), which HinaMoE cannot say")
        _check_shape(gate.node, "its gate", gate.weight, (1, hidden_size))
        biases["shared_expert_gate"] = (as_floats(gate.weight),)
    return weights | biases


def _ends(match: MoeMatch, found: _Sum, readers: list[Projection], branch: set[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """hidden_states and output with the shared expert, as far out as the graph says that they have one shape."""
    hidden_size, summed, routed = match.spec.hidden_size, found.node.outputs[0], found.values[-1]
    reshaped = _holds_reshapes(branch)
    axes = {rank(part.x) for part in readers}
    if reshaped:
        axes = {rank(found.added) if dim(found.added, -1) == hidden_size else None}
    if axes != {rank(routed)} or None in axes or dim(routed, -1) != hidden_size:
        raise NoMatch(found.node, f"the graph does not say that {found.added.name} has the shape of {routed.name}")
    try:
        # One row for each token: both sides are views of values with the shape of the tokens, and have as many axes.
        return ends(match.hidden_states, summed, hidden_size, same_rows=True)
    except NoMatch:
        if reshaped or _holds_reshapes(found.values[1:]) or {part.x for part in readers} != {match.hidden_states}:
            raise
        return match.hidden_states, summed  # nothing on the way changes the shape that both sides have


def _holds_reshapes(values: Iterable[ir.Value]) -> bool:
    return any((node := value.producer()) is not None and node.op_type in RESHAPES for value in values)


def _read(found: _Sum) -> tuple[Projection, ExpertMlp, Projection | None]:
    """The down projection of the branch, what is before it, and the projection that gates its output."""
    added, gate = found.added, found.gate
    product = produced_by(follow(added), "Mul", through_views=False)
    if gate is None and product is not None:
        first, second = operand(product, 0), operand(product, 1)
        added, gate = (second, first) if produced_by(first, "Sigmoid") else (first, second)
    down = projection(added, follow)
    mlp = expert_mlp.recognise(down.x)
    if gate is None:
        return down, mlp, None
    sigmoid = produced_by(gate, "Sigmoid")
    if sigmoid is None:
        raise NoMatch(found.node, f"its output is multiplied by {gate.name}, which is no sigmoid of a projection")
    return down, mlp, projection(operand(sigmoid, 0), follow)


def _check_activation(node: ir.Node, mlp: ExpertMlp, spec: MoeSpec) -> None:
    """NoMatch unless the shared expert has the activation of the routed ones: the op has one for both."""
    names = ["activation", "activation_alpha"]
    if mlp.gate is not None:
        names += ["activation_beta", "activation_limit"]
    for name in names:
        own, routed = mlp.fields.get(name, default_of(name)), getattr(spec, name)
        if own != routed:
            raise NoMatch(node, f"its {name} is {own}, that of the routed experts {routed}; HinaMoE has one for both")


def _layout_fields(node: ir.Node, mlp: ExpertMlp, spec: MoeSpec) -> dict[str, Any]:
    """gate_up_order and gate_up_interleaved where the routed experts do not fix them; NoMatch where they differ."""
    fields = mlp.layout_fields
    if "gate_up_proj" in spec.weight_inputs and any(getattr(spec, name) != own for name, own in fields.items()):
        raise NoMatch(node, "its gate and up lie in one tensor in another order than those of the routed experts")
    return fields


def _check_shape(node: ir.Node, name: str, source: WeightSource, expected: tuple[int, ...]) -> None:
    check_shape(node, f"{name} ({source.value.name})", source.shape, expected)


def _check_private(starts: Iterable[ir.Value], inside: set[ir.Value], found: _Sum) -> None:
    """NoMatch when something else than the branch, and the sum behind it, reads what is computed from `starts`."""
    pending = list(starts)
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            raise NoMatch(found.node, f"{value.name} is an output of the model")
        for node in value.consumers():
            if node is found.node:
                continue
            results = [v for v in node.outputs if v in inside]
            if not results:
                raise NoMatch(node, f"{value.name} is read by {node_name(node)} too, and would be computed twice")
            pending.extend(results)
