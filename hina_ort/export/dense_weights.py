"""Give the rest of a traced model its weights: read, converted and written piece by piece when the model is saved.

ONNX Runtime's CPU kernels want float32. Matrices of linear layers are stored as they multiply, `[in, out]`, so that no
session has to transpose them. Embeddings are looked up where they lie in the checkpoint, in its type, and converted
after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.external_data import ModelFileError
from graph_passes.fuse_moe import UniqueNames
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.quantize.formats import WeightFormat
from graph_passes.quantize.rtn import cast
from graph_passes.quantize.tensors import Conversion
from graph_passes.streaming import ChunkedTensor
from hina_ort.export.expert_weights import Place
from hina_ort.export.weight_map import Source

CHOICES = ("f32", "f16", "int8", "int4")
BLOCK = 32
"""Weights of a row that share a scale, of int8 and int4."""
_CHUNK = 1 << 24
"""Weights that are converted at a time."""
_CONTRIB, _CODES = "com.microsoft", "_codes"

Array = npt.NDArray[Any]


class Parameter(ChunkedTensor):
    """A parameter as float32, converted some rows at a time."""

    __slots__ = ()

    def __init__(self, source: Source) -> None:
        def chunks() -> Iterator[Array]:
            array = source.numpy()
            rows = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
            step = max(1, _CHUNK // max(1, rows.shape[1]))
            return (rows[start : start + step].astype(np.float32) for start in range(0, len(rows), step))

        super().__init__(chunks, ir.DataType.FLOAT, ir.Shape(source.shape), source.name)


def fill(model: ir.Model, sources: dict[str, Source]) -> None:
    """Give every initializer without data its parameter."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = Parameter(sources[name])


def place_dense(model: ir.Model, sources: dict[str, Source], place: Place, kind: str) -> None:
    """Let `model` read every Parameter as it is read fastest, as `kind` (one of CHOICES) says.

    f16, int8 and int4 are for the matrices of linear layers: f16 is stored, and converted when a session starts, the
    others are read by MatMulNBits. Routers, whose choice hangs on small differences, norms and biases are float32.
    """
    writer = _Writer(model, place, kind)
    initializers = model.graph.initializers
    for name, value in list(initializers.items()):
        source = sources.get(name)
        if source is None or not isinstance(value.const_value, Parameter):
            continue
        for node in [use.node for use in value.uses()]:
            if node.op_type == "Gather" and node.inputs[0] is value and source.stored is not None:
                writer.look_up(node, source)
            elif node.op_type == "Transpose" and len(source.shape) == 2:
                writer.multiply(node, source)
        if not value.uses():
            initializers.pop(name)


class _Writer:
    """Puts weights into a graph; each is made once, tied ones too."""

    def __init__(self, model: ir.Model, place: Place, kind: str) -> None:
        self._model, self._graph, self._place, self._kind = model, model.graph, place, kind
        self._names, self._made = UniqueNames(model), dict[str, ir.Value]()
        self._experts = {int(n.attributes["num_experts"].as_int()) for n in all_nodes(model) if is_hina_moe(n)}

    def look_up(self, gather: ir.Node, source: Source) -> None:
        """Let an embedding read the checkpoint."""
        stored = source.stored
        assert stored is not None
        if stored.shape != source.shape:
            raise ModelFileError(f"{stored.file}: {stored.name} has the shape {list(stored.shape)}, not {source.shape}")
        name, rows = f"{source.name}.stored", gather.outputs[0]
        gather.replace_input_with(0, self._made.get(name) or self._initializer(name, self._place(stored)))
        if stored.dtype != ir.DataType.FLOAT:
            rows.type = ir.TensorType(stored.dtype)
            readers = [(use.node, use.idx) for use in rows.uses()]
            self._to_float(rows, readers, gather)

    def multiply(self, transpose: ir.Node, source: Source) -> None:
        """Store what a Transpose of a matrix `[out, in]` makes of it, or let MatMulNBits read it quantised."""
        output = transpose.outputs[0]
        if self._kind in ("int8", "int4") and source.shape[0] not in self._experts:
            for node in [use.node for use in output.uses() if use.node.op_type == "MatMul" and use.idx == 1]:
                self._quantised(node, source)
        readers = [(use.node, use.idx) for use in output.uses()]
        if readers:
            half = self._kind == "f16" and source.shape[0] not in self._experts
            dtype, name = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT, f"{source.name}.transposed"
            matrix = self._made.get(name) or self._initializer(name, _columns(source, dtype))
            for node, index in readers:
                node.replace_input_with(index, matrix)
            if half:
                self._to_float(matrix, readers, transpose)
        self._graph.remove(transpose, safe=True)

    def _quantised(self, product: ir.Node, source: Source) -> None:
        """Put MatMulNBits in the place of a MatMul with the transposed matrix `[N, K]` of `source`."""
        (n, k), form = source.shape, WeightFormat(self._kind, BLOCK)
        if f"{source.name}{_CODES}" not in self._made:
            matrix = ir.Value(name=source.name, const_value=source.tensor())
            conversion = Conversion([matrix], (), (n, k), form, symmetric=False)
            conversion.scale_type = ir.DataType.FLOAT
            parts = conversion.values(self._graph, self._names.unique, lambda: None)
            codes = parts[""][0]
            computed = codes.const_value
            assert isinstance(computed, ChunkedTensor)
            codes.shape = ir.Shape((n, form.blocks(k), form.block * form.bits // 8))
            codes.const_value = ChunkedTensor(computed.chunks, computed.dtype, codes.shape, codes.name)
            self._made |= {f"{source.name}{part or _CODES}": each[0] for part, each in parts.items()}
        weights = [self._made[f"{source.name}{part}"] for part in (_CODES, "_scales", "_zero_points")]
        new = ir.node(
            "MatMulNBits",
            [product.inputs[0], *weights],
            {"K": k, "N": n, "bits": form.bits, "block_size": BLOCK},
            domain=_CONTRIB,
            name=f"{source.name}/MatMulNBits",
        )
        new.outputs[0].type, new.outputs[0].shape = product.outputs[0].type, product.outputs[0].shape
        name = product.outputs[0].name
        ir.convenience.replace_nodes_and_values(self._graph, product, [product], [new], product.outputs, new.outputs)
        new.outputs[0].name = name
        self._graph.opset_imports[_CONTRIB] = 1

    def _to_float(self, value: ir.Value, readers: list[tuple[ir.Node, int]], before: ir.Node) -> None:
        """Let `readers` of `value`, which comes from `before` or lies before it, read it as float32."""
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=self._names.unique(f"{value.name}/Cast"))
        cast.outputs[0].name = self._names.unique(f"{value.name}/float")
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        for node, index in readers:
            node.replace_input_with(index, cast.outputs[0])
        self._graph.insert_after(before, cast)

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        self._made[name] = value
        return value


def _columns(source: Source, dtype: ir.DataType) -> ChunkedTensor:
    """A matrix `[N, K]` transposed to `[K, N]` in another float type, converted some columns at a time."""

    def chunks() -> Iterator[Array]:
        matrix = source.numpy()
        step = max(1, _CHUNK // max(1, len(matrix)))
        for start in range(0, matrix.shape[1], step):
            part = np.ascontiguousarray(matrix[:, start : start + step].T)
            yield part.astype(np.float32) if dtype == ir.DataType.FLOAT else cast(part, dtype.numpy()).parts[0]

    return ChunkedTensor(chunks, dtype, ir.Shape(source.shape[::-1]), f"{source.name}.transposed")
