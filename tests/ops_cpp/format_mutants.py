"""Mutants of `weight_formats` and of the tensors that only quantised projections have."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import ModelProto

from graph_passes.moe_spec import FIELDS
from graph_passes.op_schema import PROJECTIONS
from graph_passes.quantize.formats import WeightFormat
from tests.ops_cpp.mutant_bases import Base, Mutant, with_attribute
from tests.tensors import make_tensor

BAD_WORDS = (
    *("gate_proj", "=int4", "gate_proj=", "=", "gate_proj=int3", "gate_proj=INT4", "gate_proj=float32"),
    *("gate_proj=int4:24", "gate_proj=int4:512", "gate_proj=int8:0", "gate_proj=int8:-32", "gate_proj=int4:032"),
    *("gate_proj=int4:", "gate_proj=int4:32:32", "gate_proj=int4:32x", "gate_proj=mxfp4:32", "gate_proj=mxfp4:"),
    *("gate_proj=int4: 32", "gate_proj =int4", "gate_proj=int4,up_proj=int4", "gate_proj=int4\tup_proj=int4"),
    *("down_proj_bias=int8", "down_proj_scales=int8", "shared_expert_gate=int8", "router_weight=int8", "extra=int8"),
    *("down_proj=int8 down_proj=int8", "down_proj=int8 down_proj=int4", "x" * 5000 + "=int8"),
)


def formats(base: Base) -> Iterator[Mutant]:
    """Words that say nothing, and formats that contradict the tensors."""
    for word in BAD_WORDS:
        yield base.mutant(f"format {word[:40]!r}", "weight_formats", model=with_attribute(base, "weight_formats", word))
    spec = base.node.spec
    words = list(spec.weight_formats)
    for name in PROJECTIONS:
        if name in spec.formats:
            continue
        model = with_attribute(base, "weight_formats", " ".join([*words, f"{name}=int8"]))
        yield base.mutant(f"{name} as int8", name, "(scales|weight_inputs)", model=model)
    for name, form in spec.formats.items():
        rest = [word for word in words if not word.startswith(f"{name}=")]
        model = with_attribute(base, "weight_formats", " ".join(rest))
        yield base.mutant(f"no format of {name}", name, "weight_formats", model=model)
        yield base.mutant(f"no {name}_scales", f"{name}_scales", model=without_field(base, f"{name}_scales"))
        for other in ("int8", "int8:16", "int4", "int4:16", "int4:32", "mxfp4"):
            if not alike(form, WeightFormat.parse(other), spec.matrix_shape(name)[1]):
                model = with_attribute(base, "weight_formats", " ".join([*rest, f"{name}={other}"]))
                yield base.mutant(f"{name} as {other}", name, "(expected|no zero points)", model=model)
        if form.name == "mxfp4":
            yield base.mutant(
                "zero points of mxfp4", f"{name}_zero_points", "mxfp4", model=with_zero_points(base, name)
            )


def alike(one: WeightFormat, other: WeightFormat, k: int) -> bool:
    """Whether tensors of one format are tensors of the other, too."""
    same_types = (one.name == "mxfp4") == (other.name == "mxfp4")
    return same_types and (one.row_bytes(k), one.blocks(k)) == (other.row_bytes(k), other.blocks(k))


def without_field(base: Base, name: str) -> ModelProto:
    """The model without a weight field, in `weight_inputs` and among the inputs."""
    names = [field for field in base.node.spec.weight_inputs if field != name]
    model = with_attribute(base, "weight_inputs", " ".join(names))
    kept = [value for value in model.graph.node[0].input if value.split(".")[0] != name]
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(kept)
    return model


def with_zero_points(base: Base, name: str) -> ModelProto:
    """The model with zero points behind the others, of the shape and type of the scales."""
    field = f"{name}_zero_points"
    assert base.node.spec.experts_stacked or FIELDS[name].shared
    model = with_attribute(base, "weight_inputs", " ".join([*base.node.spec.weight_inputs, field]))
    model.graph.initializer.append(make_tensor(field, base.node.weights[f"{name}_scales"]))
    model.graph.node[0].input.append(field)
    return model
