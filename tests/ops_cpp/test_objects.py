"""What the compiler made of the kernels: instructions stay where they belong, and hot loops keep to their registers."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ops_cpp.emulated.tables import declared
from tests.ops_cpp.objects import BUILD, Instruction, Loop, Object, exported, functions, loops, release_objects

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 instructions")

# Instructions of extensions that not every CPU with AVX-512 F, BW, VL and DQ has, and the flag that allows them.
EXTENSIONS = {
    "-mavx512vnni": r"vpdp(busd|wssd)s?",
    "-mavx512bf16": r"vdpbf16ps|vcvtne2?ps2bf16",
    "-mavx512vbmi": r"vperm[it]2b|vpermb|vpmultishiftqb",
    "-mavx512vbmi2": r"vp(compress|expand)[bw]|vpsh[lr]dv?[wdq]",
    "-mavx512ifma": r"vpmadd52[lh]uq",
    "-mavx512vpopcntdq": r"vpopcnt[dq]",
    "-mavx512bitalg": r"vpopcnt[bw]|vpshufbitqmb",
    "-mavx512fp16": r"v(?!cvt).*[ps]h|vcvt.*ph2(?!ps$).*|vcvt(?!ps).*2ph.*",
}
# What a file compiled with a flag is for: without it, the file is in the wrong place.
PURPOSE = {"-mavx512vnni": r"vpdpbusd", "-mavx512bf16": r"vdpbf16ps"}

# Instructions of AMX, and the only files that may have them. They need no flag, as kernels/tile/amx.h is assembly.
TILES = re.compile(r"(ld|st)tilecfg|tile(release|zero|loadd(t1)?|stored)|tdp\w+")
TILE_FILES = re.compile(r"kernels/(tile_\w+/avx(2|512)|peak/amx)\.cc|runtime/amx\.cc")

MULTIPLY_ADD = re.compile(r"vfn?m(add|sub)\d*p[sd]|vpdp(busd|wssd)s?|vpmadd(ubsw|wd)|vdpbf16ps")


@dataclass(frozen=True)
class Parking:
    """A function whose hot loops may use vectors on the stack, and `why`: which buffer it is, or what was measured.

    `arrays`: accesses with an index register, as to a buffer that the source declares. `sometimes`: accesses in code
    that some iterations leave out. `spills`: any others, at most so many for each instruction that multiplies and adds.
    """

    made: str
    function: str
    why: str
    arrays: bool = False
    sometimes: bool = False
    spills: float = 0.0


PARKING = [
    Parking(
        "kernels/qdot/avx512_vnni.cc",
        "few",
        "Scales and zero points of 16 units lie in a buffer, filled in one iteration of four or eight. Tiles of three "
        "and four tokens park up to 12 of their sums, four for each token: tiles of two at most, which park none, "
        "take 1.5 times as long for four tokens.",
        arrays=True,
        sometimes=True,
        spills=1 / 3,
    ),
    Parking(
        "kernels/qdot/avx2.cc",
        "few_units",
        "Tiles of two tokens keep one sum, and for 4-bit codes one constant, in memory: without, they were slower. "
        "Those of MXFP4, which has a table beside its constants, park some products as well.",
        spills=1 / 3,
    ),
    Parking(
        "kernels/qdot/avx2.cc",
        "many_of",
        "The registers hold the integer sums of a unit; the float sums of its 16 rows and 4 tokens are read and "
        "written once for each unit.",
        spills=0.29,
    ),
]


def short_name(name: str) -> str:
    """`few` of "void hina::(anonymous namespace)::few<(hina::WeightFormat)1>(hina::QRows const&, ...)"."""
    plain = re.sub(r"\((anonymous namespace|hina::\w+)\)", "", name)
    while plain != (plain := re.sub(r"<[^<>]*>", "", plain)):
        pass
    return plain.split("(")[0].split("::")[-1].split()[-1]


def vector_objects() -> list[Object]:
    """None where there is no build: then `test_flags_say_which_files_have_vector_instructions` fails, and says so."""
    return [made for made in release_objects() if made.flags] if (BUILD / "compile_commands.json").is_file() else []


def instructions(path: Path) -> list[Instruction]:
    return [instruction for body in functions(path).values() for instruction in body]


def leaks(path: Path) -> list[str]:
    """Symbols that the linker could pick for other code: all but the tables of kernels."""
    tables = {f"hina::{table}" for table in declared()}
    return [f"{name} ({kind})" for name, kind in exported(path).items() if kind not in "DR" or name not in tables]


def tile_instructions(path: Path) -> list[str]:
    return [instruction.text for instruction in instructions(path) if TILES.fullmatch(instruction.mnemonic)]


def vector_instructions(path: Path) -> list[str]:
    """Instructions that the oldest x86-64 CPUs lack, as far as their encoding tells, but for those of AMX."""
    return [
        instruction.text
        for instruction in instructions(path)
        if instruction.encoding != "legacy" and not TILES.fullmatch(instruction.mnemonic)
    ]


def beyond(path: Path, flags: tuple[str, ...]) -> list[str]:
    """Instructions that the flags do not allow."""
    found = instructions(path)
    if "-mavx512f" not in flags:
        return [instruction.text for instruction in found if instruction.encoding == "evex"]
    forbidden = re.compile("|".join(pattern for flag, pattern in EXTENSIONS.items() if flag not in flags))
    return [instruction.text for instruction in found if forbidden.fullmatch(instruction.mnemonic)]


def hot_loops(code: list[Instruction]) -> list[Loop]:
    """Innermost loops that multiply and add vectors. A loop in them that does not, such as one over pointers, is part
    of them."""
    hot = [loop for loop in loops(code) if any(MULTIPLY_ADD.fullmatch(one.mnemonic) for one in loop.code)]
    sets = [{one.address for one in loop.code} for loop in hot]
    return [loop for loop, mine in zip(hot, sets, strict=True) if not any(other < mine for other in sets)]


@dataclass
class StackAccesses:
    """Vectors stored to or loaded from the stack in one hot loop, by the kinds of `Parking`."""

    arrays: list[str]
    sometimes: list[str]
    spills: list[str]
    multiply_adds: int


def stack_accesses(code: list[Instruction]) -> list[StackAccesses]:
    """One for each hot loop. An address in another register than rsp and rbp is not seen to be on the stack."""
    frame = any(one.text == "mov %rsp,%rbp" for one in code)  # else rbp is a register as any other
    stack, vector = re.compile(r"\(%r[sb]p" if frame else r"\(%rsp"), re.compile(r"%[xyz]mm")
    found = []
    for loop in hot_loops(code):
        counted = sum(bool(MULTIPLY_ADD.fullmatch(one.mnemonic)) for one in loop.code)
        found.append(StackAccesses([], [], [], counted))
        always = {one.address for one in loop.always}
        for one in loop.code:
            if stack.search(one.operands) and vector.search(one.operands):
                indexed = re.search(r"\(%r[sb]p,", one.operands)
                kind = "sometimes" if one.address not in always else "arrays" if indexed else "spills"
                getattr(found[-1], kind).append(f"+{one.address:#x}: {one.text}")
    return found


@pytest.fixture(params=vector_objects(), ids=lambda made: made.name)
def vector_object(request: pytest.FixtureRequest) -> Object:
    made: Object = request.param
    return made


def test_only_tables_leave_a_vector_object(vector_object: Object) -> None:
    assert exported(vector_object.path)
    assert not leaks(vector_object.path)


def test_flags_say_which_files_have_vector_instructions() -> None:
    for made in release_objects():
        assert bool(made.flags) == made.source.stem.startswith("avx"), f"{made.name} is compiled with {made.flags}"
        assert bool(made.flags) == bool(vector_instructions(made.path)), made.name


def test_only_files_of_amx_have_tile_instructions() -> None:
    for made in release_objects():
        assert bool(tile_instructions(made.path)) == bool(TILE_FILES.fullmatch(made.name)), made.name


def test_instructions_are_those_of_the_flags(vector_object: Object) -> None:
    assert not beyond(vector_object.path, vector_object.flags)
    mnemonics = {one.mnemonic for one in instructions(vector_object.path)}
    for flag, pattern in PURPOSE.items():
        if flag in vector_object.flags:
            assert any(re.fullmatch(pattern, mnemonic) for mnemonic in mnemonics)
    if "-mavx512f" in vector_object.flags:
        assert any("%zmm" in one.operands for one in instructions(vector_object.path))


def test_hot_loops_keep_to_their_registers(vector_object: Object) -> None:
    if re.fullmatch(r"kernels/tile_\w+/avx2\.cc", vector_object.name):
        pytest.skip("for CPUs without AVX-512 there is AMX in the emulator only, whatever its speed")
    parking = {one.function: one for one in PARKING if one.made == vector_object.name}
    needed: dict[str, set[str]] = {name: set() for name in parking}
    bodies = functions(vector_object.path)
    for name, code in bodies.items():
        short = short_name(name)
        allowed = parking.get(short, Parking(vector_object.name, short, ""))
        for found in stack_accesses(code):
            assert not found.arrays or allowed.arrays, (name, found.arrays)
            assert not found.sometimes or allowed.sometimes, (name, found.sometimes)
            assert len(found.spills) <= allowed.spills * found.multiply_adds, (name, found.spills)
            needed.get(short, set()).update(kind for kind in ("arrays", "sometimes", "spills") if getattr(found, kind))
    for name, one in parking.items():
        assert needed[name] == {kind for kind in ("arrays", "sometimes", "spills") if getattr(one, kind)}, (
            f"{name} no longer needs all of its exceptions"
        )
    if "dot/" in vector_object.name:
        assert any(hot_loops(code) for code in bodies.values())


def compiled(folder: Path, source: str, *flags: str) -> Path:
    """An object file of `source`, made as the build makes them."""
    (folder / "planted.cc").write_text(source)
    command = ["g++", "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", *flags]
    subprocess.run([*command, "-c", "planted.cc", "-o", "planted.o"], cwd=folder, check=True)
    functions.cache_clear()
    return folder / "planted.o"


# Dot products of rows with one token, as many accumulators as rows.
TILE = """
#include <immintrin.h>
extern "C" void tile(const float* const* rows, const float* x, long k, float* out) {
  __m256 acc[ROWS], buffer[64];
#pragma GCC unroll 32
  for (int r = 0; r < ROWS; ++r) acc[r] = _mm256_setzero_ps();
  for (long i = 0; i < k; i += 8) {
    const __m256 xv = _mm256_loadu_ps(x + i);
    PARK
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[r] + i), xv, acc[r]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < ROWS; ++r) _mm256_storeu_ps(out + 8 * r, acc[r]);
  _mm256_storeu_ps(out + 8 * ROWS, buffer[k & 63]);
}
"""


@pytest.mark.parametrize(
    ("rows", "park", "kind"),
    [
        (8, "", None),
        (20, "", "spills"),
        (8, "buffer[i & 63] = xv;", "arrays"),
        (8, "if (i & 8) buffer[i & 63] = xv;", "sometimes"),
    ],
)
def test_a_spill_is_found(rows: int, park: str, kind: str | None, tmp_path: Path) -> None:
    source = TILE.replace("ROWS", str(rows)).replace("PARK", park)
    (code,) = functions(compiled(tmp_path, source, "-mavx2", "-mfma")).values()
    loops_found = stack_accesses(code)
    assert loops_found and all(one.multiply_adds % rows == 0 for one in loops_found)
    for other in ("arrays", "sometimes", "spills"):
        assert any(getattr(one, other) for one in loops_found) == (other == kind)


def test_a_leak_is_found(tmp_path: Path) -> None:
    shared = "inline __attribute__((noinline)) float twice(float x) { return x + x; }\n"
    source = "namespace hina { extern float (*const kDotAvx2[1])(float); float (*const kDotAvx2[1])(float) = {twice}; }"
    assert not leaks(compiled(tmp_path, "static " + shared + source))
    assert leaks(compiled(tmp_path, shared + source)) == ["twice(float) (W)"]
    assert leaks(compiled(tmp_path, "int counter;")) == ["counter (B)"]


def test_a_stray_instruction_is_found(tmp_path: Path) -> None:
    add = "using V = float __attribute__((vector_size({}))); void add(V& a, const V& b) {{ a += b; }}"
    assert not vector_instructions(compiled(tmp_path, add.format(16)))
    avx = compiled(tmp_path, add.format(32), "-mavx2")
    assert vector_instructions(avx) and not beyond(avx, ("-mavx2",))
    assert beyond(compiled(tmp_path, add.format(64), "-mavx512f"), ("-mavx2",))
    dot = """#include <immintrin.h>
    __attribute__((target("avx512f,avx512vnni,avx512bf16"))) void dot(__m512i& a, __m512& b, __m512i c) {
      a = _mm512_dpbusd_epi32(a, c, c);
      b = _mm512_dpbf16_ps(b, (__m512bh)c, (__m512bh)c);
    }"""
    plain = ("-mavx512f",)
    assert {line.split()[0] for line in beyond(compiled(tmp_path, dot), plain)} == {"vpdpbusd", "vdpbf16ps"}
    assert not beyond(compiled(tmp_path, dot), (*plain, "-mavx512vnni", "-mavx512bf16"))
    tiles = [
        *("ldtilecfg (%rdi)", "sttilecfg (%rdi)", "tilerelease", "tilezero %tmm1", "tileloadd (%rdi,%rsi,1),%tmm1"),
        *("tileloaddt1 (%rdi,%rsi,1),%tmm1", "tilestored %tmm1,(%rdi,%rsi,1)", "tdpbf16ps %tmm3,%tmm2,%tmm1"),
        *(f"tdpb{signs}d %tmm3,%tmm2,%tmm1" for signs in ("ss", "su", "us", "uu")),
    ]
    stray = compiled(tmp_path, "void f() {" + "".join(f'__asm__ volatile("{one}");' for one in tiles) + "}")
    assert tile_instructions(stray) == tiles and not vector_instructions(stray)
