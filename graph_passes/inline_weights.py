"""Weights inside a model file, found without reading them, so that they can be mapped as external data is.

Only the frame of the file is looked at: fields, their lengths, and what is no initializer. The numbers of the fields
are those of onnx.proto; https://protobuf.dev/programming-guides/encoding says how they lie in a file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf has no types

WHOLE_BYTES = 1 << 26
"""A file of at most so many bytes is read as a whole."""

_LENGTH_DELIMITED = 2
_SIZES = {1: 8, 5: 4}
"""Bytes of the wire types that have a fixed length."""

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number


def read_model(path: Path, least: int) -> onnx.ModelProto:
    """The model at `path`, external data not loaded.

    In a large file, initializers of `least` bytes or more become external data that lies in this file itself. Raises
    DecodeError when it is no model, OSError when it cannot be read.
    """
    if path.stat().st_size <= WHOLE_BYTES or not path.stat().st_size:
        whole: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
        return whole
    model, rest = onnx.ModelProto(), bytearray()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, start, value, end in _fields(data, 0, len(data)):
            if number == _GRAPH:
                _read_graph(model.graph, data, value, end, (path.name, least))
            else:
                rest += data[start:end]
    model.MergeFromString(bytes(rest))
    return model


def _read_graph(graph: onnx.GraphProto, data: mmap.mmap, start: int, stop: int, where: tuple[str, int]) -> None:
    rest = bytearray()
    for number, begin, value, end in _fields(data, start, stop):
        if number == _INITIALIZER:
            graph.initializer.append(_read_tensor(data, value, end, *where))
        else:
            rest += data[begin:end]
    graph.MergeFromString(bytes(rest))


def _read_tensor(data: mmap.mmap, start: int, stop: int, location: str, least: int) -> onnx.TensorProto:
    rest = bytearray()
    place: dict[str, str | int] = {}
    for number, begin, value, end in _fields(data, start, stop):
        if number == _RAW_DATA and end - value >= least:
            place = {"location": location, "offset": value, "length": end - value}
        else:
            rest += data[begin:end]
    tensor: onnx.TensorProto = onnx.TensorProto.FromString(bytes(rest))
    if place:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in place.items():
            tensor.external_data.add(key=key, value=str(entry))
    return tensor


def _fields(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message in `data[start:stop]`: number, and where the field, its value and the next one begin."""
    while start < stop:
        tag, value = _varint(data, start, stop)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, value = _varint(data, value, stop)
            end = value + length
        elif kind == 0:
            _, end = _varint(data, value, stop)
        elif kind in _SIZES:
            end = value + _SIZES[kind]
        else:
            raise DecodeError(f"unknown wire type {kind}")
        if end > stop:
            raise DecodeError("a field is longer than what holds it")
        yield tag >> 3, start, value, end
        start = end


def _varint(data: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    """The number at `start`, 7 bits to a byte, lowest first, and where it ends."""
    number = 0
    for index in range(start, min(stop, start + 10)):
        byte = data[index]
        number |= (byte & 127) << 7 * (index - start)
        if byte < 128:
            return number, index + 1
    raise DecodeError("a number does not end")
