"""Compiled code and the CPUs that run it: the emulated one, and this one. Both are called in the same way:

    cpu.call(address, 7, array, Out(result), [row0, row1])

An int is handed over as it is; an array as a pointer to its bytes, which only an `Out` lets the function change; a list
as a pointer to as many words, each an int or a pointer, which serves for pointer arrays and for structs of words.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import re
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.ops_cpp.emulated import machine
from tests.ops_cpp.emulated.machine import PAGE, Call, Fault, Pages
from tests.ops_cpp.objects import ROOT


@dataclass(eq=False)
class Out:
    """An array that the function may write."""

    array: np.ndarray


Argument = int | np.ndarray | Out | list[Any]


class Operands:
    """The operands of one call in `memory`, which the callee sees from address `base` on.

    Each has pages of its own between two that no operand has. `at_end` puts its last byte at the end of a page, else
    its first byte at the beginning of one; 0xff, NaN in every float type, fills the rest.
    """

    def __init__(self, memory: memoryview, base: int, at_end: bool) -> None:
        self._memory, self._base, self._at_end = memory, base, at_end
        self._placed: dict[int, int] = {}
        self._outs: list[np.ndarray] = []
        self.extents: list[tuple[int, int]] = []
        self.pages: list[Pages] = []

    def word(self, argument: Argument) -> int:
        """The argument as a register or a word of memory holds it."""
        if isinstance(argument, list):
            return self._place(b"".join(struct.pack("<q", self.word(item)) for item in argument), False)
        if not isinstance(argument, np.ndarray | Out):
            return int(argument)
        if id(argument) not in self._placed:
            if isinstance(argument, Out):
                self._outs.append(argument.array)
                self._placed[id(argument)] = self._place(argument.array.tobytes(), True)
            else:
                self._placed[id(argument)] = self._place(argument.tobytes(), False)
        return self._placed[id(argument)]

    def _place(self, data: bytes, writable: bool) -> int:
        size = max(PAGE, -(-len(data) // PAGE) * PAGE)
        start = self.pages[-1].address + self.pages[-1].size + PAGE if self.pages else self._base
        margin = b"\xff" * (size - len(data))
        at = start - self._base
        self._memory[at : at + size] = margin + data if self._at_end else data + margin
        address = start + (len(margin) if self._at_end else 0)
        self.pages.append(Pages(start, size, writable))
        self.extents.append((address, address + len(data)))
        return address

    def take(self) -> None:
        """Copy what was written into the arrays; raises AssertionError if a byte beside them was."""
        written = (place for place in zip(self.pages, self.extents, strict=True) if place[0].writable)
        for array, (pages, extent) in zip(self._outs, written, strict=True):
            data = bytes(self._memory[pages.address - self._base :][: pages.size])
            first, last = (address - pages.address for address in extent)
            margin = data[:first] + data[last:]
            assert margin.count(0xFF) == len(margin), "bytes beside an output were written"
            array[...] = np.frombuffer(data[first:last], array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Symbol:
    """A defined symbol; functions and tables have sizes."""

    name: str
    address: int
    size: int


class Cpu(ABC):
    """A CPU with one program; `symbols` are in the order of their addresses."""

    def __init__(self, program: Path, base: int = 0) -> None:
        listed = subprocess.run(
            ["nm", "--demangle", "--print-size", "--defined-only", "--numeric-sort", program],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = re.findall(r"^(\w{16}) (?:(\w{16}) )?. (.+)$", listed, re.M)
        self.symbols = [Symbol(name, base + int(address, 16), int(size or "0", 16)) for address, size, name in lines]

    def symbol(self, name: str) -> Symbol:
        """The symbol of this demangled name, which only one has."""
        (found,) = (symbol for symbol in self.symbols if symbol.name == name)
        return found

    @abstractmethod
    def read(self, address: int, size: int) -> bytes:
        """Bytes of the program."""

    @abstractmethod
    def call(self, address: int, *arguments: Argument) -> int:
        """Call the function at `address` (of the program); the result is a 64-bit integer."""

    def text(self, address: int) -> str:
        """The C string at `address`."""
        return self.read(address, 64).split(b"\0")[0].decode()


class EmulatedCpu(Cpu):
    """The emulated Sapphire Rapids. `at_end` as in `Operands`; raises AssertionError where a call faults."""

    def __init__(self, image: Path, wheel: Path) -> None:
        super().__init__(image)
        self.at_end = True
        ram = os.memfd_create("ram")
        os.ftruncate(ram, machine.RAM)
        self._memory = memoryview(mmap.mmap(ram, machine.RAM))[machine.OPERANDS :]
        self._segments = list(machine.segments(image.read_bytes()))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.ops_cpp.emulated import machine; machine.main()", image, str(ram)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[ram],
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(wheel)},
        )
        os.close(ram)

    def close(self) -> None:
        """End the emulator."""
        self._process.communicate()

    def read(self, address: int, size: int) -> bytes:
        for segment in self._segments:
            if segment.address <= address < segment.address + len(segment.data):
                return segment.data[address - segment.address :][:size]
        raise AssertionError(f"{address:#x} is not in the image")

    def call(self, address: int, *arguments: Argument) -> int:
        operands = Operands(self._memory, machine.OPERANDS, self.at_end)
        words = tuple(operands.word(argument) for argument in arguments)
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(Call(address, words, tuple(operands.pages)), self._process.stdin)
        self._process.stdin.flush()
        result: int | Fault = pickle.load(self._process.stdout)
        assert not isinstance(result, Fault), self._describe(result, operands)
        operands.take()
        return result

    def _describe(self, fault: Fault, operands: Operands) -> str:
        function = [symbol for symbol in self.symbols if symbol.address <= fault.at][-1]
        text = f"{fault.what} in {function.name} at +{fault.at - function.address:#x}"
        if fault.what != machine.PAGE_FAULT:
            return text
        for number, (first, last) in enumerate(operands.extents):
            if first <= fault.address < last:
                return f"{text}: a write to byte {fault.address - first} of operand {number}, an input"
            if first - PAGE < fault.address < last + PAGE:
                return f"{text}: operand {number} of {last - first} bytes, at byte {fault.address - first}"
        return f"{text}: address {fault.address:#x}"


class NativeCpu(Cpu):
    """This CPU. Operands lie as they do in the emulator, but nothing guards them."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), os.RTLD_NOW)
        # The tables are hidden symbols: they are found by their offset from where the library was loaded, which is the
        # first word of its link map (dlinfo(3), RTLD_DI_LINKMAP).
        link_map = ctypes.POINTER(ctypes.c_uint64)()
        status = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(self._library._handle), 2, ctypes.byref(link_map))
        assert status == 0
        super().__init__(library, link_map[0])
        memory = mmap.mmap(-1, machine.RAM - machine.OPERANDS)
        self._memory = memoryview(memory)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def call(self, address: int, *arguments: Argument) -> int:
        operands = Operands(self._memory, self._base, at_end=True)
        words = [operands.word(argument) for argument in arguments]
        result: int = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(words))(address)(*words)
        operands.take()
        return result
