"""Tensors between numpy, ONNX files and ONNX Runtime, bfloat16 among them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
}


def numpy_type(name: str) -> np.dtype:
    """The numpy dtype called `name`; bfloat16 is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def make_tensor(name: str, value: np.ndarray) -> TensorProto:
    """An initializer with raw data."""
    return helper.make_tensor(name, ONNX_TYPES[value.dtype.name], value.shape, value.tobytes(), raw=True)


def save_external(model: ModelProto, path: Path, *, alignment: int = 4096, offset: int = 0) -> None:
    """Write `model` to `path`, initializers to `path`.data, each `offset` bytes behind a multiple of `alignment`."""
    external = ModelProto()
    external.CopyFrom(model)
    with path.with_name(path.name + ".data").open("wb") as data:
        for tensor in external.graph.initializer:
            data.seek(-(-data.tell() // alignment) * alignment + offset)
            make_external(tensor, path.name + ".data", data.tell(), len(tensor.raw_data))
            data.write(tensor.raw_data)
            tensor.ClearField("raw_data")
    path.write_bytes(external.SerializeToString())


def make_external(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Say that the data of `tensor` lies in the file `location`."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def restored(value: np.ndarray) -> np.ndarray:
    """An array from a file of numpy's, which keeps the bytes of bfloat16 but not the type."""
    return value.view(ml_dtypes.bfloat16) if value.dtype.kind == "V" else value


def misaligned(value: np.ndarray) -> np.ndarray:
    """The same array one byte off its natural address: ONNX Runtime hands such memory to the op as it is."""
    memory = np.empty(value.nbytes + value.itemsize + 1, np.uint8)
    start = 1 + (-memory.ctypes.data) % value.itemsize
    moved = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    moved[...] = value
    return moved


def to_ort(value: np.ndarray) -> ort.OrtValue:
    value = value if value.flags.c_contiguous else np.ascontiguousarray(value)
    if value.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value.view(np.uint16), TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(value)


def from_ort(value: ort.OrtValue) -> np.ndarray:
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    result = np.empty(value.shape(), ml_dtypes.bfloat16)
    if result.size:
        ctypes.memmove(result.ctypes.data, value.data_ptr(), result.nbytes)
    return result
