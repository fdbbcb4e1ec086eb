"""Settings for all tests: no network, and tests of exporters that are not in this environment are left out."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from tests.ops_cpp.amx.environment import AMX_KIND

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_report_header() -> str:
    return f"AMX: {AMX_KIND}"


def _major(package: str) -> int:
    try:
        return int(metadata.version(package).split(".")[0])
    except metadata.PackageNotFoundError:
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = {"optimum": bool(_major("optimum")), "dynamo": _major("transformers") >= 5 and bool(_major("torch"))}
    for item in items:
        for name, present in available.items():
            if item.get_closest_marker(name) and not present:
                item.add_marker(pytest.mark.skip(reason=f"needs the {name} environment, see CONTRIBUTING.md"))
