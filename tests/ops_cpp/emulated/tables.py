"""The kernel tables of a program, read from its memory as ops_cpp/kernels/*/*.h declare them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from tests.ops_cpp.emulated.cpu import Cpu
from tests.ops_cpp.objects import ROOT

# The fields of each family's struct; those of type u8 after `name` are functions.
FAMILIES = {
    "Dot": "name:u8 isa:i4 weight_type:i4 token_type:i4 fn:u8",
    "QDot": "name:u8 isa:i4 format:i4 pack_from:i4 streams:i4 token_bytes:u8 quantise:u8 few:u8 panel_bytes:u8 pack:u8 "
    "many:u8",
    "Dequantise": "name:u8 isa:i4 format:i4 fn:u8",
    "Convert": "name:u8 isa:i4 type:i4 widen:u8 narrow:u8",
    "Activation": "name:u8 isa:i4 activation:i4 fn:u8",
    "Route": "name:u8 isa:i4 softmax:u8 sigmoid:u8 top_k:u8",
    "Scatter": "name:u8 isa:i4 fn:u8",
    "Tile": "name:u8 isa:i4 format:i4 terms:i4 from_tokens:i4 panel_bytes:u8 pack:u8 pack_rows:u8 unpack:u8 "
    "multiply:u8",
    "Peak": "name:u8 isa:i4 type:i4 multiply_adds:i8 sum:u8",
}


@cache
def declared() -> dict[str, str]:
    """The family of each table that a header of ops_cpp/kernels declares."""
    headers = (ROOT / "ops_cpp" / "kernels").rglob("*.h")
    text = "\n".join(header.read_text() for header in headers)
    return {table: family for family, table in re.findall(r"^extern const (\w+)Kernel (k\w+)\[", text, re.M)}


@dataclass(frozen=True)
class Kernel:
    """An entry: its fields are attributes, functions can be called (None for nullptr)."""

    cpu: Cpu
    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]


def entries(cpu: Cpu, table: str) -> list[Kernel]:
    """All entries of `table`, as `declared` names it."""
    words = [word.split(":") for word in FAMILIES[declared()[table]].split()]
    layout = np.dtype([(name, kind) for name, kind in words], align=True)
    symbol = cpu.symbol(f"hina::{table}")
    assert symbol.size % layout.itemsize == 0, f"{table} is not made of the structs that tests know"
    kernels = []
    for row in np.frombuffer(cpu.read(symbol.address, symbol.size), layout):
        fields: dict[str, Any] = {"name": cpu.text(int(row["name"]))}
        for name, kind in words[1:]:
            value = int(row[name])
            fields[name] = value if kind.startswith("i") else partial(cpu.call, value) if value else None
        kernels.append(Kernel(cpu, fields))
    return kernels
