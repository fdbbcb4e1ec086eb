"""Graphs of tests with their weights quantised: MatMul turned into MatMulNBits, or weights behind DequantizeLinear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graph_passes.quantize.formats import WeightFormat

INT4 = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}


@dataclass(frozen=True)
class NBits:
    """How `with_nbits` quantises: random codes and scales; `zero_points` "", "packed" or "float"."""

    bits: int = 4
    block: int = 16
    zero_points: str = ""
    accuracy_level: int = 0
    bias: bool = False
    scale_type: str = "float32"

    def node(self, old: ir.Node, rng: np.random.Generator) -> tuple[ir.Node, list[ir.Value]]:
        """MatMulNBits in the place of a MatMul by an initializer `[K, N]`, and its initializers."""
        stored = old.inputs[1]
        assert stored is not None and stored.shape is not None
        k, n = (int(d) for d in stored.shape)
        codes, scales, packed = WeightFormat(f"int{self.bits}", self.block).shapes(n, k)
        blocks, size = scales[1], 1.0 / (math.sqrt(k) * 2 ** (self.bits - 2))
        arrays = {
            "Q": rng.integers(0, 256, (n, blocks, codes[1] // blocks), np.uint8),
            "scales": (rng.uniform(0.5, 1.5, n * blocks) * size).astype(self.scale_type),
        }
        if self.zero_points == "packed":
            arrays["zeros"] = rng.integers(0, 256, math.prod(packed), np.uint8)
            if self.bits == 8:
                arrays["zeros"] = rng.integers(96, 160, math.prod(packed), np.uint8)
        elif self.zero_points == "float":
            arrays["zeros"] = rng.uniform(4.0, 12.0, n * blocks).astype(self.scale_type)
        if self.bias:
            arrays["bias"] = rng.standard_normal(n).astype(self.scale_type)
        made = {part: initializer(f"{stored.name}.{part}", array) for part, array in arrays.items()}
        inputs = [old.inputs[0], made["Q"], made["scales"], made.get("zeros"), None, made.get("bias")]
        numbers = {"K": k, "N": n, "bits": self.bits, "block_size": self.block, "accuracy_level": self.accuracy_level}
        node = ir.Node("com.microsoft", "MatMulNBits", inputs, [ir.AttrInt64(*item) for item in numbers.items()])
        return node, list(made.values())


def with_nbits(model: ir.Model, how: Callable[[str], NBits | None], seed: int = 0) -> ir.Model:
    """The model, changed in place: `how` says by the weight's name how a MatMul is quantised, None for not at all."""
    rng = np.random.default_rng(seed)
    for old in list(model.graph):
        stored = old.inputs[1] if old.op_type == "MatMul" else None
        if stored is None or not stored.is_initializer() or (chosen := how(str(stored.name))) is None:
            continue
        node, made = chosen.node(old, rng)
        node.name = f"{old.name}_nbits"
        for value in made:
            model.graph.register_initializer(value)
        result, new = old.outputs[0], node.outputs[0]
        new.type, new.shape, name = result.type, result.shape, result.name
        model.graph.insert_before(old, node)
        result.replace_all_uses_with(new, replace_graph_outputs=True)
        model.graph.remove(old, safe=True)
        new.name = name
    return model


@dataclass(frozen=True)
class Dequantised:
    """How `with_dequantised` stores a weight: codes of `dtype`, scales along `axis`, or of blocks of `block` along it.

    `axis` None is one scale. Zero points, if `zero_points`, are random numbers near the middle of the codes.
    """

    dtype: str = "int8"
    axis: int | None = None
    block: int = 0
    zero_points: bool = False
    domain: str = ""
    scale_type: str = "float32"

    def tensors(self, shape: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
        """Codes, scales and maybe zero points of a weight of `shape`."""
        signed, bits = self.dtype.startswith("i"), 4 if self.dtype in INT4 else 8
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
        dtype = np.dtype(INT4.get(self.dtype, self.dtype))
        codes = rng.integers(low, high, shape).astype(dtype)
        several: tuple[int, ...] = ()
        if self.axis is not None:
            several = (shape[self.axis],)
            if self.block:
                several = (*shape[: self.axis], -(-shape[self.axis] // self.block), *shape[self.axis + 1 :])
        size = 1.0 / (math.sqrt(shape[-2:][0]) * 2 ** (bits - 2))
        tensors = [codes, (rng.uniform(0.5, 1.5, several) * size).astype(self.scale_type)]
        if self.zero_points:
            middle = (low + high) // 2
            tensors.append(rng.integers(middle - 2, middle + 3, several).astype(dtype))
        return tensors


def with_dequantised(model: ir.Model, names: Iterable[str], how: Dequantised, seed: int = 0) -> ir.Model:
    """The model, changed in place: the initializers `names` are what DequantizeLinear makes of random codes."""
    rng = np.random.default_rng(seed)
    for name in names:
        stored = model.graph.initializers[name]
        assert stored.shape is not None
        tensors = how.tensors(tuple(int(d) for d in stored.shape), rng)
        made = [initializer(f"{name}.{i}", array) for i, array in enumerate(tensors)]
        numbers = {} if how.axis is None else {"axis": how.axis, "block_size": how.block}
        node = ir.Node(
            how.domain, "DequantizeLinear", made, [ir.AttrInt64(*item) for item in numbers.items() if item[1]]
        )
        if how.axis == 0:
            node.attributes["axis"] = ir.AttrInt64("axis", 0)
        node.name = f"{name}_dequantised"
        for value in made:
            model.graph.register_initializer(value)
        first = model.graph[0]
        model.graph.insert_before(first, node)
        node.outputs[0].type, node.outputs[0].shape = stored.type, stored.shape
        stored.replace_all_uses_with(node.outputs[0])
        del model.graph.initializers[name]
        node.outputs[0].name = name
    model.ir_version = 10
    model.graph.opset_imports[""] = 21
    return model


def initializer(name: str, array: np.ndarray) -> ir.Value:
    """A value that holds `array`; it is to be registered."""
    tensor = ir.Tensor(array, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
