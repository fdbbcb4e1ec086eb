"""NUMA machines that are not there: what the library would say of them, and the calls of their kernel."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from typing import Any

from hina_ort.numa.kernel import MAX_NODES, MPOL_MF_MOVE, MPOL_MF_MOVE_ALL, PAGE


def topology(
    *cpus: Iterable[int], memory: Iterable[int] | None = None, allowed: Iterable[int] | None = None, **more: Any
) -> dict[str, Any]:
    """A machine with these CPUs on its nodes, of which `memory` may be used, and the CPUs `allowed`."""
    owned = [list(numbers) for numbers in cpus]
    usable = list(range(len(owned)) if memory is None else memory)
    wanted = {cpu for numbers in owned for cpu in numbers} if allowed is None else set(allowed)
    nodes = [
        {
            "id": i,
            "cpus": numbers,
            "allowed_cpus": [cpu for cpu in numbers if cpu in wanted],
            "memory_bytes": 64 << 30,
            "free_bytes": 60 << 30,
            "memory_allowed": i in usable,
        }
        for i, numbers in enumerate(owned)
    ]
    words = {"asked": "auto", "asked_by": "default", "mode": "auto", "mode_reason": "two nodes", "error": None}
    ids = {"usable": usable, "workers": [node["id"] for node in nodes if node["allowed_cpus"]], "near": []}
    return {"nodes": nodes, "distances": [], "page_bytes": 4096, "huge_pages": "madvise"} | ids | words | more


class FakeKernel:
    """The calls of a machine whose pages are on `node_of(address)` until they are moved; `refuses` names calls.

    `stuck` says of an address that its page cannot be moved; `capable` is whether the user has CAP_SYS_NICE.
    """

    def __init__(
        self,
        node_of: Callable[[int], int] = lambda address: 0,
        refuses: Iterable[str] = (),
        stuck: Callable[[int], bool] = lambda address: False,
        capable: bool = False,
    ) -> None:
        self.node_of, self.refuses, self.stuck, self.capable = node_of, set(refuses), stuck, capable
        self.policy: tuple[int, tuple[int, ...]] = (0, ())
        self.policies: list[tuple[int, tuple[int, ...]]] = []
        self.moved: dict[int, int] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        """One system call."""
        if name in self.refuses:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        getattr(self, f"_{name}")(*arguments)

    def _get_mempolicy(self, mode: Any, mask: Any, bits: int, address: None, flags: int) -> None:
        assert bits == MAX_NODES + 1 and flags == 0
        mode._obj.value = self.policy[0]
        for node in self.policy[1]:
            mask[node // 64] |= 1 << node % 64

    def _set_mempolicy(self, mode: int, mask: Any, bits: int) -> None:
        assert bits == MAX_NODES + 1
        self.policy = (mode, tuple(i for i in range(MAX_NODES) if mask[i // 64] >> i % 64 & 1))
        self.policies.append(self.policy)

    def _move_pages(self, process: int, count: int, pages: Any, nodes: Any, status: Any, flags: int) -> None:
        assert process == 0 and (flags in (MPOL_MF_MOVE, MPOL_MF_MOVE_ALL) if nodes is not None else flags == 0)
        if flags == MPOL_MF_MOVE_ALL and not self.capable:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        addresses = (ctypes.c_uint64 * count).from_address(pages.value)
        results = (ctypes.c_int32 * count).from_address(status.value)
        for i, address in enumerate(addresses):
            assert address % PAGE == 0
            if nodes is not None and not self.stuck(address):
                self.moved[address] = (ctypes.c_int32 * count).from_address(nodes.value)[i]
            results[i] = self.moved.get(address, self.node_of(address))
