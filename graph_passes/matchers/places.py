"""What all matchers say alike: the name of a block, what of it was recognised, and the Miss of a failed match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace

import onnx_ir as ir

from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.quantised_weights import with_parts
from graph_passes.matchers.views import NoMatch

_steps: ContextVar[dict[str, str] | None] = ContextVar("steps", default=None)


def judge(place: ir.Node, match: Callable[[], MoeMatch], family: str) -> MoeMatch | Miss:
    """What `match` finds, or a Miss with its reason at the node that it names, else at `place`."""
    steps: dict[str, str] = {}
    token = _steps.set(steps)
    try:
        return replace(with_parts(match()), steps=_words(steps))
    except (NoMatch, ValueError) as problem:
        node = problem.node if isinstance(problem, NoMatch) and problem.node is not None else place
        return Miss(node_name(node), str(problem), family, node, place, _words(steps))
    finally:
        _steps.reset(token)


def _words(steps: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{part}: {words}" for part, words in steps.items())


def recognised(part: str, words: str) -> None:
    """Note what a match in progress has recognised, so that a Miss says how far it came; a later word on it counts."""
    if (steps := _steps.get()) is not None:
        steps[part] = words


def node_name(node: ir.Node) -> str:
    """A name by which a node is found in the graph; that of its first output when it has none."""
    return node.name or node.outputs[0].name or node.op_type


def block_name(node: ir.Node, router_weight: WeightSource | None) -> str:
    """The module path of a block, as `model.layers.0.mlp`.

    It is read off the router's weight (`layers.0.mlp.gate.weight`), else off the path of `node`
    (`/model/layers.0/mlp/NonZero`); a node without a path gives its own name. Modules of router and experts inside the
    block are left out.
    """
    path = (router_weight.value.name or "").split(".")[:-2] if router_weight is not None else []
    name = node_name(node)
    path = path or name.rpartition("/")[0].strip("/").replace("/", ".").split(".")
    inner = len(path) > 1 and path[-1] in ("experts", "router")
    return ".".join(path[:-1] if inner else path) or name
