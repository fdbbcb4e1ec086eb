"""`hina-ort doctor`: keys, problems, and the limits of containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
from typer.testing import CliRunner

import hina_ort
from hina_ort import doctor, runtime
from hina_ort.cli import app
from tests.ops_cpp.amx.environment import NATIVE, amx_environment, needs_amx


def test_json_has_everything() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["problems"] == []
    assert found["version"] == found["library"]["version"] == hina_ort.__version__
    assert Path(found["library"]["path"]).is_file()
    assert found["onnxruntime"]["version"] == onnxruntime.__version__
    assert found["onnxruntime"]["packages"]["onnxruntime"] == onnxruntime.__version__
    assert found["onnxruntime"]["registers"] is True
    assert found["onnxruntime"]["api_version"] >= found["cpu"]["minimum_ort_api"]
    assert found["cpu"] == json.loads(json.dumps(hina_ort.cpu_info()))
    assert 1 <= found["threads"]["usable"] <= len(found["threads"]["affinity"]) <= found["threads"]["cpus"]
    assert set(found["container"]) == {"cgroup", "cpus", "memory_bytes"}
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


def test_the_table_names_the_instruction_set_and_why() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    info = hina_ort.cpu_info()
    assert result.exit_code == 0
    assert f"{info['isa']}: {info['isa_reason']}" in result.stdout
    assert onnxruntime.__version__ in result.stdout


@pytest.mark.parametrize("cap", ["", "avx2"])
def test_amx_is_on_or_the_reason_is_told(cap: str) -> None:
    environment = {"COLUMNS": "200", "HINA_ISA": cap}
    cpu = json.loads(CliRunner().invoke(app, ["doctor", "--json"], env=environment).stdout)["cpu"]
    assert cpu["amx"] == (NATIVE and not cap)
    assert cpu["amx_reason"] == "HINA_ISA=avx2 caps the choice" if cap else cpu["amx_reason"]
    row = f"{'on' if cpu['amx'] else 'off'}: {cpu['amx_reason']}"
    table = CliRunner().invoke(app, ["doctor"], env=environment).stdout
    assert any("AMX " in line and row in line for line in table.splitlines()), table


@needs_amx
@pytest.mark.parametrize(
    ("refused", "row"), [("", "on: AMX is emulated"), ("1", "off: the kernel refused permission for tiles")]
)
def test_amx_that_is_emulated_or_refused(refused: str, row: str) -> None:
    environment = os.environ | amx_environment("emulated") | {"COLUMNS": "200"}
    if refused:
        environment["AMX_EMULATOR_REFUSE"] = refused
    command = [sys.executable, "-c", "from hina_ort.cli import app; app()", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert row in done.stdout, done


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LIBRARY_NAME", "libnot_there.so")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert len(found["problems"]) == 1 and "make library" in found["problems"][0]
    assert found["library"]["path"] is None and found["cpu"] is None and found["onnxruntime"]["registers"] is False
    table = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert table.exit_code == 1 and "make library" in table.stdout


def test_a_library_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__version__", "9.9.9")
    problems = doctor.diagnose()["problems"]
    assert len(problems) == 1 and "9.9.9" in problems[0] and hina_ort.__version__ in problems[0]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_cgroup_v2_are_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "sys"
    write(membership, "0::/pod/container\n")
    write(mount / "cgroup.controllers", "cpu memory\n")
    write(mount / "pod/cpu.max", "150000 100000\n")
    write(mount / "pod/memory.max", "max\n")
    write(mount / "pod/container/cpu.max", "max 100000\n")
    write(mount / "pod/container/memory.max", "1073741824\n")
    assert doctor.container_limits(membership, mount) == {"cgroup": 2, "cpus": 1.5, "memory_bytes": 1 << 30}


def test_limits_of_cgroup_v1(tmp_path: Path) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "sys"
    write(membership, "5:memory:/box\n4:cpu,cpuacct:/box\n")
    write(mount / "cpu/box/cpu.cfs_quota_us", "50000\n")
    write(mount / "cpu/box/cpu.cfs_period_us", "100000\n")
    write(mount / "cpu/cpu.cfs_quota_us", "-1\n")
    write(mount / "cpu/cpu.cfs_period_us", "100000\n")
    write(mount / "memory/box/memory.limit_in_bytes", "536870912\n")
    write(mount / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert doctor.container_limits(membership, mount) == {"cgroup": 1, "cpus": 0.5, "memory_bytes": 1 << 29}


def test_no_limits(tmp_path: Path) -> None:
    unlimited = {"cpus": None, "memory_bytes": None}
    assert doctor.container_limits(tmp_path / "no", tmp_path / "nowhere") == {"cgroup": None, **unlimited}
    write(tmp_path / "cgroup", "0::/\n")
    write(tmp_path / "sys/cgroup.controllers", "\n")
    assert doctor.container_limits(tmp_path / "cgroup", tmp_path / "sys") == {"cgroup": 2, **unlimited}
