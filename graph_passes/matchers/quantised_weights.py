"""Quantised weights of a projection, as MatMulNBits and DequantizeLinear have them, in words of HinaMoE's formats.

A matcher sees a `QuantisedWeight` as the matrix of the values that its codes stand for: shape, transpose and index are
those of any WeightSource. `with_parts` then names codes, scales and zero points as weight fields of their own. No value
is quantised again: codes, scales and zero points keep what they say. Where their layout fits they are read as they lie,
else they are transposed, padded to whole blocks or packed two to a byte when the model is saved.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.matchers.match import MoeMatch, WeightSource
from graph_passes.matchers.views import NoMatch, operand, weight
from graph_passes.op_schema import PROJECTIONS
from graph_passes.quantize.formats import BLOCKS, WeightFormat, either, pack

_INT4 = (ir.DataType.INT4, ir.DataType.UINT4)
_INT8 = (ir.DataType.INT8, ir.DataType.UINT8)

Parts = Mapping[str, WeightSource]
"""Sources of codes (""), "_scales" and maybe "_zero_points"."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight(WeightSource):
    """Codes in `value`, which `node` reads; `shape` `[N, K]` or `[E, N, K]` is that of the values."""

    node: ir.Node

    @property
    def in_place(self) -> bool:
        """False: the values are not stored."""
        return False

    @property
    def accuracy_level(self) -> int:
        """The `accuracy_level` of the node, 0 when it says none."""
        return self.node.attributes.get_int("accuracy_level", 0)

    @abstractmethod
    def parts(self) -> tuple[WeightFormat, Parts]:
        """The format and its tensors. Raises NoMatch when HinaMoE has no words for it."""


@dataclass(frozen=True, kw_only=True)
class NBitsWeight(QuantisedWeight):
    """The weights of com.microsoft::MatMulNBits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """N and K, as the node says."""
        return self.node.attributes.get_int("N", 0), self.node.attributes.get_int("K", 0)

    def parts(self) -> tuple[WeightFormat, Parts]:
        """Codes, scales and zero points as they are stored. Raises NoMatch."""
        node, (n, k) = self.node, self.shape
        bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
        if _input(node, 4) is not None:
            raise NoMatch(node, "MatMulNBits reorders the columns of its weights (g_idx); quantise without act_order")
        if bits not in (4, 8) or block not in BLOCKS:
            raise NoMatch(
                node,
                f"MatMulNBits has {bits} bits in blocks of {block}; HinaMoE takes 4 or 8 bits in blocks of "
                f"{either(BLOCKS)}",
            )
        form, parts = WeightFormat(f"int{bits}", block), {"": WeightSource(self.value)}
        places = {"_scales": (_input(node, 2), "scales"), "_zero_points": (_input(node, 3), "zero points")}
        for part, (value, what) in places.items():
            if value is None:
                continue
            parts[part] = _stored(node, value, what)
        zeros = parts.get("_zero_points")
        if zeros is not None and bits == 8 and zeros.dtype != ir.DataType.UINT8:
            raise NoMatch(
                node,
                f"the zero points {zeros.value.name} of 8-bit codes are {zeros.dtype.numpy().name}, expected uint8",
            )
        sizes = dict(zip(("", "_scales", "_zero_points"), map(math.prod, form.shapes(n, k)), strict=True))
        if zeros is not None and zeros.dtype != ir.DataType.UINT8:
            sizes["_zero_points"] = sizes["_scales"]
        for part, source in parts.items():
            if math.prod(source.shape) != sizes[part]:
                raise NoMatch(
                    node,
                    f"{source.value.name} is {list(source.shape)}, expected {sizes[part]} elements for weights "
                    f"{[n, k]} as {form}",
                )
        return form, parts


@dataclass(frozen=True, kw_only=True)
class DequantisedWeight(QuantisedWeight):
    """The weights that DequantizeLinear makes of codes, integers of 8 or 4 bits in the shape of the weights."""

    def parts(self) -> tuple[WeightFormat, Parts]:
        """Codes, scales and zero points as HinaMoE reads them. Raises NoMatch."""
        node, codes = self.node, self.stored
        if codes.dtype not in (*_INT8, *_INT4):
            raise NoMatch(
                node, f"the weights {self.value.name} are {codes.dtype.numpy().name}; HinaMoE takes 8 or 4 bits"
            )
        scales = _stored(node, operand(node, 1), "scales")
        zero_value = _input(node, 2)
        zeros = None if zero_value is None else _stored(node, zero_value, "zero points")
        form = WeightFormat("int4" if codes.dtype in _INT4 else "int8", self._block(scales))
        if zeros is not None and (zeros.shape, zeros.dtype) != (scales.shape, codes.dtype):
            raise NoMatch(node, f"the zero points {zeros.value.name} do not have the shape of the scales")
        n, k = self.shape[-2:]
        shapes = form.shapes(n, k)
        parts = {"": self._codes(form, shapes[0]), "_scales": self._spread(scales, form, shapes[1])}
        if zeros is not None:
            parts["_zero_points"] = self._spread(zeros, form, shapes[2])
        elif codes.dtype in (ir.DataType.UINT8, ir.DataType.UINT4):  # 0, and not the middle, where they are left out

            def nothing(stored: npt.NDArray[Any], index: int | None) -> npt.NDArray[Any]:
                return np.zeros((*stored.shape[:-2], *shapes[2])[-2 if index is not None else -3 :], np.uint8)

            parts["_zero_points"] = self._made(self.value, shapes[2], ir.DataType.UINT8, nothing)
        return form, parts

    def _block(self, scales: WeightSource) -> int:
        """How many values of a row share a scale; 0: all of them. Raises NoMatch."""
        node, rank = self.node, len(self.stored.shape)
        axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        columns = rank - 2 if self.transpose else rank - 1
        along = axis % rank == columns if -rank <= axis < rank else False
        if math.prod(scales.shape) == 1:
            return 0
        if len(scales.shape) == 1:
            if along or scales.shape[0] != self.stored.shape.numpy()[axis]:
                raise NoMatch(
                    node,
                    f"the scales {scales.value.name} are one for each input feature, which HinaMoE cannot say; "
                    "quantise along the output features, or in blocks",
                )
            return 0
        expected = [int(d) for d in self.stored.shape.numpy()]
        length = expected[columns]
        expected[columns] = -(-length // block) if block else 0
        if not along or list(scales.shape) != expected:
            raise NoMatch(
                node,
                f"the scales {scales.value.name} are {list(scales.shape)}, expected one for each block of a row",
            )
        if block >= length:
            return 0
        if block not in BLOCKS:
            raise NoMatch(node, f"the weights {self.value.name} have blocks of {block}, HinaMoE takes {either(BLOCKS)}")
        return block

    def _codes(self, form: WeightFormat, shape: tuple[int, ...]) -> WeightSource:
        columns = self.shape[-1]
        padding = form.row_bytes(columns) * 8 // form.bits - columns
        if form.bits == 8 and not padding:
            return WeightSource(self.value, self.transpose, self.index)

        def compute(stored: npt.NDArray[Any], index: int | None) -> npt.NDArray[Any]:
            array = _matrices(stored, index, self.transpose)
            array = _unsigned(array) if form.bits == 4 else array
            array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)])
            return pack(array) if form.bits == 4 else array

        dtype = ir.DataType.UINT8 if form.bits == 4 else self.dtype
        return self._made(self.value, shape, dtype, compute)

    def _spread(self, source: WeightSource, form: WeightFormat, shape: tuple[int, ...]) -> WeightSource:
        """One scale or zero point for each block of each row, from those that `source` holds."""
        stored = [int(d) for d in self.stored.shape.numpy()]
        rank = len(stored)
        stored[rank - 2 if self.transpose else rank - 1] = form.blocks(self.shape[-1])
        axis = self.node.attributes.get_int("axis", 1) % rank
        dtype = source.dtype

        def compute(array: npt.NDArray[Any], index: int | None) -> npt.NDArray[Any]:
            if array.size == 1:
                array = array.reshape([1] * rank)
            elif array.ndim == 1:
                array = array.reshape([-1 if a == axis else 1 for a in range(rank)])
            whole = _matrices(np.broadcast_to(array, stored), index, self.transpose)
            return pack(_unsigned(whole)) if dtype in _INT4 else whole

        return self._made(source.value, shape, ir.DataType.UINT8 if dtype in _INT4 else dtype, compute)

    def _made(self, value: ir.Value, shape: tuple[int, ...], dtype: ir.DataType, compute: _Compute) -> Made:
        stacked = len(self.stored.shape) == 3
        experts = int(self.stored.shape.numpy()[0]) if stacked else None
        return Made(value, index=self.index, each=shape, experts=experts, of_type=dtype, compute=compute)


_Compute = Callable[[npt.NDArray[Any], int | None], npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Made(WeightSource):
    """A tensor that is computed from the initializer: of expert `index`, or of all `experts`; `each` is one's shape."""

    each: tuple[int, ...]
    experts: int | None
    of_type: ir.DataType
    compute: _Compute

    @property
    def in_place(self) -> bool:
        """False: it is not stored."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the op reads."""
        return self.each if self.experts is None or self.index is not None else (self.experts, *self.each)

    @property
    def dtype(self) -> ir.DataType:
        """Element type of the tensor."""
        return self.of_type

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that the op reads."""
        return math.prod(self.shape) * self.of_type.numpy().itemsize

    def _evaluate(self) -> ir.TensorProtocol:
        made = self.compute(self.stored.numpy(), self.index).reshape(self.shape)
        return ir.Tensor(np.ascontiguousarray(made), dtype=self.of_type, name=self.value.name)


def _matrices(array: npt.NDArray[Any], index: int | None, transpose: bool) -> npt.NDArray[Any]:
    if index is not None:
        array = array[index]
    return array.swapaxes(-1, -2) if transpose else array


def _unsigned(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Four-bit numbers as HinaMoE has them: signed ones around 8 in the place of 0."""
    middle = 8 if codes.dtype == ir.DataType.INT4.numpy() else 0
    return (codes.astype(np.int8) + middle).astype(np.uint8)


def nbits_weight(node: ir.Node) -> NBitsWeight:
    """The weights of a MatMulNBits node. Raises NoMatch when they are not stored."""
    return NBitsWeight(_stored(node, operand(node, 1), "weights").value, node=node)


def dequantised_weight(node: ir.Node) -> DequantisedWeight | None:
    """The weights that a DequantizeLinear makes; None when its codes are computed by the graph."""
    source = weight(operand(node, 0))
    return None if source is None else DequantisedWeight(source.value, source.transpose, node=node)


def as_floats(source: WeightSource) -> WeightSource:
    """`source`, or the float32 values of a quantised one: for small tensors that HinaMoE takes in float types alone."""
    if not isinstance(source, QuantisedWeight):
        return source
    (form, parts), shape = source.parts(), source.shape

    def compute(stored: npt.NDArray[Any], index: int | None) -> npt.NDArray[Any]:
        arrays = {part: np.asarray(each.tensor().numpy()) for part, each in parts.items()}
        values = form.dequantise(arrays[""], arrays["_scales"], arrays.get("_zero_points"), shape[-2], shape[-1])
        return values.astype(np.float32)

    return Made(source.value, each=shape, experts=None, of_type=ir.DataType.FLOAT, compute=compute)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _stored(node: ir.Node, value: ir.Value, what: str) -> WeightSource:
    source = weight(value)
    if source is None or source.transpose:
        raise NoMatch(node, f"the {what} of {node.op_type} ({value.name}) are not stored as an initializer")
    return source


def with_parts(match: MoeMatch) -> MoeMatch:
    """`match` with codes, scales and zero points of quantised projections as weight fields.

    Raises NoMatch when a projection is quantised in several ways, or what is quantised is none.
    """
    quantised = [s for sources in match.weights.values() for s in sources if isinstance(s, QuantisedWeight)]
    if not quantised:
        return match
    weights: dict[str, tuple[WeightSource, ...]] = {}
    formats = [*match.spec.weight_formats]
    for name, sources in match.weights.items():
        read = _read(name, sources)
        if read[0] is None:
            weights[name] = sources
            continue
        formats.append(f"{name}={read[0][0]}")
        for part in read[0][1]:
            weights[name + part] = tuple(found[1][part] for found in read if found is not None)
    # Levels below 4 all mean float activations. Where only some projections may round them, none does.
    levels = [s.accuracy_level for s in quantised] + [match.spec.accuracy_level] * bool(match.spec.weight_formats)
    spec = replace(match.spec, weight_inputs=tuple(weights), weight_formats=tuple(formats), accuracy_level=min(levels))
    return replace(match, spec=spec, weights=weights)


def _read(name: str, sources: Sequence[WeightSource]) -> list[tuple[WeightFormat, Parts] | None]:
    """Formats and parts of one field, None for experts in float; NoMatch unless all have one format."""
    node = next((s.node for s in sources if isinstance(s, QuantisedWeight)), None)
    if node is not None and name not in PROJECTIONS:
        raise NoMatch(node, f"{name} is quantised, HinaMoE takes it in a float type; quantise the projections alone")
    read = [s.parts() if isinstance(s, QuantisedWeight) else None for s in sources]
    words = ["float" if r is None else f"{r[0]}{' with zero points' * ('_zero_points' in r[1])}" for r in read]
    for expert, word in enumerate(words):
        if word != words[0]:
            raise NoMatch(
                node,
                f"{name} is {word} in expert {expert}, but {words[0]} in expert 0; quantise the experts all alike",
            )
    return read
