"""From the parts that a matcher recognised to its MoeMatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graph_passes.matchers.expert_mlp import ExpertMlp
from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.places import block_name
from graph_passes.matchers.router import Router
from graph_passes.moe_spec import MoeSpec

Sources = Mapping[str, tuple[WeightSource, ...]]


def assemble(
    family: str,
    combine: ir.Node,
    sizes: Mapping[str, Any],
    mlp: ExpertMlp,
    routing: Router,
    ends: tuple[ir.Value, ir.Value],
    weights: Sources,
    biases: Sources,
) -> MoeMatch:
    """The match of a block whose `ends` are hidden_states and output; `sizes` are the four sizes of MoeSpec.

    Its name is that of the router's module, else it is read off `combine`, where the experts' outputs are summed.
    """
    spec = MoeSpec(
        **sizes,
        weight_inputs=(*weights, *biases),
        **mlp.layout_fields,
        **mlp.fields,
        **routing.fields,
    )
    name = block_name(combine, routing.constants.get("router_weight"))
    return MoeMatch(name, family, spec, *ends, routing.inputs, routing.constants, {**weights, **biases})
