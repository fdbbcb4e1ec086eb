"""MoE blocks in the bodies of If, Loop and Scan: found, never fused, so that nobody wonders why."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.matchers import batched_mm, dense_experts, grouped_mm, moe_op, unrolled_loop
from graph_passes.matchers.match import Miss
from graph_passes.matchers.places import node_name


def subgraph_misses(model: ir.Model) -> list[Miss]:
    """One Miss for each place in a subgraph of `model` (normalised) that a matcher would look at."""
    misses = []
    for owner, attribute, graph in _subgraphs(model.graph):
        where = f"{attribute} of {owner.op_type} {node_name(owner)}"
        loops = [masks[0].node for masks in unrolled_loop.find_places(graph).values()]
        products = [products[0].node for products in batched_mm.find_places(graph).values()]
        dense = [products[-1].node for products in dense_experts.find_places(graph).values()]
        grouped = [place[-1] for place in grouped_mm.find_places(graph)]
        for place in loops + products + dense + grouped + moe_op.find_places(graph):
            misses.append(
                Miss(
                    node_name(place),
                    f"it lies in a subgraph ({where}), and only the main graph is rewritten; export the model without "
                    "branches or loops around its layers (optimum-cli: --no-post-process keeps the decoders apart)",
                )
            )
    return misses


def _subgraphs(graph: ir.Graph) -> Iterator[tuple[ir.Node, str, ir.Graph]]:
    """Every subgraph below `graph`, with the node and the attribute that hold it."""
    for node in graph:
        for attribute in node.attributes.values():
            held: list[ir.Graph] = []
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                held = [attribute.as_graph()]
            elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                held = list(attribute.as_graphs())
            for inner in held:
                yield node, attribute.name, inner
                yield from _subgraphs(inner)
