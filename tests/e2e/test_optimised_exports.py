"""Whole models of optimum-onnx that ONNX Runtime has optimised and saved: fused as the exports themselves are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from graph_passes import external_data
from graph_passes.accuracy import float16_bound
from graph_passes.pipeline import fuse_model
from tests.e2e.test_dense_exports import export_gpt_oss
from tests.e2e.test_optimum_exports import TINY, compare_outputs, export
from tests.optimised import LEVELS, optimised

pytestmark = pytest.mark.optimum


EXPORTS = {"qwen3_moe": lambda folder, dtype: export(folder, dtype=dtype), "gpt_oss": export_gpt_oss}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    return functools.cache(lambda name, dtype: EXPORTS[name](tmp_path_factory.mktemp(name), dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", None), ("qwen3_moe", "fp16"), ("gpt_oss", None)])
def test_every_layer_is_fused(
    exported: Callable[[str, str | None], Path], name: str, dtype: str | None, level: str, tmp_path: Path
) -> None:
    optimised(exported(name, dtype), level, tmp_path)
    saved = tmp_path / f"{level}.onnx"
    model = external_data.load(saved)
    report = fuse_model(model)
    assert report.refused == []
    assert len(report.fused) == TINY["num_hidden_layers"]
    assert not any(node.op_type in ("NonZero", "OneHot", "ScatterElements", "Tile") for node in model.graph)
    bound = math.sqrt(2 * len(report.fused)) * float16_bound(2) if dtype else 1e-5
    compare_outputs(saved, model, tmp_path / "fused.onnx", bound)
