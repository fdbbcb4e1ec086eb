"""Mapped weights: each tensor its own bytes, and few of them resident."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from graph_passes import mapped
from graph_passes.mapped import MappedTensor, bounded


def tensor(path: Path, offset: int, array: np.ndarray) -> MappedTensor:
    """`array`, written into the file `path` at `offset`."""
    path.touch()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(array.tobytes())
    dtype = ir.DataType.from_numpy(array.dtype)
    return MappedTensor(
        path.name, offset, array.nbytes, dtype, shape=ir.Shape(array.shape), name="w", base_dir=path.parent
    )


@pytest.mark.parametrize("offset", [0, 8, 4096, 12345 * 2])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_any_offset_is_mapped(tmp_path: Path, offset: int, dtype: type) -> None:
    array = np.arange(-60, 60).reshape(2, 60).astype(dtype)
    weights = tensor(tmp_path / "data", offset, array)
    for _ in range(2):
        np.testing.assert_array_equal(weights.numpy(), array)
        np.testing.assert_array_equal(np.asarray(weights), array)
        assert weights.numpy().dtype == array.dtype and not weights.numpy().flags.writeable
        assert weights.tobytes() == array.tobytes()
        weights.release()


def test_types_of_less_than_a_byte_are_unpacked(tmp_path: Path) -> None:
    proto = numpy_helper.from_array(np.arange(9).reshape(3, 3).astype(ml_dtypes.uint4))
    (tmp_path / "data").write_bytes(b"12345" + proto.raw_data + b"6")
    weights = MappedTensor("data", 5, 5, ir.DataType.UINT4, shape=ir.Shape([3, 3]), name="w", base_dir=tmp_path)
    np.testing.assert_array_equal(weights.numpy(), numpy_helper.to_array(proto))
    assert weights.tobytes() == proto.raw_data


def test_an_empty_tensor(tmp_path: Path) -> None:
    assert tensor(tmp_path / "data", 0, np.empty((0, 4), np.float32)).numpy().shape == (0, 4)


def test_tensors_of_a_huge_file_take_little_address_space(tmp_path: Path) -> None:
    """A mapping of the whole file for each of them would need 400 TiB, and there are 128."""
    kept = []
    for index in range(400):
        weights = tensor(tmp_path / "data", index << 31, np.full(1000, index, np.float32))
        with (tmp_path / "data").open("r+b") as file:
            file.truncate(1 << 40)
        kept.append((weights, weights.numpy()))
    assert all((array == index).all() for index, (_, array) in enumerate(kept))


def read(weights: MappedTensor) -> int:
    """Read all of the tensor in pieces, and return how many bytes more were resident at most."""
    before, most = mapped._resident_bytes(), 0
    array = weights.numpy().view(np.uint8)
    for start in range(0, array.size, 1 << 22):
        assert not array[start : start + (1 << 22)].any()
        most = max(most, mapped._resident_bytes() - before)
    return most


@pytest.mark.skipif(not mapped._resident_bytes(), reason="the kernel does not say what is resident")
def test_little_stays_resident(tmp_path: Path) -> None:
    weights = tensor(tmp_path / "data", 0, np.zeros(4, np.uint8))
    os.truncate(tmp_path / "data", 1 << 30)
    whole = MappedTensor("data", 0, 1 << 30, weights.dtype, shape=ir.Shape([1 << 30]), name="w", base_dir=tmp_path)
    threads = threading.active_count()
    with bounded(1 << 26):
        assert read(whole) < 1 << 29
    assert read(whole) > 0.9 * (1 << 30)
    assert threading.active_count() == threads
