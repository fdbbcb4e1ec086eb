"""Layers that are multiplied in tiles: right, the same bits in every batch, and no more loads than it takes.

They run on this CPU's AMX where it has that, and some of them under the emulator as well; else all under the emulator.
HINA_AMX_FROM=1 has every expert in tiles, however few its tokens are.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops_cpp.amx.environment import AMX_KIND, amx_environment, needs_amx
from tests.ops_cpp.amx.programs import run
from tests.ops_cpp.isas import ISAS, hiding_library

pytestmark = needs_amx

VECTORS = {"HINA_ISA": "avx512_vnni"}
"""What is preferred beside AMX, or what there is of it."""

QUICK, SLOW = [(AMX_KIND, 0, 3)], [(AMX_KIND, layout, 1) for layout in range(6)]
if AMX_KIND == "native":
    QUICK.append(("emulated", 0, 7))
    SLOW += [("emulated", layout, 1) for layout in range(6)]

selections = pytest.mark.parametrize(
    ("kind", "layout", "every"), QUICK + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW]
)
"""Which cases of `amx_layers.cases`."""


def outcome(module: str, *arguments: object, env: dict[str, str]) -> Any:
    """What a program of this folder prints."""
    done = run(sys.executable, "-m", f"tests.ops_cpp.{module}", *map(str, arguments), env={"HINA_AMX_FROM": "1"} | env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def tiles(kind: str) -> dict[str, str]:
    return {"HINA_ISA": "amx"} | amx_environment(kind)


@selections
def test_layers_are_right(kind: str, layout: int, every: int) -> None:
    """Every weight type with each activation type, against the reference."""
    assert outcome("amx_layers", "right", layout, every, env=tiles(kind))["layers"] == -(-54 // every)


@selections
def test_int8_activations_give_the_bits_of_vectors(kind: str, layout: int, every: int) -> None:
    got = outcome("amx_layers", "right_int8", layout, every, env=tiles(kind))
    want = outcome("amx_layers", "digests", 4, layout, every, env=VECTORS)
    assert got == want and len(got) == -(-51 // every)


def test_projections_of_different_types_are_right() -> None:
    assert outcome("amx_layers", "right_mixtures", env=tiles(AMX_KIND))["layers"] == 24


def test_tiles_and_vectors_share_a_layer() -> None:
    """The first expert has 257 tokens, the others have fewer than a hundred."""
    mixed = tiles(AMX_KIND) | {"HINA_AMX_FROM": "200"}
    assert outcome("amx_layers", "right_in_part", 2, 5, env=mixed)["layers"] == 11
    got = outcome("amx_layers", "right_int8", 2, 5, env=mixed)
    assert got == outcome("amx_layers", "digests", 4, 2, 5, env=VECTORS)


def test_the_usual_thresholds_change_no_bits_of_int8() -> None:
    """Whatever computes an expert of few tokens, and of many. (In floats, tiles round more than vectors.)"""
    usual = tiles(AMX_KIND) | {"HINA_AMX_FROM": ""}
    assert len(outcome("amx_layers", "right_int8", 3, 9, env=usual)) == 6
    assert outcome("amx_layers", "right_in_part", 3, 9, env=usual)["layers"] == 6


@pytest.mark.skipif("avx512" not in ISAS, reason="this CPU has AVX2 only, as all other tests here know")
def test_avx2_beside_tiles_will_do(tmp_path: Path) -> None:
    """The emulator on a CPU whose AVX-512 is hidden."""
    older = tiles("emulated")
    older["LD_PRELOAD"] += f" {hiding_library(tmp_path)}"
    assert outcome("amx_layers", "right", 1, 13, env=older)["layers"] == 5
    got = outcome("amx_layers", "right_int8", 1, 13, env=older)
    assert got == outcome("amx_layers", "digests", 4, 1, 13, env={"HINA_ISA": "avx2"})


def test_quantised_weights_are_rounded_only_if_asked_for() -> None:
    """Without int8 activations, int8 and int4 weights go into tiles as bfloat16 where HINA_ISA=amx says so."""
    unset, vectors, amx = (
        outcome("amx_layers", "digests", 0, 0, 6, env=env)
        for env in ({"HINA_ISA": ""} | amx_environment(), VECTORS, tiles(AMX_KIND))
    )
    assert unset == vectors
    assert all(amx[name] != digest for name, digest in vectors.items())


@pytest.mark.parametrize("kind", sorted({AMX_KIND, "emulated"}))
def test_sessions_and_threads_at_once(kind: str) -> None:
    calls = 60 if kind == "native" else 15
    assert outcome("amx_layers", "sessions_at_once", calls, env=tiles(kind))["calls"] == 8 * calls


@pytest.mark.parametrize("kind", sorted({AMX_KIND, "emulated"}))
def test_bad_tokens_stay_alone(kind: str) -> None:
    assert outcome("amx_layers", "bad_tokens", env=tiles(kind))["runs"] == 4 * 3 * 3


@pytest.mark.parametrize("text", ["0", "8 tokens"])
def test_a_threshold_that_is_no_number_is_a_clear_error(text: str) -> None:
    command = [sys.executable, "-m", "tests.ops_cpp.amx_layers", "digests", "0", "0", "60"]
    done = run(*command, env=tiles(AMX_KIND) | {"HINA_AMX_FROM": text})
    expected = f"HinaMoE node 'moe': HINA_AMX_FROM is '{text}', expected a number of tokens from 1 on"
    assert done.returncode == 1 and expected in done.stderr.splitlines()[-1], done.stderr


# Counts

FEW = [1, 2, 3, 8, 15, 16]
MORE = [17, 31, 32, 33, 64, 80]


def counts(folder: Path, *layers: tuple[Any, ...], env: dict[str, str] | None = None) -> list[list[dict[str, Any]]]:
    """Of each layer (the arguments of `amx_counts.count`), for each number of tokens."""
    found = outcome("amx_counts", folder, json.dumps(layers), env=tiles("emulated") | (env or {}))
    assert len(found) == len(layers)
    return found


def loaded(found: dict[str, Any], times: int) -> bool:
    """Whether each byte of the expert was loaded so often."""
    return all(extremes == [times, times] for extremes in found["weights"].values())


def test_few_tokens_load_each_weight_once(tmp_path: Path) -> None:
    """Straight from the model. Tiles of rows of int8 share the loads of a panel, as many as are possible for each of 8
    workers; those of bfloat16 come in pairs, in order to read memory fast (docs/amx.md), and meet both terms.
    """
    kinds = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("int8", "float32"), ("int8:32", "bfloat16")]
    results = counts(tmp_path, *((*kind, [2048, 64], FEW) for kind in kinds))
    for most, found in zip((1.5, 1, 1.25, 1.25), results, strict=True):
        for one in found:
            assert loaded(one, 1) and one["strays"] == 0, one
            assert one["loads"] - one["sums"] <= most * one["products"], one


def test_panels_share_the_loads_of_weights(tmp_path: Path) -> None:
    """Two panels meet two tiles of rows at a time; three to five of them meet one."""
    layers = [("bfloat16", activation_type, [192, 128], MORE) for activation_type in ("bfloat16", "float32")]
    for terms, results in enumerate(counts(tmp_path, *layers), 1):
        for n, found in zip(MORE, results, strict=True):
            assert loaded(found, 1) and found["strays"] == 0, found
            most = 0.5 + 0.5 / terms if n <= 32 else 1 + 1 / (terms * -(-n // 16))
            assert found["loads"] <= most * found["products"], (n, found)


def test_panels_are_no_larger_than_their_tokens(tmp_path: Path) -> None:
    """Nothing but weights and panels is loaded, and one token of bfloat16, alone or left over, is its own panel."""
    tokens = FEW + MORE
    layers = [("bfloat16", activation_type, [192, 128], tokens) for activation_type in ("bfloat16", "float32")]
    for terms, results in enumerate(counts(tmp_path, *layers), 1):
        for n, found in zip(tokens, results, strict=True):
            assert found["elsewhere"] == 2 * terms * n * (192 + 128), (terms, n, found)
            assert found["tokens"] == (2 * 192 if n % 16 == terms == 1 else 0), (terms, n, found)


def test_loads_stay_in_rows_of_any_size(tmp_path: Path) -> None:
    """Each row's last step, which is not whole, is loaded from elsewhere, and so is a token of such a size, of bfloat16
    or not. Tiles of 16 rows may overlap at the end.
    """
    kinds = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("int8", "float32")]
    for found in itertools.chain(*counts(tmp_path, *((*kind, [145, 97], [1, 5, 17, 31]) for kind in kinds))):
        assert found["strays"] == found["tokens"] == 0
        assert all(1 <= least <= most <= 2 for least, most in found["weights"].values()), found


def test_four_bits_are_unpacked_before_they_are_loaded(tmp_path: Path) -> None:
    layers = [(word, "float32", [192, 128], [1, 8]) for word in ("int4:32", "mxfp4")]
    for found in itertools.chain(*counts(tmp_path, *layers)):
        assert loaded(found, 0) and found["products"] > 0, found
        assert found["loads"] - found["sums"] <= 1.25 * found["products"], found


def test_the_threshold_counts_the_tokens_of_an_expert(tmp_path: Path) -> None:
    (found,) = counts(tmp_path, ("bfloat16", "float32", [96, 64], [16, 17, 40]), env={"HINA_AMX_FROM": "17"})
    assert found[0]["products"] == 0 and found[1]["products"] > 0 and found[2]["products"] > 0
