"""The package as a whole: documents that must keep up with the code, and the wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import hina_ort
from docs import generate_checkpoints
from docs.generate_op import PAGE, page
from hina_ort.cli import app
from tests.hina_ort import tiny

ROOT = Path(__file__).resolve().parents[2]
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_the_page_of_the_operator_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.generate_op"


def test_every_option_is_documented() -> None:
    for command in ("convert", "export", "unfuse", "inspect", "generate", "doctor", "run"):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
        assert options
        for option in options:
            assert f"`{option}" in CLI_PAGE, option


def test_the_page_of_architectures_is_fresh() -> None:
    assert generate_checkpoints.PAGE.read_text(encoding="utf-8") == generate_checkpoints.page(), (
        "run python -m docs.generate_checkpoints"
    )


def test_every_json_key_is_documented(model: Path, tmp_path: Path) -> None:
    for arguments in (
        ["convert", str(model), str(tmp_path / "fused.onnx"), "--json"],
        ["inspect", str(model), "--json"],
        ["doctor", "--json"],
    ):
        answer = json.loads(CliRunner().invoke(app, arguments).stdout)
        for key in answer:
            assert re.search(rf"[`{{, ]{key}[`}}, ]", CLI_PAGE), key


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{hina_ort.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", ["dynamo", "optimum"])
def test_the_environments_pin_what_the_project_asks_for(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "environments" / f"{extra}.txt").read_text(encoding="utf-8").splitlines()
    pins = {r.name.lower().replace("_", "-"): r for r in map(Requirement, (x for x in lines if not x.startswith("#")))}
    assert str(pins["torch"].specifier) == "==2.13.0+cpu"  # the local version keeps CUDA builds out
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras[extra], *extras["test"]):
        wanted = Requirement(text)
        pinned = str(pins[wanted.name.lower().replace("_", "-")].specifier).removeprefix("==")
        assert wanted.specifier.contains(pinned), text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_holds_both_packages_and_the_library(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"hina_ort-{re.escape(hina_ort.__version__)}-py3-none-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hina_ort", "graph_passes", f"hina_ort-{hina_ort.__version__}.dist-info"}
    for name in ("hina_ort/_lib/libhina_ort.so", "hina_ort/cli.py", "graph_passes/op_schema.py"):
        assert names.count(name) == 1

    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True)
    model = tiny.save_model(tmp_path / "model.onnx")
    # The dependencies of this environment without its .pth files (-S): an editable install would come before the wheel.
    packages = sysconfig.get_paths()["purelib"]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{packages}"}
    for script, arguments in (
        ("import hina_ort; print(hina_ort.get_library_path())", []),
        ("from hina_ort.cli import app; app()", ["convert", model, tmp_path / "fused.onnx", "--check", "1"]),
    ):
        command = [sys.executable, "-S", "-c", script, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert arguments or Path(done.stdout.strip()).is_relative_to(site)
