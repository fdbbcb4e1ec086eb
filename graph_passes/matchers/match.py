"""What a matcher says about a graph: a block it recognised, or a place that looks like one and why it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from graph_passes.moe_spec import MoeSpec, split_field


@dataclass(frozen=True)
class WeightSource:
    """Where one weight tensor lies: an initializer `value`, seen through `index` and then `transpose`.

    `index` picks one entry of the leading axis (one expert of a stacked tensor); `transpose` swaps the last two
    axes, for weights that are stored `[K, N]`. Neither reads the tensor until `tensor().numpy()` is called.
    """

    value: ir.Value
    transpose: bool = False
    index: int | None = None

    @property
    def stored(self) -> ir.TensorProtocol:
        """The initializer as it lies in the model; ValueError when `value` is no initializer."""
        tensor = self.value.const_value
        if tensor is None:
            raise ValueError(f"{self.value.name} is no initializer")
        return tensor

    @property
    def in_place(self) -> bool:
        """Whether the op can read the initializer where it lies."""
        return not self.transpose and self.index is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the op reads."""
        shape = tuple(int(d) for d in self.stored.shape.numpy())
        if self.index is not None:
            shape = shape[1:]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transpose else shape

    @property
    def dtype(self) -> ir.DataType:
        """Element type of the tensor."""
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that the op reads."""
        return self.stored.nbytes // (self.stored.shape.numpy()[0] if self.index is not None else 1)

    def tensor(self) -> ir.TensorProtocol:
        """The tensor that the op reads: the initializer itself, or a lazily computed view of it."""
        if self.in_place:
            return self.stored
        return ir.LazyTensor(self._evaluate, dtype=self.dtype, shape=ir.Shape(self.shape), name=self.value.name)

    def _evaluate(self) -> ir.TensorProtocol:
        array = self.stored.numpy()
        if self.index is not None:
            array = array[self.index]
        if self.transpose:
            array = array.swapaxes(-1, -2)
        return ir.Tensor(array.copy(), dtype=self.dtype, name=self.value.name)


@dataclass(frozen=True)
class MoeMatch:
    """One recognised block: replace `output` by a HinaMoE node that reads `hidden_states`.

    `inputs` maps op inputs that stay graph values (router_logits, topk_ids, topk_weights) to those values,
    `constants` maps router_weight `[E, H]`, router_bias `[E]` and e_score_correction_bias `[E]` to initializers.
    `weights` maps each field of `spec.weight_inputs` to one source (stacked or shared) or to E sources; those
    of a quantised projection have any shape that the op takes.
    `output` has the shape and type of `hidden_states`. A match with a shared expert is `routed_only` without it; the
    `note` is a word to the user on what was left in the graph, and `steps` say what was recognised.
    """

    name: str
    family: str
    spec: MoeSpec
    hidden_states: ir.Value
    output: ir.Value
    inputs: Mapping[str, ir.Value] = field(default_factory=dict)
    constants: Mapping[str, WeightSource] = field(default_factory=dict)
    weights: Mapping[str, tuple[WeightSource, ...]] = field(default_factory=dict)
    routed_only: MoeMatch | None = field(default=None, repr=False)
    note: str = ""
    steps: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def field_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one expert's tensor of weight field `name`: zero points are packed only where they are integers."""
        projection, part = split_field(name)
        if part == "_zero_points" and self.weights[name][0].dtype.is_floating_point():
            return self.spec.field_shape(f"{projection}_scales")
        return self.spec.field_shape(name)


@dataclass(frozen=True)
class Miss:
    """A place that looks like a MoE block and is left as it is: the node's `name`, and the `reason` in plain words.

    `family` is the pattern that was tried, `node` where the graph and it part, `place` the node that it was tried at,
    and `steps` says in words what had been recognised by then.
    """

    name: str
    reason: str
    family: str = field(default="", compare=False)
    node: ir.Node | None = field(default=None, compare=False, repr=False)
    place: ir.Node | None = field(default=None, compare=False, repr=False)
    steps: tuple[str, ...] = field(default=(), compare=False)
