"""One HinaMoE node as a model: built from a MoeSpec, run in ONNX Runtime, computed by the reference.

Every test of the op goes through this module, so that a spec, its tensors and its tolerance are stated once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from graph_passes import reference
from graph_passes.moe_spec import FIELDS, MoeSpec
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE, OPSET_VERSION
from hina_ort import get_library_path
from tests import quantised
from tests.tensors import ONNX_TYPES, from_ort, make_tensor, numpy_type, to_ort

ROOT = Path(__file__).resolve().parents[1]

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_STEP = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

Tensors = dict[str, np.ndarray]


def make_spec(
    *,
    hidden_size: int = 48,
    intermediate_size: int = 33,
    num_experts: int = 8,
    top_k: int = 2,
    mlp: str = "split",
    bias: bool = False,
    shared_intermediate_size: int = 0,
    shared_mlp: str = "split",
    shared_bias: bool = False,
    shared_expert_gate: bool = False,
    formats: Mapping[str, str] | None = None,
    zero_points: bool = False,
    **fields: Any,
) -> MoeSpec:
    """A MoeSpec whose `weight_inputs` follow from `mlp`: "split" (gate, up), "fused" (gate_up) or "plain" (up).

    `formats` are those of the quantised projections, as in {"gate_proj": "int4:32"}; names that the spec lacks are left
    out. With `zero_points` they have those too, except mxfp4.
    """
    names = _mlp_fields("", mlp, bias)
    if shared_intermediate_size:
        names += _mlp_fields("shared_", shared_mlp, shared_bias)
        if shared_expert_gate:
            names.append("shared_expert_gate")
    formats = {name: form for name, form in (formats or {}).items() if name in names}
    return MoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        weight_inputs=tuple(quantised.with_parts(names, formats, zero_points)),
        weight_formats=tuple(f"{name}={form}" for name, form in formats.items()),
        shared_intermediate_size=shared_intermediate_size,
        **fields,
    )


def _mlp_fields(prefix: str, mlp: str, bias: bool) -> list[str]:
    first = {"split": ["gate_proj", "up_proj"], "fused": ["gate_up_proj"], "plain": ["up_proj"]}[mlp]
    names = [prefix + name for name in [*first, "down_proj"]]
    return names + [name + "_bias" for name in names] if bias else names


@dataclass
class Node:
    """A spec with its constant tensors: `weights` as the reference takes them (stacked), `constants` by input name."""

    spec: MoeSpec
    activation_type: str = "float32"
    constants: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)

    def initializers(self) -> Tensors:
        """Constant inputs by value name, in input order: a per-expert tensor is called `field.expert`."""
        tensors = dict(self.constants)
        for name in self.spec.weight_inputs:
            if FIELDS[name].shared or self.spec.experts_stacked:
                tensors[name] = self.weights[name]
            else:
                tensors |= {f"{name}.{e}": self.weights[name][e] for e in range(self.spec.num_experts)}
        return tensors


def random_node(
    spec: MoeSpec,
    rng: np.random.Generator,
    *,
    activation_type: str = "float32",
    types: Mapping[str, str] | None = None,
    router_bias: bool = False,
    correction_bias: bool = False,
) -> Node:
    """Normal weights scaled by 1/sqrt(K), so that every intermediate value is of order one.

    `types` gives the type of a field or constant input where it is not `activation_type`, and the types of quantised
    tensors as `quantised.random_parts` has them. The correction bias is positive when it takes part in mixing, so that
    a norm over mixing weights is not a difference of near equals.
    """
    types = types or {}
    sizes = {"E": spec.num_experts, "H": spec.hidden_size}
    present = {"router_weight": spec.router_input == "router_weight", "router_bias": router_bias}
    present["e_score_correction_bias"] = correction_bias
    node = Node(spec, activation_type)
    for item in INPUTS:
        if item.constant and present[item.name]:
            shape = tuple(sizes[symbol] for symbol in item.shape.strip("[]").split(", "))
            value = rng.standard_normal(shape) * (2.0 / math.sqrt(spec.hidden_size) if len(shape) == 2 else 0.2)
            if item.name == "e_score_correction_bias" and spec.mixing_source == "selection":
                value = np.abs(value)
            node.constants[item.name] = value.astype(numpy_type(types.get(item.name, activation_type)))
    for name in spec.formats:
        node.weights |= quantised.random_parts(spec, name, rng, types)
    for name in spec.weight_inputs:
        if name in node.weights:
            continue
        shape = spec.field_shape(name)
        value = rng.standard_normal(shape if FIELDS[name].shared else (spec.num_experts, *shape))
        scale = 1.0 / math.sqrt(shape[1]) if len(shape) == 2 else 0.2
        node.weights[name] = (value * scale).astype(numpy_type(types.get(name, activation_type)))
    return node


def random_feeds(
    node: Node,
    rng: np.random.Generator,
    leading: Sequence[int],
    *,
    router_type: str | None = None,
    index_type: str = "int64",
) -> Tensors:
    """Inputs of one run; `router_type` is the type of router_logits or topk_weights (default: activation type).

    Rows whose choice of experts hangs on a rounding error are drawn again (see `settled`): a float32 router may choose
    another expert than a float64 one when two scores nearly meet, and both are right.
    """
    spec, tokens = node.spec, math.prod(leading)
    router = numpy_type(router_type or node.activation_type)
    hidden = rng.standard_normal((tokens, spec.hidden_size)).astype(numpy_type(node.activation_type))
    feeds: Tensors = {"hidden_states": hidden}
    if spec.router_input == "topk_ids":
        every = np.tile(np.arange(spec.num_experts), (tokens, 1))
        feeds["topk_ids"] = rng.permuted(every, axis=1)[:, : spec.top_k].astype(index_type)
        feeds["topk_weights"] = rng.uniform(0.1, 1.0, (tokens, spec.top_k)).astype(router)
    else:
        drawn = {"router_weight": "hidden_states", "router_logits": "router_logits"}[spec.router_input]
        if drawn == "router_logits":
            feeds[drawn] = (2.0 * rng.standard_normal((tokens, spec.num_experts))).astype(router)
        for _ in range(200):
            again = ~settled(node, feeds, rng)
            if not again.any():
                break
            scale = 2.0 if drawn == "router_logits" else 1.0
            fresh = scale * rng.standard_normal((int(again.sum()), feeds[drawn].shape[1]))
            feeds[drawn][again] = fresh.astype(feeds[drawn].dtype)
        else:
            raise AssertionError(f"no rows with a clear choice of experts in 200 draws: {spec.summary()}")
    return {name: value.reshape(*leading, value.shape[-1]) for name, value in feeds.items()}


def settled(node: Node, feeds: Tensors, rng: np.random.Generator) -> np.ndarray:
    """Which rows `[T]` choose the same experts, with nearly the same weights, when scores move a little.

    Logits move by 1e-4 (relative above 1) and the correction bias by 1e-6, sixteen times with random signs. A float32
    logit of order one is off by about 1e-6, so a row that stands this test has a margin of some hundred roundings.
    Comparing the weights too covers the threshold of sparsemixer. With k = E the choice is always settled.
    """
    spec, bias = node.spec, node.constants.get("e_score_correction_bias")
    logits = router_logits(node, feeds)
    ids, mixing = _by_expert(*reference.route(spec, logits, bias))
    same = np.ones(len(logits), bool)
    for _ in range(16):
        moved = logits + 1e-4 * np.maximum(1.0, np.abs(logits)) * rng.choice([-1.0, 1.0], logits.shape)
        moved_bias = None if bias is None else bias.astype(np.float64) + 1e-6 * rng.choice([-1.0, 1.0], bias.shape)
        other_ids, other = _by_expert(*reference.route(spec, moved, moved_bias))
        close = np.isclose(mixing, other, rtol=1e-2, atol=1e-6, equal_nan=True)
        same &= (ids == other_ids).all(-1) & close.all(-1)
    return same


def _by_expert(ids: np.ndarray, mixing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ids, -1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(mixing, order, -1)


def router_logits(node: Node, feeds: Tensors) -> np.ndarray:
    """Float64 logits `[T, E]` that the router sees."""
    spec = node.spec
    if "router_logits" in feeds:
        return feeds["router_logits"].astype(np.float64).reshape(-1, spec.num_experts)
    x = feeds["hidden_states"].astype(np.float64).reshape(-1, spec.hidden_size)
    logits = x @ node.constants["router_weight"].astype(np.float64).T
    return logits + node.constants.get("router_bias", np.zeros(spec.num_experts)).astype(np.float64)


def make_node(node: Node, *, tokens_per_expert: bool = False) -> NodeProto:
    """The node alone; value names are those of the inputs and of `Node.initializers`."""
    dynamic = {"hidden_states", node.spec.router_input}
    if node.spec.router_input == "topk_ids":
        dynamic.add("topk_weights")
    constants = node.initializers()
    names = [item.name if item.name in dynamic or item.name in constants else "" for item in INPUTS]
    names += [name for name in constants if name not in node.constants]
    outputs = ["output", "tokens_per_expert"] if tokens_per_expert else ["output"]
    return helper.make_node(OP_TYPE, names, outputs, name="moe", domain=DOMAIN, **node.spec.attributes())


def make_model(
    node: Node,
    *,
    leading: Sequence[int | str] = ("T",),
    router_type: str | None = None,
    index_type: str = "int64",
    tokens_per_expert: bool = False,
    initializers: Sequence[TensorProto] | None = None,
) -> ModelProto:
    """The node as a model: its graph inputs are the non-constant inputs, `leading` their leading axes.

    `initializers` take the place of the node's own where those are too large to be copied.
    """
    spec = node.spec
    router = ONNX_TYPES[router_type or node.activation_type]
    inputs = [("hidden_states", ONNX_TYPES[node.activation_type], spec.hidden_size)]
    if spec.router_input == "router_logits":
        inputs.append(("router_logits", router, spec.num_experts))
    elif spec.router_input == "topk_ids":
        inputs += [("topk_ids", ONNX_TYPES[index_type], spec.top_k), ("topk_weights", router, spec.top_k)]
    outputs = [helper.make_tensor_value_info("output", ONNX_TYPES[node.activation_type], None)]
    if tokens_per_expert:
        outputs.append(helper.make_tensor_value_info("tokens_per_expert", TensorProto.INT64, None))
    graph = helper.make_graph(
        [make_node(node, tokens_per_expert=tokens_per_expert)],
        "moe",
        [helper.make_tensor_value_info(name, kind, [*leading, size]) for name, kind, size in inputs],
        outputs,
        initializers or [make_tensor(name, value) for name, value in node.initializers().items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def make_session(
    model: ModelProto | Path, threads: int = 1, config: Mapping[str, str] | None = None
) -> ort.InferenceSession:
    """A CPU session with the library registered and `threads` intra-op threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    options.register_custom_ops_library(os.environ.get("HINA_TEST_LIBRARY") or get_library_path())
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: Tensors) -> Tensors:
    """Outputs by name. Goes through OrtValue because numpy has no bfloat16 that ONNX Runtime knows."""
    names = [output.name for output in session.get_outputs()]
    values = {name: to_ort(value) for name, value in feeds.items()}
    return dict(zip(names, map(from_ort, session.run_with_ort_values(names, values)), strict=True))


def expected(node: Node, feeds: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Output and tokens_per_expert in float64, with int8 activations where the node says so."""
    output, counts, _ = _oracle(node, feeds)
    return output, counts


def _oracle(node: Node, feeds: Tensors) -> tuple[np.ndarray, np.ndarray, float]:
    """And an absolute bound, in L2, of what rounding does to int8 activations."""
    spec, hidden = node.spec, feeds["hidden_states"]
    if spec.accuracy_level < 4 or not spec.formats:
        return *reference.hina_moe(spec, hidden, node.weights, **_other(feeds), **node.constants), 0.0
    x = hidden.reshape(-1, spec.hidden_size)
    if spec.router_input == "topk_ids":
        ids = feeds["topk_ids"].astype(np.int64).reshape(-1, spec.top_k)
        mixing = feeds["topk_weights"].astype(np.float64).reshape(-1, spec.top_k)
    else:
        correction = node.constants.get("e_score_correction_bias")
        ids, mixing = reference.route(spec, router_logits(node, feeds), correction)
    shared_mixing = np.ones((len(x), 1))
    if (gate := node.weights.get("shared_expert_gate")) is not None:
        with np.errstate(all="ignore"):
            shared_mixing = reference.sigmoid(x.astype(np.float64) @ gate.astype(np.float64).T)
    output, bound = quantised.int8_layer(spec, x, ids, mixing, node.weights, shared_mixing)
    counts = np.bincount(ids.ravel(), minlength=spec.num_experts).astype(np.int64)
    return output.reshape(hidden.shape), counts, float(np.linalg.norm(bound[np.isfinite(output)]))


def _other(feeds: Tensors) -> Tensors:
    return {name: value for name, value in feeds.items() if name != "hidden_states"}


def tolerance(node: Node) -> float:
    """Bound on the relative L2 error of the output, derived from what the op computes.

    A float32 dot product of K terms of random sign, summed in any order, is off by about u * sqrt(K) relative to its
    own size, u = 2^-24 (the rounding errors of partial sums are a random walk). Errors of the dots on the way add up:
    router and first projection (both H long), down projection (I long), shared expert (S long), sum over k experts;
    exp, division and the products between them add a few u more, counted as eight. A factor of four stands between
    the typical and the worst of many drawn cases. Intermediate values are float32, so the activation type enters once,
    when the output is rounded to it: at most u of that type for each element, hence also in the L2 norm. A quantised
    weight is rounded twice on the way to float32, or not at all where activations are int8: 2 u for each projection.

    Plain bfloat16 weights beside bfloat16 activations get all their tokens in bfloat16 where the CPU multiplies it:
    FC2's inputs are rounded too, and FC1's, for gate and for up, where mixing weights multiply them. See also
    `_of_tiles`.
    """
    spec = node.spec
    lengths = (spec.hidden_size, spec.hidden_size, spec.intermediate_size, spec.shared_intermediate_size, spec.top_k)
    roundings = 8.0 + 6.0 * bool(spec.formats) + sum(map(math.sqrt, lengths))
    outer = 1
    if node.activation_type == "bfloat16":
        narrow = [n for n in spec.projections if any(part.dtype == ml_dtypes.bfloat16 for part in node.weights[n])]
        outer += any("down" in name for name in narrow)
        outer += 2 * (spec.apply_weights_to == "input" and any("up" in name or "gate" in name for name in narrow))
    return 4.0 * 2.0**-24 * roundings + outer * UNIT_ROUNDOFF[node.activation_type] + _of_tiles(node)


def _of_tiles(node: Node) -> float:
    """What AMX may add to `tolerance`. Its floats are bfloat16: the inputs of both projections become two terms each,
    which add up to them within 2^-16, and where HINA_ISA=amx asks for it, int8 and int4 weights of gate, up and down
    are rounded. int8 activations are multiplied exactly.
    """
    if node.spec.formats and node.spec.accuracy_level == 4:
        return 0.0
    asked = os.environ.get("HINA_ISA") == "amx"
    formats = {str(form) for form in node.spec.formats.values()}
    narrow = any(part.dtype == ml_dtypes.bfloat16 for name in node.spec.projections for part in node.weights[name])
    two_terms = asked or narrow or "mxfp4" in formats
    rounded = asked and bool(formats - {"mxfp4"})
    return two_terms * 2 * 2.0**-16 + rounded * 3 * UNIT_ROUNDOFF["bfloat16"]


def assert_close(node: Node, got: np.ndarray, want: np.ndarray, slack: float = 0.0) -> None:
    """Shapes and types equal, NaN and infinities in the same places, the rest within `tolerance` in L2, plus `slack`.

    Elements below the normal range of the output type round to a fixed step, which is allowed for on top.
    """
    assert got.dtype == numpy_type(node.activation_type), got.dtype
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    found = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    infinite = np.isinf(want)
    np.testing.assert_array_equal(np.where(np.isinf(found), found, 0.0), np.where(infinite, want, 0.0))
    finite = np.isfinite(want)
    error = float(np.linalg.norm(found[finite] - want[finite]))
    norm = float(np.linalg.norm(want[finite]))
    allowed = tolerance(node) * norm + SMALLEST_STEP[node.activation_type] * math.sqrt(want.size) + slack
    assert error <= allowed, (
        f"relative L2 error {error / norm if norm else math.inf:.3g}, allowed "
        f"{allowed / norm if norm else math.inf:.3g}: {node.activation_type}, {node.spec.summary()}"
    )


def assert_right(node: Node, feeds: Tensors, outputs: Tensors) -> None:
    """`outputs` of a run equal the oracle's."""
    output, counts, slack = _oracle(node, feeds)
    assert_close(node, outputs["output"], output, slack)
    if "tokens_per_expert" in outputs:
        np.testing.assert_array_equal(outputs["tokens_per_expert"], counts)


def check(node: Node, feeds: Tensors, *, threads: int = 1, **model_options: Any) -> Tensors:
    """Run the node with `feeds`, compare output and tokens_per_expert with the reference, return the outputs."""
    model = make_model(node, tokens_per_expert=True, **model_options)
    outputs = run(make_session(model, threads), feeds)
    assert_right(node, feeds, outputs)
    return outputs
