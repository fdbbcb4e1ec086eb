"""A MoE block as a small drawing: boxes in rows, repeated branches as one box with a count.

Nodes are drawn as one box when they have the same operator, read the same weight field, and get their inputs from nodes
that are drawn as one box themselves: the branches of a loop over experts thus fall together. Reshapes and the like, and
arithmetic on shapes, are counted but not drawn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.cut import block_values
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.places import node_name
from graph_passes.moe_spec import FIELDS, MoeSpec, split_field

STAGES = ("input", "router", "top-k", "dispatch", "experts", "shared expert", "combine", "output")
"""What nodes of a block are for, in the order of the data."""

_PLUMBING = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast", "Flatten", "Transpose", "Expand"})
_LOOKUPS = _PLUMBING | {"Gather", "GatherND", "Split", "DequantizeLinear"}
_SUMS = frozenset({"Add", "Sum", "ScatterND", "ScatterElements"})
"""Operators that make a chain when the experts' outputs are added up one by one."""
_MOST_BOXES = 60
_LOOK_BACK = 8
"""Steps from an input of a node back to the weight that it is made of."""


@dataclass(frozen=True)
class Box:
    """One box: an operator (or the name of an input), what it reads or is, its stage, how many nodes, and its row."""

    text: str
    note: str
    stage: str
    count: int = 1
    row: int = 0
    marked: bool = False


@dataclass(frozen=True)
class Drawing:
    """Boxes, and edges as pairs of their places; `operators` counts the nodes of each stage, drawn or not."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    operators: dict[str, dict[str, int]]


def block_before(match: MoeMatch) -> Drawing:
    """The block of `match` as it lies in the graph."""
    nodes = nodes_of(match)
    fields = {s.value: name for name, sources in (*match.weights.items(), *_constants(match)) for s in sources}
    inside = set(nodes)
    reads = {node: _fields_read(node, inside, fields) for node in nodes}
    stages = _stages(nodes, reads)
    operators: dict[str, dict[str, int]] = {stage: {} for stage in STAGES if stage in stages.values()}
    for stage, count in Counter((stages[node], node.op_type) for node in nodes).items():
        operators[stage[0]][stage[1]] = count
    for detailed in (True, False):
        drawer = _Drawer(match, detailed)
        for node in nodes:
            drawer.add(node, stages[node], reads[node])
        drawer.finish(match.output)
        if len(drawer.boxes) <= _MOST_BOXES:
            break
    return _in_rows(drawer.boxes, drawer.edges, operators)


def block_after(spec: MoeSpec, inputs: Iterable[tuple[str, str]]) -> Drawing:
    """The HinaMoE node with its `inputs`, pairs of a name and a note."""
    boxes = [
        Box(name, note, "router" if name.startswith(("router", "topk", "e_score")) else "experts")
        for name, note in inputs
    ]
    boxes = [replace(box, stage="shared expert") if box.text.startswith("shared_") else box for box in boxes]
    boxes = [replace(box, stage="input") if box.text == "hidden_states" else box for box in boxes]
    place = len(boxes)
    boxes += [Box("HinaMoE", f"{spec.num_experts} experts, top {spec.top_k}", "output"), Box("output", "", "input")]
    edges = [*((index, place) for index in range(place)), (place, place + 1)]
    return _in_rows(boxes, edges, {"output": {"HinaMoE": 1}})


def surroundings(node: ir.Node, levels: int = 2) -> Drawing:
    """`node`, marked, with what it is computed from and what reads it; alike neighbours are one box."""
    groups: dict[tuple[int, str], list[ir.Node]] = {(0, ""): [node]}
    level_of = {node: (0, "")}
    for step, near in ((-1, producers_of), (1, readers_of)):
        front = [node]
        for level in range(1, levels + 1):
            found = dict.fromkeys(n for item in front for n in near(item) if n not in level_of)
            for item in found:
                level_of[item] = (step * level, item.op_type)
                groups.setdefault(level_of[item], []).append(item)
            front = list(found)
            if step > 0:
                break
    keys = sorted(groups, key=lambda key: key[0])
    boxes = [
        Box(group[0].op_type, node_name(group[0]) if len(group) == 1 else "", "dispatch", len(group), 0, key[0] == 0)
        for key in keys
        for group in (groups[key],)
    ]
    edges = {
        (keys.index(level_of[source]), keys.index(key)): None
        for key, group in groups.items()
        for item in group
        for source in producers_of(item)
        if source in level_of and level_of[source][0] < key[0]
    }
    return _in_rows(boxes, list(edges), {})


def producers_of(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that compute what `node` reads."""
    for value in node.inputs:
        if value is not None and (producer := value.producer()) is not None:
            yield producer


def readers_of(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that read what `node` computes."""
    for value in node.outputs:
        yield from value.consumers()


def _constants(match: MoeMatch) -> list[tuple[str, tuple[WeightSource, ...]]]:
    return [(name, (source,)) for name, source in match.constants.items()]


def nodes_of(match: MoeMatch) -> list[ir.Node]:
    """The nodes of the block, each behind those that it reads."""
    inside = {node for value in block_values(match) if (node := value.producer()) is not None}
    ordered: dict[ir.Node, None] = {}
    last = match.output.producer()
    pending = [] if last is None else [last]
    while pending:
        node = pending[-1]
        waiting = [n for n in producers_of(node) if n in inside and n not in ordered]
        if waiting:
            pending.extend(reversed(waiting))
        else:
            ordered[pending.pop()] = None
    return list(ordered)


def _fields_read(node: ir.Node, inside: set[ir.Node], fields: dict[ir.Value, str]) -> tuple[str, ...]:
    """The weight fields that the node reads, by nodes outside of the block if need be."""
    found: dict[str, None] = {}
    pending = deque((value, 0) for value in node.inputs)
    while pending:
        value, steps = pending.popleft()
        if value is None:
            continue
        if value in fields:
            found[fields[value]] = None
        producer = value.producer()
        if producer is not None and producer not in inside and steps < _LOOK_BACK:
            pending.extend((v, steps + 1) for v in producer.inputs)
    return tuple(found)


def _closure(start: Iterable[ir.Node], order: Sequence[ir.Node], forward: bool) -> set[ir.Node]:
    """`start` and the nodes of `order` that are computed from it, or that it is computed from."""
    found = set(start)
    if forward:
        for node in order:
            if any(n in found for n in producers_of(node)):
                found.add(node)
        return found
    inside = set(order)
    for node in reversed(order):
        if node in found:
            found.update(n for n in producers_of(node) if n in inside)
    return found


def _products(readers: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that use weights which `readers` read or look up."""
    pending = list(readers)
    while pending:
        node = pending.pop()
        if node.op_type in _LOOKUPS:
            pending.extend(readers_of(node))
        else:
            yield node


def _stages(order: Sequence[ir.Node], reads: dict[ir.Node, tuple[str, ...]]) -> dict[ir.Node, str]:
    """What each node is for."""
    weighted = {n: [split_field(f)[0].removesuffix("_bias") for f in reads[n]] for n in order}
    shared = [n for n in order if any(f in FIELDS and FIELDS[f].shared for f in weighted[n])]
    lookups = [n for n in order if any(f in FIELDS and not FIELDS[f].shared for f in weighted[n])]
    experts = list(_products(lookups))
    choosing = [n for n in order if n.op_type in ("TopK", "ArgMax") and n.attributes.get_int("largest", 1) != 0]
    scoring = [n for n in order if any(f.startswith("router_") for f in weighted[n])]
    routing, chosen = _closure(choosing, order, False), _closure(choosing, order, True)
    routing |= _closure(scoring, order, True) - chosen
    behind, before = _closure(experts, order, True), _closure(experts, order, False)
    of_shared = _closure(shared, order, True) & _closure(shared, order, False)
    stages = {}
    for node in order:
        if node in of_shared:
            stages[node] = "shared expert"
        elif node in behind:
            stages[node] = "experts" if node in before else "combine"
        elif node in lookups:
            stages[node] = "experts"
        elif node in choosing:
            stages[node] = "top-k"
        elif node in routing:
            stages[node] = "router"
        elif node in chosen and node not in before:
            stages[node] = "top-k"
        elif any(n in of_shared for n in producers_of(node)):
            stages[node] = "combine"
        else:
            stages[node] = "dispatch"
    return stages


class _Drawer:
    """Boxes of the nodes that `add` gets in the order of the data, and the edges between them.

    Without `detailed`, what a node reads does not tell it apart from another of its operator and stage.
    """

    def __init__(self, match: MoeMatch, detailed: bool) -> None:
        self.boxes: list[Box] = []
        self.edges: dict[tuple[int, int], None] = {}
        self._detailed = detailed
        self._sources: dict[ir.Value, tuple[int, ...]] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[ir.Node, int] = {}
        self._box_of: dict[int, int] = {}
        self._shapes: set[ir.Node] = set()
        self._chain: set[ir.Node] = set()
        for name, value in {"hidden_states": match.hidden_states, **match.inputs}.items():
            self._sources[value] = (len(self.boxes),)
            self.boxes.append(Box(name, value.name or "", "input"))

    def add(self, node: ir.Node, stage: str, fields: tuple[str, ...]) -> None:
        """Draw `node`, which reads `fields` of weights."""
        inputs = [v for v in dict.fromkeys(node.inputs) if v is not None and v in self._sources]
        producers = [v.producer() for v in inputs]
        if node.op_type in ("Shape", "Size") or (producers and all(p in self._shapes for p in producers)):
            self._shapes.add(node)
            self._sources.update(dict.fromkeys(node.outputs, ()))
            return
        if stage == "combine" and node.op_type in _SUMS:
            self._chain.add(node)
        alike = {self._trait(v) for v in inputs if not (node in self._chain and v.producer() in self._chain)}
        key = (stage, node.op_type, fields, frozenset(alike) if self._detailed else None)
        kind = self._kind_of[node] = self._kinds.setdefault(key, len(self._kinds))
        drawn = tuple(sorted({box for v in inputs for box in self._sources[v]}))
        if node.op_type not in _PLUMBING or fields:
            box = self._box_of.setdefault(kind, len(self.boxes))
            if box == len(self.boxes):
                self.boxes.append(Box(node.op_type, ", ".join(fields), stage, 0))
            self.boxes[box] = replace(self.boxes[box], count=self.boxes[box].count + 1)
            self.edges.update(dict.fromkeys((source, box) for source in drawn if source < box))
            drawn = (box,)
        self._sources.update(dict.fromkeys(node.outputs, drawn))

    def finish(self, output: ir.Value) -> None:
        """Draw the end of the block."""
        self.edges.update(dict.fromkeys((source, len(self.boxes)) for source in self._sources.get(output, ())))
        self.boxes.append(Box("output", output.name or "", "input"))

    def _trait(self, value: ir.Value) -> object:
        """What an input says about the kind of its reader: the kind of its producer, and which of two outputs it is."""
        producer = value.producer()
        if producer is None or producer not in self._kind_of:
            return "a shape" if producer in self._shapes else value.name
        return self._kind_of[producer], value.index() if len(producer.outputs) == 2 else 0


def _in_rows(boxes: Sequence[Box], edges: Iterable[tuple[int, int]], operators: dict[str, dict[str, int]]) -> Drawing:
    """The drawing, each box in the row below all that it reads."""
    rows = [0] * len(boxes)
    ordered = sorted(edges, key=lambda edge: (edge[1], edge[0]))
    for source, target in ordered:
        rows[target] = max(rows[target], rows[source] + 1)
    return Drawing(
        tuple(replace(box, row=row) for box, row in zip(boxes, rows, strict=True)), tuple(ordered), operators
    )
