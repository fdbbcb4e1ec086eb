"""The benchmark runs on a tiny layer, agrees with ONNX Runtime's own MoE, and reports every cell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hina_ort import bench


def test_bench_of_a_tiny_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--shape", "tiny", "--tokens", "1,5", "--repeats", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["tokens"] for cell in result["cells"]] == [1, 5]
    for cell in result["cells"]:
        assert cell["hina_ms"] > 0 and cell["ort_ms"] > 0
        assert cell["speedup"] == pytest.approx(cell["ort_ms"] / cell["hina_ms"])
    assert bench.main(["--shape", "tiny", "--tokens", "1", "--repeats", "1"]) == 0
    assert "speed-up" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.linalg, "norm", lambda _: np.float64(1.0))  # as if the results were far apart
    with pytest.raises(RuntimeError, match="differ"):
        bench.main(["--shape", "tiny", "--tokens", "1", "--repeats", "1", "--json"])
