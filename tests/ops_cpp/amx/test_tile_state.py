"""Tile configuration belongs to the thread: operators that trust theirs, and HinaMoE, in turn on the same threads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ops_cpp.amx.environment import NATIVE, amx_environment, needs_amx
from tests.ops_cpp.amx.programs import compiled, run
from tests.ops_cpp.isas import AMX, cpu_features

pytestmark = needs_amx

KINDS = ["emulated", pytest.param("native", marks=pytest.mark.skipif(not NATIVE, reason="this machine has no AMX"))]


@pytest.fixture(scope="module")
def latch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("latch", tmp_path_factory.mktemp("latch"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_thread_is_kept(kind: str, latch: Path) -> None:
    assert run(latch, "kept", env=amx_environment(kind)).stdout == "trusting right, other right, idle right\n"
    # The test can fail: without it, the operator that trusts its configuration is wrong.
    assert run(latch, "careless", env=amx_environment(kind)).stdout == "trusting wrong, other right, idle wrong\n"


@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_and_hina_alternate(kind: str) -> None:
    environment = amx_environment(kind) | {"HINA_AMX_FROM": "1"}
    done = run(sys.executable, "-m", "tests.ops_cpp.amx.alternate", env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    right = {"products": True, "layers": True}
    assert (found["bfloat16"], found["int8"]) == (right, right)
    if kind == "emulated":
        assert found["counts"]["tdpbf16ps"] > 1000  # HinaMoE's
        assert (found["counts"]["tdpbusd"] > 1000) == (cpu_features() >= AMX)  # ONNX Runtime's
