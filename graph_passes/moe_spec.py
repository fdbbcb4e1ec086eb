"""MoeSpec: the one description of a Mixture-of-Experts block that crosses layers.

Matchers produce it, the probe proves it, `fuse_moe` turns it into node attributes, `reference` computes it.
It holds no tensors and no backend switches. Field names are those of `op_schema.ATTRIBUTES`, which documents them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from graph_passes.op_schema import ATTRIBUTES, PROJECTIONS, SPEC_VERSION, WEIGHT_FIELDS, WeightField
from graph_passes.quantize.formats import WeightFormat

FIELDS: dict[str, WeightField] = {field.name: field for field in WEIGHT_FIELDS}
_WORDS = {"weight_inputs", "weight_formats"}
_PARTS = ("", "_scales", "_zero_points")
ROUTER_INPUTS = ("router_weight", "router_logits", "topk_ids")


def default_of(name: str) -> Any:
    """Return the default of attribute `name`; KeyError for an unknown name."""
    return next(a.default for a in ATTRIBUTES if a.name == name)


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Sizes, routing and expert arithmetic of one MoE block.

    `hidden_size` H, `intermediate_size` I, `shared_intermediate_size` S (0: no shared expert), `num_experts` E,
    `top_k` k. `router_input` names the one router input of the node that is present. The rest is documented in
    `op_schema.ATTRIBUTES`, where its defaults come from too. Raises ValueError when the fields contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    weight_inputs: tuple[str, ...]
    shared_intermediate_size: int = 0
    router_input: str = "router_weight"
    weight_formats: tuple[str, ...] = ()
    accuracy_level: int = 0
    experts_stacked: bool = True
    gate_up_order: str = "gate_up"
    gate_up_interleaved: bool = False
    score_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score_func: str = "max"
    group_mask_value: float = -math.inf
    mixing_source: str = "scores"
    norm_topk_prob: bool = False
    norm_p: float = 1.0
    norm_eps: float = 0.0
    norm_floor: float = 0.0
    routed_scaling_factor: float = 1.0
    sparsemixer_jitter_eps: float = 0.01
    tie_break: str = "lowest"
    nonfinite_router: str = "propagate"
    apply_weights_to: str = "output"
    activation: str = "silu"
    activation_alpha: float = 1.0
    activation_beta: float = 0.0
    activation_limit: float = math.inf

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "n_group", "topk_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, expected at most num_experts = {self.num_experts}")
        if self.num_experts % self.n_group:
            raise ValueError(f"num_experts = {self.num_experts} is not a multiple of n_group = {self.n_group}")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group is {self.topk_group}, expected at most n_group = {self.n_group}")
        if self.router_input not in ROUTER_INPUTS:
            raise ValueError(f"router_input is {self.router_input!r}, expected one of {', '.join(ROUTER_INPUTS)}")
        for attribute in ATTRIBUTES:
            if attribute.values and getattr(self, attribute.name) not in attribute.values:
                got, allowed = getattr(self, attribute.name), ", ".join(attribute.values)
                raise ValueError(f"{attribute.name} is {got!r}, expected one of {allowed}")
        if self.score_func == "sparsemixer" and self.top_k != 2:
            raise ValueError(f"score_func sparsemixer needs top_k = 2, got {self.top_k}")
        if self.score_func in ("softmax_topk", "sigmoid_topk", "sparsemixer") and self.n_group > 1:
            raise ValueError(f"score_func {self.score_func} has no groups, got n_group = {self.n_group}")
        if not self.norm_p > 0:
            raise ValueError(f"norm_p is {self.norm_p}, expected a number above 0")
        if self.accuracy_level not in range(5):
            raise ValueError(f"accuracy_level is {self.accuracy_level}, expected 0 to 4")
        self._check_weight_inputs()

    def _check_weight_inputs(self) -> None:
        names = self.weight_inputs
        for name in names:
            if name not in FIELDS:
                raise ValueError(f"weight_inputs names {name!r}, which is no weight field")
        if len(set(names)) != len(names):
            raise ValueError(f"weight_inputs names a field twice: {' '.join(names)}")
        prefixes = ("", "shared_") if any(FIELDS[n].shared for n in names) else ("",)
        for prefix in prefixes:
            _check_projections(names, prefix)
        if bool(self.shared_intermediate_size) != (len(prefixes) == 2):
            raise ValueError("shared_intermediate_size and the shared_* weight inputs contradict each other")
        _check_formats(names, _parse_formats(self.weight_formats))

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """The formats of the quantised projections by field; the other projections are plain floats."""
        return _parse_formats(self.weight_formats)

    @property
    def gated(self) -> bool:
        """Whether the routed experts compute down(act(gate x) * up x) rather than down(act(up x))."""
        return "gate_proj" in self.weight_inputs or "gate_up_proj" in self.weight_inputs

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections of `weight_inputs`, those of the shared expert included."""
        return tuple(name for name in self.weight_inputs if name in PROJECTIONS)

    @property
    def has_shared_expert(self) -> bool:
        """Whether a shared expert is added to the routed output."""
        return self.shared_intermediate_size > 0

    def field_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor of weight field `name`, without the expert axis; one of several where it is quantised."""
        projection, part = split_field(name)
        if form := self.formats.get(projection):
            n, k = self.matrix_shape(projection)
            return form.shapes(n, k)[_PARTS.index(part)]
        return self.matrix_shape(name)

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the values that weight field `name` stands for: `[N, K]` of a projection, quantised or not."""
        sizes = {"H": self.hidden_size, "I": self.intermediate_size, "S": self.shared_intermediate_size, "1": 1}
        sizes |= {"2I": 2 * self.intermediate_size, "2S": 2 * self.shared_intermediate_size}
        return tuple(sizes[symbol] for symbol in FIELDS[name].shape.strip("[]").split(", "))

    def attributes(self) -> dict[str, int | float | str]:
        """Node attributes that say this spec; defaults are left out."""
        values: dict[str, int | float | str] = {"spec_version": SPEC_VERSION}
        for attribute in ATTRIBUTES:
            if attribute.name == "spec_version":
                continue
            value = getattr(self, attribute.name)
            if attribute.name in _WORDS:
                value = " ".join(value)
            elif attribute.type == "int":
                value = int(value)
            if value != attribute.default:
                values[attribute.name] = value
        return values

    @classmethod
    def from_attributes(cls, values: Mapping[str, Any], **sizes: Any) -> MoeSpec:
        """Build a spec from node attributes and the sizes (and `router_input`) that attributes do not hold.

        Raises ValueError for a missing or unknown attribute, or another spec_version.
        """
        known = {a.name for a in ATTRIBUTES}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown attribute {unknown[0]!r}")
        if values.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version is {values.get('spec_version')}, expected {SPEC_VERSION}")
        if missing := [a.name for a in ATTRIBUTES if a.default is None and a.name not in values]:
            raise ValueError(f"attribute {missing[0]!r} is missing")
        arguments: dict[str, Any] = {k: v for k, v in values.items() if k != "spec_version"}
        for name in _WORDS & set(arguments):
            arguments[name] = tuple(str(arguments[name]).split())
        for name in ("experts_stacked", "gate_up_interleaved", "norm_topk_prob"):
            if name in arguments:
                arguments[name] = bool(arguments[name])
        return cls(**arguments, **sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of all fields, for JSON; infinities become the strings "inf" and "-inf"."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in plain.items()}

    def summary(self) -> str:
        """One line for people: sizes, then whatever differs from the defaults."""
        parts = [f"E={self.num_experts} k={self.top_k} H={self.hidden_size} I={self.intermediate_size}"]
        if self.has_shared_expert:
            parts.append(f"shared I={self.shared_intermediate_size}")
        shown = {"hidden_size", "intermediate_size", "num_experts", "top_k", "shared_intermediate_size"}
        shown |= {"weight_inputs", "weight_formats", "experts_stacked", "router_input"}
        parts += ["router left in the graph" if self.router_input == "topk_ids" else self.score_func, self.activation]
        if self.weight_formats:
            words = {name: str(form) for name, form in self.formats.items()}
            alike = set(words) == set(self.projections) and len(set(words.values())) == 1
            parts.append(f"{next(iter(words.values()))} weights" if alike else " ".join(self.weight_formats))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown | {"score_func", "activation"} and value != field.default:
                parts.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
        return ", ".join(parts)


def _check_projections(names: tuple[str, ...], prefix: str) -> None:
    """Raise ValueError unless the fields with `prefix` make one MLP."""
    gate, up, both, down = (f"{prefix}{p}_proj" in names for p in ("gate", "up", "gate_up", "down"))
    if not down or both == up or (both and gate):
        raise ValueError(
            f"weight_inputs must hold {prefix}down_proj and either {prefix}gate_up_proj, {prefix}gate_proj with "
            f"{prefix}up_proj, or {prefix}up_proj alone; got: {' '.join(names)}"
        )
    for name in names:
        if name.startswith(prefix) and name.endswith("_bias") and name.removesuffix("_bias") not in names:
            raise ValueError(f"weight_inputs holds {name} without {name.removesuffix('_bias')}")


def split_field(name: str) -> tuple[str, str]:
    """The projection that weight field `name` belongs to, and "_scales", "_zero_points" or ""; a bias is its own."""
    for part in _PARTS[1:]:
        if name.endswith(part):
            return name.removesuffix(part), part
    return name, ""


def _parse_formats(words: tuple[str, ...]) -> dict[str, WeightFormat]:
    """Read `weight_formats`; ValueError for a word that is no `field=format`, or names a field twice."""
    formats: dict[str, WeightFormat] = {}
    for word in words:
        name, _, form = word.partition("=")
        if name not in PROJECTIONS:
            raise ValueError(f"weight_formats holds {word!r}, expected field=format with a field that is a projection")
        if name in formats:
            raise ValueError(f"weight_formats names {name} twice: {' '.join(words)}")
        try:
            formats[name] = WeightFormat.parse(form)
        except ValueError as error:
            raise ValueError(f"weight_formats holds {word!r}: {error}") from error
    return formats


def _check_formats(names: tuple[str, ...], formats: Mapping[str, WeightFormat]) -> None:
    """Raise ValueError unless quantised projections have scales, the others have none, and zero points are in place."""
    for projection, form in formats.items():
        if projection not in names:
            raise ValueError(f"weight_formats names {projection}, which is not in weight_inputs: {' '.join(names)}")
        if f"{projection}_scales" not in names:
            raise ValueError(f"{projection} is {form}, so weight_inputs must hold {projection}_scales")
        if form.name == "mxfp4" and f"{projection}_zero_points" in names:
            raise ValueError(f"{projection} is mxfp4, which has no zero points; weight_inputs holds them")
    for name in names:
        projection, part = split_field(name)
        if part and projection not in formats:
            raise ValueError(f"weight_inputs holds {name}, but weight_formats names no format for {projection}")
