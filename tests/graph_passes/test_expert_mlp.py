"""The arithmetic between an expert's projections, where the graph is not what exporters write."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.matchers.expert_mlp import recognise
from graph_passes.matchers.views import NoMatch

DEEP = 5000
"""Far beyond the depth of Python's recursion."""


def product(a: ir.Value, b: ir.Value) -> ir.Value:
    return ir.node("Mul", [a, b]).outputs[0]


def test_a_deep_product_has_its_factors_in_order() -> None:
    up, half, two = ir.val("up"), *(ir.val(f"c{c}", const_value=ir.tensor(c)) for c in (0.5, 2.0))
    gate = ir.val("gate")
    value = product(ir.node("Relu", [gate]).outputs[0], up)
    for _ in range(DEEP // 2):
        value = product(two, product(value, half))
    found = recognise(value)
    assert found.gate is not None and (found.gate.source, found.up.source) == (gate, up)
    assert found.fields["activation"] == "relu"


def test_a_product_of_thousands_of_values_is_refused() -> None:
    one, squared = ir.val("x0"), ir.val("x")
    for index in range(DEEP):
        one, squared = product(ir.val(f"x{index}"), one), product(squared, squared)
    for value in (one, squared):
        with pytest.raises(NoMatch, match="the product of more than 64 values"):
            recognise(value)
