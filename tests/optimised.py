"""Models as ONNX Runtime saves them once it has optimised them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

LEVELS = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def optimised(model: ir.Model | Path, level: str, folder: Path) -> ir.Model:
    """The model that a session writes with `optimized_model_filepath`, at one of `LEVELS`."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    options.log_severity_level = 3
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    return ir.load(options.optimized_model_filepath)
