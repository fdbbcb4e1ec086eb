"""HinaMoE nodes -> standard ONNX operators, for people without the library and as a second opinion on what it computes.

A node becomes its router and an unrolled loop over the experts, as exporters write it, and as `matchers.unrolled_loop`
reads it again:

    token, slot = NonZero(ids == e)
    output[token] += mixing[token, slot] * mlp_e(x[token])

Why this form, and not a gather of the weights of every (token, expert) pair: that one copies k matrices for each token,
which no long prompt can pay for. Here an expert computes the tokens that chose it, in one product, for any number of
tokens, none too. Beside the weights a run needs the rows of one expert at a time, and a mask of E * T * k bytes. The
price is some twenty nodes per expert.

Everything is computed in float32 from the values that the tensors hold, and rounded once to the type of the output.
Weights stay the initializers that they are, where they lie; no float copy of them enters the model. When ONNX Runtime
loads it, though, it cuts experts out of stacked weights and widens 16-bit ones into memory of its own (with
`ORT_DISABLE_ALL` it does so in every run instead). Quantised weights go through DequantizeLinear, which it leaves in
place: 4-bit codes become a byte each when the model is loaded, floats of one expert at a time in every run.

What standard operators cannot say: `accuracy_level`, which allows rounding and means nothing, is dropped; ids outside
0..E-1 choose no expert instead of ending the run; and where logits hold NaN, the choice is that of the runtime's TopK.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from graph_passes.fuse_moe import UniqueNames
from graph_passes.moe_node import is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import FIELDS, MoeSpec, split_field
from graph_passes.normalize.inlining import inline_fused
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE
from graph_passes.standard_ops import Constants
from graph_passes.weight_ops import WeightNodes, dtype_of

MIN_OPSET = 16
"""ScatterND adds since then."""

_TO_THE_END = (1 << 31) - 1


class UnfuseError(Exception):
    """A HinaMoE node cannot be said in standard operators; the message names it and says why and what to do."""


@dataclass(frozen=True)
class UnfusedBlock:
    """A HinaMoE node that is standard operators now: its name, and what it computes."""

    name: str
    spec: MoeSpec


def unfuse_model(model: ir.Model) -> list[UnfusedBlock]:
    """Replace every HinaMoE node of `model`, in place, by standard operators; say what they were.

    Functions that hold such nodes are inlined. Raises UnfuseError, with every HinaMoE node as it was, when one has
    another opset than the model, for a node that is not valid, and for a model whose opset is below `MIN_OPSET`.
    """
    try:
        inline_fused(model)
    except ValueError as error:
        raise UnfuseError(str(error)) from error
    nodes = [node for node in model.graph.all_nodes() if is_hina_moe(node)]
    if not nodes:
        return []
    opset = model.opset_imports.get("", 0)
    if opset < MIN_OPSET:
        raise UnfuseError(
            f"the model imports opset {opset}, and the standard operators that replace {OP_TYPE} need {MIN_OPSET} or "
            "later; export and fuse it with a later opset"
        )
    specs = [_checked_spec(node) for node in nodes]
    names = UniqueNames(model)
    constants: dict[ir.Graph, Constants] = {}
    for node, spec in zip(nodes, specs, strict=True):
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        known = constants.setdefault(graph, Constants(graph, names))
        _replace(node, _Block(node, spec, opset, names, known))
    for graph in model.graphs():
        graph.opset_imports.pop(DOMAIN, None)
    return [UnfusedBlock(_name(node), spec) for node, spec in zip(nodes, specs, strict=True)]


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or OP_TYPE


def _checked_spec(node: ir.Node) -> MoeSpec:
    """The spec of a node whose inputs are there and whose weights have the sizes that it asks for."""
    try:
        spec = spec_of(node)
        if spec.router_input == "topk_ids" and _input(node, "topk_weights") is None:
            raise ValueError("it has topk_ids without topk_weights")
        weights = weights_of(node)
        for name, values in weights.items():
            shape = spec.field_shape(name)
            if name.endswith("_zero_points") and dtype_of(weights, name).is_floating_point():
                shape = spec.field_shape(f"{split_field(name)[0]}_scales")  # one to an element, not packed
            if spec.experts_stacked and not FIELDS[name].shared:
                shape = (spec.num_experts, *shape)
            for value in values:
                if value.const_value is None or value.const_value.size != math.prod(shape):
                    raise ValueError(f"its {name} ({value.name}) is {value.shape}, expected {list(shape)}")
    except ValueError as error:
        raise UnfuseError(f"the HinaMoE node {_name(node)} is not valid: {error}") from error
    return spec


def _input(node: ir.Node, name: str) -> ir.Value | None:
    """The fixed input called `name`, None when it is absent."""
    index = next(index for index, item in enumerate(INPUTS) if item.name == name)
    return node.inputs[index] if index < len(node.inputs) else None


def _replace(old: ir.Node, block: _Block) -> None:
    """Put the nodes of `block` in the place of `old`; initializers that nothing uses any more go."""
    graph = old.graph
    assert graph is not None
    wanted = [v for v in old.outputs if v.uses() or v.is_graph_output()]
    outputs = [block.output() if value is old.outputs[0] else block.tokens_per_expert() for value in wanted]
    before = [value for value in old.inputs if value is not None]
    ir.convenience.replace_nodes_and_values(graph, old, [old], block.nodes, wanted, outputs)
    for value in before:
        if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            assert value.graph is not None and value.name is not None
            value.graph.initializers.pop(value.name, None)


class _Block(WeightNodes):
    """Makes the nodes that take the place of one HinaMoE node.

    T tokens, H hidden size, E experts, k experts per token.
    """

    def __init__(self, node: ir.Node, spec: MoeSpec, opset: int, names: UniqueNames, constants: Constants) -> None:
        path = _name(node).removesuffix(f"/{OP_TYPE}")
        super().__init__(path, opset, names, constants, spec, weights_of(node))
        self._node = node
        self._x = self._present("hidden_states")
        self._tokens = self._rows("hidden_states", spec.hidden_size)
        self._wide_tokens = self.float32(self._tokens)
        self._ids, self._mixing = self._route()
        hot = self.op("Equal", self.unsqueeze(self._ids), self.ints(range(spec.num_experts)))
        self._chosen = self.op("Transpose", hot, perm=[2, 0, 1])  # [E, T, k]

    def output(self) -> ir.Value:
        """The block's output, with the shape and type of hidden_states."""
        total = self._routed_experts()
        if self.spec.has_shared_expert:
            total = self.op("Add", total, self._shared_expert())
        dtype = self._x.dtype or self._node.outputs[0].dtype
        if dtype is None:
            total = self.op("CastLike", total, self._x)
        elif dtype != ir.DataType.FLOAT:
            total = self.op("Cast", total, to=dtype)
        return self.op("Reshape", total, self.op("Shape", self._x), allowzero=1)

    def tokens_per_expert(self) -> ir.Value:
        """How many tokens chose each expert, int64 `[E]`."""
        return self.reduce("ReduceSum", self.op("Cast", self._chosen, to=ir.DataType.INT64), 1, 2, keepdims=0)

    def _present(self, name: str) -> ir.Value:
        value = _input(self._node, name)
        assert value is not None
        return value

    def _rows(self, name: str, width: int) -> ir.Value:
        """Input `name` `[..., width]` as `[T, width]`."""
        return self.reshape(self._present(name), -1, width)

    # --- router ---

    def _route(self) -> tuple[ir.Value, ir.Value]:
        """Expert ids, int64 `[T, k]`, and mixing weights, float32 `[T, k]`."""
        spec = self.spec
        if spec.router_input == "topk_ids":
            ids, mixing = self._rows("topk_ids", spec.top_k), self._rows("topk_weights", spec.top_k)
            return self.op("Cast", ids, to=ir.DataType.INT64), self.float32(mixing)
        logits = self._logits()
        ids, mixing = self._sparsemixer(logits) if spec.score_func == "sparsemixer" else self._top_k_router(logits)
        if spec.norm_topk_prob:
            mixing = self.op("Div", mixing, self._norm(mixing))
        if spec.routed_scaling_factor != 1.0:
            mixing = self.op("Mul", mixing, self.number(spec.routed_scaling_factor))
        if spec.nonfinite_router == "zero":
            # Softmax of a row with NaN, +inf or nothing finite is NaN, and so is its sum; of any other it is 1.
            total = self.reduce("ReduceSum", self.op("Softmax", logits, axis=-1), -1, keepdims=1)
            mixing = self.op("Where", self.op("IsNaN", total), self.number(0.0), mixing)
        return ids, mixing

    def _logits(self) -> ir.Value:
        """Float32 `[T, E]`."""
        if self.spec.router_input == "router_logits":
            return self.float32(self._rows("router_logits", self.spec.num_experts))
        bias = _input(self._node, "router_bias")
        weight = self.float32(self._present("router_weight"))
        return self.gemm(self._wide_tokens, weight, None if bias is None else self.float32(bias), "router")

    def _top_k_router(self, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        spec = self.spec
        function, after = {
            "softmax": ("Softmax", ""),
            "sigmoid": ("Sigmoid", ""),
            "softmax_topk": ("", "Softmax"),
            "sigmoid_topk": ("", "Sigmoid"),
        }[spec.score_func]
        scores = self._over_last_axis(function, logits)
        selection, bias = scores, _input(self._node, "e_score_correction_bias")
        if bias is not None:
            selection = self.op("Add", selection, self.float32(bias))
        if spec.n_group > 1:
            selection = self._mask_groups(selection)
        mixing, ids = self._top_k(selection, spec.num_experts, spec.top_k)
        if selection is not scores and spec.mixing_source == "scores":
            mixing = self.op("GatherElements", scores, ids, axis=1)
        return ids, self._over_last_axis(after, mixing)

    def _over_last_axis(self, function: str, value: ir.Value) -> ir.Value:
        """Softmax or Sigmoid of `value`; `value` itself for no function."""
        if function == "Softmax":
            return self.op(function, value, axis=-1)
        return self.op(function, value) if function else value

    def _top_k(self, scores: ir.Value, size: int, k: int) -> tuple[ir.Value, ir.Value]:
        """The k largest of `[T, size]` and their places `[T, k]`; TopK takes the lowest place among equal scores."""
        if self.spec.tie_break == "lowest":
            values, places = self.ops("TopK", scores, self.ints([k]), count=2, axis=-1)
            return values, places
        backwards = self.ints(range(size - 1, -1, -1))
        values, places = self.ops(
            "TopK", self.op("Gather", scores, backwards, axis=1), self.ints([k]), count=2, axis=-1
        )
        return values, self.op("Gather", backwards, places, axis=0)

    def _mask_groups(self, selection: ir.Value) -> ir.Value:
        """`[T, E]` with group_mask_value for the experts of groups that are not chosen."""
        spec = self.spec
        size = spec.num_experts // spec.n_group
        groups = self.reshape(selection, -1, spec.n_group, size)
        if spec.group_score_func == "max":
            scores = self.reduce("ReduceMax", groups, -1, keepdims=0)
        else:
            best, _ = self.ops("TopK", groups, self.ints([min(2, size)]), count=2, axis=-1)
            scores = self.reduce("ReduceSum", best, -1, keepdims=0)
        _, places = self._top_k(scores, spec.n_group, spec.topk_group)
        kept = self.op("ScatterElements", self.filled_like(scores, 0.0), places, self.filled_like(places, 1.0), axis=1)
        chosen = self.op("Cast", self.unsqueeze(kept), to=ir.DataType.BOOL)
        masked = self.op("Where", chosen, groups, self.number(spec.group_mask_value))
        return self.reshape(masked, -1, spec.num_experts)

    def _sparsemixer(self, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Two rounds, one expert each: softmax over the logits near the best, the first expert left out of the second.

        Phi-3.5-MoE, arXiv:2409.12136.
        """
        first, first_weight = self._round(logits, logits)
        left = self.op("ScatterElements", logits, first, self.filled_like(first, -math.inf), axis=1)
        second, second_weight = self._round(logits, left)
        return self.op("Concat", first, second, axis=-1), self.op("Concat", first_weight, second_weight, axis=-1)

    def _round(self, logits: ir.Value, left: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The best expert `[T, 1]` of those that are `left`, and its softmax among the logits near it."""
        best = self.reduce("ReduceMax", left, -1, keepdims=1)
        scale = self.op("Max", self.op("Abs", logits), best)
        distance = self.op("Div", self.op("Sub", best, logits), scale)
        far = self.op("Greater", distance, self.number(2 * self.spec.sparsemixer_jitter_eps))
        scores = self.op("Softmax", self.op("Where", far, self.number(-math.inf), left), axis=-1)
        last = int(self.spec.tie_break == "highest")
        place = self.op("ArgMax", left, axis=-1, keepdims=1, select_last_index=last)
        return place, self.op("GatherElements", scores, place, axis=1)

    def _norm(self, mixing: ir.Value) -> ir.Value:
        """What the mixing weights are divided by, `[T, 1]`."""
        spec = self.spec
        if spec.norm_p == 1.0:
            norm = self.reduce("ReduceSum", mixing, -1, keepdims=1)
        elif spec.norm_p == 2.0:
            norm = self.reduce("ReduceL2", mixing, -1, keepdims=1)
        else:
            powers = self.op("Pow", self.op("Abs", mixing), self.number(spec.norm_p))
            norm = self.reduce("ReduceSum", powers, -1, keepdims=1)
            norm = self.op("Pow", norm, self.number(1.0 / spec.norm_p))
        if spec.norm_eps:
            norm = self.op("Add", norm, self.number(spec.norm_eps))
        if spec.norm_floor:
            norm = self.op("Max", norm, self.number(spec.norm_floor))
        return norm

    # --- experts ---

    def _routed_experts(self) -> ir.Value:
        """The weighted sum of the experts' outputs, float32 `[T, H]`."""
        # A router chooses an expert once for a token, so an expert's rows are added to different tokens. Ids handed in
        # may repeat, and runtimes may add to one token from two threads at once: then each slot keeps its row.
        by_slot = self.spec.router_input == "topk_ids"
        shape = self.op("Shape", self._tokens)
        if by_slot:
            shape = self.op("Concat", self.op("Shape", self._ids), self.ints([self.spec.hidden_size]), axis=0)
        total = self.op("ConstantOfShape", shape)
        weights = self.unsqueeze(self._mixing)
        for expert in range(self.spec.num_experts):
            with self.within(f"experts.{expert}"):
                mask = self.op("Gather", self._chosen, self.integer(expert), axis=0)
            found = self.op("NonZero", mask, name=f"chosen.{expert}")  # [2, n]: tokens, slots
            with self.within(f"experts.{expert}"):
                found = self.op("Transpose", found, perm=[1, 0])
                token, slot = self.ops("Split", found, self.ints([1, 1]), count=2, axis=1)
                pairs = self.op("Concat", token, slot, axis=1)
                rows = self.float32(self.op("GatherND", self._tokens, token))
                scale = self.op("GatherND", weights, pairs)  # [n, 1]
                if self.spec.apply_weights_to == "input":
                    made = self._mlp("", self.op("Mul", rows, scale), expert)
                else:
                    made = self.op("Mul", self._mlp("", rows, expert), scale)
                if by_slot:
                    total = self.op("ScatterND", total, pairs, made)
                else:
                    total = self.op("ScatterND", total, token, made, reduction="add")
        return self.reduce("ReduceSum", total, 1, keepdims=0) if by_slot else total

    def _shared_expert(self) -> ir.Value:
        """Float32 `[T, H]`."""
        with self.within("shared_expert"):
            made = self._mlp("shared_", self._wide_tokens, None)
            if "shared_expert_gate" in self.weights:
                weight = self.matrix("shared_expert_gate", None)
                gate = self.op("Sigmoid", self.gemm(self._wide_tokens, weight, None, "gate"))
                made = self.op("Mul", made, gate)
        return made

    def _mlp(self, prefix: str, x: ir.Value, expert: int | None) -> ir.Value:
        """One expert: `[n, H]` -> `[n, H]`."""
        spec = self.spec

        def project(name: str, value: ir.Value) -> ir.Value:
            return self.project(prefix + name, value, expert)

        if f"{prefix}gate_up_proj" in self.weights:
            gate, up = self._halves(project("gate_up_proj", x), spec.matrix_shape(f"{prefix}gate_up_proj")[0] // 2)
        elif f"{prefix}gate_proj" in self.weights:
            gate, up = project("gate_proj", x), project("up_proj", x)
        else:
            return project("down_proj", self._activate(project("up_proj", x)))
        if not math.isinf(spec.activation_limit):
            low, high = self.number(-spec.activation_limit), self.number(spec.activation_limit)
            gate, up = self.op("Min", gate, high), self.op("Min", self.op("Max", up, low), high)
        activated = self._activate(gate)
        if spec.activation_beta:
            up = self.op("Add", up, self.number(spec.activation_beta))
        return project("down_proj", self.op("Mul", activated, up))

    def _halves(self, both: ir.Value, half: int) -> tuple[ir.Value, ir.Value]:
        """Gate and up of the output `[n, 2 half]` of gate_up_proj."""
        if self.spec.gate_up_interleaved:
            first, second = (self.columns(both, start, _TO_THE_END, 2) for start in (0, 1))
        else:
            first, second = self.ops("Split", both, self.ints([half, half]), count=2, axis=1)
        return (first, second) if self.spec.gate_up_order == "gate_up" else (second, first)

    def _activate(self, g: ir.Value) -> ir.Value:
        number = self.number
        match self.spec.activation:
            case "silu":
                alpha = self.spec.activation_alpha
                return self.op("Mul", g, self.op("Sigmoid", g if alpha == 1.0 else self.op("Mul", g, number(alpha))))
            case "gelu":
                inner = self.op("Erf", self.op("Mul", g, number(math.sqrt(0.5))))
                return self.op("Mul", self.op("Mul", g, self.op("Add", inner, number(1.0))), number(0.5))
            case "gelu_tanh":
                cube = self.op("Mul", self.op("Mul", g, g), g)
                inner = self.op("Add", g, self.op("Mul", cube, number(0.044715)))
                inner = self.op("Tanh", self.op("Mul", inner, number(math.sqrt(2.0 / math.pi))))
                return self.op("Mul", self.op("Mul", g, self.op("Add", inner, number(1.0))), number(0.5))
            case "relu":
                return self.op("Relu", g)
            case "relu2":
                positive = self.op("Relu", g)
                return self.op("Mul", positive, positive)
            case _:
                return g
