"""What all matchers say alike: the name of a block, and the Miss that a failed match becomes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graph_passes.matchers.match import Miss, MoeMatch, WeightSource
from graph_passes.matchers.views import NoMatch


def judge(place: ir.Node, match: Callable[[], MoeMatch]) -> MoeMatch | Miss:
    """What `match` finds, or a Miss with its reason at the node that it names, else at `place`."""
    try:
        return match()
    except NoMatch as problem:
        return Miss(node_name(problem.node or place), problem.reason)
    except ValueError as problem:
        return Miss(node_name(place), str(problem))


def node_name(node: ir.Node) -> str:
    """A name by which a node is found in the graph; that of its first output when it has none."""
    return node.name or node.outputs[0].name or node.op_type


def block_name(node: ir.Node, router_weight: WeightSource | None) -> str:
    """The module path of a block, as `model.layers.0.mlp`.

    It is read off the router's weight (`layers.0.mlp.gate.weight`), else off the path of `node`
    (`/model/layers.0/mlp/NonZero`); a node without a path gives its own name.
    """
    path = (router_weight.value.name or "").split(".")[:-2] if router_weight is not None else []
    name = node_name(node)
    return ".".join(path) or name.rpartition("/")[0].strip("/").replace("/", ".") or name
