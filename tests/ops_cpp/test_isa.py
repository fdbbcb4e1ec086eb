"""The choice of kernels: capped by HINA_ISA, reported by HINA_VERBOSE, and of no consequence for the result."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from graph_passes.op_schema import PROJECTIONS
from hina_ort import cpu_info
from hina_ort.runtime import query
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.amx.environment import NATIVE, amx_environment, needs_amx, read_counts
from tests.ops_cpp.isas import AMX, ISAS, NEEDS, cpu_features, hiding_library
from tests.ops_cpp.scenarios import scenario, start
from tests.tensors import restored

PREFERRED = [isa for isa in ISAS if isa != "avx512_bf16"][-1]  # that one only when HINA_ISA names it

on_every_isa = pytest.mark.parametrize(
    "isa",
    [
        *(pytest.param(n, marks=[] if n in ISAS else pytest.mark.skip(f"this CPU has no {n}")) for n in NEEDS),
        pytest.param("amx", marks=needs_amx),
    ],
)


def environment(isa: str) -> dict[str, str]:
    """Of a process that uses this word of HINA_ISA."""
    return {"HINA_ISA": isa} | (amx_environment() if isa == "amx" else {})


def chosen(isa: str) -> dict[str, object]:
    """What `outputs` says that the library uses then."""
    return {"isa": PREFERRED if isa == "amx" else isa, "amx": isa == "amx"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models of `PROBLEMS` and their inputs."""
    made = tmp_path_factory.mktemp("problems")
    for name, (node, feeds) in problems().items():
        (made / f"{name}.onnx").write_bytes(harness.make_model(node).SerializeToString())
        np.savez(made / f"{name}.npz", **feeds)
    return made


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds one of them."""
    made = tmp_path_factory.mktemp("one")
    for suffix in (".onnx", ".npz"):
        shutil.copy((folder / next(iter(problems()))).with_suffix(suffix), made)
    return made


@cache
def problems() -> dict[str, tuple[Node, Tensors]]:
    """Nodes of every weight type, format and activation."""
    made = {}
    for number, (weight_type, activation) in enumerate(
        (w, a) for w in ("float32", "float16", "bfloat16") for a in ("silu", "gelu", "gelu_tanh", "relu2")
    ):
        sizes = {"hidden_size": (60, 544)[number % 2], "intermediate_size": (33, 48)[number // 2 % 2]}
        spec = make_spec(**sizes, activation=activation, num_experts=16, top_k=4, mlp=("split", "fused")[number % 2])
        rng = np.random.default_rng(number)
        node = harness.random_node(spec, rng, types=dict.fromkeys(spec.weight_inputs, weight_type))
        made[f"{weight_type}-{activation}"] = node, harness.random_feeds(node, rng, (40,))
    rng = np.random.default_rng(20)
    for word in ("int8", "int8:16", "int4", "int4:16", "int4:32", "int4:256", "mxfp4"):
        for level in (0, 4):
            sizes = {"hidden_size": 144, "intermediate_size": 60, "num_experts": 16, "top_k": 4}
            formats = dict.fromkeys(PROJECTIONS, word)
            spec = make_spec(**sizes, formats=formats, zero_points=True, accuracy_level=level)
            node = harness.random_node(spec, rng)
            made[f"{word.replace(':', '-')}-level{level}"] = node, harness.random_feeds(node, rng, (40,))
    for place in ("output", "input"):
        node = harness.random_node(make_spec(apply_weights_to=place), rng, activation_type="bfloat16")
        made[f"all-bfloat16-{place}"] = node, harness.random_feeds(node, rng, (40,))
    return made


def assert_outputs(folder: Path) -> None:
    """What the scenario `outputs` wrote is right."""
    for name, (node, feeds) in problems().items():
        output = restored(np.load(folder / f"{name}.out.npy"))
        harness.assert_right(node, feeds, {"output": output})


@on_every_isa
def test_every_isa_is_right(isa: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINA_ISA", isa)  # what results may differ by depends on it
    tiles_for_all = {"HINA_AMX_FROM": "1"}
    assert scenario("outputs", folder, env=environment(isa) | tiles_for_all) == chosen(isa)
    assert_outputs(folder)


@on_every_isa
def test_every_isa_keeps_the_promises(isa: str) -> None:
    """Every batch repeats each token's own bits, whatever kernels compute it."""
    assert scenario("random_calls", 150, env=environment(isa))["calls"] == 150


def test_best_isa_is_chosen_and_explained() -> None:
    info = cpu_info()
    assert info["isa"] == PREFERRED
    assert info["isa_reason"]
    assert set().union(*(NEEDS[name] for name in ISAS)) <= set(info["features"])
    assert info["amx"] == NATIVE
    assert info["amx_reason"] == "the CPU has AMX and the kernel permits it" if NATIVE else info["amx_reason"]


@needs_amx
def test_amx_is_used_unless_capped(one: Path) -> None:
    for isa, amx in (("", True), ("amx", True), ("avx512_bf16", False), ("avx2", False)):
        environment = amx_environment() | ({"HINA_ISA": isa} if isa else {})
        assert scenario("outputs", one, env=environment)["amx"] == amx


@pytest.mark.parametrize("word", ["avx9", "AVX2", "portable,avx2", "avx512_"])
def test_unknown_word_is_a_clear_error(word: str, one: Path) -> None:
    done = start("outputs", one, env={"HINA_ISA": word})
    assert done.returncode == 1, done.stderr[-2000:]
    message = done.stderr.splitlines()[-1]
    for part in ("HINA_ISA", word, *NEEDS, "amx"):
        assert part in message, message


def test_an_isa_that_the_cpu_lacks_is_no_error(one: Path) -> None:
    """HINA_ISA is a cap: the newest of these words allows everything there is but AMX."""
    newest = list(NEEDS)[-1]
    assert scenario("outputs", one, env={"HINA_ISA": newest}) == {"isa": ISAS[-1], "amx": False}


@needs_amx
def test_amx_beside_avx2_is_right(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has AVX2 only: the emulated tiles, and the kernels' vectors of AVX2."""
    monkeypatch.setenv("HINA_ISA", "amx")
    older = amx_environment("emulated", tmp_path / "counts") | {"HINA_ISA": "amx", "HINA_AMX_FROM": "1"}
    if ISAS[-1] != "avx2":
        older["LD_PRELOAD"] += f" {hiding_library(tmp_path)}"
    assert scenario("outputs", folder, env=older) == {"isa": "avx2", "amx": True}
    assert_outputs(folder)
    assert read_counts(tmp_path / "counts")["tdpbf16ps"] > 1000
    assert scenario("random_calls", 150, env=older)["calls"] == 150


def assert_amx_is_refused(one: Path, env: dict[str, str], why: str) -> None:
    """HINA_ISA=amx is an error of one sentence that says `why` and what to do; without it, AMX is just not used."""
    done = start("outputs", one, env=env | {"HINA_ISA": "amx"})
    assert done.returncode == 1, done.stderr[-2000:]
    message = done.stderr.splitlines()[-1]
    advice = re.escape(": unset HINA_ISA, or set it to ") + "(" + "|".join(NEEDS) + ") or an older one"
    assert re.search(f"HinaMoE node '.*': HINA_ISA is 'amx', but {why}{advice}$", message), message
    done = start("outputs", one, env=env | {"HINA_VERBOSE": "1"})
    assert done.returncode == 0 and json.loads(done.stdout)["amx"] is False, done.stderr[-2000:]
    assert re.search(f" isa ({'|'.join(NEEDS)}) because .*; no amx because {why}$", done.stderr, re.M), done.stderr


def test_amx_on_a_cpu_without_it_is_a_clear_error(one: Path, tmp_path: Path) -> None:
    hidden = {"LD_PRELOAD": str(hiding_library(tmp_path))} if cpu_features() >= AMX else {}
    assert_amx_is_refused(one, hidden, "the CPU lacks amx_(tile|bf16|int8)")


@needs_amx
def test_amx_without_permission_is_a_clear_error(one: Path) -> None:
    refused = amx_environment("emulated") | {"AMX_EMULATOR_REFUSE": "1"}
    reason = "the kernel refused permission for tiles (ARCH_REQ_XCOMP_PERM: Operation not permitted)"
    assert_amx_is_refused(one, refused, re.escape(reason))


@pytest.mark.skipif(not NATIVE, reason="this machine has no AMX")
def test_a_small_signal_stack_is_told() -> None:
    """The kernel wants room for tiles on the alternate signal stack of every thread, before it gives permission."""
    script = """
import ctypes, json

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

from hina_ort import cpu_info
print(json.dumps(cpu_info()))
"""
    info = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert not info["amx"] and "the alternate signal stack of a thread is too small" in info["amx_reason"]


def test_the_word_of_an_emulator_is_not_enough(one: Path) -> None:
    """The variable that the emulator sets, without the emulator: the kernel has the last word."""
    if NATIVE:
        pytest.skip("this machine has AMX")
    done = start("outputs", one, env={"HINA_AMX_EMULATOR": "1", "HINA_ISA": "amx"})
    assert done.returncode == 1 and "the kernel refused permission" in done.stderr, done.stderr[-2000:]


@on_every_isa
def test_verbose_names_kernel_and_reason(isa: str, folder: Path) -> None:
    done = start("outputs", folder, env=environment(isa) | {"HINA_VERBOSE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("hina: HinaMoE")]
    assert len(lines) == len(problems())
    choice = f"isa {PREFERRED} with amx because " if isa == "amx" else f"isa {isa} because "
    assert all(choice in line and f"HINA_ISA={isa}" in line for line in lines), lines
    for line, name in zip(lines, sorted(problems()), strict=True):
        if isa == "amx":
            assert re.search("; (AMX is emulated|the CPU has AMX and the kernel permits it)$", line), line
        else:
            assert line.endswith(f"; no amx because HINA_ISA={isa} caps the choice"), line
            check_line(line, problems()[name][0], isa)
    quiet = start("outputs", folder, env=environment(isa))
    assert not [line for line in quiet.stderr.splitlines() if "hina" in line.lower()], quiet.stderr


def check_line(line: str, node: Node, isa: str) -> None:
    """Three kernels that may be used with `isa`, of the family that the node needs, and what else is said of each."""
    kernels = {kernel["name"]: kernel for kernel in query("kernels")}
    named = [kernels[word] for word in re.findall(r"\w+", line) if word in kernels]
    words = {str(form) for form in node.spec.formats.values()}
    int8 = bool(words) and node.spec.accuracy_level == 4
    assert [kernel["family"] for kernel in named] == 3 * ["qdot" if int8 else "dot"], line
    assert max(list(NEEDS).index(kernel["isa"]) for kernel in named) <= list(NEEDS).index(isa), line
    for word in words:
        assert all(f" {place} {word} " in line for place in ("gate", "up", "down")), line
    assert line.count("with int8 activations") == 3 * int8, line
    assert line.count("dequantised for") == 3 * (bool(words) and not int8), line
    if node.activation_type == "bfloat16" and isa == "avx512_bf16":
        assert {kernel["isa"] for kernel in named} == {isa}, line
