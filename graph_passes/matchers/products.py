"""Products of the rows of all experts with their weights, and the block that is put together from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.matchers import router
from graph_passes.matchers.assembly import Sources, assemble
from graph_passes.matchers.ends import check_routing, ends
from graph_passes.matchers.expert_mlp import ExpertMlp
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.router import Router
from graph_passes.matchers.views import NoMatch, dim, node_axes, produced_by, rank, strip

BiasOf = Callable[[ir.Node, ir.Value], WeightSource]
"""The bias that an Add joins to a product, given as its value; NoMatch when it is none."""


@dataclass(frozen=True)
class Product:
    """x @ W.T + bias for all experts; `weights`, as the op reads them, are one `[E, N, K]` or E tensors `[N, K]`."""

    node: ir.Node
    x: ir.Value
    weights: tuple[WeightSource, ...]
    bias: WeightSource | None = None

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.weights) if len(self.weights[0].shape) == 2 else self.weights[0].shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """N and K."""
        return self.weights[0].shape[-2:]


@dataclass(frozen=True, kw_only=True)
class Grouped(Product):
    """A product of rows `x` `[S, K]`, sorted by expert; `cuts` `[E]` are the ends, or the sizes, of the runs."""

    cuts: ir.Value


def of_all_experts(node: ir.Node, weights: Sequence[WeightSource]) -> tuple[WeightSource, ...]:
    """The stacked tensor whose entries, in order, are the weights of the experts, or one tensor for each."""
    first = weights[0]
    if first.index is None:
        if any(w.index is not None or w.shape != first.shape or w.dtype != first.dtype for w in weights):
            raise NoMatch(node, "the weights of the experts are not alike")
        return tuple(weights)
    for expert, source in enumerate(weights):
        if source.value is not first.value or source.transpose is not first.transpose:
            raise NoMatch(
                node, f"expert 0 has weights of {first.value.name}, but expert {expert} those of {source.value.name}"
            )
        if source.index != expert:
            raise NoMatch(node, f"the rows of expert {expert} are multiplied by the weights of expert {source.index}")
    whole = replace(first, index=None)
    if whole.shape[0] != len(weights):
        raise NoMatch(node, f"{first.value.name} holds {whole.shape[0]} experts, but {len(weights)} are used")
    return (whole,)


@dataclass(frozen=True)
class Combine:
    """The end of a block: `output` [T, H] = sum over k of `mixing` * (down projection and its bias).

    `same_rows`: `output` has one row for each token that the router gives k ids.
    """

    node: ir.Node
    down: Product
    mixing: ir.Value
    top_k: int
    output: ir.Value
    same_rows: bool = True


def top_k_of_sum(node: ir.Node, value: ir.Value, hidden_size: int) -> int:
    """k when the ReduceSum `node` sums `value` `[tokens, k, hidden_size]` over the experts of a token, else NoMatch."""
    axes, top_k = node_axes(node), dim(value, -2)
    if rank(value) is None or top_k is None or dim(value, -1) not in (None, hidden_size) or axes is None:
        raise NoMatch(node, f"ReduceSum does not sum a tensor [tokens, top_k, {hidden_size}]")
    if len(axes) != 1 or axes[0] not in (-2, (rank(value) or 0) - 2):
        raise NoMatch(node, f"ReduceSum runs over axes {list(axes)}, expected the experts of a token")
    return top_k


def projection_at(value: ir.Value, products: Sequence[Product], bias_of: BiasOf) -> Product:
    """The one of `products` (with its bias, if one is added) whose result `value` is. Raises NoMatch."""
    addition = produced_by(value, "Add")
    candidates = [value] if addition is None else [v for v in addition.inputs if v is not None]
    for candidate in candidates:
        for product in products:
            if strip(candidate) is product.node.outputs[0]:
                return product if addition is None else replace(product, bias=bias_of(addition, candidate))
    raise NoMatch(value.producer(), f"{value.name} is not one of the projections of the experts' tokens")


def weight_fields(mlp: ExpertMlp, inputs: Sequence[Product], down: Product, bias_of: BiasOf) -> tuple[Sources, Sources]:
    """The sources of the weight fields and of their biases, of the shapes that the sizes of `down` ask for."""
    halves = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    named = zip(mlp.layout, halves, strict=False)
    projections = {name: projection_at(half.source, inputs, bias_of) for name, half in named} | {"down_proj": down}
    hidden_size, intermediate_size = down.shape
    weights: dict[str, tuple[WeightSource, ...]] = {}
    biases: dict[str, tuple[WeightSource, ...]] = {}
    for name, product in projections.items():
        rows, columns = matrix_shape(name, hidden_size, intermediate_size)
        stored, found = product.weights[0].value.name, (product.experts, *product.shape)
        check_shape(product.node, f"{name} ({stored})", found, (down.experts, rows, columns))
        weights[name] = product.weights
        if product.bias is not None:
            found = product.bias.shape  # [E, N] or [E, 1, N]
            found = (found[0], found[-1]) if product.bias.stored.size == found[0] * found[-1] else found
            check_shape(product.node, f"{name}_bias ({product.bias.value.name})", found, (down.experts, rows))
            biases[f"{name}_bias"] = (product.bias,)
    return weights, biases


def matrix_shape(name: str, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
    """N and K of the projection `name` of an MLP of these sizes."""
    if name == "down_proj":
        return hidden_size, intermediate_size
    return (2 * intermediate_size if name == "gate_up_proj" else intermediate_size), hidden_size


def check_shape(node: ir.Node, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """NoMatch at `node` unless `name` has the shape that is expected."""
    if found != expected:
        raise NoMatch(node, f"{name} is {list(found)}, expected {list(expected)}")


def block_of(
    family: str,
    combine: Combine,
    tokens: ir.Value,
    ids: ir.Value,
    mlp: ExpertMlp,
    fields: tuple[Sources, Sources],
    check: Callable[[Router], None] = lambda routing: None,
) -> MoeMatch:
    """The match of a block whose experts read rows of `tokens` [T, H] chosen by `ids`, k for each token.

    `fields` are those of `weight_fields`; `check` may object to the router. Raises NoMatch.
    """
    down = combine.down
    hidden_size, intermediate_size = down.shape
    routing = router.recognise(combine.mixing, ids, tokens, combine.top_k)
    block_ends = ends(tokens, combine.output, hidden_size, combine.same_rows)
    check_routing(routing, tokens, down.experts, hidden_size)
    check(routing)
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": down.experts,
        "top_k": combine.top_k,
    }
    return assemble(family, combine.node, sizes, mlp, routing, block_ends, *fields)
