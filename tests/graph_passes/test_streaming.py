"""Tensors written piece by piece."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import streaming
from graph_passes.mapped import MappedTensor
from graph_passes.streaming import ChunkedTensor, write_tensor

CONTENT = bytes(range(256)) * 64


def written(path: Path, tensor: ir.TensorProtocol) -> list[int]:
    """Write `tensor` behind three bytes, check that it stands there, and return the progress."""
    steps: list[int] = []
    with path.open("wb") as file:
        file.write(b"abc")
        write_tensor(tensor, file, steps.append)
        file.write(b"xyz")
    assert path.read_bytes() == b"abc" + tensor.tobytes() + b"xyz"
    assert sum(steps) == tensor.nbytes
    return steps


def stored(folder: Path) -> MappedTensor:
    (folder / "data").write_bytes(b"12345" + CONTENT)
    shape = ir.Shape([len(CONTENT)])
    return MappedTensor("data", 5, len(CONTENT), ir.DataType.UINT8, shape=shape, name="w", base_dir=folder)


@pytest.mark.parametrize("number", [None, errno.EXDEV, errno.ENOSYS, errno.EINVAL])
def test_files_are_copied_in_the_kernel_or_through_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    monkeypatch.setattr(streaming, "COPY_BYTES", 5000)
    monkeypatch.setattr(streaming, "_READ_BYTES", 5000)
    kernel, calls = os.copy_file_range, []

    def copy_file_range(*arguments: int) -> int:
        calls.append(arguments)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return kernel(*arguments)

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    assert written(tmp_path / "out", stored(tmp_path)) == [5000, 5000, 5000, len(CONTENT) - 15000]
    assert len(calls) == (4 if number is None else 1)


def test_a_full_disk_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "out", stored(tmp_path))


def test_a_file_that_is_cut_off_meanwhile_is_named(tmp_path: Path) -> None:
    tensor = stored(tmp_path)
    os.truncate(tmp_path / "data", 1000)
    with pytest.raises(OSError, match=r"/data ended at byte 1000 while it was copied"):
        write_tensor(tensor, (tmp_path / "out").open("wb"), lambda _: None)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, ml_dtypes.bfloat16])
def test_arrays_are_written(tmp_path: Path, dtype: type) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype)
    written(tmp_path / "out", ir.Tensor(array))
    written(tmp_path / "out", ir.Tensor(array.T))


def test_types_of_less_than_a_byte_are_written_packed(tmp_path: Path) -> None:
    tensor = ir.Tensor(np.arange(9).astype(ml_dtypes.uint4))
    assert tensor.nbytes == 5
    written(tmp_path / "out", tensor)


def test_chunks_are_written_one_by_one(tmp_path: Path) -> None:
    array, made = np.arange(24, dtype=np.float16).reshape(4, 2, 3), []

    def chunks() -> Iterator[np.ndarray]:
        for row in array:
            made.append(row)
            yield row.T.copy().T

    tensor = ChunkedTensor(chunks, ir.DataType.FLOAT16, ir.Shape(array.shape))
    np.testing.assert_array_equal(tensor.numpy(), array)
    made.clear()
    file = io.BytesIO()
    write_tensor(tensor, file, lambda _: made.append(None))
    assert file.getvalue() == array.tobytes()
    assert [piece is None for piece in made] == [False, True] * 4
