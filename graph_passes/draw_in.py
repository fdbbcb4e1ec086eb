"""Draw routers and shared experts into HinaMoE nodes that a graph hands expert ids and weights to.

An exporter that knows the op makes such nodes and leaves the router before them in the graph. It is read as that of any
other block, and proven without the experts, whatever their size: a stand-in takes their place for that, whose expert e
gives the same random vector to every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.fuse_moe import UniqueNames, check, fuse
from graph_passes.matchers import router, shared_expert
from graph_passes.matchers.ends import check_routing, ends
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.views import NoMatch
from graph_passes.moe_node import all_nodes, is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import MoeSpec
from graph_passes.normalize import normalize
from graph_passes.op_schema import INPUTS, OP_TYPE
from graph_passes.pipeline import Progress
from graph_passes.probe import probe, probe_shared_expert

_PLACES = {item.name: place for place, item in enumerate(INPUTS)}
_SEED = 20240229


@dataclass(frozen=True)
class Drawn:
    """A node after the attempt: what it computes, and why a router or shared expert beside it stays in the graph."""

    name: str
    spec: MoeSpec
    notes: tuple[str, ...]


def draw_in(model: ir.Model, rtol: float = 1e-5, progress: Progress | None = None) -> list[Drawn]:
    """Draw what is proven to agree within `rtol` (see `probe`) into the HinaMoE nodes of `model`, in place.

    The model is normalised first. A node whose router is not recognised, or not proven, keeps taking ids and weights.
    """
    normalize(model)
    nodes = [node for node in all_nodes(model) if is_hina_moe(node) and node.inputs[_PLACES["topk_ids"]] is not None]
    names, drawn = UniqueNames(model), []
    for done, node in enumerate(nodes):
        if progress is not None:
            progress("drawing in routers", done, len(nodes))
        drawn.append(_draw_in(model, node, rtol, names))
    if progress is not None:
        progress("drawing in routers", len(nodes), len(nodes))
    return drawn


def _draw_in(model: ir.Model, node: ir.Node, rtol: float, names: UniqueNames) -> Drawn:
    spec, notes = spec_of(node), list[str]()
    try:
        with_router, with_shared = _proven(model, node, rtol, notes)
        match = _match(node, node.outputs[0], with_router=with_router)
        match = shared_expert.draw_in(match) if with_shared else match
        if not (with_router or with_shared):
            return Drawn(str(node.name), spec, tuple(notes))
        check(match)
    except (NoMatch, ValueError) as problem:
        return Drawn(str(node.name), spec, (*notes, str(problem)))
    new = fuse(model, match, names)
    new.name = node.name
    return Drawn(str(new.name), spec_of(new), tuple(notes))


def _proven(model: ir.Model, node: ir.Node, rtol: float, notes: list[str]) -> tuple[bool, bool]:
    """Whether the router can be drawn in, and a shared expert; `notes` gets the reasons why not. May raise NoMatch."""
    with _stand_in(node) as (output, weights):
        with_router, match = True, _match(node, output, with_router=True)
        if match.spec.router_input == "topk_ids":
            with_router = False
            notes.append(f"its router stays in the graph: {match.note}")
        else:
            outcome = probe(model, _of_stand_in(match, weights), rtol)
            if not outcome.ok:
                with_router, match = False, _match(node, output, with_router=False)
                notes.append(f"its router stays in the graph: {outcome.reason}")
        extended = shared_expert.draw_in(match)
        if extended.routed_only is None:
            notes += [extended.note] if extended.note else []
            return with_router, False
        outcome = probe_shared_expert(model, extended, rtol)
        if not outcome.ok:
            notes.append(shared_expert.left_out(outcome.reason))
        return with_router, outcome.ok


def _match(node: ir.Node, output: ir.Value, *, with_router: bool) -> MoeMatch:
    """The block of `node`, whose output, or that of a stand-in, is `output`; NoMatch when its router cannot be read."""
    spec, (tokens, ids, mixing) = spec_of(node), (node.inputs[_PLACES[n]] for n in ("hidden_states", *_EXPLICIT))
    assert tokens is not None and ids is not None and mixing is not None
    routing = router.Router({"router_input": "topk_ids"}, dict(zip(_EXPLICIT, (ids, mixing), strict=True)))
    if with_router:
        routing = router.recognise(mixing, ids, tokens, spec.top_k)
        check_routing(routing, tokens, spec.num_experts, spec.hidden_size)
    hidden_states, end = ends(tokens, output, spec.hidden_size, same_rows=True)
    weights = {name: tuple(WeightSource(value) for value in values) for name, values in weights_of(node).items()}
    name = str(node.name).removesuffix(f"/{OP_TYPE}")
    return MoeMatch(
        name,
        "hina_moe",
        replace(spec, **routing.fields),
        hidden_states,
        end,
        routing.inputs,
        routing.constants,
        weights,
        note=routing.note,
    )


_EXPLICIT = ("topk_ids", "topk_weights")


@contextmanager
def _stand_in(node: ir.Node) -> Iterator[tuple[ir.Value, dict[str, ir.Value]]]:
    """Let the readers of `node` read standard operators in its place while the body runs.

    Yields their output, and the weights of a plain MLP that computes the same: its bias is what each expert gives.
    """
    spec, graph = spec_of(node), node.graph
    assert isinstance(graph, ir.Graph)
    shapes = {
        "up_proj": (1, spec.hidden_size),
        "down_proj": (spec.hidden_size, 1),
        "down_proj_bias": (spec.hidden_size,),
    }
    weights = {name: _initializer(name, np.zeros((spec.num_experts, *shape))) for name, shape in shapes.items()}
    given = np.random.default_rng(_SEED).standard_normal((spec.num_experts, spec.hidden_size))
    weights["down_proj_bias"] = bias = _initializer("hina_stand_in.experts", given)
    ids, mixing = (node.inputs[_PLACES[name]] for name in _EXPLICIT)
    constants = {axis: _initializer(f"hina_stand_in.axis{axis}", np.array([axis], np.int64)) for axis in (-1, -2)}
    gather = ir.node("Gather", [bias, ids], {"axis": 0})  # [T, k, H]
    weight = ir.node("Unsqueeze", [mixing, constants[-1]])
    product = ir.node("Mul", [gather.outputs[0], weight.outputs[0]])
    total = ir.node("ReduceSum", [product.outputs[0], constants[-2]], {"keepdims": 0})
    added, old, new = [gather, weight, product, total], node.outputs[0], total.outputs[0]
    new.type, new.shape, new.name = old.type, old.shape, "hina_stand_in.output"
    for value in (bias, *constants.values()):
        graph.register_initializer(value)
    graph.insert_after(node, added)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    try:
        yield new, weights
    finally:
        new.replace_all_uses_with(old, replace_graph_outputs=True)
        graph.remove(added, safe=True)
        for value in (bias, *constants.values()):
            graph.initializers.pop(str(value.name))


def _initializer(name: str, array: npt.NDArray[Any]) -> ir.Value:
    tensor = ir.Tensor(array if array.dtype == np.int64 else array.astype(np.float32), name=name)
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)


def _of_stand_in(match: MoeMatch, weights: dict[str, ir.Value]) -> MoeMatch:
    """`match` with the experts of the stand-in; it has their weights on the output, where all experts may have them."""
    spec = replace(
        match.spec,
        intermediate_size=1,
        weight_inputs=tuple(weights),
        weight_formats=(),
        experts_stacked=True,
        activation="identity",
        apply_weights_to="output",
    )
    return replace(match, spec=spec, weights={name: (WeightSource(value),) for name, value in weights.items()})
