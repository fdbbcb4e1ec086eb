"""Weight tensors as another type: computed when the model is saved, one matrix at a time, nothing held for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import onnx_ir as ir

from graph_passes.external_data import release
from graph_passes.fuse_moe import StackedExperts
from graph_passes.quantize.formats import WeightFormat
from graph_passes.quantize.rtn import WeightError, cast, check_cast, check_mxfp4, fits_float16, quantise
from graph_passes.streaming import Array, ChunkedTensor

Target = ir.DataType | WeightFormat
"""What weights become: a float type or a format of quantised weights."""

Tick = Callable[[], None]
"""Called for each matrix that is done."""


class Conversion:
    """One projection of a node, a tensor or one tensor for each expert, and what it becomes.

    `measure` reads the weights, refuses those that cannot be converted, and chooses the type of the scales: a model
    says types before data. `values` makes the new initializers, whose data is computed when the model is saved.
    """

    def __init__(
        self,
        sources: Sequence[ir.Value],
        leading: tuple[int, ...],
        shape: tuple[int, int],
        target: Target,
        symmetric: bool,
    ) -> None:
        """Convert `sources`, each a matrix `shape` [N, K] or a stack of them (`leading` is () or (E,))."""
        self.target = target
        self.scale_type = ir.DataType.FLOAT16
        self._tensors = [_Tensor(value, leading, shape, target, symmetric) for value in sources]
        self._new: list[dict[str, ir.LazyTensor]] = []
        self._made: dict[ir.Graph, dict[str, list[ir.Value]]] = {}

    @property
    def matrices(self) -> int:
        """How many matrices there are."""
        return sum(tensor.matrices for tensor in self._tensors)

    @property
    def before(self) -> str:
        """The types that the weights had."""
        return "/".join(sorted({tensor.stored.dtype.numpy().name for tensor in self._tensors}))

    @property
    def after(self) -> str:
        """The type or format that they have."""
        return str(self.target) if isinstance(self.target, WeightFormat) else self.target.numpy().name

    @property
    def bytes_before(self) -> int:
        """Bytes of the old tensors."""
        return sum(tensor.stored.nbytes for tensor in self._tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of the new tensors, scales and zero points included."""
        return sum(tensor.nbytes for parts in self._new for tensor in parts.values())

    @property
    def relative_l2(self) -> float | None:
        """sqrt(sum (w - new w)^2 / sum w^2) over all experts; None until the model is saved."""
        error, norm = 0.0, 0.0
        for tensor in self._tensors:
            if tensor.squared_error is None:
                return None
            error, norm = error + tensor.squared_error, norm + tensor.squared_norm
        return math.sqrt(error / norm) if norm else 0.0

    @property
    def needs_measuring(self) -> bool:
        """Whether `measure` has anything to find; every weight has its float32."""
        return self.target != ir.DataType.FLOAT

    def measure(self, tick: Tick) -> None:
        """Choose float16 for the scales where each is zero or a normal number of it, else float32.

        Raises WeightError, naming the tensor, for weights that cannot be converted.
        """
        if not all([tensor.measure(tick) for tensor in self._tensors]):
            self.scale_type = ir.DataType.FLOAT

    def values(self, graph: ir.Graph, unique: Callable[[str], str], tick: Tick) -> dict[str, list[ir.Value]]:
        """New initializers for "" (values or codes), "_scales" and "_zero_points"; the same for every call of a graph.

        They are registered in `graph`, under names that `unique` makes; those of several bodies hold the same tensors.
        Saving them may raise WeightError, naming the old tensor.
        """
        self._new = self._new or [tensor.parts(self.scale_type, tick) for tensor in self._tensors]
        if graph not in self._made:
            made: dict[str, list[ir.Value]] = {}
            for tensor, parts in zip(self._tensors, self._new, strict=True):
                base = f"{tensor.source.name}.{self.after.replace(':', '_')}"
                for part, lazy in parts.items():
                    name, kind = unique(base + part), ir.TensorType(lazy.dtype)
                    lazy.name = lazy.name or name
                    value = ir.Value(name=name, shape=lazy.shape, type=kind, const_value=lazy)
                    graph.register_initializer(value)
                    made.setdefault(part, []).append(value)
            self._made[graph] = made
        return self._made[graph]


class _Tensor:
    """One tensor, a matrix or a stack of them, and the tensors that it becomes.

    The first of these, the values or codes, is computed matrix by matrix whenever it is read, and what belongs to it is
    kept until that is read, once: saving a model holds one matrix in its old form and its new, and scales of a tensor.
    """

    def __init__(
        self, source: ir.Value, leading: tuple[int, ...], shape: tuple[int, int], target: Target, symmetric: bool
    ) -> None:
        assert source.const_value is not None
        self.source, self.stored = source, source.const_value
        self.leading, self.shape, self.target, self.symmetric = leading, shape, target, symmetric
        self.matrices = math.prod(leading)
        self.squared_error: float | None = None  # None until computed
        self.squared_norm = 0.0
        self._held: dict[str, Array] = {}

    def measure(self, tick: Tick) -> bool:
        """Whether every scale, if there are any, is zero or a normal float16."""
        fits = True
        for index, matrix in enumerate(self._read()):
            with self._named(index):
                if isinstance(self.target, ir.DataType):
                    check_cast(matrix, self.target.numpy())
                elif self.target.name == "mxfp4":
                    check_mxfp4(matrix, self.target)
                else:
                    fits = fits_float16(matrix, self.target, self.symmetric) and fits
            tick()
        return fits

    def parts(self, scale_type: ir.DataType, tick: Tick) -> dict[str, ir.LazyTensor]:
        """What the tensor becomes."""
        if isinstance(self.target, ir.DataType):
            places = {"": (self.target, self.shape)}
        else:
            codes, scales, zeros = self.target.shapes(*self.shape)
            mxfp4 = self.target.name == "mxfp4"
            places = {"": (ir.DataType.UINT8, codes), "_scales": (ir.DataType.UINT8 if mxfp4 else scale_type, scales)}
            if not (mxfp4 or self.symmetric):
                places["_zero_points"] = (ir.DataType.UINT8, zeros)

        def take(part: str) -> ir.TensorProtocol:
            if part not in self._held:
                for _ in self._fill(places, tick):
                    pass
            return ir.Tensor(self._held.pop(part), dtype=places[part][0])

        def lazy(part: str, dtype: ir.DataType, shape: ir.Shape) -> ir.LazyTensor:
            if not part:
                return ChunkedTensor(partial(self._fill, places, tick), dtype, shape)
            return ir.LazyTensor(partial(take, part), dtype, shape)

        return {part: lazy(part, dtype, ir.Shape((*self.leading, *shape))) for part, (dtype, shape) in places.items()}

    def _fill(self, places: Mapping[str, tuple[ir.DataType, tuple[int, ...]]], tick: Tick) -> Iterator[Array]:
        """Compute the parts: matrices of the first are handed out, the others held."""
        held = {
            part: np.empty((self.matrices, *shape), dtype.numpy()) for part, (dtype, shape) in places.items() if part
        }
        squared_error, squared_norm = 0.0, 0.0
        for index, matrix in enumerate(self._read()):
            with self._named(index):
                if isinstance(self.target, WeightFormat):
                    scale_type = places["_scales"][0].numpy()
                    made = quantise(matrix, self.target, symmetric=self.symmetric, scale_type=scale_type)
                else:
                    made = cast(matrix, self.target.numpy())
            for array, part in zip(held.values(), made.parts[1:], strict=True):
                array[index] = part
            squared_error += made.squared_error
            squared_norm += made.squared_norm
            tick()
            yield made.parts[0]
        self._held = {part: array.reshape(*self.leading, *places[part][1]) for part, array in held.items()}
        self.squared_error, self.squared_norm = squared_error, squared_norm

    def _read(self) -> Iterator[Array]:
        """The matrices one by one: a file is unmapped between them, as what was read of it counts as memory in use."""
        if isinstance(self.stored, StackedExperts):
            yield from (self.stored.expert(index).reshape(self.shape) for index in range(self.matrices))
        elif isinstance(self.stored, ir.ExternalTensor):
            for index in range(self.matrices):
                yield self.stored.numpy().reshape(self.matrices, *self.shape)[index].copy()
                release(self.stored)
        else:
            yield from self.stored.numpy().reshape(self.matrices, *self.shape)

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Put the name of the tensor before a WeightError of the body."""
        try:
            yield
        except WeightError as error:
            expert = f", expert {index}," if self.leading else ""
            raise WeightError(f"the weights {self.source.name}{expert} cannot be converted: {error}") from error
