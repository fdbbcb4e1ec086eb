"""The AVX-512 kernels that the release build made, run on an emulated Sapphire Rapids, whatever this machine is.

Every entry of every AVX-512 table runs there on odd sizes; each operand lies between pages that are not mapped, inputs
on pages that cannot be written. Where this CPU has the instructions, the same calls are made here, too.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.ops_cpp.emulated import calls, data, panels, programs, tables
from tests.ops_cpp.emulated.calls import FLOATS
from tests.ops_cpp.emulated.cpu import Cpu, EmulatedCpu, NativeCpu, Out
from tests.ops_cpp.emulated.tables import Kernel, entries
from tests.ops_cpp.isas import ISAS, NEEDS

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator runs on x86-64 only")

UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Cpus:
    emulated: EmulatedCpu
    native: NativeCpu


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cpus]:
    folder = tmp_path_factory.mktemp("emulated")
    emulated = EmulatedCpu(programs.link_image(folder), programs.link_wheel(folder))
    yield Cpus(emulated, NativeCpu(programs.link_library(folder)))
    emulated.close()


@pytest.fixture(params=["ends of pages", "starts of pages", "native"])
def cpu(request: pytest.FixtureRequest, cpus: Cpus) -> Cpu:
    """The CPUs that run the kernels; in the emulator with operands at either side of their pages."""
    if request.param == "native":
        return cpus.native
    cpus.emulated.at_end = request.param == "ends of pages"
    return cpus.emulated


def avx512_tables(family: str) -> list[str]:
    return [table for table, other in tables.declared().items() if other == family and "Avx512" in table]


def kernels(cpu: Cpu, table: str) -> list[Kernel]:
    """The entries of `table`, if `cpu` can run them."""
    found = entries(cpu, table)
    assert found
    newest = list(NEEDS)[max(entry.isa for entry in found)]
    if isinstance(cpu, NativeCpu) and newest not in ISAS:
        pytest.skip(f"this CPU has no {newest}")
    return found


def portable(cpus: Cpus, family: str, **fields: int) -> Kernel:
    """The portable kernel of the family with these fields."""
    table = entries(cpus.native, f"k{family}Portable")
    (found,) = (entry for entry in table if all(entry.fields[name] == value for name, value in fields.items()))
    return found


def assert_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """The same bits; which NaN it is, is not specified."""
    bits = got.dtype.str.replace("f", "u").replace("V", "u")
    differ = (got.view(bits) != want.view(bits)) & ~(np.isnan(got) & np.isnan(want))
    assert not differ.any(), (
        f"{what}: {got[differ][:4]}, expected {want[differ][:4]} at {np.argwhere(differ)[:4].tolist()}"
    )


def test_every_avx512_table_is_in_the_image(cpus: Cpus) -> None:
    assert all(family in tables.FAMILIES for family in tables.declared().values())
    declared = {f"hina::{table}" for family in tables.FAMILIES for table in avx512_tables(family)}
    assert declared == {symbol.name for symbol in cpus.emulated.symbols if symbol.name.startswith("hina::k")}


def test_the_emulator_sees_every_access(cpus: Cpus) -> None:
    """Functions of the image within their operands and beyond them; AVX-512 instructions are executed."""
    cpu = cpus.emulated
    copy, fill, add = (cpu.symbol(name).address for name in ("memcpy", "memset", "add16"))
    source, numbers = np.arange(100, dtype=np.uint8), np.arange(16, dtype=np.float32)
    target, total = Out(np.zeros(100, np.uint8)), Out(np.zeros(16, np.float32))
    for cpu.at_end in (True, False):
        cpu.call(copy, target, source, 100)
        assert np.array_equal(target.array, source)
        cpu.call(fill, target, 7, 50)
        assert np.array_equal(target.array, [7] * 50 + list(range(50, 100)))
        cpu.call(add, numbers, numbers, total)
        assert np.array_equal(total.array, 2 * numbers)
        with pytest.raises(AssertionError, match=r"a page fault in memset.* a write to byte 0 of operand 0, an input"):
            cpu.call(fill, source, 0, 1)
    longer = np.zeros(101, np.uint8)
    with pytest.raises(AssertionError, match="bytes beside an output were written"):
        cpu.call(copy, target, longer, 101)
    cpu.at_end = True
    with pytest.raises(AssertionError, match=r"a page fault in memcpy.* operand 1 of 100 bytes, at byte 100"):
        cpu.call(copy, Out(longer), source, 101)
    with pytest.raises(AssertionError, match=r"a page fault in memcpy.* operand 0 of 100 bytes, at byte 100"):
        cpu.call(copy, target, longer, 101)
    with pytest.raises(AssertionError, match=r"a page fault in add16.* operand 1 of 60 bytes, at byte 60"):
        cpu.call(add, numbers, numbers[1:], total)
    with pytest.raises(AssertionError, match="an invalid instruction in __stack_chk_fail"):
        cpu.call(cpu.symbol("__stack_chk_fail").address)


def check_exact_dots(kernel: Kernel, parts: int) -> None:
    """Small whole numbers, whose sums are exact in any order: every element counts once, and only in its result."""
    rng = np.random.default_rng(1)
    for number, k in enumerate(data.DOT_SIZES):
        weights = rng.integers(-8, 9, (max(data.DOT_ROWS), k))
        x = rng.integers(-8, 9, (max(data.DOT_TOKENS), k))
        rows = [calls.shifted(row.astype(FLOATS[kernel.weight_type]), int(rng.integers(0, 4))) for row in weights]
        tokens = list(x.astype(FLOATS[kernel.token_type]))
        for n, t in data.mixtures(number, parts, data.DOT_ROWS, data.DOT_TOKENS):
            got = calls.dot(kernel, rows[:n], tokens[:t], k)
            assert np.array_equal(got, x[:t] @ weights[:n].T), f"{kernel.name} k={k} rows={n} tokens={t}"


@pytest.mark.parametrize("parts", [len(data.DOT_SIZES), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", avx512_tables("Dot"))
def test_dot_of_whole_numbers_is_exact(cpu: Cpu, table: str, parts: int) -> None:
    for kernel in kernels(cpu, table):
        check_exact_dots(kernel, parts)


@pytest.mark.parametrize("table", avx512_tables("Dot"))
def test_dot_rounds_well_and_ignores_its_batch(cpu: Cpu, table: str) -> None:
    """k products added in any order: at most k roundings on the way of each, so |error| <= k u / (1 - k u) * sum |w x|
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). BF16 instructions flush what is below 2^-126.
    """
    for kernel in kernels(cpu, table):
        for k in (1, 5, 16, 37, 544, 2080):
            rows, tokens = data.dot_operands(kernel, k)
            w, x = np.array(rows, np.float64), np.array(tokens, np.float64)
            got = calls.dot(kernel, rows, tokens, k)
            rounded = k * UNIT_ROUNDOFF / (1 - k * UNIT_ROUNDOFF)
            bound = rounded * (np.abs(x) @ np.abs(w).T) + k * 2.0**-126
            assert np.all(np.abs(got - x @ w.T) <= bound), (kernel.name, k)
            for t, r in ((0, 0), (17, 8), (3, 5), (14, 1)):
                assert calls.dot(kernel, rows[r : r + 1], tokens[t : t + 1], k) == got[t, r], (kernel.name, k, t, r)
            assert np.array_equal(calls.dot(kernel, rows[2:], tokens[1:], k), got[1:, 2:]), (kernel.name, k)


@pytest.mark.parametrize("table", avx512_tables("Dot"))
def test_dot_keeps_infinity_and_nan_in_their_row_and_token(cpu: Cpu, table: str) -> None:
    for kernel in kernels(cpu, table):
        for k in (3, 16, 37):
            rows, tokens = data.dot_operands(kernel, k)
            want = calls.dot(kernel, rows, tokens, k)
            rows[4][k - 1] = np.nan
            tokens[5][0] = np.inf
            got = calls.dot(kernel, rows, tokens, k)
            assert np.isnan(got[:, 4]).all() and np.isinf(np.delete(got[5], 4)).all(), kernel.name
            got, want = (np.delete(np.delete(result, 5, 0), 4, 1) for result in (got, want))
            assert np.array_equal(got, want), kernel.name


def check_qdot(kernel: Kernel, reference: Kernel, number: int, unit: int, parts: int) -> None:
    """All functions of one entry at one size against the portable ones: the same bits."""
    k = data.QDOT_SIZES[number]
    rng = np.random.default_rng(1000 * number + unit)
    rows = data.quantised_rows(rng, kernel, k, unit, padded=bool(number % 2))
    x = data.activations(rng, k)
    tokens = [calls.quantise(kernel, one, unit) for one in x]
    expected = [calls.quantise(reference, one, unit) for one in x]
    for n, t in data.mixtures(number, parts, data.QDOT_ROWS, data.QDOT_TOKENS):
        block = rows.first(n)
        want = calls.many(reference, calls.pack(reference, block, k), n, unit, expected[:t], k)
        got = calls.many(kernel, calls.pack(kernel, block, k), n, unit, tokens[:t], k)
        assert_same(got, want, f"many of {kernel.name} k={k} unit={unit} rows={n} tokens={t}")
        if kernel.few is not None and unit == 32:
            got = calls.few(kernel, block, tokens[:t], k)
            assert_same(got, want, f"few of {kernel.name} k={k} rows={n} tokens={t}")


@pytest.mark.parametrize("parts", [len(data.QDOT_SIZES), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", [16, 32])
@pytest.mark.parametrize("table", avx512_tables("QDot"))
def test_qdot_has_the_bits_of_the_portable_kernel(cpu: Cpu, cpus: Cpus, table: str, unit: int, parts: int) -> None:
    for kernel in kernels(cpu, table):
        for number in range(len(data.QDOT_SIZES)):
            check_qdot(kernel, portable(cpus, "QDot", format=kernel.format), number, unit, parts)


@pytest.mark.parametrize("table", avx512_tables("QDot"))
def test_tokens_may_be_quantised_in_parts(cpu: Cpu, table: str) -> None:
    rng = np.random.default_rng(3)
    for kernel in kernels(cpu, table):
        for unit, k in itertools.product((16, 32), (33, 129, 288)):
            x = rng.standard_normal(k).astype(np.float32)
            whole = calls.quantise(kernel, x, unit)
            for cuts in ((unit,), tuple(range(unit, k, unit)), tuple(range(2 * unit, k, 3 * unit))):
                assert np.array_equal(calls.quantise(kernel, x, unit, cuts), whole), (kernel.name, unit, k, cuts)


@pytest.mark.parametrize("table", avx512_tables("Dequantise"))
def test_dequantise_has_the_bits_of_the_portable_kernel(cpu: Cpu, cpus: Cpus, table: str) -> None:
    rng = np.random.default_rng(4)
    for kernel in kernels(cpu, table):
        reference = portable(cpus, "Dequantise", format=kernel.format)
        for unit, k in itertools.product((16, 32), (*range(1, 68), 95, 96, 100, 127, 129, 288, 1000)):
            rows = data.quantised_rows(rng, kernel, k, unit, padded=False)
            for row in (0, 31):  # with whole and with fractional zero points
                operands = rows.values[row], k, unit, rows.scales[row], rows.zero_points[row]
                got, want = (calls.dequantise(one, *operands) for one in (kernel, reference))
                assert_same(got, want, f"{kernel.name} k={k} unit={unit}")


@pytest.mark.parametrize("table", avx512_tables("Convert"))
def test_widen_has_the_bits_of_the_portable_kernel(cpu: Cpu, cpus: Cpus, table: str) -> None:
    """Every pattern of 8 and 16 bits, and every length of a tail, at odd addresses."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    for kernel in kernels(cpu, table):
        reference = portable(cpus, "Convert", type=kernel.type)
        bits = (32, 16, 16, 8, 8, 4, 8)[kernel.type]
        for n in (*range(70), patterns.size * 8 // bits):
            source = calls.shifted(np.roll(patterns, -997 * n)[: -(-n * bits // 8)], n % 3)
            assert_same(calls.widen(kernel, source, n), calls.widen(reference, source, n), f"{kernel.name} n={n}")


@pytest.mark.parametrize("table", avx512_tables("Convert"))
def test_narrow_has_the_bits_of_the_portable_kernel(cpu: Cpu, cpus: Cpus, table: str) -> None:
    floats = data.floats_to_narrow(np.random.default_rng(6))
    for kernel in kernels(cpu, table):
        if kernel.narrow is None:
            assert kernel.type >= len(FLOATS)
            continue
        reference = portable(cpus, "Convert", type=kernel.type)
        for case in floats + [floats[-1][n : 2 * n] for n in range(70)]:
            got, want = (calls.narrow(one, case, case.size % 4) for one in (kernel, reference))
            assert_same(got, want, f"{kernel.name} n={case.size}")


INF = float("inf")


def exact_activation(which: int, g: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """silu or gelu_tanh as g / (1 + exp(-z)) in float64, and z."""
    z = alpha * g if which == 0 else 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    with np.errstate(over="ignore"):
        return g / (1 + np.exp(-z)), z


@pytest.mark.parametrize("table", avx512_tables("Activation"))
def test_activation_is_exact_to_its_roundings(cpu: Cpu, table: str) -> None:
    """z carries at most six roundings (square, cube, constants), which exp turns into 6 u |z|; exp itself, the division
    and the product with up add no more than ten. Where exp(-z) exceeds float32, a result below 2^-126 |g u| is zero.
    """
    rng = np.random.default_rng(7)
    for kernel in kernels(cpu, table):
        assert kernel.activation in (0, 2)
        for parameters in ((1.0, 0.0, INF), (1.702, 1.0, 7.0)):
            gate, up = data.gates(rng, 4003)
            alpha, beta, limit = (float(np.float32(p)) for p in parameters)
            for gated in (True, False):
                got = calls.activate(kernel, parameters, gate, up if gated else None, in_place=not gated)
                g = np.minimum(gate.astype(np.float64), limit) if gated else gate.astype(np.float64)
                factor = np.clip(up.astype(np.float64), -limit, limit) + beta if gated else np.float64(1)
                act, z = exact_activation(kernel.activation, g, alpha)
                want = act * factor
                bound = UNIT_ROUNDOFF * (10 + 6 * np.abs(z)) * np.abs(want) + 2.0**-126 * (1 + np.abs(g * factor))
                worst = np.argmax(np.abs(got - want) / bound)
                assert np.all(np.abs(got - want) <= bound), (kernel.name, gate[worst], up[worst], got[worst])


@pytest.mark.parametrize("table", avx512_tables("Activation"))
def test_activation_ignores_its_place_and_keeps_nan(cpu: Cpu, table: str) -> None:
    rng = np.random.default_rng(8)
    for kernel in kernels(cpu, table):
        gate, up = data.gates(rng, 70)
        gate[[3, 17, 40]] = np.nan, INF, -INF
        up[[5, 50]] = np.nan, INF
        for parameters in ((1.0, 0.0, INF), (1.702, 1.0, 7.0)):
            whole = calls.activate(kernel, parameters, gate, up, in_place=False)
            assert np.isnan(whole[[3, 5]]).all()
            assert np.isinf(whole[17]) == (parameters[2] == INF)
            for n in range(70):
                assert_same(calls.activate(kernel, parameters, gate[:n], up[:n], n % 2 == 0), whole[:n], kernel.name)
                assert_same(calls.activate(kernel, parameters, gate[n:], up[n:], False), whole[n:], kernel.name)


@pytest.mark.parametrize("table", avx512_tables("Route"))
def test_scores_are_exact_to_their_roundings(cpu: Cpu, table: str) -> None:
    """x - max is rounded, which exp turns into u |x - max|; exp itself adds two units, the sum of n / 16 + 4 additions
    these and the mean error of its terms, below log n + 2, and the quotient one. A row with NaN, +infinity or nothing
    but -infinity has no scores.
    """
    rng = np.random.default_rng(10)
    for kernel in kernels(cpu, table):
        for number, n in enumerate(data.EXPERTS):
            for logits in data.router_rows(rng, n):
                got = calls.score(kernel.softmax, logits, in_place=number % 2 == 0)
                with np.errstate(invalid="ignore"):
                    below = logits.astype(np.float64) - logits.max()
                    want = np.exp(below) / np.exp(below).sum()
                    size = np.where(want > 0, np.abs(below), 0)
                assert np.array_equal(np.isnan(got), np.isnan(want)), (kernel.name, logits)
                bound = UNIT_ROUNDOFF * (size + math.log(n) + n / 16 + 10) * want + 2.0**-149
                assert np.isnan(want).all() or np.all(np.abs(got - want) <= bound), (kernel.name, n, logits, got)
                got = calls.score(kernel.sigmoid, logits, in_place=number % 2 == 1)
                want = 1 / (1 + np.exp(-logits.astype(np.float64)))
                right = np.abs(got - want) <= 5 * UNIT_ROUNDOFF * want + 2.0**-127
                assert np.all(right | (np.isnan(got) & np.isnan(want))), (kernel.name, n, logits, got)


@pytest.mark.parametrize("table", avx512_tables("Route"))
def test_top_k_finds_the_ids_of_the_portable_kernel(cpu: Cpu, cpus: Cpus, table: str) -> None:
    rng = np.random.default_rng(11)
    reference = portable(cpus, "Route")
    for kernel in kernels(cpu, table):
        for n in data.EXPERTS:
            for scores in data.router_rows(rng, n):
                for k, ties_to_highest in itertools.product({1, 2, 8, 12, 13, 22, 65, n}, (False, True)):
                    if k <= n:
                        got, want = (calls.top_k(one, scores, k, ties_to_highest) for one in (kernel, reference))
                        assert got == want, (kernel.name, n, k, ties_to_highest, scores)


@pytest.mark.parametrize("table", avx512_tables("Route"))
def test_scores_have_the_bits_of_avx2(cpu: Cpu, cpus: Cpus, table: str) -> None:
    if "avx2" not in ISAS:
        pytest.skip("this CPU has no avx2")
    (older,) = entries(cpus.native, "kRouteAvx2")
    rng = np.random.default_rng(12)
    for kernel in kernels(cpu, table):
        for n in data.EXPERTS:
            for logits in data.router_rows(rng, n):
                for name in ("softmax", "sigmoid"):
                    got, want = (calls.score(getattr(one, name), logits) for one in (kernel, older))
                    assert_same(got, want, f"{name} of {kernel.name} n={n}")


@pytest.mark.parametrize("table", avx512_tables("Scatter"))
def test_scatter_rounds_the_product_and_the_sum(cpu: Cpu, table: str) -> None:
    rng = np.random.default_rng(13)
    for kernel in kernels(cpu, table):
        for rows, n in [*itertools.product((0, 1, 15, 16, 17, 32, 45, 97), range(1, 17)), (31, 35)]:
            values, sums = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, n), (n, rows)))
            weights = rng.standard_normal(n).astype(np.float32)
            want = sums + weights[:, None] * values.T
            assert_same(calls.scatter(kernel, values, weights, sums), want, f"{kernel.name} rows={rows} n={n}")


def check_panel(kernel: Kernel, got: np.ndarray, x: np.ndarray) -> None:
    """The bits of the panel of `x [n, k]`, as the layout of the kernel's family says."""
    n, k = x.shape
    what = f"{kernel.name} n={n} k={k}"
    if kernel.terms:
        terms = panels.terms_in(got, n, kernel.terms)
        assert_same(terms[..., :k], panels.bf16_terms(x, kernel.terms), what)
        assert terms.shape[-1] % 32 == 0 and np.all(terms[..., k:] == 0), f"{what}: padding"
        return
    codes, factors = panels.int8_panel(x)
    assert np.array_equal(got[: codes.size], codes), what
    assert_same(got[codes.size :].view(np.float32), factors, what)


@pytest.mark.parametrize("table", avx512_tables("Tile"))
def test_panels_are_packed_as_their_layout_says(cpu: Cpu, table: str) -> None:
    """Whole tokens, with weights and without, and rows of FC1's results in pieces, in any order."""
    rng = np.random.default_rng(14)
    for kernel in kernels(cpu, table):
        if kernel.format > 1:  # all formats share their panels
            continue
        step = 16 if kernel.terms else panels.UNIT
        for k, n in itertools.product(panels.SIZES, panels.TOKENS):
            x = np.array(data.activations(rng, k))[rng.permutation(17)[:n]]
            weights = rng.choice(np.array([0.7, -1.3, np.inf], np.float32), n)
            with np.errstate(over="ignore", invalid="ignore"):
                weighted = x * weights[:, None]
            check_panel(kernel, calls.pack_tile(kernel, x, None, n % 4), x)
            check_panel(kernel, calls.pack_tile(kernel, x, weights, k % 4), weighted)
            cuts = [*sorted({*(step * rng.integers(0, 1 + k // step, 3)), 0}), k]
            pieces = [piece for piece in itertools.pairwise(cuts) if piece[0] < piece[1]]
            check_panel(kernel, calls.pack_tile_rows(kernel, x, rng.permutation(pieces).tolist()), x)


@pytest.mark.parametrize("table", avx512_tables("Tile"))
def test_four_bits_become_bytes(cpu: Cpu, table: str) -> None:
    rng = np.random.default_rng(15)
    for kernel in kernels(cpu, table):
        form = calls.FORMATS[kernel.format]
        assert (kernel.unpack is not None) == (form in ("int4", "mxfp4"))
        for k, padded, centred in itertools.product(panels.SIZES, (False, True), (False, True)):
            if kernel.unpack is None:
                continue
            rows = data.quantised_rows(rng, kernel, k, panels.UNIT, padded)
            bits = np.array([row[: rows.row_bytes] for row in rows.values])
            for n, gap in ((1, 0), (5, 32), (32, 0)):
                stride = -(-k // panels.UNIT) * panels.UNIT + gap
                got = calls.unpack_tile(kernel, rows.first(n), k, centred, stride)
                assert np.array_equal(got, panels.unpacked(bits[:n], str(form), k, centred)), (kernel.name, k, centred)


@pytest.mark.parametrize("table", avx512_tables("Peak"))
def test_peak_loops_count_their_products(cpus: Cpus, table: str) -> None:
    call = cpus.emulated.symbol("call_for_double").address
    for kernel in entries(cpus.emulated, table):
        for steps in (1, 2, 100):
            total = Out(np.zeros(1))
            cpus.emulated.call(call, kernel.sum.args[0], steps, total)
            assert total.array[0] == steps * kernel.multiply_adds * 6, kernel.name  # kPeakProduct


@pytest.mark.parametrize("family", ["Dot", "Activation"])
def test_the_emulator_gives_the_bits_of_this_cpu(cpus: Cpus, family: str) -> None:
    """The families whose portable kernels round otherwise."""
    gate, up = data.gates(np.random.default_rng(9), 4003)
    for table in avx512_tables(family):
        for pair in zip(kernels(cpus.native, table), kernels(cpus.emulated, table), strict=True):
            if family == "Activation":
                want, got = (calls.activate(kernel, (1.702, 1.0, 7.0), gate, up, False) for kernel in pair)
                assert_same(got, want, pair[0].name)
                continue
            for k in (1, 5, 16, 37, 544, 2080):
                want, got = (calls.dot(kernel, *data.dot_operands(kernel, k), k) for kernel in pair)
                assert_same(got, want, f"{pair[0].name} k={k}")
