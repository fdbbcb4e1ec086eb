"""The choice of kernels: capped by HINA_ISA, reported by HINA_VERBOSE, and of no consequence for the result."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from graph_passes.op_schema import PROJECTIONS
from hina_ort import cpu_info
from hina_ort.runtime import query
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.isas import ISAS, NEEDS
from tests.ops_cpp.scenarios import scenario, start
from tests.tensors import restored

on_every_isa = pytest.mark.parametrize(
    "isa",
    [pytest.param(name, marks=[] if name in ISAS else pytest.mark.skip(f"this CPU has no {name}")) for name in NEEDS],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models of `PROBLEMS` and their inputs."""
    made = tmp_path_factory.mktemp("problems")
    for name, (node, feeds) in problems().items():
        (made / f"{name}.onnx").write_bytes(harness.make_model(node).SerializeToString())
        np.savez(made / f"{name}.npz", **feeds)
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


@on_every_isa
def test_every_isa_is_right(isa: str, folder: Path) -> None:
    assert scenario("outputs", folder, env={"HINA_ISA": isa})["isa"] == isa
    for name, (node, feeds) in problems().items():
        output = restored(np.load(folder / f"{name}.out.npy"))
        harness.assert_right(node, feeds, {"output": output})


@on_every_isa
def test_every_isa_keeps_the_promises(isa: str) -> None:
    """Every batch repeats each token's own bits, whatever kernels compute it."""
    assert scenario("random_calls", 150, env={"HINA_ISA": isa})["calls"] == 150


def test_best_isa_is_chosen_and_explained() -> None:
    info = cpu_info()
    assert info["isa"] == [isa for isa in ISAS if isa != "avx512_bf16"][-1]  # used only when HINA_ISA names it
    assert info["isa_reason"]
    assert set().union(*(NEEDS[name] for name in ISAS)) <= set(info["features"])


@pytest.mark.parametrize("word", ["avx9", "AVX2", "portable,avx2", "avx512_"])
def test_unknown_word_is_a_clear_error(word: str, folder: Path) -> None:
    done = start("outputs", folder, env={"HINA_ISA": word})
    assert done.returncode == 1, done.stderr[-2000:]
    message = done.stderr.splitlines()[-1]
    for part in ("HINA_ISA", word, *NEEDS):
        assert part in message, message


def test_an_isa_that_the_cpu_lacks_is_no_error(folder: Path) -> None:
    """HINA_ISA is a cap: the newest word allows everything there is."""
    newest = list(NEEDS)[-1]
    assert scenario("outputs", folder, env={"HINA_ISA": newest})["isa"] == ISAS[-1]


@on_every_isa
def test_verbose_names_kernel_and_reason(isa: str, folder: Path) -> None:
    done = start("outputs", folder, env={"HINA_ISA": isa, "HINA_VERBOSE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("hina: HinaMoE")]
    assert len(lines) == len(problems())
    assert all(f"isa {isa} because " in line and f"HINA_ISA={isa}" in line for line in lines), lines
    for line, name in zip(lines, sorted(problems()), strict=True):
        check_line(line, problems()[name][0], isa)
    quiet = start("outputs", folder, env={"HINA_ISA": isa})
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
