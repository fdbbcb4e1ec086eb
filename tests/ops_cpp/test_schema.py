"""The C++ schema equals graph_passes/op_schema.py, entry by entry and in the same order."""

from __future__ import annotations

import math
from typing import Any

from graph_passes import op_schema
from hina_ort.runtime import query


def plain(value: Any) -> Any:
    """A default as JSON says it: infinities are strings."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def test_names_and_versions() -> None:
    schema = query("op_schema")
    assert schema["domain"] == op_schema.DOMAIN
    assert schema["op_type"] == op_schema.OP_TYPE
    assert schema["opset_version"] == op_schema.OPSET_VERSION
    assert schema["spec_version"] == op_schema.SPEC_VERSION
    assert schema["outputs"] == [name for name, _, _ in op_schema.OUTPUTS]


def test_inputs() -> None:
    want = [
        {
            "name": item.name,
            "types": list(item.types),
            "shape": item.shape,
            "required": item.required,
            "constant": item.constant,
        }
        for item in op_schema.INPUTS
    ]
    assert query("op_schema")["inputs"] == want


def test_attributes() -> None:
    want = [
        {"name": a.name, "type": a.type, "default": plain(a.default), "values": list(a.values)}
        for a in op_schema.ATTRIBUTES
    ]
    assert query("op_schema")["attributes"] == want


def test_weight_fields() -> None:
    want = [{"name": f.name, "shared": f.shared, "shape": f.shape} for f in op_schema.WEIGHT_FIELDS]
    assert query("op_schema")["weight_fields"] == want
