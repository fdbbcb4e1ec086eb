"""Load and save models whose weights may be larger than memory.

`load` maps external weights into memory instead of reading them; `save` writes weights one at a time into one data
file beside the model and moves both into place only when they are complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir import serde

from graph_passes import collector
from graph_passes.staging import new_folder, publish, staging_folder

ALIGNMENT = 4096
EXTERNAL_BYTES = 1024
"""Tensors of at least this many bytes go to the data file."""

Progress = Callable[[int, int], None]


class ModelFileError(Exception):
    """A model file cannot be read or written; the message says which, why, and what to do."""


class LinkedTensor(ir.ExternalTensor):
    """External data reached through a link (a Hugging Face cache keeps its files as links into a blob folder).

    It reads the file that the link leads to; `name_in_model` is the location that the model gives.
    """

    __slots__ = ("folder", "name_in_model")

    def __init__(self, tensor: ir.ExternalTensor) -> None:
        super().__init__(
            os.path.realpath(tensor.path),
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
        )
        self.folder = tensor.base_dir
        self.name_in_model = tensor.location


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read the model at `path`; external weights are memory-mapped when they are first used.

    Raises ModelFileError when the model is missing, unreadable or cut off, and when external data is missing, too
    short, or placed outside the model's folder by an absolute path or `..`.
    """
    path = Path(path)
    if not path.exists():
        raise ModelFileError(f"{path} does not exist")
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder, expected an ONNX file")
    try:
        proto = onnx.load(os.fspath(path), format="protobuf", load_external_data=False)
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
    """Unmap `tensor` if it is external: every mapping covers the whole file, and address space is finite."""
    if isinstance(tensor, ir.ExternalTensor):
        with suppress(BufferError):  # an array still looks into the mapping; it goes when that array goes
            tensor.release()


def save(model: ir.Model, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Write `model` to `path` and its weights to `<path>.data`, at offsets that can be memory-mapped.

    Weights that already lie in external data in the folder of `path` stay where they are. The files are written aside
    and renamed when both are complete; an interrupt or an error before that leaves what was there, folders included.
    `progress(done, total)` is called per tensor written. The model itself is unchanged. Raises ModelFileError when a
    file cannot be written, or when `<path>.data` holds weights of the source.
    """
    path = Path(path)
    folder = path.parent.resolve()
    values = [v for graph in model.graphs() for v in graph.initializers.values() if v.const_value is not None]
    before = [v.const_value for v in values]
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
    """Check every external tensor of `model`, and make those behind links readable."""
    sizes: dict[str, int] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _checked(value.const_value, path, sizes)
    for node, name, tensor in _attribute_tensors(model):
        tensor.base_dir = path.parent
        data = _checked(tensor, path, sizes)
        node.attributes[name] = ir.AttrTensor(name, ir.Tensor(data.numpy().copy(), dtype=data.dtype, name=data.name))


def _checked(tensor: ir.ExternalTensor, path: Path, sizes: dict[str, int]) -> ir.ExternalTensor:
    """Return `tensor`, or a LinkedTensor where onnx_ir refuses links; `sizes` remembers files already looked at."""
    location = os.fspath(tensor.location)
    if os.path.isabs(location) or os.path.normpath(location).split(os.sep)[0] == os.pardir:
        raise ModelFileError(
            f"{path}: tensor {tensor.name} lies in {location!r}, outside the model's folder; "
            "move the data beside the model and correct its location"
        )
    if location not in sizes:
        try:
            sizes[location] = os.stat(tensor.path).st_size
        except OSError as error:
            raise ModelFileError(
                f"{path}: its external data file {location} cannot be read ({error.strerror}); put it beside the model"
            ) from error
    end = (tensor.offset or 0) + tensor.nbytes
    if (tensor.length or tensor.nbytes) != tensor.nbytes or end > sizes[location]:
        raise ModelFileError(
            f"{path}: tensor {tensor.name} needs bytes {tensor.offset or 0} to {end} of {location}, which holds "
            f"{sizes[location]} bytes (length given: {tensor.length}); the file is cut off or belongs to another model"
        )
    linked = os.path.realpath(tensor.path) != os.path.join(
        os.path.realpath(tensor.base_dir), os.path.normpath(location)
    )
    return LinkedTensor(tensor) if linked or os.stat(tensor.path).st_nlink > 1 else tensor


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
    to_write: dict[int, ir.TensorProtocol] = {}
    places: dict[int, ir.ExternalTensor] = {}
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor) and (location := _location_in(tensor, folder)) is not None:
            if location == data.name:
                raise ModelFileError(
                    f"{data.name} in {folder} holds weights of the model being saved and would be overwritten; "
                    "choose another name"
                )
            places[id(tensor)] = _external(location, tensor.offset, tensor)
        elif tensor.nbytes >= EXTERNAL_BYTES and tensor.dtype != ir.DataType.STRING:
            to_write[id(tensor)] = tensor
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=value.name)
            release(tensor)
    if to_write:
        total, done = len(to_write), 0

        def written(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        placed = ir.external_data.convert_tensors_to_external(
            list(to_write.values()),
            data.parent,
            data.name,
            callback=written,
            alignment=ALIGNMENT,
            align_threshold=EXTERNAL_BYTES - 1,
        )
        for key, tensor in zip(to_write, placed, strict=True):
            places[key] = _external(data.name, tensor.offset, tensor)
    for value in values:
        tensor = value.const_value
        if place := places.get(id(tensor)):
            value.const_value = _external(place.location, place.offset, place, name=value.name)


def _location_in(tensor: ir.ExternalTensor, folder: Path) -> str | None:
    """Location of `tensor` as a model in `folder` would give it, or None when it lies elsewhere."""
    base, location = tensor.base_dir, tensor.location
    if isinstance(tensor, LinkedTensor):
        base, location = tensor.folder, tensor.name_in_model
    return os.path.normpath(location) if os.path.realpath(base) == os.fspath(folder) else None


def _external(
    location: str | os.PathLike[str], offset: int | None, like: ir.TensorProtocol, name: str | None = None
) -> ir.ExternalTensor:
    shape = ir.Shape(like.shape.numpy())
    return ir.ExternalTensor(
        location, offset, like.nbytes, like.dtype, shape=shape, name=name or like.name or "", doc_string=like.doc_string
    )
