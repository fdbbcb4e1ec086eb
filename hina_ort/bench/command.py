"""`hina-ort bench layer`: its arguments as words, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hina_ort.bench.options import LayerOptions, parse_peers, parse_shape, parse_tokens
from hina_ort.doctor import usable_cpus
from hina_ort.files import UsageError


def check_files(files: dict[str, Path | None]) -> None:
    """UsageError, by the option's name, for a file that cannot be written."""
    for option, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} names {path}, but there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise UsageError(f"{option} names {path}, which is a folder; name a file")


def run_layer(
    *,
    shape: str,
    tokens: str,
    versus: str,
    threads: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    progress: Any,
    **options: Any,
) -> dict[str, Any]:
    """Run the benchmark and write what was asked for; UsageError for arguments that do not fit."""
    asked = LayerOptions(
        shape=parse_shape(shape),
        tokens=parse_tokens(tokens),
        peers=parse_peers(versus),
        threads=usable_cpus() if threads is None else threads,
        **options,
    )
    check_files({"--json": json_file, "--plot": plot_file})  # what would fail after minutes of measuring
    if plot_file is not None:
        from hina_ort.bench.plot import import_matplotlib

        import_matplotlib()

    from hina_ort.bench.layer import bench_layer

    result = bench_layer(asked, progress)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from hina_ort.bench.plot import plot_layer

        plot_layer(result, plot_file)
    return result
