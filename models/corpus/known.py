"""Results that are not as they should be and are accepted: pattern of exporters, architecture, result, reason."""

from __future__ import annotations

KNOWN: tuple[tuple[str, str, str, str], ...] = (
    (
        "torchscript-4-128",
        "switch_transformers",
        "refused",
        "its experts take a limited number of tokens each and drop the others, which the operator does not do",
    ),
    (
        "genai-int4",
        "granitemoehybrid",
        "refused",
        "the builder leaves out the routed experts, and the converter says so; int4 models are not compared with torch",
    ),
    ("*-5*", "muse_spark", "refused", "a norm follows each expert, which the operator cannot compute"),
    ("transformers", "muse_spark", "refused", "a norm follows each expert, which the operator cannot compute"),
    (
        "torchscript-5*",
        "longcat_flash",
        "wrong export, not found",
        "ONNX Runtime cannot load this export, converted or not: the types of an If are inconsistent",
    ),
)
