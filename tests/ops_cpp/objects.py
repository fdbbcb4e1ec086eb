"""The object files of the release build: which there are, their symbols, instructions and loops."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"


@dataclass(frozen=True)
class Object:
    """An object file, the source it was made from, and the `-m` flags it was compiled with."""

    path: Path
    source: Path
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The source below ops_cpp."""
        return str(self.source.relative_to(ROOT / "ops_cpp"))


def release_objects() -> list[Object]:
    """Every object file of the build that `make library` leaves, as its compilation database lists them."""
    found = []
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        folder = Path(entry["directory"])
        flags = tuple(word for word in entry["command"].split() if word.startswith("-m"))
        made = Object(folder / entry["output"], (folder / entry["file"]).resolve(), flags)
        assert made.path.is_file(), f"{made.path} is missing; run `make library`"
        found.append(made)
    return found


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly: its first opcode byte tells a VEX or EVEX encoding."""

    address: int
    encoding: str  # "vex", "evex" or "legacy"
    mnemonic: str
    operands: str
    target: int | None  # of a direct jump

    @property
    def text(self) -> str:
        """As objdump writes it."""
        return f"{self.mnemonic} {self.operands}".strip()


_LINE = re.compile(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2} )+) *\t(.*)$")
_JUMP = re.compile(r"^([0-9a-f]+) <")
_PREFIXES = {0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x67}  # those that may come before VEX and EVEX


def _encoding(raw: bytes) -> str:
    opcode = next((byte for byte in raw if byte not in _PREFIXES), 0)
    return {0xC4: "vex", 0xC5: "vex", 0x62: "evex"}.get(opcode, "legacy")


@cache
def functions(path: Path) -> dict[str, list[Instruction]]:
    """The instructions of each function of an object file, by demangled name; each lies in a section of its own."""
    listing = subprocess.run(
        ["objdump", "-d", "-r", "-w", "--demangle", path], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in listing.splitlines():
        if start := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            body = found.setdefault(start[1], [])
        elif part := _LINE.match(line):
            # A relocation stands behind the instruction that it changes.
            text, *relocated = part[3].split("\t")
            mnemonic, _, operands = text.strip().partition(" ")
            jump = _JUMP.match(operands.strip()) if mnemonic.startswith("j") and not relocated else None
            target = int(jump[1], 16) if jump else None
            body.append(
                Instruction(int(part[1], 16), _encoding(bytes.fromhex(part[2])), mnemonic, operands.strip(), target)
            )
    return found


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop, those of the loops in it too; `always` are those that no iteration leaves out."""

    code: list[Instruction]
    always: list[Instruction]


_ENDS = ("ret", "jmp", "notrack", "ud2", "hlt")  # what does not go on with the next instruction
Graph = dict[int, list[int]]


def _blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], Graph]:
    """Basic blocks, and which may follow each; where an indirect jump goes is not known.

    Padding between blocks is left out: it leads into the loop behind it, but nothing leads to it.
    """
    targets = {instruction.target for instruction in code}
    blocks: list[list[Instruction]] = []
    falls: list[bool] = []  # whether a block leads to the one behind it
    ended = jumped = True
    for instruction in code:
        padding = "nop" in instruction.text or instruction.text == "xchg %ax,%ax"
        if ended and padding and instruction.address not in targets:
            continue
        if ended or jumped or instruction.address in targets:
            falls.append(not ended)
            blocks.append([])
        blocks[-1].append(instruction)
        ended = instruction.mnemonic in _ENDS
        jumped = instruction.target is not None
    first = {block[0].address: number for number, block in enumerate(blocks)}
    follow: Graph = {}
    for number, block in enumerate(blocks):
        follow[number] = [number + 1] if number + 1 < len(blocks) and falls[number + 1] else []
        if block[-1].target in first:
            follow[number].append(first[block[-1].target])
    return blocks, follow


def _components(nodes: set[int], follow: Graph) -> list[set[int]]:
    """Largest sets of nodes that all reach one another; a node alone only if it follows itself."""
    reached: dict[int, set[int]] = {}
    for node in nodes:
        reached[node] = set()
        work = [node]
        while work:
            new = (set(follow[work.pop()]) & nodes) - reached[node]
            reached[node] |= new
            work += new
    rest = {node for node in nodes if node in reached[node]}
    found = []
    while rest:
        node = rest.pop()
        found.append({node} | {other for other in rest if other in reached[node] and node in reached[other]})
        rest -= found[-1]
    return found


def _is_loop(nodes: set[int], follow: Graph) -> bool:
    """Whether any path within `nodes` comes back: something is left when dead ends are taken away."""
    left = nodes
    while left != (kept := {node for node in left if not left.isdisjoint(follow[node])}):
        left = kept
    return bool(left)


def loops(code: list[Instruction]) -> list[Loop]:
    """All loops of a function. Those within a loop are the loops of what is left of it without its entries."""
    blocks, follow = _blocks(code)
    before: Graph = {number: [] for number in follow}
    for number, after in follow.items():
        for other in after:
            before[other].append(number)
    found = []
    work = _components(set(follow), follow)
    while work:
        loop = work.pop()
        always = [number for number in sorted(loop) if not _is_loop(loop - {number}, follow)]
        found.append(
            Loop(
                [instruction for number in sorted(loop) for instruction in blocks[number]],
                [instruction for number in always for instruction in blocks[number]],
            )
        )
        entries = {number for number in loop if set(before[number]) - loop}
        work += _components(loop - (entries or {min(loop)}), follow)
    return found


def exported(path: Path) -> dict[str, str]:
    """The symbols that an object file offers to others, weak ones too: demangled names and nm's letters."""
    listing = subprocess.run(
        ["nm", "--demangle", "--defined-only", "--extern-only", "--portability", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {match[1]: match[2] for match in re.finditer(r"^(.+?) ([A-Za-z]) [0-9a-f]", listing, re.M)}
