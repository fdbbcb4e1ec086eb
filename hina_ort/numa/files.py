"""Files of weights in the page cache: which of their pages are in memory and where, and how to spread them.

Pages of a file are on the node that the memory policy of their first reader chose. They stay there while they are
cached, whoever maps the file later and whatever policy it has.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from graph_passes import external_data
from hina_ort.files import external_bytes, find_model
from hina_ort.numa.kernel import PAGE, Addresses, Kernel, resident

CHUNK = (64 << 20) // PAGE
"""Pages that are looked at together."""
_READ = 4 << 20
FITTING = 0.95
"""Of a file's pages; the library takes a matrix with as many in their places as interleaved."""


class MappedFile:
    """A file mapped for reading, a context manager. Nothing is read from the disk but what `read` is asked for.

    `tells` is whether this user may know what is cached: who neither owns the file nor may write it is told that all of
    it is (mincore(2), since Linux 5.2).
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(self._file)
            self.size = status.st_size
            self.tells = status.st_uid == os.geteuid() or os.access(path, os.W_OK)
            self.pages = -(-self.size // PAGE)
            self._map = mmap.mmap(self._file, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._file)
            raise
        # Without read-ahead pages are cached one by one: larger pieces would be on one node each.
        self._map.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._map.close()
        os.close(self._file)

    def addresses(self, first: int, count: int) -> Addresses:
        """Of `count` pages from page `first` on."""
        return self.address + np.arange(first, first + count, dtype=np.uint64) * np.uint64(PAGE)

    def resident(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of these pages are in the page cache; see `tells`."""
        return resident(self.address + first * PAGE, count)

    def read(self, first: int, count: int) -> None:
        """Bring these pages into the page cache, where the calling thread's memory policy puts them."""
        end, buffer = min((first + count) * PAGE, self.size), bytearray(_READ)
        for offset in range(first * PAGE, end, _READ):
            os.preadv(self._file, [memoryview(buffer)[: min(_READ, end - offset)]], offset)

    def map(self, pages: NDArray[np.intp]) -> None:
        """Let these pages, cached ones, be mapped by this process: the kernel tells nothing of others."""
        int(self._bytes[pages * PAGE].sum(dtype=np.int64))


@dataclass(frozen=True)
class Spread:
    """What `spread` did to a file: its pages, those not known to be cached before, moved, and now in their places."""

    path: str
    pages: int
    read: int
    moved: int
    fitting: int
    refused: str | None = None
    """Why the kernel neither tells where pages are nor moves them, if so; they were read all the same."""

    @property
    def done(self) -> bool:
        """Whether the file counts as interleaved."""
        return self.fitting >= FITTING * self.pages


def spread(path: Path, nodes: tuple[int, ...], kernel: Kernel) -> Spread:
    """Cache `path` page by page on `nodes` in turn, beginning with any of them.

    Pages that are not cached are read, under the policy of the calling thread; those elsewhere are moved, as far as
    `Kernel.move` can. OSError when the file cannot be read.
    """
    order, refused = np.array(nodes, np.int32), None
    with MappedFile(path) as file:
        read = moved = fitting = 0
        for first in range(0, file.pages, CHUNK):
            count = min(CHUNK, file.pages - first)
            cold = ~file.resident(first, count) if file.tells else np.ones(count, np.bool_)
            read += int(cold.sum())
            if cold.any():
                file.read(first, count)
            file.map(np.arange(first, first + count))
            pages = file.addresses(first, count)
            try:
                before = after = kernel.nodes_of(pages)
                if not first:
                    # Where the kernel began its round is as good as elsewhere, and less has to be moved.
                    turns = [np.resize(np.roll(order, -i), count) for i in range(len(order))]
                    order = np.roll(order, -int(np.argmax([(before == turn).sum() for turn in turns])))
                wanted = np.resize(np.roll(order, -first), count)
                if (wrong := before != wanted).any():
                    kernel.move(pages[wrong], wanted[wrong])
                    after = kernel.nodes_of(pages)
            except OSError as error:
                refused = error.strerror
                continue
            moved += int((after != before).sum())
            fitting += int((after == wanted).sum())
        return Spread(str(path), file.pages, read, moved, fitting, refused)


def data_files(path: Path) -> Iterator[Path]:
    """The files to spread for `path`: the external data of a model or of a folder's, else the file itself.

    ModelFileError when the model cannot be read. A model's own file is left out: ONNX Runtime copies what it holds.
    """
    if path.is_dir() or path.suffix == ".onnx":
        yield from sorted(external_bytes(external_data.load(find_model(path))))
    else:
        yield path
