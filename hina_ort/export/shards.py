"""A checkpoint of Hugging Face as files: its configuration, and where in its safetensors shards each tensor lies.

A safetensors file is 8 bytes with the length n of its header (little endian), n bytes of JSON that give each tensor
its `dtype`, `shape` and `data_offsets` (begin and end, counted from the end of the header), and the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes.external_data import ModelFileError
from graph_passes.mapped import MappedTensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""The most that the safetensors library accepts."""

_DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "F8_E8M0": ir.DataType.UINT8,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: `nbytes` bytes of the shard `file` from `offset` on, row-major."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: ir.DataType
    shape: tuple[int, ...]

    def tensor(self, folder: Path | None = None) -> MappedTensor:
        """The tensor, to be mapped when it is read: from the file of the same name in `folder`, if that is given."""
        base, shape = folder or self.file.parent, ir.Shape(self.shape)
        return MappedTensor(
            self.file.name, self.offset, self.nbytes, self.dtype, shape=shape, name=self.name, base_dir=base
        )


@dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint: its `folder`, the values of its config.json, and its tensors by name."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read configuration and headers, no data.

        Raises ModelFileError, naming the file, when one is missing, no safetensors, or cut off.
        """
        if not folder.is_dir():
            raise ModelFileError(
                f"{folder} is no folder; download the checkpoint (hf download NAME --local-dir FOLDER), and name its "
                "folder"
            )
        config = _json(folder / CONFIG_NAME, "name the folder of a checkpoint, with its configuration in it")
        tensors: dict[str, StoredTensor] = {}
        for name in _shards(folder):
            tensors |= read_header(folder / name)
        return cls(folder, config, tensors)


def _shards(folder: Path) -> list[str]:
    """Names of the shards of a checkpoint, in order; all are there."""
    if (folder / INDEX_NAME).exists():
        index = _json(folder / INDEX_NAME, "download the checkpoint again")
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelFileError(f"{folder / INDEX_NAME} has no weight_map; download the checkpoint again")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            if Path(name).name != name:
                raise ModelFileError(f"{folder / INDEX_NAME} names {name!r}, which is no file in its folder")
            if not (folder / name).is_file():
                raise ModelFileError(
                    f"{folder / name} is missing, {INDEX_NAME} names it as one of {len(names)} shards; "
                    "download the checkpoint again"
                )
        return names
    if (folder / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    raise ModelFileError(
        f"{folder} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}; download a checkpoint in the safetensors format"
    )


def _json(path: Path, advice: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} does not exist; {advice}") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is no JSON ({error}); download the checkpoint again") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} holds no JSON object; download the checkpoint again")
    return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors file `path`; ModelFileError when it is none, or cut off."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise ModelFileError(f"{path} is no safetensors file, or it is cut off; download it again")
            header = json.loads(stream.read(length))
            items = [(name, item) for name, item in header.items() if name != "__metadata__"]
            tensors = {name: _tensor(name, item, path, 8 + length) for name, item in items}
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"the header of {path} cannot be read ({error}); download it again") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > size:
        raise ModelFileError(
            f"{path} holds {size} bytes and its header asks for {end}: it is cut off; download it again"
        )
    return tensors


def _tensor(name: str, item: dict[str, Any], path: Path, start: int) -> StoredTensor:
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name} has the unknown type {item['dtype']}")
    dtype, shape = _DTYPES[item["dtype"]], tuple(int(size) for size in item["shape"])
    begin, end = (int(place) for place in item["data_offsets"])
    nbytes = math.prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != nbytes:
        raise ValueError(f"tensor {name} has {end - begin} bytes, its shape asks for {nbytes}")
    return StoredTensor(name, path, start + begin, int(nbytes), dtype, shape)
