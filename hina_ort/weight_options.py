"""What a user asks for about weights, in words, as the types that `graph_passes.quantize` knows."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.quantize.formats import BLOCKS, MXFP4_BLOCK, WeightFormat, either
from graph_passes.quantize.rewrite import WeightTypes
from graph_passes.quantize.tensors import Target

FLOATS = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
INTEGERS = ("int8", "int4")
"""Quantised types that have a choice of blocks."""
BLOCK = 32
"""Their block when none is given."""
CHOICES = ("keep", *FLOATS, *INTEGERS, "mxfp4")


def weight_types(
    weights: str, block: int | None, symmetric: bool, shared_weights: str | None, accuracy_level: int | None
) -> WeightTypes:
    """The arguments of `hina_ort.convert` of the same names as WeightTypes.

    Raises ValueError, naming the option, for a word or number that is not known, and for one that does not apply.
    """
    words = (weights, weights if shared_weights is None else shared_weights)
    for name, word in zip(("--weights", "--shared-weights"), words, strict=True):
        if word not in CHOICES:
            raise ValueError(f"{name} is {word!r}, expected {either(CHOICES)}")
    asked = " and ".join(dict.fromkeys(words))
    if block is not None and block not in (0, *BLOCKS):
        raise ValueError(f"--block is {block}, expected 0 (one scale per row), {either(BLOCKS)}")
    if not set(words) & set(INTEGERS):
        for name, given in (("--block", block is not None), ("--symmetric", symmetric)):
            if given:
                raise ValueError(f"{name} is for int8 and int4 weights, not for {asked}; leave it out")
    if accuracy_level not in (None, 0, 4):
        raise ValueError(f"--accuracy-level is {accuracy_level}, expected 0 (float activations) or 4 (int8 ones)")
    if accuracy_level is not None and set(words) <= set(FLOATS):
        raise ValueError(f"--accuracy-level is for quantised weights, not for {asked}; leave it out")
    routed, shared = (_target(word, block) for word in words)
    return WeightTypes(routed=routed, shared=shared, symmetric=symmetric, accuracy_level=accuracy_level)


def _target(word: str, block: int | None) -> Target | None:
    if word in INTEGERS:
        return WeightFormat(word, BLOCK if block is None else block)
    return WeightFormat(word, MXFP4_BLOCK) if word == "mxfp4" else FLOATS.get(word)
