"""Matchers: one per family of exported graphs; each maps a graph to matches and misses."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graph_passes.matchers import batched_mm, dense_experts, grouped_mm, moe_op, sliced_rows, split_rows, unrolled_loop
from graph_passes.matchers.match import Miss, MoeMatch, WeightSource

MATCHERS: tuple[Callable[[ir.Graph], list[MoeMatch | Miss]], ...] = (
    unrolled_loop.match_graph,
    batched_mm.match_graph,
    grouped_mm.match_graph,
    split_rows.match_graph,
    sliced_rows.match_graph,
    dense_experts.match_graph,
    moe_op.match_graph,
)

__all__ = ["MATCHERS", "Miss", "MoeMatch", "WeightSource"]
