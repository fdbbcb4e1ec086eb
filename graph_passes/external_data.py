"""Load and save models whose weights may be larger than memory.

`load` maps external weights into memory instead of reading them; `save` streams weights into one data file beside the
model and moves both into place only when they are complete.

Where data may lie is ONNX Runtime's rule, links followed: beneath the folder of the model, or beneath the folder that a
link to the model leads to, which is how a Hugging Face cache keeps both; never at an absolute path, nor at one that
starts with `..`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir import serde

from graph_passes import collector
from graph_passes.inline_weights import read_model
from graph_passes.mapped import InlineTensor, MappedTensor
from graph_passes.staging import new_folder, publish, staging_folder
from graph_passes.streaming import write_tensor

ALIGNMENT = 4096
EXTERNAL_BYTES = 1024
"""Tensors of at least this many bytes go to the data file."""

Progress = Callable[[int, int], None]
"""Called with the bytes written, and those to be written."""


class ModelFileError(Exception):
    """A model file cannot be read or written; the message says which, why, and what to do."""


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read the model at `path`; weights are memory-mapped when they are first used, also those inside a large file.

    Raises ModelFileError when the model is missing, unreadable or cut off, and when external data is missing, too
    short, or placed where it may not lie.
    """
    path = Path(path)
    if not path.exists():
        raise ModelFileError(f"{path} does not exist")
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder, expected an ONNX file")
    try:
        proto = read_model(path, EXTERNAL_BYTES)
    except DecodeError as error:
        raise ModelFileError(f"{path} is no ONNX model, or it is cut off: download or export it again") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelFileError(f"{path} is no ONNX model, or it is cut off: it holds no graph or no opset import")
    try:
        with collector.paused():
            model = serde.deserialize_model(proto)
    except Exception as error:  # onnx_ir raises many types for malformed graphs
        raise ModelFileError(f"{path} is no valid ONNX model: {error}") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    _check_external_data(model, path)
    return model


def data_path(path: str | os.PathLike[str]) -> Path:
    """Where `save` puts the weights of the model `path`: `<path>.data`."""
    path = Path(path)
    return path.with_name(path.name + ".data")


def release(tensor: ir.TensorProtocol | None) -> None:
    """Unmap `tensor` if it is external."""
    if isinstance(tensor, ir.ExternalTensor):
        with suppress(BufferError):  # an array still looks into the mapping; it goes when that array goes
            tensor.release()


def save(model: ir.Model, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Write `model` to `path` and its weights to `<path>.data`, at offsets that can be memory-mapped.

    Weights that already lie in external data in the folder of `path` stay where they are, unless a link leads out of
    it. The files are written aside and renamed when both are complete; an interrupt or an error before that leaves what
    was there, folders included. The model itself is unchanged. Raises ModelFileError when a file cannot be written,
    when the disk has no room for it, or when `<path>.data` holds weights of the source.
    """
    path = Path(path)
    folder = path.parent.resolve()
    values = [v for graph in model.graphs() for v in graph.initializers.values() if v.const_value is not None]
    before = [v.const_value for v in values]
    if any(isinstance(t, InlineTensor) and os.path.realpath(t.path) == os.path.realpath(path) for t in before):
        raise ModelFileError(f"{path} holds weights of the model being saved; choose another name")
    try:
        with new_folder(folder), staging_folder(folder / path.name) as staged:
            _place_tensors(values, folder, staged / data_path(path).name, progress)
            try:
                (staged / path.name).write_bytes(serde.serialize_model(model).SerializeToString())
            except ValueError as error:
                raise ModelFileError(
                    f"{path} would exceed 2 GiB without its weights, which protobuf forbids"
                ) from error
            publish(staged, folder, last=path.name)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def _check_external_data(model: ir.Model, path: Path) -> None:
    """Check every external tensor of `model`, and give it a MappedTensor; those of attributes are read."""
    files = _DataFiles(path)
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = files.checked(value.const_value)
    for node, name, tensor in _attribute_tensors(model):
        tensor.base_dir = path.parent
        data = files.checked(tensor)
        node.attributes[name] = ir.AttrTensor(name, ir.Tensor(data.numpy().copy(), dtype=data.dtype, name=data.name))


class _DataFiles:
    """The data files of the model `path`; each is looked at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders = {os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))}
        self._sizes: dict[str, int] = {}

    def checked(self, tensor: ir.ExternalTensor) -> MappedTensor:
        """`tensor`, which may be mapped; ModelFileError, naming it and its file, when it may not."""
        location = os.fspath(tensor.location)
        if location not in self._sizes:
            self._sizes[location] = self._size(tensor, location)
        size, end = self._sizes[location], (tensor.offset or 0) + tensor.nbytes
        if (tensor.length or tensor.nbytes) != tensor.nbytes or end > size:
            raise ModelFileError(
                f"{self._path}: tensor {tensor.name} needs bytes {tensor.offset or 0} to {end} of {location}, which "
                f"holds {size} bytes (length given: {tensor.length}); the file is cut off or belongs to another model"
            )
        return InlineTensor.of(tensor) if location == self._path.name else MappedTensor.of(tensor)

    def _size(self, tensor: ir.ExternalTensor, location: str) -> int:
        if not location or os.path.isabs(location) or os.path.normpath(location).split(os.sep)[0] == os.pardir:
            raise ModelFileError(
                f"{self._path}: tensor {tensor.name} lies in {location!r}, outside the model's folder; "
                "move the data beside the model and correct its location"
            )
        try:
            status = os.stat(tensor.path)
        except OSError as error:
            raise ModelFileError(
                f"{self._path}: its external data file {location} cannot be read ({error.strerror}); "
                "put it beside the model"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{self._path}: its external data {location} is no file; put it beside the model")
        real = os.path.realpath(tensor.path)
        if not any(_lies_beneath(real, folder) for folder in self._folders):
            raise ModelFileError(
                f"{self._path}: its external data file {location} is a link to {real}, outside the model's folder, "
                "which ONNX Runtime does not follow; put the file itself, or a hard link, beside the model"
            )
        return status.st_size


def _lies_beneath(real: str, folder: str) -> bool:
    return real.startswith(os.path.join(folder, ""))


def _attribute_tensors(model: ir.Model) -> Iterator[tuple[ir.Node, str, ir.ExternalTensor]]:
    nodes = list(model.graph.all_nodes())
    for function in model.functions.values():
        nodes += list(function.all_nodes())
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if isinstance(attribute.value, ir.ExternalTensor):
                yield node, name, attribute.value


def _place_tensors(values: list[ir.Value], folder: Path, data: Path, progress: Progress | None) -> None:
    """Point every value at its tensor's final place in `folder`; write those that have none yet to the file `data`."""
    to_write: dict[object, ir.TensorProtocol] = {}
    places: dict[object, ir.ExternalTensor] = {}
    locations: dict[str, str | None] = {}
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor) and tensor.path not in locations:
            locations[tensor.path] = _location_in(tensor, folder)
        if isinstance(tensor, ir.ExternalTensor) and (location := locations[tensor.path]) is not None:
            if location == data.name:
                raise ModelFileError(
                    f"{data.name} in {folder} holds weights of the model being saved and would be overwritten; "
                    "choose another name"
                )
            places[_data_of(tensor)] = _external(location, tensor.offset, tensor)
        elif tensor.nbytes >= EXTERNAL_BYTES and tensor.dtype != ir.DataType.STRING:
            to_write[_data_of(tensor)] = tensor
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=value.name)
            release(tensor)
    if to_write:
        places |= zip(to_write, _write(list(to_write.values()), data, progress), strict=True)
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        if place := places.get(_data_of(tensor)):
            value.const_value = _external(place.location, place.offset, tensor, name=value.name)


def _data_of(tensor: ir.TensorProtocol) -> object:
    """What tensors with the same data have in common: where it lies in a file, or the object that holds it."""
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.path, tensor.offset or 0, tensor.nbytes
    return id(tensor)


def _write(tensors: list[ir.TensorProtocol], data: Path, progress: Progress | None) -> list[ir.ExternalTensor]:
    """Write the tensors to the new file `data`, one behind the other, each at a page boundary; return their places."""
    places, end = [], 0
    for tensor in tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places.append(_external(data.name, offset, tensor))
        end = offset + tensor.nbytes
    _require_room(data.parent, end)
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with data.open("wb") as file:
        for tensor, place in zip(tensors, places, strict=True):
            file.seek(place.offset or 0)
            write_tensor(tensor, file, written)
            release(tensor)
    return places


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"it needs {needed:,} bytes for weights, and its disk has {free:,} free; make room, or choose another disk"
        )


def _location_in(tensor: ir.ExternalTensor, folder: Path) -> str | None:
    """Location of `tensor` as a model in `folder` would give it, or None when it lies elsewhere or a link leads out."""
    beside = os.path.realpath(tensor.base_dir) == os.fspath(folder)
    inside = (
        beside
        and not isinstance(tensor, InlineTensor)
        and _lies_beneath(os.path.realpath(tensor.path), os.fspath(folder))
    )
    return os.path.normpath(tensor.location) if inside else None


def _external(
    location: str | os.PathLike[str], offset: int | None, like: ir.TensorProtocol, name: str | None = None
) -> ir.ExternalTensor:
    shape = ir.Shape(like.shape.numpy())
    return ir.ExternalTensor(
        location, offset, like.nbytes, like.dtype, shape=shape, name=name or like.name or "", doc_string=like.doc_string
    )
