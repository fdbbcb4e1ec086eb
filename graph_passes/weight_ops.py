"""Standard operators that make float32 matrices of the weights of a HinaMoE node, whatever they are stored as.

Plain floats are cast where they are not float32. Quantised ones (`quantize/formats.py` says how they lie) go through
DequantizeLinear as rows that share a scale each, which needs no opset that knows blocks or four bits: 4-bit codes are
looked up, a byte at a time, in a table of pairs of bytes. Of MXFP4 the table has twice the numbers, which are integers,
and the scales are halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.fuse_moe import UniqueNames
from graph_passes.moe_spec import MoeSpec
from graph_passes.quantize.formats import E2M1, e8m0, unpack
from graph_passes.standard_ops import Constants, Nodes

Fields = Mapping[str, Sequence[ir.Value]]
"""Initializers by weight field: one, or one for each expert."""

_NIBBLES = unpack(np.arange(256, dtype=np.uint8)[:, None])
"""The two codes `[256, 2]` of every byte."""


def dtype_of(weights: Fields, name: str) -> ir.DataType:
    """The type of the tensors of a weight field."""
    tensor = weights[name][0].const_value
    assert tensor is not None
    return tensor.dtype


class WeightNodes(Nodes):
    """New nodes, among them those that read the `weights` of a node that says `spec`.

    `expert` None is the shared expert.
    """

    def __init__(
        self, path: str, opset: int, names: UniqueNames, constants: Constants, spec: MoeSpec, weights: Fields
    ) -> None:
        super().__init__(path, opset, names, constants)
        self.spec, self.weights = spec, weights

    def project(self, name: str, x: ir.Value, expert: int | None) -> ir.Value:
        """x @ W.T + b of projection `name`."""
        bias = self.matrix(f"{name}_bias", expert) if f"{name}_bias" in self.weights else None
        return self.gemm(x, self.matrix(name, expert), bias, name)

    def matrix(self, name: str, expert: int | None) -> ir.Value:
        """The float32 values of weight field `name`: of one expert, or of the shared one."""
        if name in self.spec.formats:
            return self._dequantised(name, expert)
        return self._tensor(name, expert, wide=True)

    def _tensor(self, name: str, expert: int | None, *, wide: bool = False) -> ir.Value:
        """The tensor of weight field `name` as it is stored, or `wide`ned to float32."""
        values = self.weights[name]
        one_each = expert is not None and not self.spec.experts_stacked
        value = values[expert if expert is not None and one_each else 0]
        if wide:
            value = self.float32(value)  # before an expert is taken, where our own matcher looks for it
        if expert is None or one_each:
            return value
        return self.op("Gather", value, self.integer(expert), axis=0, name=f"{name}.weight")

    def _dequantised(self, name: str, expert: int | None) -> ir.Value:
        """Float32 `[N, K]`: codes as rows of one scale each, `[N * blocks, block]`, through DequantizeLinear."""
        form = self.spec.formats[name]
        n, k = self.spec.matrix_shape(name)
        blocks = form.blocks(k)
        rows = n * blocks
        codes, zeros = self._tensor(name, expert), f"{name}_zero_points"
        zero_type = dtype_of(self.weights, zeros) if zeros in self.weights else None
        scales = self._scales(name, expert)
        if form.bits == 4:
            if form.name == "mxfp4":
                codes = self.looked_up((2.0 * E2M1[_NIBBLES]).astype(np.int8), codes)  # _scales halves the scales
            else:
                codes = self.looked_up(_NIBBLES if zero_type is not None else _NIBBLES.astype(np.int8) - 8, codes)
        codes = self.reshape(codes, rows, -1)
        if zero_type is not None and zero_type.is_floating_point():
            plain = self.op("DequantizeLinear", codes, self.number(1.0))
            column = self.reshape(self._tensor(zeros, expert, wide=True), rows, 1)
            values = self.op("Mul", self.op("Sub", plain, column), self.reshape(scales, rows, 1))
        else:
            inputs = [codes, scales]
            if zero_type is not None:
                inputs.append(self._packed_zeros(name, expert))
            elif form.bits == 8 and dtype_of(self.weights, name) == ir.DataType.UINT8:
                inputs.append(self.op("Expand", self.constants.of(np.array(128, np.uint8)), self.ints([rows])))
            values = self.op("DequantizeLinear", *inputs, axis=0)
        values = self.reshape(values, n, -1)
        return self.columns(values, 0, k) if form.row_bytes(k) * 8 // form.bits != k else values

    def _scales(self, name: str, expert: int | None) -> ir.Value:
        """Float32 `[N * blocks]`; those of mxfp4 are halved, as twice a number of E2M1 is an integer."""
        if self.spec.formats[name].name == "mxfp4":
            halves = (0.5 * e8m0(np.arange(256))).astype(np.float32)
            return self.reshape(self.looked_up(halves, self._tensor(f"{name}_scales", expert)), -1)
        return self.reshape(self._tensor(f"{name}_scales", expert, wide=True), -1)

    def _packed_zeros(self, name: str, expert: int | None) -> ir.Value:
        """Integer zero points `[N * blocks]`, in the type of the codes."""
        form = self.spec.formats[name]
        zeros = self._tensor(f"{name}_zero_points", expert)
        if form.bits == 4:
            n, k = self.spec.matrix_shape(name)
            zeros = self.reshape(self.looked_up(_NIBBLES, zeros), n, -1)
            if form.blocks(k) % 2:
                zeros = self.columns(zeros, 0, form.blocks(k))
        return self.reshape(zeros, -1)
