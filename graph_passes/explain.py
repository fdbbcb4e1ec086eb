"""What the matchers make of a place in a graph: the pattern, what of it was recognised, and where the graph parts.

`explain` looks for a node by name and describes the blocks that it is part of, or the nearest ones.
"""

from __future__ import annotations

import difflib
import heapq
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import onnx_ir as ir

from graph_passes.matchers import MATCHERS, Miss, MoeMatch
from graph_passes.matchers.match import WeightSource
from graph_passes.matchers.places import node_name
from graph_passes.moe_node import all_nodes, is_hina_moe, spec_of, weights_of
from graph_passes.moe_spec import MoeSpec
from graph_passes.names import NamingError, matching
from graph_passes.normalize.inlining import inlined
from graph_passes.op_schema import INPUTS
from graph_passes.picture import Drawing, block_after, block_before, nodes_of, producers_of, readers_of, surroundings
from graph_passes.pipeline import find_blocks, find_in_calls, prove
from graph_passes.probe import ProbeResult

_REACH = 60
"""How many nodes away a block may be to count as near."""
_BEYOND = 8
"""A refused place is known by two nodes only: it may be so much further away than a block that was recognised."""
_MOST_PLACES = 3
_MOST_NODES = 20
_MOST_INPUTS = 6
"""So many inputs and readers of a node are listed."""


@dataclass(frozen=True)
class ValueView:
    """A value: where it comes from ("initializer", "graph input" or "node"), and the node that computes it."""

    name: str
    type: str | None
    shape: list[int | str | None] | None
    source: str
    producer: NodeView | None = None

    def describe(self) -> str:
        """Type, shape and source in words."""
        axes = None if self.shape is None else ", ".join("?" if axis is None else str(axis) for axis in self.shape)
        words = f"{self.type or 'of unknown type'} {'of unknown shape' if axes is None else f'[{axes}]'}"
        return words if self.source == "node" else f"{words}, {self.source}"


@dataclass(frozen=True)
class NodeView:
    """A node with what it reads, some levels deep, and the names of the nodes that read it."""

    name: str
    op_type: str
    inputs: list[ValueView]
    outputs: list[ValueView]
    readers: list[str]
    left_out: int = 0
    """Inputs and readers that are not listed."""


@dataclass(frozen=True)
class Stored:
    """The tensors of one weight field or router constant: the first one's name, how many, and what each is."""

    field: str
    tensor: str
    count: int
    type: str
    shape: list[int]
    bytes: int


@dataclass(frozen=True)
class Proof:
    """What the probe said of a block; `worst_relative_l2` is None when the block could not be run."""

    proven: bool
    worst_relative_l2: float | None
    reason: str


@dataclass(frozen=True)
class Place:
    """A block, or what looks like one. `state` is "fused" (a HinaMoE node), "recognised" or "refused".

    `steps` says what was recognised, and `note` what was left in the graph; `broke_at` is the node where graph and
    pattern part. Pictures are those of `picture`: the block, or the surroundings of that node, and the HinaMoE node.
    """

    node: str
    state: str
    family: str | None = None
    steps: list[str] = field(default_factory=list)
    reason: str | None = None
    spec: MoeSpec | None = None
    note: str = ""
    constants: list[Stored] = field(default_factory=list)
    weights: list[Stored] = field(default_factory=list)
    proof: Proof | None = None
    broke_at: NodeView | None = None
    before: Drawing | None = None
    after: Drawing | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the experts' weights."""
        return sum(stored.bytes for stored in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without pictures."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("before", "after")}
        return plain | {
            "spec": self.spec and self.spec.to_dict(),
            "constants": [asdict(stored) for stored in self.constants],
            "weights": [asdict(stored) for stored in self.weights],
            "proof": self.proof and asdict(self.proof),
            "broke_at": self.broke_at and asdict(self.broke_at),
        }


@dataclass(frozen=True)
class Explanation:
    """The first `nodes` that `asked` names, and the places that they are part of (`distance` 0) or near to.

    `distance` is None when there is none; then `patterns` says what each family looks for.
    """

    asked: str
    nodes: list[str]
    distance: int | None
    places: list[Place]
    patterns: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        return {**vars(self), "places": [place.to_dict() for place in self.places]}


def explain(model: ir.Model, asked: str, rtol: float = 1e-5) -> Explanation:
    """Describe the blocks of `model` that the node, value or module `asked` is part of, or the nearest ones.

    Blocks that are described are proven too. `model` may be normalised in place. Raises NamingError, with similar
    names, when nothing is called so, or several modules are.
    """
    model = inlined(model)
    everything = list(all_nodes(model))
    named, problem = _matching(everything, asked)
    behind = _behind(named)
    found: list[MoeMatch | Miss | ir.Node] = list(find_blocks(model))
    in_calls = find_in_calls(model)
    found += [item for _, item in in_calls]
    found += [node for node in all_nodes(model) if is_hina_moe(node)]
    places = [item for item in found if _name_of(item) == asked]
    distance: int | None = 0
    if not places:
        if problem is not None:
            raise problem
        left = [node for node in named if node.graph is not None]
        named = left or matching(list(all_nodes(model)), asked) or [n for n in behind if n.graph is not None][:1]
        if not named:
            raise NamingError(_unknown(asked, everything, [_name_of(item) for item in found]))
        distance, places = _nearest(named, found)
    homes = {id(item): home for home, item in in_calls}
    shown = [_described(homes.get(id(item), model), item, rtol) for item in places[:_MOST_PLACES]]
    names = [node_name(node) for node in named[:_MOST_NODES]]
    return Explanation(asked, names, distance, shown, {} if shown else patterns())


def _matching(nodes: Sequence[ir.Node], asked: str) -> tuple[list[ir.Node], NamingError | None]:
    """What `asked` names, or that it names several modules: it may be the name of a block all the same."""
    try:
        return matching(nodes, asked), None
    except NamingError as problem:
        return [], problem


def patterns() -> dict[str, str]:
    """What each matcher looks for, by family."""
    modules = [sys.modules[matcher.__module__] for matcher in MATCHERS]
    return {module.FAMILY: (module.__doc__ or "").partition("\n")[0] for module in modules}


def describe(found: MoeMatch | Miss, outcome: ProbeResult | None = None, *, pictures: bool = False) -> Place:
    """What a matcher found, and what its proof gave when there was one."""
    if isinstance(found, Miss):
        broke_at = None if found.node is None else view(found.node)
        before = surroundings(found.node) if pictures and found.node is not None else None
        return Place(
            found.name,
            "refused",
            found.family or None,
            list(found.steps),
            found.reason,
            broke_at=broke_at,
            before=before,
        )
    proof = None
    if outcome is not None:
        worst = outcome.worst_relative_l2
        proof = Proof(outcome.ok, worst if math.isfinite(worst) else None, outcome.reason)
    refused = proof is not None and not proof.proven
    constants = [_stored(name, (source,)) for name, source in found.constants.items()]
    weights = [_stored(name, sources) for name, sources in found.weights.items()]
    return Place(
        found.name,
        "refused" if refused else "recognised",
        found.family,
        _steps_of(found),
        outcome.reason if outcome is not None and refused else None,
        found.spec,
        found.note,
        constants,
        weights,
        proof,
        before=block_before(found) if pictures else None,
        after=_after(found.spec, found.inputs, [*constants, *weights]) if pictures and not refused else None,
    )


def describe_node(node: ir.Node, *, pictures: bool = False) -> Place:
    """What a HinaMoE node is; one that is not valid is "refused" with the reason."""
    try:
        spec = spec_of(node)
        held = {name: tuple(WeightSource(v) for v in values) for name, values in weights_of(node).items()}
    except ValueError as error:
        return Place(node_name(node), "refused", reason=f"this HinaMoE node is not valid: {error}")
    given = {i.name: v for i, v in zip(INPUTS[1:], node.inputs[1:], strict=False) if v is not None}
    constants = [_stored(name, (WeightSource(v),)) for name, v in given.items() if v.const_value is not None]
    weights = [_stored(name, sources) for name, sources in held.items()]
    after = _after(spec, given, [*constants, *weights]) if pictures else None
    return Place(node_name(node), "fused", spec=spec, constants=constants, weights=weights, after=after)


def view(node: ir.Node, levels: int = 2) -> NodeView:
    """The node, what reads it, and `levels` levels of what it is computed from."""
    above = _producing(node, levels)
    readers = list(dict.fromkeys(f"{reader.op_type} {node_name(reader)}" for reader in readers_of(node)))
    return replace(
        above,
        outputs=[_value_view(value, 0) for value in node.outputs[:_MOST_INPUTS]],
        readers=readers[:_MOST_INPUTS],
        left_out=above.left_out + max(len(readers) - _MOST_INPUTS, 0),
    )


def _producing(node: ir.Node, levels: int) -> NodeView:
    """The node with `levels` levels of what it is computed from."""
    op_type = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
    inputs = [value for value in node.inputs if value is not None] if levels else []
    shown = [_value_view(value, levels) for value in inputs[:_MOST_INPUTS]]
    return NodeView(node_name(node), op_type, shown, [], [], max(len(inputs) - _MOST_INPUTS, 0))


def _value_view(value: ir.Value, levels: int) -> ValueView:
    producer = value.producer()
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    source = "node" if producer is not None else "initializer" if value.is_initializer() else "graph input"
    above = None if producer is None or not levels else _producing(producer, levels - 1)
    return ValueView(value.name or "", None if value.dtype is None else _type(value.dtype), shape, source, above)


def _type(dtype: ir.DataType) -> str:
    name = dtype.name.lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _stored(name: str, sources: Sequence[WeightSource]) -> Stored:
    first = sources[0]
    shape = list(first.shape)
    total = sum(source.nbytes for source in sources)
    return Stored(name, first.value.name or "", len(sources), _type(first.dtype), shape, total)


def _steps_of(match: MoeMatch) -> list[str]:
    spec = match.spec
    words = {
        "router": "left in the graph" if spec.router_input == "topk_ids" else f"{spec.score_func}, top {spec.top_k}",
        "experts": f"{spec.num_experts} of {spec.num_experts}, {spec.activation}, {' '.join(spec.weight_inputs)}",
        "ends": f"reads {match.hidden_states.name}, gives {match.output.name}",
    }
    read = dict(step.split(": ", 1) for step in match.steps)
    return [f"{part}: {said}" for part, said in {**read, **words, **read}.items()]


def _after(spec: MoeSpec, inputs: Iterable[str], weights: Sequence[Stored]) -> Drawing:
    shown = [("hidden_states", f"H = {spec.hidden_size}")]
    shown += [(name, "") for name in inputs if name not in {stored.field for stored in weights}]
    for stored in weights:
        times = f"{stored.count} x " if stored.count > 1 else ""
        shown.append((stored.field, f"{times}{stored.type} {stored.shape}"))
    return block_after(spec, shown)


def _behind(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """The nearest nodes that read what `nodes` compute: one of them is left when normalisation removes `nodes`."""
    found = dict.fromkeys(nodes)
    pending = list(nodes)
    while pending and len(found) < _REACH:
        readers = [reader for reader in readers_of(pending.pop(0)) if reader not in found]
        found.update(dict.fromkeys(readers))
        pending.extend(readers)
    return list(found)


def _name_of(found: MoeMatch | Miss | ir.Node) -> str:
    return node_name(found) if isinstance(found, ir.Node) else found.name


def _nearest(
    named: Sequence[ir.Node], found: Sequence[MoeMatch | Miss | ir.Node]
) -> tuple[int | None, list[MoeMatch | Miss | ir.Node]]:
    """The distance in nodes from `named` to the nearest of `found`, and what is that near; None when nothing is."""
    covers: dict[ir.Node, list[int]] = {}
    for index, item in enumerate(found):
        for node in _covered(item):
            covers.setdefault(node, []).append(index)
    front, seen = list(named), set(named)
    hits: dict[int, int] = {}
    for distance in range(_REACH):
        met = [index for node in front for index in covers.get(node, ()) if index not in hits]
        hits |= {index: distance for index in met if not hits or isinstance(found[index], Miss)}
        if hits and (0 in hits.values() or distance == min(hits.values()) + _BEYOND):
            break
        near = dict.fromkeys(n for node in front for n in (*producers_of(node), *readers_of(node)) if n not in seen)
        seen.update(near)
        front = list(near)
    return min(hits.values(), default=None), [found[index] for index in hits]


def _covered(found: MoeMatch | Miss | ir.Node) -> list[ir.Node]:
    if isinstance(found, ir.Node):
        return [found]
    if isinstance(found, MoeMatch):
        return nodes_of(found)
    return [node for node in (found.node, found.place) if node is not None]


def _described(model: ir.Model, found: MoeMatch | Miss | ir.Node, rtol: float) -> Place:
    if isinstance(found, ir.Node):
        return describe_node(found)
    return describe(*prove(model, found, [], rtol)) if isinstance(found, MoeMatch) else describe(found)


def _unknown(asked: str, nodes: Sequence[ir.Node], blocks: Sequence[str]) -> str:
    """That nothing is called `asked`, and what is called nearly so."""
    names = dict.fromkeys([*blocks, *(n.name or "" for n in nodes), *(v.name or "" for n in nodes for v in n.outputs)])
    words = [word for word in re.split(r"[^0-9A-Za-z]+", asked) if len(word) > 1]
    pool = heapq.nlargest(2000, names, key=lambda name: sum(word in name for word in words))
    similar = difflib.get_close_matches(asked, pool, n=4, cutoff=0.5)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else "; hina-ort inspect MODEL lists the MoE blocks"
    return f"no node, value or module is called {asked}{hint}"
