"""The emulated computer: one Sapphire Rapids core (Bochs), 64 MiB, no operating system. A process of its own.

`cpu.py` starts `main` with wheel.so preloaded, shares the memory with it and puts the operands there, and talks with it
in pickles over stdin and stdout: a `Call` goes in, its result or a `Fault` comes out. Guest addresses are physical
addresses. A page that holds none of the image, the stack or the operands of the call is not mapped, and only pages
that say so can be written: a fault ends the call.

About ten million instructions a second and 0.2 ms a call. Compared with a Sapphire Rapids on random bits, two
instructions differ (release 0.4.0): vcvtne2ps2bf16 gives its second operand twice, vrcp14ps other subnormals.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 4096
MIB = 1 << 20
RAM = 64 * MIB
TABLES = 1 * MIB  # page tables
HALT = 2 * MIB  # where a call returns to
IMAGE_END = 16 * MIB  # the image is linked to 4 MiB
STACK, STACK_END = 17 * MIB, 18 * MIB
OPERANDS = 32 * MIB

PRESENT, WRITABLE = 1, 2  # bits of a page table entry
PAGE_FAULT = "a page fault"
FAULTS = {6: "an invalid instruction", 13: "a misaligned or otherwise protected access", 14: PAGE_FAULT}


@dataclass(frozen=True)
class Segment:
    """A part of the image: where it lies, and whether it may be written."""

    address: int
    data: bytes
    writable: bool


@dataclass(frozen=True)
class Pages:
    """Whole pages of memory for an operand; whether the guest may write them."""

    address: int
    size: int
    writable: bool


@dataclass(frozen=True)
class Call:
    """A System V call of the function at `address` with integers and pointers into `pages`."""

    address: int
    arguments: tuple[int, ...]
    pages: tuple[Pages, ...]


@dataclass(frozen=True)
class Fault:
    """An exception: what happened, at which instruction, and the address of a page fault."""

    what: str
    at: int
    address: int


def segments(elf: bytes) -> Iterator[Segment]:
    """What a static ELF file wants loaded."""
    (offset,) = struct.unpack_from("<Q", elf, 32)
    (count,) = struct.unpack_from("<H", elf, 56)
    for i in range(count):
        kind, flags, start, address, _, in_file, size = struct.unpack_from("<2I5Q", elf, offset + i * 56)
        if kind == 1 and size > 0:  # PT_LOAD
            yield Segment(address, elf[start : start + in_file].ljust(size, b"\0"), bool(flags & 2))


class Machine:
    """One core and its memory (`RAM` bytes) with an image loaded; `run` is one call."""

    def __init__(self, image: Path, ram: mmap.mmap) -> None:
        sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_NOW)  # so that wheel.c finds the processor it chooses
        import bochscpu
        import bochscpu.cpu
        import bochscpu.memory

        self._boch: Any = bochscpu
        self._ram = ram
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._ram))
        for page in range(0, RAM, PAGE):
            bochscpu.memory.page_insert(page, base + page)
        # Four levels; the last one, all of it, begins at `entries`, eight bytes for each page of RAM.
        self._entries = TABLES + 3 * PAGE
        for level in range(2):
            self._store(TABLES + level * PAGE, TABLES + (level + 1) * PAGE | PRESENT | WRITABLE)
        for i in range(RAM // (2 * MIB)):
            self._store(TABLES + 2 * PAGE + i * 8, self._entries + i * PAGE | PRESENT | WRITABLE)
        for segment in segments(image.read_bytes()):
            assert segment.address + len(segment.data) <= IMAGE_END
            self._ram[segment.address : segment.address + len(segment.data)] = segment.data
            self._map(segment.address, len(segment.data), segment.writable)
        self._ram[HALT : HALT + PAGE] = b"\xf4" * PAGE
        self._map(HALT, PAGE, writable=False)
        self._map(STACK, STACK_END - STACK, writable=True)

        self._session = bochscpu.Session()
        self._session.missing_page_handler = lambda address: os.abort()  # all of RAM is there
        self._hook = bochscpu.Hook()
        self._hook.hlt = lambda session, _: session.stop()
        self._hook.exception = self._exception
        self._fault: Fault | None = None

    def _store(self, address: int, word: int) -> None:
        self._ram[address : address + 8] = struct.pack("<Q", word)

    def _map(self, address: int, size: int, writable: bool) -> None:
        for page in range(address // PAGE, (address + size - 1) // PAGE + 1):
            self._store(self._entries + page * 8, page * PAGE | PRESENT | (WRITABLE if writable else 0))

    def _unmap(self, address: int, size: int) -> None:
        for page in range(address // PAGE, (address + size - 1) // PAGE + 1):
            self._store(self._entries + page * 8, 0)

    def _exception(self, session: Any, _cpu: int, vector: int, _error: int) -> None:
        state = session.cpu
        self._fault = Fault(FAULTS.get(vector, f"exception {vector}"), state.rip, state.cr2)
        session.stop()

    def _segment(self, selector: int, attributes: int, base: int = 0) -> Any:
        segment = self._boch.Segment()
        segment.present, segment.selector, segment.base = True, selector, base
        segment.limit, segment.attr = 0xFFFFFFFF, attributes
        return segment

    def _state(self, call: Call) -> Any:
        state = self._boch.State()
        self._boch.cpu.set_long_mode(state)  # read-only pages are so in ring 0, too
        state.cr3 = TABLES
        state.cr4 = state.cr4 | 1 << 9 | 1 << 10 | 1 << 18  # SSE and its exceptions, XSAVE
        state.xcr0 = 0xE7  # x87, SSE, AVX, AVX-512
        state.mxcsr, state.mxcsr_mask = 0x1F80, 0xFFFF
        state.cs = self._segment(0x10, 0x229B)
        for name in ("ds", "es", "ss", "gs"):
            setattr(state, name, self._segment(0x18, 0xC93))
        state.fs = self._segment(0x18, 0xC93, STACK)  # a stack protector reads fs:0x28
        for name, value in zip(("rdi", "rsi", "rdx", "rcx", "r8", "r9"), call.arguments, strict=False):
            setattr(state, name, value)
        rest = call.arguments[6:]
        state.rsp = STACK_END - 256 - 8  # 16-byte aligned before the call
        for i, word in enumerate((HALT, *rest)):
            self._store(state.rsp + 8 * i, word)
        state.rip, state.rflags = call.address, 2
        return state

    def run(self, call: Call) -> int | Fault:
        """Call a function: map the operands, run to the end (its rax) or to the first fault, unmap them."""
        for pages in call.pages:
            self._map(pages.address, pages.size, pages.writable)
        self._fault = None
        self._session.cpu.state = self._state(call)  # new tables: this also empties the TLB
        self._session.run([self._hook])
        for pages in call.pages:
            self._unmap(pages.address, pages.size)
        result: int = self._session.cpu.rax
        return result if self._fault is None else self._fault


def main() -> None:
    """Serve calls until stdin ends. Arguments: the image, and the open file that is the memory."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the emulator prints to stdout
    machine = Machine(Path(sys.argv[1]), mmap.mmap(int(sys.argv[2]), RAM))
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # the wheel may crash while the interpreter is torn down
        pickle.dump(machine.run(call), answers)
        answers.flush()
