"""Judge one export: is it what torch computes, and what does the converter make of it?"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import hina_ort
from graph_passes.accuracy import relative_l2

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

RIGHT = {"float32": 1e-4, "float16": 5e-2, "int4": math.inf}
"""Relative L2 from torch up to which an export counts as right; wrong ones in float32 are off by more than 0.1.

Four bits for a weight change what a small random model computes altogether, so there the export is taken as it is.
"""

TIED_TOKENS = 1 / 32
"""Of a float16 export, the share of tokens that may differ from torch in any way, for each input.

In float16 the scores of two experts may tie, and then a rounding chooses: one token of 33 got another expert, the
others differed by 0.002. An expert that is missing changes a quarter of the tokens of these models.
"""

EQUAL = {"float32": 1e-5, "float16": 2e-2, "int4": 1e-5}
"""Relative L2 from the export up to which a fused model is equal to it."""


def judge(folder: Path) -> dict[str, Any]:
    """Convert FOLDER/model.onnx; what was found, with the largest differences over all inputs (None: cannot run).

    Keys: `export_error` (export and torch), `export_failure` (why it does not run on an input), `fused`, `families`,
    `refused`, `fused_error` (fused model and export), `fused_vs_torch`, `convert_error`.
    """
    source, target = folder / "model.onnx", folder / "converted"
    cases = _cases(folder / "torch.npz")
    sizes = json.loads((folder / "export.json").read_text(encoding="utf-8")).get("sizes", {})
    exported, failure = _run(source, cases, sizes)
    found: dict[str, Any] = {
        "export_error": _worst(exported, cases),
        "export_failure": failure,
        "fused": 0,
        "families": [],
        "refused": [],
    }
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        report = hina_ort.convert(source, target / "model.onnx", partial=True, overwrite=True)
    except Exception as error:  # a crash of the converter is a result, too
        return {**found, "convert_error": f"{type(error).__name__}: {error}"}
    found |= {
        "fused": len(report.fused),
        "families": sorted({block.family for block in report.fused}),
        "refused": [{"node": miss.name, "reason": miss.reason} for miss in report.refused],
        "specs": [block.spec.to_dict() for block in report.fused],
    }
    if report.fused:
        outputs, failure = _run(target / "model.onnx", cases, sizes)
        pairs = [(a, b) for a, b in zip(exported, outputs, strict=True) if a is not None]
        found["fused_error"] = max((_difference(a, b) for a, b in pairs), default=None)
        found["fused_vs_torch"] = _worst(outputs, cases)
        found["fused_failure"] = failure
    shutil.rmtree(target)
    return json.loads(json.dumps(found, default=str))


def _cases(path: Path) -> list[Arrays]:
    arrays = np.load(path)
    cases: dict[str, Arrays] = {}
    for key in arrays.files:
        index, name = key.split("/", 1)
        cases.setdefault(index, {})[name] = arrays[key]
    return list(cases.values())


def _run(model: Path, cases: list[Arrays], sizes: Mapping[str, int]) -> tuple[list[Array | None], str]:
    """The first output for each case, None where ONNX Runtime refuses, and why it first did."""
    outputs: list[Array | None] = []
    failure = ""
    options = hina_ort.session_options()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime have no base class of their own
        return [None for _ in cases], str(error)
    for case in cases:
        try:
            feeds = {item.name: _feed(item, case, sizes) for item in session.get_inputs()}
            outputs.append(session.run([session.get_outputs()[0].name], feeds)[0])
        except Exception as error:  # see above
            failure = failure or str(error)
            outputs.append(None)
    return outputs, failure


def _feed(item: Any, case: Arrays, sizes: Mapping[str, int]) -> npt.NDArray[Any]:
    """An input of `case`, or what goes with it: positions are counted, cached values are none or zeros."""
    if item.name in case:
        return case[item.name]
    batch = next(iter(case.values())).shape[0]
    if "position" in item.name:
        positions = np.arange(case["input_ids"].shape[1])
        leading = (3, batch)[1 - len(item.shape) :]  # Qwen3.5 counts three kinds of positions
        return np.array(np.broadcast_to(positions, (*leading, len(positions))))
    shape = [axis if isinstance(axis, int) else batch if "batch" in axis else sizes.get(axis, 0) for axis in item.shape]
    return np.zeros(shape, np.float16 if item.type == "tensor(float16)" else np.float32)


def _worst(outputs: list[Array | None], cases: list[Arrays]) -> float | None:
    """The largest difference from torch; None when the model could not run on any of the cases."""
    if any(output is None for output in outputs):
        return None
    pairs = [(case["expected"], output) for case, output in zip(cases, outputs, strict=True) if output is not None]
    return max(_difference(*_without_ties(expected, output)) for expected, output in pairs)


def _without_ties(expected: Array, got: Array) -> tuple[Array, Array]:
    """Both, without the tokens that differ most where a tie of float16 may be why: `[tokens, size]`."""
    if expected.dtype != np.float16:
        return expected, got
    expected, got = (array.reshape(-1, array.shape[-1]).astype(np.float32) for array in (expected, got))
    left_out = int(len(expected) * TIED_TOKENS)
    order = np.argsort(np.linalg.norm(got - expected, axis=1))
    kept = order[: len(order) - left_out]
    return expected[kept], got[kept]


def _difference(expected: Array, got: Array | None) -> float:
    if got is None:
        return math.inf
    return relative_l2(expected.astype(np.float32), got.astype(np.float32))
