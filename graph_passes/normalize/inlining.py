"""Local functions as nodes of the graphs that call them, where opsets allow it."""

from __future__ import annotations

from contextlib import suppress

import onnx_ir as ir
from onnx_ir.passes import common

from graph_passes.moe_node import all_nodes, is_fused
from graph_passes.normalize.lifting import lift_constants

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def inline_functions(model: ir.Model) -> None:
    """Inline, in place, every function that is not fused and has no conflict; the rest stays."""
    kept = conflicts(model)
    common.InlinePass(lambda function: function.identifier() not in kept and not is_fused(function))(model)


def inline_fused(model: ir.Model) -> None:
    """Inline, in place, the functions that hold HinaMoE nodes, as these read weights by call.

    Constants become initializers, where weights are looked for. Raises ValueError, saying what to do, for such a
    function with a conflict; nothing is inlined then.
    """
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir has no annotations there
    holding = _holding(model)
    if not holding:
        return
    problems = conflicts(model)
    for identifier in holding:
        if identifier in problems:
            raise ValueError(problems[identifier])
    common.InlinePass(lambda function: function.identifier() in holding)(model)
    lift_constants(model)


def inlined(model: ir.Model) -> ir.Model:
    """`model`, or a copy as `inline_fused` makes it when functions hold HinaMoE nodes: to be looked at, not written.

    Functions are taken as if they had the opsets of the model; HinaMoE nodes are the same in all.
    """
    holding = _holding(model)
    if not holding:
        return model
    copy = model.clone()
    for identifier in holding:
        imports = copy.functions[identifier].opset_imports
        imports.update({domain: copy.opset_imports.get(domain, version) for domain, version in imports.items()})
    with suppress(ValueError):
        inline_fused(copy)
    return copy


def conflicts(model: ir.Model) -> dict[ir.OperatorIdentifier, str]:
    """Why functions cannot be inlined: they have other opsets than the model or a function that calls them, mostly."""
    places = [("the model", model.opset_imports, set(model.functions))]
    places += [(f"the function {f.name}", f.opset_imports, _called(model, f)) for f in model.functions.values()]
    found: dict[ir.OperatorIdentifier, str] = {}
    for caller, imports, called in places:
        known = dict(imports)
        for function in (function for identifier, function in model.functions.items() if identifier in called):
            for domain, version in function.opset_imports.items():
                if (other := known.setdefault(domain, version)) != version:
                    reason = (
                        f"the function {function.name} imports opset {version} of {domain or 'ai.onnx'} and {caller} "
                        f"{other}, so it cannot be inlined; export the model with one opset for both"
                    )
                    found.setdefault(function.identifier(), reason)
    for node in all_nodes(model):
        if node.op_identifier() in model.functions and any(a.type in _GRAPHS for a in node.attributes.values()):
            reason = (
                f"the function {node.op_type} takes graphs as attributes, so it cannot be inlined; export it inlined"
            )
            found.setdefault(node.op_identifier(), reason)
    return found


def _holding(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """The functions with HinaMoE nodes, and those that call them."""
    holding = {identifier for identifier, function in model.functions.items() if is_fused(function)}
    while more := {i for i, f in model.functions.items() if i not in holding and _called(model, f) & holding}:
        holding |= more
    return holding


def _called(model: ir.Model, function: ir.Function) -> set[ir.OperatorIdentifier]:
    return {node.op_identifier() for node in function.all_nodes()} & model.functions.keys()
