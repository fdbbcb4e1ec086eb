"""What an expert does between its projections: the gate, the activation and the limits, in every spelling.

`recognise` starts at the value that enters the down projection. It flattens the product found there into factors,
finds the activation among them, and says which projected value, or which part of it, is gate and which is up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graph_passes.matchers.places import recognised
from graph_passes.matchers.views import (
    NoMatch,
    constant,
    dim,
    integers,
    is_last_axis,
    is_standard,
    operand,
    produced_by,
    rank,
    scalar,
    strip,
    with_scalar,
)

_INT_MAX = (1 << 31) - 1
_MOST_FACTORS = 64
"""Far more than any spelling of an activation has; values that are squared again and again have no end of them."""


@dataclass(frozen=True)
class Half:
    """What gate or up is: `source` (views stripped) or a part of its last axis.

    `part` is "all", "first" or "second" (halves), "even" or "odd" (interleaved).
    """

    source: ir.Value
    part: str

    def __str__(self) -> str:
        words = {"all": "", "first": "the first half of ", "second": "the second half of "}
        return f"{words.get(self.part, f'the {self.part} columns of ')}{self.source.name}"


@dataclass(frozen=True)
class ExpertMlp:
    """act(gate) * (up + beta), or act(up) when `gate` is None; `fields` are the MoeSpec fields that say how."""

    gate: Half | None
    up: Half
    fields: Mapping[str, Any]

    @property
    def layout(self) -> tuple[str, ...]:
        """Weight fields in front of down_proj: one concatenated, two separate, or up alone.

        Raises NoMatch when gate and up overlap or are parts of different tensors.
        """
        if self.gate is None:
            if self.up.part != "all":
                raise NoMatch(self.up.source.producer(), "only a part of the up projection is used")
            return ("up_proj",)
        if self.gate.part == self.up.part == "all" and self.gate.source is not self.up.source:
            return ("gate_proj", "up_proj")
        parts = {self.gate.part, self.up.part}
        if self.gate.source is self.up.source and parts in ({"first", "second"}, {"even", "odd"}):
            return ("gate_up_proj",)
        raise NoMatch(
            self.up.source.producer(),
            f"gate is {self.gate} and up {self.up}: HinaMoE takes two projections, or the two halves of one; leave "
            "this block as it is",
        )

    @property
    def layout_fields(self) -> dict[str, Any]:
        """gate_up_order and gate_up_interleaved of a concatenated projection."""
        if self.gate is None or self.gate.part == "all":
            return {}
        return {
            "gate_up_order": "gate_up" if self.gate.part in ("first", "even") else "up_gate",
            "gate_up_interleaved": self.gate.part in ("even", "odd"),
        }


@dataclass
class _Product:
    """Factors of a product tree (views stripped) and the product of its constants."""

    factors: list[ir.Value]
    scale: float

    def take(self, value: ir.Value) -> bool:
        """Remove one factor that is `value`; say whether there was one."""
        for index, factor in enumerate(self.factors):
            if factor is strip(value):
                del self.factors[index]
                return True
        return False


def recognise(value: ir.Value) -> ExpertMlp:
    """Read the arithmetic that ends in `value`, the input of a down projection.

    Raises NoMatch, naming the node, when the op has no words for it.
    """
    product = _flatten(value)
    node = strip(value).producer()
    for kind in (_sigmoid_gate, _single_node, _gelu_erf, _gelu_tanh, _squared_relu, _relu):
        found = kind(product)
        if found is not None:
            activated, fields = found
            break
    else:
        if len(product.factors) != 2 and len(product.factors) != 1:
            raise NoMatch(node, f"the product of {len(product.factors)} values before the down projection is unknown")
        activated, fields = product.factors.pop(0), {"activation": "identity"}
    if not math.isclose(product.scale, 1.0, rel_tol=1e-6):
        raise NoMatch(node, f"the activation is scaled by {product.scale:g}, which HinaMoE cannot say")
    if len(product.factors) > 1:
        raise NoMatch(node, f"{len(product.factors)} values multiply the activation, expected one (up) or none")
    recognised("expert MLP", f"{fields['activation']}{' times up' if product.factors else ''}")
    if not product.factors:
        return ExpertMlp(None, _half(activated), fields)
    up, beta = with_scalar(product.factors[0], "Add") or (product.factors[0], 0.0)
    gate, gate_low, gate_high = _limits(activated)
    up, up_low, up_high = _limits(up)
    if gate_low != -math.inf or up_low != -up_high or gate_high != up_high or gate_high < 0.0:
        raise NoMatch(
            node,
            f"gate is limited to [{gate_low:g}, {gate_high:g}] and up to [{up_low:g}, {up_high:g}]; HinaMoE knows "
            "gate <= limit with -limit <= up <= limit",
        )
    fields = {**fields, "activation_beta": beta, "activation_limit": gate_high}
    return ExpertMlp(_half(gate), _half(up), {k: v for k, v in fields.items() if k != "activation_beta" or v})


def _flatten(value: ir.Value) -> _Product:
    """The tree of products that ends in `value`; NoMatch when it has more than `_MOST_FACTORS` leaves."""
    product = _Product([], 1.0)
    pending = [value]
    while pending:
        value = pending.pop()
        node = produced_by(value, "Mul")
        if node is None:
            product.factors.append(strip(value))
            continue
        if len(product.factors) + len(pending) > _MOST_FACTORS:
            raise NoMatch(
                node, f"the product of more than {_MOST_FACTORS} values before the down projection is unknown"
            )
        for index in (1, 0):
            number = scalar(node.inputs[index])
            if number is None:
                pending.append(operand(node, index))
            else:
                product.scale *= number
    return product


_Found = tuple[ir.Value, dict[str, Any]] | None


def _sigmoid_gate(product: _Product) -> _Found:
    """x * Sigmoid(alpha * x)."""
    for factor in product.factors:
        node = produced_by(factor, "Sigmoid")
        if node is None:
            continue
        inner = operand(node, 0)
        candidates = [(inner, 1.0)]
        if (scaled := with_scalar(inner, "Mul")) is not None:
            candidates.append(scaled)
        for x, alpha in candidates:
            if product.take(x):
                product.take(factor)
                return x, _silu(alpha)
    return None


def _silu(alpha: float) -> dict[str, Any]:
    return {"activation": "silu"} if alpha == 1.0 else {"activation": "silu", "activation_alpha": alpha}


def _single_node(product: _Product) -> _Found:
    """Swish, QuickGelu, Gelu, FastGelu: activations that are one node."""
    for factor in product.factors:
        node = factor.producer()
        if node is None or not (is_standard(node) or node.domain == "com.microsoft"):
            continue
        fields: dict[str, Any]
        match node.op_type:
            case "Swish":
                fields = _silu(node.attributes.get_float("alpha", 1.0))
            case "QuickGelu":
                fields = _silu(float(f"{node.attributes.get_float('alpha', 1.702):.7g}"))
            case "Gelu":
                tanh = node.attributes.get_string("approximate", "none") == "tanh"
                fields = {"activation": "gelu_tanh" if tanh else "gelu"}
            case "FastGelu" if len(node.inputs) == 1:
                fields = {"activation": "gelu_tanh"}
            case _:
                continue
        product.take(factor)
        return operand(node, 0), fields
    return None


def _gelu_erf(product: _Product) -> _Found:
    """0.5 * x * (1 + Erf(x / sqrt 2))."""

    def argument(inner: ir.Value) -> ir.Value | None:
        node = produced_by(inner, "Erf")
        return None if node is None else _scaled_by(operand(node, 0), math.sqrt(0.5))

    return _spelled_gelu(product, argument, "gelu")


def _gelu_tanh(product: _Product) -> _Found:
    """0.5 * x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""

    def argument(inner: ir.Value) -> ir.Value | None:
        node = produced_by(inner, "Tanh")
        polynomial = None if node is None else _scaled_by(operand(node, 0), math.sqrt(2.0 / math.pi))
        return None if polynomial is None else _tanh_polynomial(polynomial)

    return _spelled_gelu(product, argument, "gelu_tanh")


def _spelled_gelu(product: _Product, argument: Callable[[ir.Value], ir.Value | None], name: str) -> _Found:
    for factor in product.factors:
        added = with_scalar(factor, "Add")
        if added is None or added[1] != 1.0:
            continue
        x = argument(added[0])
        if x is not None and product.take(x):
            product.take(factor)
            product.scale *= 2.0
            return x, {"activation": name}
    return None


def _scaled_by(value: ir.Value, factor: float) -> ir.Value | None:
    """The x of x * factor, or of x / (1 / factor)."""
    scaled = with_scalar(value, "Mul")
    if scaled is not None and math.isclose(scaled[1], factor, rel_tol=1e-3):
        return scaled[0]
    node = produced_by(value, "Div")
    divisor = None if node is None else scalar(node.inputs[1])
    if node is not None and divisor is not None and math.isclose(divisor * factor, 1.0, rel_tol=1e-3):
        return operand(node, 0)
    return None


def _tanh_polynomial(value: ir.Value) -> ir.Value | None:
    """The x of x + 0.044715 * x^3, or of x * (1 + 0.044715 * x^2)."""
    coefficient = 0.044715
    if (node := produced_by(value, "Add")) is not None:
        for index in (0, 1):
            x, cubic = operand(node, index), operand(node, 1 - index)
            if _is_power(_scaled_by(cubic, coefficient), x, 3):
                return x
    product = _flatten(value)
    for factor in product.factors:
        added = with_scalar(factor, "Add")
        if added is None or added[1] != 1.0 or len(product.factors) != 2:
            continue
        x = next(f for f in product.factors if f is not factor)
        if _is_power(_scaled_by(added[0], coefficient), x, 2):
            return x
    return None


def _is_power(value: ir.Value | None, x: ir.Value, exponent: int) -> bool:
    if value is None:
        return False
    node = produced_by(value, "Pow")
    if node is not None:
        return strip(operand(node, 0)) is strip(x) and scalar(node.inputs[1]) == exponent
    product = _flatten(value)
    return len(product.factors) == exponent and product.scale == 1.0 and all(f is strip(x) for f in product.factors)


def _squared_relu(product: _Product) -> _Found:
    """Relu(x)^2, as Pow or as a product."""
    for factor in product.factors:
        power = produced_by(factor, "Pow")
        relu = produced_by(factor, "Relu")
        if power is not None and scalar(power.inputs[1]) == 2.0:
            inner = produced_by(operand(power, 0), "Relu")
            if inner is not None:
                product.take(factor)
                return operand(inner, 0), {"activation": "relu2"}
        if relu is not None and sum(f is factor for f in product.factors) == 2:
            product.take(factor)
            product.take(factor)
            return operand(relu, 0), {"activation": "relu2"}
    return None


def _relu(product: _Product) -> _Found:
    for factor in product.factors:
        node = produced_by(factor, "Relu")
        if node is not None:
            product.take(factor)
            return operand(node, 0), {"activation": "relu"}
    return None


def _limits(value: ir.Value) -> tuple[ir.Value, float, float]:
    """The value behind Clip, Min and Max with constants, and the interval they leave."""
    low, high = -math.inf, math.inf
    while True:
        clip = produced_by(value, "Clip")
        if clip is not None and clip.attributes:
            raise NoMatch(clip, "Clip has its limits as attributes; convert the model to opset 13 or later")
        minimum, maximum = with_scalar(value, "Min"), with_scalar(value, "Max")
        if clip is not None:
            bounds = [v if v is not None else None for v in (*clip.inputs, None, None)[1:3]]
            numbers = [None if bound is None else scalar(bound) for bound in bounds]
            if any(bound is not None and number is None for bound, number in zip(bounds, numbers, strict=True)):
                return value, low, high
            low = max(low, -math.inf if numbers[0] is None else numbers[0])
            high = min(high, math.inf if numbers[1] is None else numbers[1])
            value = operand(clip, 0)
        elif minimum is not None:
            value, high = minimum[0], min(high, minimum[1])
        elif maximum is not None:
            value, low = maximum[0], max(low, maximum[1])
        else:
            return strip(value), low, high


def _half(value: ir.Value) -> Half:
    """Whether `value` is a half of the last axis of something, or everything."""
    value = strip(value)
    if (split := produced_by(value, "Split")) is not None:
        source, index = operand(split, 0), value.index()
        if len(split.inputs) > 1 and split.inputs[1] is not None:
            sizes = integers(split.inputs[1])
        else:
            sizes = tuple(split.attributes.get_ints("split", (1,) * len(split.outputs)))
        if (
            sizes is None
            or len(sizes) != 2
            or sizes[0] != sizes[1]
            or index is None
            or not is_last_axis(split.attributes.get_int("axis", 0), source)
        ):
            raise NoMatch(split, "Split does not cut the last axis into two equal halves")
        return Half(strip(source), ("first", "second")[index])
    if (cut := produced_by(value, "Slice")) is not None:
        return _sliced(cut)
    if (gather := produced_by(value, "Gather")) is not None and constant(gather.inputs[1]) is not None:
        raise NoMatch(gather, "Gather with constant indices between the projections is unknown")
    return Half(value, "all")


def _sliced(cut: ir.Node) -> Half:
    source = operand(cut, 0)
    start, end, axis, step = (integers(v) for v in (*cut.inputs, None, None, None, None)[1:5])
    size, axes = dim(source, -1), rank(source)
    last = axis[0] if axis is not None and len(axis) == 1 else (0 if axis is None and axes == 1 else None)
    if last is None or not is_last_axis(last, source) or start is None or end is None or len(start) != 1:
        raise NoMatch(cut, "Slice does not cut the last axis by constant bounds")
    by = 1 if step is None else step[0]
    to_the_end = end[0] >= _INT_MAX or end[0] == size
    if by == 2 and to_the_end and start[0] in (0, 1):
        return Half(strip(source), ("even", "odd")[start[0]])
    if by == 1 and size is not None and size % 2 == 0:
        half = size // 2
        if start[0] == 0 and end[0] in (half, -half):
            return Half(strip(source), "first")
        if start[0] in (half, -half) and to_the_end:
            return Half(strip(source), "second")
    raise NoMatch(cut, f"Slice [{start[0]}:{end[0]}:{by}] of the last axis is neither a half nor every second value")
