"""The choice of kernels: capped by HINA_ISA, reported by HINA_VERBOSE, and of no consequence for the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hina_ort import cpu_info
from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.scenarios import scenario, start

needs_avx2 = pytest.mark.skipif(
    not {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()), reason="this CPU has no AVX2"
)


@pytest.fixture
def problems(tmp_path: Path) -> dict[str, tuple[Node, Tensors]]:
    """Nodes of every weight type and activation, written to `tmp_path` with their inputs."""
    made = {}
    for number, (weight_type, activation) in enumerate(
        (w, a) for w in ("float32", "float16", "bfloat16") for a in ("silu", "gelu", "gelu_tanh", "relu2")
    ):
        sizes = {"hidden_size": (60, 544)[number % 2], "intermediate_size": (33, 48)[number // 2 % 2]}
        spec = make_spec(**sizes, activation=activation, num_experts=16, top_k=4, mlp=("split", "fused")[number % 2])
        rng = np.random.default_rng(number)
        node = harness.random_node(spec, rng, types=dict.fromkeys(spec.weight_inputs, weight_type))
        feeds = harness.random_feeds(node, rng, (40,))
        name = f"{weight_type}-{activation}"
        (tmp_path / f"{name}.onnx").write_bytes(harness.make_model(node).SerializeToString())
        np.savez(tmp_path / f"{name}.npz", **feeds)
        made[name] = node, feeds
    return made


@pytest.mark.parametrize("isa", ["portable", pytest.param("avx2", marks=needs_avx2)])
def test_every_isa_is_right(isa: str, problems: dict[str, tuple[Node, Tensors]], tmp_path: Path) -> None:
    assert scenario("outputs", tmp_path, env={"HINA_ISA": isa})["isa"] == isa
    for name, (node, feeds) in problems.items():
        harness.assert_close(node, np.load(tmp_path / f"{name}.out.npy"), harness.expected(node, feeds)[0])


def test_portable_keeps_the_promises() -> None:
    """Every batch repeats each token's own bits on the portable kernels too."""
    assert scenario("random_calls", 300, env={"HINA_ISA": "portable"})["calls"] == 300


@needs_avx2
def test_best_isa_is_chosen_and_explained() -> None:
    info = cpu_info()
    assert info["isa"] == "avx2"
    assert info["isa_reason"]
    assert {"avx2", "fma", "f16c"} <= set(info["features"])


@pytest.mark.parametrize("word", ["avx9", "AVX2", "portable,avx2"])
def test_unknown_word_is_a_clear_error(word: str, problems: dict[str, tuple[Node, Tensors]], tmp_path: Path) -> None:
    done = start("outputs", tmp_path, env={"HINA_ISA": word})
    assert done.returncode == 1, done.stderr[-2000:]
    message = done.stderr.splitlines()[-1]
    for part in ("HINA_ISA", word, "portable", "avx2"):
        assert part in message, message


@pytest.mark.parametrize("isa", ["portable", pytest.param("avx2", marks=needs_avx2)])
def test_verbose_names_kernel_and_reason(isa: str, problems: dict[str, tuple[Node, Tensors]], tmp_path: Path) -> None:
    done = start("outputs", tmp_path, env={"HINA_ISA": isa, "HINA_VERBOSE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "hina" in line.lower()]
    assert any(isa in line for line in lines), done.stderr[-2000:]
    reason = "HINA_ISA=portable" if isa == "portable" else "the CPU has AVX2"
    assert any(reason in line for line in lines), done.stderr[-2000:]
    quiet = start("outputs", tmp_path, env={"HINA_ISA": isa})
    assert not [line for line in quiet.stderr.splitlines() if "hina" in line.lower()], quiet.stderr
