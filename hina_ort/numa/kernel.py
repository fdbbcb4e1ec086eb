"""Linux's calls about NUMA, without libnuma: the memory policy of a thread, and the nodes that pages are on."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
MPOL_INTERLEAVE = 3  # linux/mempolicy.h
MPOL_MF_MOVE = 1 << 1
MPOL_MF_MOVE_ALL = 1 << 2
MAX_NODES = 1024
"""The most that Linux can be built for; a smaller mask is refused."""
_WORD = 64
_MASK = ctypes.c_ulong * (MAX_NODES // _WORD)
_NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}

Addresses = NDArray[np.uint64]
Nodes = NDArray[np.int32]
Call = Callable[..., None]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def system_call(name: str, *arguments: Any) -> None:
    """Make a call by its number; numbers are passed as 64 bits. OSError when it fails."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    _checked(_libc().syscall(ctypes.c_long(numbers[name]), *words))


def resident(address: int, pages: int) -> NDArray[np.bool_]:
    """Which of the pages from `address` on are in memory, mapped or not (mincore); OSError when it fails."""
    found = np.zeros(pages, np.uint8)
    length = ctypes.c_size_t(pages * PAGE)
    _checked(_libc().mincore(ctypes.c_void_p(address), length, ctypes.c_void_p(found.ctypes.data)))
    return (found & 1).astype(np.bool_)


@dataclass(frozen=True)
class Policy:
    """Where new memory of a thread comes from: a mode of linux/mempolicy.h, flags included, and its nodes."""

    mode: int
    nodes: tuple[int, ...] = ()


class Kernel:
    """The calls, of the calling thread; each raises OSError when the kernel refuses it.

    Tests pass another `call`.
    """

    def __init__(self, call: Call = system_call) -> None:
        self._call = call

    def policy(self) -> Policy:
        """The memory policy of the calling thread."""
        mode, mask = ctypes.c_int(), _MASK()
        self._call("get_mempolicy", ctypes.byref(mode), mask, MAX_NODES + 1, None, 0)
        return Policy(mode.value, tuple(i for i in range(MAX_NODES) if mask[i // _WORD] >> i % _WORD & 1))

    def set_policy(self, policy: Policy) -> None:
        """Set the memory policy of the calling thread; threads and programs that it starts inherit it."""
        mask = _MASK()
        for node in policy.nodes:
            mask[node // _WORD] |= 1 << node % _WORD
        # The kernel takes one bit less than the size says.
        self._call("set_mempolicy", policy.mode, mask, MAX_NODES + 1)

    def nodes_of(self, pages: Addresses) -> Nodes:
        """The node of each page, or below 0 for one that this process has not mapped, as move_pages says."""
        return self._move_pages(pages, None, 0)

    def move(self, pages: Addresses, nodes: Nodes) -> None:
        """Move each page to its node; one that is mapped elsewhere too stays, unless the user has CAP_SYS_NICE."""
        for flag in (MPOL_MF_MOVE_ALL, MPOL_MF_MOVE):
            try:
                self._move_pages(pages, nodes, flag)
            except PermissionError:
                if flag == MPOL_MF_MOVE:
                    raise
            else:
                return

    def _move_pages(self, pages: Addresses, nodes: Nodes | None, flags: int) -> Nodes:
        pages, status = np.ascontiguousarray(pages, np.uint64), np.full(len(pages), -errno.ENOENT, np.int32)
        nodes = None if nodes is None else np.ascontiguousarray(nodes, np.int32)
        targets = None if nodes is None else ctypes.c_void_p(nodes.ctypes.data)
        if len(pages):
            at, result = ctypes.c_void_p(pages.ctypes.data), ctypes.c_void_p(status.ctypes.data)
            self._call("move_pages", 0, len(pages), at, targets, result, flags)
        return status
