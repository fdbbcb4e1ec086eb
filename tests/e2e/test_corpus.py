"""The corpus of exports: its verdicts, a sample of it, and the page that shows its results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from docs import generate_exporting
from hina_ort import convert
from models import language_models
from models.corpus import __main__ as corpus
from models.corpus.judge import judge
from models.corpus.registry import EXPORTERS
from models.corpus.results import verdicts_in
from models.corpus.verdict import RESULTS, Verdict, verdict

BAD = {"wrong, fused", "fused wrongly", "converter fails", "skipped"}


def cells_of_page() -> dict[tuple[str, str], str]:
    """What the tables by architecture say about each exporter and architecture."""
    found: dict[tuple[str, str], str] = {}
    head: list[str] = []
    for line in generate_exporting.PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if cells and cells[0] == "architecture":
            head = cells[1:]
        elif head and cells and cells[0] != "---":
            found |= {(exporter, cells[0]): cell for exporter, cell in zip(head, cells[1:], strict=True)}
        elif not cells:
            head = []
    return found


def test_the_page_has_a_result_for_everything_in_the_registry() -> None:
    cells = cells_of_page()
    assert {key for key, cell in cells.items() if cell} == {
        (exporter, architecture) for exporter, row in EXPORTERS.items() for architecture in row.architectures
    }
    words = {result.replace(" export", "") for result in RESULTS}
    assert {cell for cell in cells.values() if cell} <= words - BAD


def test_the_page_keeps_its_own_text_and_orders_alike_reasons_together() -> None:
    one, other = (
        Verdict("dynamo-5", name, "refused", f"node /layers.{number}/mul of {number} tokens", 1)
        for number, name in ((1, "olmoe"), (22, "mixtral"))
    )
    page = generate_exporting.page([one, other, Verdict("dynamo-5", "aria", "fused", moe_layers=1, fused=1)])
    assert page.startswith("# Exporting models that fuse\n")
    assert "- `dynamo-5`: olmoe, mixtral: refused; the converter says: `node /layers.1/mul of 1 tokens`\n" in page


MEASURED: dict[str, Any] = {
    "moe_layers": 2,
    "export_error": 1e-7,
    "export_failure": "",
    "fused": 2,
    "families": ["batched_mm"],
    "refused": [],
    "fused_error": 1e-7,
    "fused_vs_torch": 1e-7,
    "fused_failure": "",
}
MISS = [{"node": "mlp", "reason": "experts 3 are missing"}]


@pytest.mark.parametrize(
    ("measured", "result"),
    [
        ({}, "fused"),
        ({"fused": 1, "refused": MISS}, "refused"),
        ({"fused": 1}, "not found"),
        ({"fused": 0, "fused_error": None}, "not found"),
        ({"fused_error": 1e-3}, "fused wrongly"),
        ({"fused_error": float("inf")}, "fused wrongly"),
        ({"fused_error": float("nan")}, "fused wrongly"),
        ({"fused_error": None}, "fused wrongly"),
        ({"export_error": 0.5}, "wrong export, fused"),
        ({"export_error": None}, "wrong export, fused"),
        ({"export_error": 0.5, "fused": 0, "refused": MISS}, "wrong export, refused"),
        ({"export_error": 0.5, "fused": 1, "refused": MISS}, "wrong export, refused"),
        ({"export_error": None, "fused": 0, "export_failure": "Split"}, "wrong export, not found"),
        ({"convert_error": "KeyError: 3", "fused": 0}, "converter fails"),
        ({"judge_error": "died"}, "converter fails"),
        ({"error": "RuntimeError: no"}, "export fails"),
        ({"error": "ModuleNotFoundError: No module named 'onnxscript'"}, "skipped"),
    ],
)
def test_verdicts(measured: dict[str, Any], result: str) -> None:
    found = verdict("dynamo-5", "olmoe", {**MEASURED, **measured})
    assert found.result == result
    assert found.expected == (result in ("fused", "wrong export, refused", "export fails", "skipped"))


def test_what_is_known_is_known_for_its_exporter_and_result_only() -> None:
    assert Verdict("genai-int4", "granitemoehybrid", "refused").expected
    assert not Verdict("dynamo-5", "granitemoehybrid", "refused").expected
    assert not Verdict("genai-int4", "granitemoehybrid", "wrong export, fused").expected


def test_an_unknown_name_is_an_error() -> None:
    assert corpus.select(["optimum/gpt_oss", "optimum/qwen3_moe"]) == {"optimum": ["gpt_oss", "qwen3_moe"]}
    for wanted in ("optimal", "optimum/olmo"):
        with pytest.raises(SystemExit, match=f"{wanted} is unknown"):
            corpus.select([wanted])


def test_a_process_that_dies_costs_one_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        for architecture in command[6:]:
            if architecture == "mixtral":
                return subprocess.CompletedProcess(command, -11)
            (tmp_path / "dynamo-5" / architecture).mkdir()
            (tmp_path / "dynamo-5" / architecture / "export.json").write_text('{"error": "RuntimeError: no"}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(corpus.subprocess, "run", run)
    corpus.run_step("export", "dynamo-5", ["aria", "mixtral", "olmoe"], tmp_path, again=False)
    reasons = {item.architecture: item.reason for item in verdicts_in(tmp_path)}
    assert reasons["mixtral"] == "the process died with exit code -11"
    assert reasons["aria"] == reasons["olmoe"] == "RuntimeError: no"


@pytest.mark.dynamo
def test_a_sample_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right export, a wrong one, and the same right export broken afterwards."""
    monkeypatch.setattr(sys, "argv", ["corpus", "--folder", str(tmp_path), "--jobs", "1"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "torchscript-5/mixtral", "--only", "torchscript-5/nllb_moe"])
    assert corpus.main() == 0
    (right, wrong) = json.loads((tmp_path / "results.json").read_text())
    assert (right["architecture"], right["result"], right["fused"]) == ("mixtral", "fused", 1)
    assert right["export_error"] <= 1e-5 and right["fused_error"] <= 1e-5
    assert (wrong["architecture"], wrong["result"]) == ("nllb_moe", "wrong export, refused")
    assert wrong["export_error"] > 0.1

    folder = tmp_path / "torchscript-5" / "mixtral"
    model = ir.load(folder / "model.onnx")
    weight = max(model.graph.initializers.values(), key=lambda value: value.const_value.size)
    weight.const_value = ir.tensor(np.flip(weight.const_value.numpy(), 1).copy(), name=weight.name)
    ir.save(model, folder / "model.onnx")
    broken = verdict("torchscript-5", "mixtral", {"moe_layers": 1, **judge(folder)})
    assert broken.result == "wrong export, fused" and not broken.expected


@pytest.mark.slow
@pytest.mark.dynamo
@pytest.mark.parametrize("heading", ["transformers 5: OnnxExporter", "transformers 5: torch.onnx.export"])
def test_the_lines_of_the_page_work_as_written(heading: str, tmp_path: Path) -> None:
    text = generate_exporting.PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code
    language_models.build("qwen3_moe").save_pretrained(tmp_path / "Qwen" / "Qwen3-30B-A3B")
    subprocess.run([sys.executable, "-c", code[1]], cwd=tmp_path, check=True, env={"HF_HUB_OFFLINE": "1"})
    (source,) = (path for path in (tmp_path, tmp_path / "exported") if (path / "model.onnx").exists())
    report = convert(source / "model.onnx", tmp_path / "fused.onnx", check="full")
    assert len(report.fused) == language_models.LAYERS and not report.refused
