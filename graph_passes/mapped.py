"""Weights in files, mapped into memory: each tensor its own bytes, and no more of them resident than need be.

Pages of a mapped file count as memory of the process from when they are read until they are given back; what is given
back stays in the page cache, and a reader that comes again finds it there.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir import serde

RESIDENT_BYTES = 1 << 27
"""`bounded` lets this much of all mapped weights stay in memory."""

_INTERVAL = 0.02
"""Seconds between two looks of `bounded`; a core reads some 100 MB meanwhile."""

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class MappedTensor(ir.ExternalTensor):
    """External data that is read through links, and of which only its own bytes are mapped.

    onnx_ir maps the whole file for each tensor, so that many tensors of a large file exhaust the address space, and it
    refuses the links of a Hugging Face cache. Where the file may lie is not checked here, see `external_data.load`.
    """

    __slots__ = ("_mapping", "_view")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mapping: mmap.mmap | None = None
        self._view: npt.NDArray[Any] | None = None

    @classmethod
    def of(cls, tensor: ir.ExternalTensor) -> MappedTensor:
        """The same data as `tensor`."""
        return cls(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            base_dir=tensor.base_dir,
        )

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor, where it is mapped; types of less than a byte are read and unpacked."""
        if self._view is None:
            self._view = self._map() if self.dtype.bitwidth >= 8 and self.size else self._read()
        return self._view

    def __array__(self, dtype: Any = None) -> npt.NDArray[Any]:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        """The bytes in the file."""
        with open(self.path, "rb") as file:
            file.seek(self.offset or 0)
            return file.read(self.nbytes)

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes to `file`."""
        file.write(self.tobytes())

    def release(self) -> None:
        """Unmap the tensor; BufferError while an array still looks into it."""
        self._view = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _map(self) -> npt.NDArray[Any]:
        offset = self.offset or 0
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        if self._mapping is None:
            with open(self.path, "rb") as file:
                length = offset - start + self.nbytes
                self._mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
            _mappings.add(self._mapping)
        dtype = np.dtype(self.dtype.numpy()).newbyteorder("<")
        return np.frombuffer(self._mapping, dtype, self.size, offset - start).reshape(self.shape.numpy())

    def _read(self) -> npt.NDArray[Any]:
        proto = onnx.TensorProto(dims=self.shape.numpy(), data_type=self.dtype.value, raw_data=self.tobytes())
        return serde.deserialize_tensor(proto).numpy()


class InlineTensor(MappedTensor):
    """A tensor that lies in the model file itself, see `inline_weights`; no other model may refer to it there."""

    __slots__ = ()


@contextmanager
def bounded(limit: int = RESIDENT_BYTES) -> Iterator[None]:
    """While the body runs, give mapped weights back whenever more than `limit` bytes of files are resident.

    It takes no part in what the body does: a run of ONNX Runtime may read all experts of a layer, and nothing else
    could let go of the first of them while it reads the last. Works as a decorator, too.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_keep_low, args=(stop, limit), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _keep_low(stop: threading.Event, limit: int) -> None:
    at_least = _resident_bytes()  # code is mapped as well
    while not stop.wait(_INTERVAL):
        resident = _resident_bytes()
        at_least = min(at_least, resident)
        if resident - at_least <= limit:
            continue
        for mapping in list(_mappings):
            with suppress(ValueError):  # it was closed
                mapping.madvise(mmap.MADV_DONTNEED)
        at_least = _resident_bytes()


def _resident_bytes() -> int:
    """Bytes of files that are resident in this process; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0
