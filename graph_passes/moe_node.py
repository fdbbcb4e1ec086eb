"""A HinaMoE node of a model, read back into its spec and its weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.moe_spec import FIELDS, ROUTER_INPUTS, MoeSpec
from graph_passes.op_schema import DOMAIN, INPUTS, OP_TYPE


def is_hina_moe(node: ir.Node) -> bool:
    """Whether `node` is a HinaMoE node."""
    return node.domain == DOMAIN and node.op_type == OP_TYPE


def is_fused(function: ir.Function) -> bool:
    """Whether a local function holds HinaMoE nodes."""
    return any(is_hina_moe(node) for node in function.all_nodes())


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of the graph, its subgraphs and its local functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def weights_of(node: ir.Node) -> dict[str, list[ir.Value]]:
    """The weight initializers of a HinaMoE node by field: one, or one for each expert, expert 0 first.

    Raises ValueError when there are fewer or more than its `weight_inputs` name.
    """
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    stacked, experts = values.get("experts_stacked", 1), int(values.get("num_experts", 1))
    left = [v for v in node.inputs[len(INPUTS) :] if v is not None and v.const_value is not None]
    fields: dict[str, list[ir.Value]] = {}
    for name in str(values.get("weight_inputs", "")).split():
        count = 1 if stacked or (name in FIELDS and FIELDS[name].shared) else experts
        if len(left) < count:
            raise ValueError(f"it lacks weights of {name}")
        fields[name], left = left[:count], left[count:]
    if left:
        raise ValueError(f"it has weights that its weight_inputs do not name, the first is {left[0].name}")
    return fields


def spec_of(node: ir.Node) -> MoeSpec:
    """The spec that a HinaMoE node says.

    Raises ValueError when its attributes or weights do not make one. Sizes are numbers of rows: columns of quantised
    weights are packed.
    """
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    weights = weights_of(node)
    if "down_proj" not in weights:
        raise ValueError("its weight_inputs name no down_proj")

    def rows(name: str) -> int:
        axis = 1 if attributes.get("experts_stacked", 1) and not name.startswith("shared_") else 0
        shape = weights[name][0].const_value.shape.numpy()  # type: ignore[union-attr]
        if len(shape) <= axis:
            raise ValueError(f"its {name} has the shape {list(shape)}")
        return int(shape[axis])

    def inner(prefix: str) -> int:
        up, both = f"{prefix}up_proj", f"{prefix}gate_up_proj"
        return rows(up) if up in weights else rows(both) // 2 if both in weights else 0

    present = {item.name for item, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
    return MoeSpec.from_attributes(
        attributes,
        hidden_size=rows("down_proj"),
        intermediate_size=inner(""),
        shared_intermediate_size=inner("shared_"),
        router_input=next((name for name in ROUTER_INPUTS if name in present), "none"),
    )
