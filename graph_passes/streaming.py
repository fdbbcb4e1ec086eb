"""Tensors written to a file piece by piece: what is copied never enters the process, what is computed is not kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

COPY_BYTES = 1 << 26
"""Copied between two looks at signals and two calls of Progress."""

_READ_BYTES = 1 << 23

_NOT_IN_KERNEL = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}

Array = npt.NDArray[Any]

Written = Callable[[int], None]
"""Called with the number of bytes just written."""


class ChunkedTensor(ir.LazyTensor):
    """A tensor that is computed when it is read: `chunks()` makes arrays that follow each other in memory."""

    __slots__ = ("chunks",)

    def __init__(
        self, chunks: Callable[[], Iterator[Array]], dtype: ir.DataType, shape: ir.Shape, name: str | None = None
    ) -> None:
        super().__init__(self._whole, dtype, shape, name=name)
        self.chunks = chunks

    def _whole(self) -> ir.TensorProtocol:
        whole = np.empty(self.shape.numpy(), self.dtype.numpy())
        flat, start = whole.reshape(-1), 0
        for chunk in self.chunks():
            flat[start : start + chunk.size] = chunk.reshape(-1)
            start += chunk.size
        return ir.Tensor(whole, dtype=self.dtype)


def write_tensor(tensor: ir.TensorProtocol, file: BinaryIO, written: Written) -> None:
    """Write the bytes of `tensor` to `file`, from where it stands."""
    if isinstance(tensor, ir.ExternalTensor):
        _copy(tensor.path, tensor.offset or 0, tensor.nbytes, file, written)
    elif isinstance(tensor, ChunkedTensor):
        for chunk in tensor.chunks():
            _write(chunk, file, written)
    elif tensor.dtype.bitwidth < 8:
        _write(np.frombuffer(tensor.tobytes(), np.uint8), file, written)
    else:
        _write(tensor.numpy(), file, written)


def _write(array: Array, file: BinaryIO, written: Written) -> None:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(data), COPY_BYTES):
        written(file.write(data[start : start + COPY_BYTES].data))


def _copy(path: str, offset: int, count: int, file: BinaryIO, written: Written) -> None:
    """Copy bytes of the file `path` within the kernel where it can: some file systems then share them on disk."""
    copy = _in_kernel
    with open(path, "rb") as source:
        while count:
            try:
                done = copy(source, file, offset, min(count, COPY_BYTES))
            except OSError as error:
                if copy is not _in_kernel or error.errno not in _NOT_IN_KERNEL:
                    raise
                copy = _through_process
                continue
            if not done:
                raise OSError(f"{path} ended at byte {offset} while it was copied")
            offset, count = offset + done, count - done
            written(done)


def _in_kernel(source: BinaryIO, file: BinaryIO, offset: int, count: int) -> int:
    file.flush()
    place = file.tell()
    done = os.copy_file_range(source.fileno(), file.fileno(), count, offset, place)
    file.seek(place + done)
    return done


def _through_process(source: BinaryIO, file: BinaryIO, offset: int, count: int) -> int:
    source.seek(offset)
    return file.write(source.read(min(count, _READ_BYTES)))
