"""Names of values, one for each."""

from __future__ import annotations

import onnx_ir as ir


def make_names_unique(model: ir.Model) -> None:
    """Rename values in bodies that have the name of a value elsewhere in the model.

    The two branches of an If may use the same names, but ONNX's inference mixes up the sizes that it computes for them.
    """
    taken: set[str] = set()
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        for value in dict.fromkeys(values):
            if not value.name:
                continue
            name, number = value.name, 1
            while name in taken:
                name, number = f"{value.name}_{number}", number + 1
            taken.add(name)
            if name != value.name:
                value.name = name
