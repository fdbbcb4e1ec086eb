"""Run two models on the same random inputs in ONNX Runtime and compare every output."""

from __future__ import annotations

import ast
import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes import external_data
from graph_passes.accuracy import relative_l2
from graph_passes.cut import to_ort
from hina_ort.session import session_options

Array = npt.NDArray[Any]

_NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Comparison:
    """One run: the sizes given to symbolic axes, the output that differs most by relative L2 norm, and all outputs."""

    sizes: dict[str, int]
    output: str
    relative_l2: float
    outputs: dict[str, float] = field(default_factory=dict)


class CheckError(Exception):
    """Two models cannot be compared, or differ; the message says where."""


class _Model:
    """A model in ONNX Runtime; whatever goes wrong there is a CheckError that names the file."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.path = path
        options = session_options()
        with self._clear_errors():
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, names: list[str], inputs: dict[str, Array]) -> list[Array]:
        with self._clear_errors():
            values = {name: to_ort(value) for name, value in inputs.items()}
            return [_from_ort(value) for value in self.session.run_with_ort_values(names, values)]

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the exceptions of ONNX Runtime have no base class of their own
            raise CheckError(f"ONNX Runtime cannot run {self.path}: {error}") from error


def _from_ort(value: Any) -> Array:
    if value.element_type() != ir.DataType.BFLOAT16.value:
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    if bits.size:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16)


def compare_models(
    original: Path, fused: Path, runs: int, progress: Callable[[str, int, int], None] | None = None
) -> list[Comparison]:
    """Run both models `runs` times on the same random inputs, batch, past and token counts varied.

    Raises CheckError when ONNX Runtime cannot run a model or an input cannot be made up (unknown type), and
    FileNotFoundError when the compiled library is missing.
    """
    one, other = _Model(original), _Model(fused)
    limits = _id_limits(external_data.load(original))
    results = []
    for run in range(runs):
        random = np.random.default_rng(run)
        inputs, sizes = random_inputs(one.session.get_inputs(), limits, random)
        names = [output.name for output in one.session.get_outputs()]
        pairs = zip(names, one.run(names, inputs), other.run(names, inputs), strict=True)
        outputs = {name: relative_l2(a, b) for name, a, b in pairs}
        worst = max(outputs, key=lambda name: outputs[name])
        results.append(Comparison(sizes, worst, outputs[worst], outputs))
        if progress is not None:
            progress("checking", run + 1, runs)
    return results


def random_inputs(
    signature: list[Any], limits: Mapping[str, int], random: np.random.Generator
) -> tuple[dict[str, Array], dict[str, int]]:
    """Make one set of inputs for `signature` (`InferenceSession.get_inputs()`); return it with the sizes chosen.

    Symbolic axes that share a name share a size. Integer inputs become token ids below their entry in `limits`,
    attention masks of ones, or positions that follow the cached ones; float inputs are standard normal. Raises
    CheckError for a type without random values.
    """
    sizes: dict[str, int] = {}
    shapes = {arg.name: tuple(_size(axis, sizes, random) for axis in arg.shape) for arg in signature}
    total = max((shape[-1] for name, shape in shapes.items() if "attention_mask" in name and shape), default=0)
    inputs: dict[str, Array] = {}
    for arg in signature:
        if arg.type not in _NUMPY_TYPES:
            raise CheckError(f"input {arg.name} has type {arg.type}, for which no random values can be made")
        shape, dtype = shapes[arg.name], np.dtype(_NUMPY_TYPES[arg.type])
        if dtype == np.bool_ or "mask" in arg.name:
            values: Array = np.ones(shape)
        elif dtype.kind in "iu" and "position" in arg.name:
            length = shape[-1] if shape else 1
            values = np.broadcast_to(np.arange(length) + max(total - length, 0), shape)
        elif dtype.kind in "iu":
            values = random.integers(0, limits.get(arg.name, 2), shape)
        else:
            values = random.standard_normal(shape)
        inputs[arg.name] = np.array(values, dtype, order="C")
    return inputs, sizes


def _size(axis: int | str | None, sizes: dict[str, int], random: np.random.Generator) -> int:
    """Size of one axis; a name not seen before gets one, an expression such as `past + new` is computed."""
    if isinstance(axis, int):
        return axis
    if axis is None:
        return int(random.integers(1, 4))
    try:
        tree: ast.expr = ast.parse(axis, mode="eval").body
    except SyntaxError:
        tree = ast.Name(axis)
    return _evaluate(tree, axis, sizes, random)


def _evaluate(tree: ast.expr, text: str, sizes: dict[str, int], random: np.random.Generator) -> int:
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = (_evaluate(side, text, sizes, random) for side in (left, right))
            return _OPERATORS[type(op)](one, other)
        case _:
            name = tree.id if isinstance(tree, ast.Name) else text
            if name not in sizes:
                sizes[name] = int(random.integers(1, 3 if "batch" in name else 9))
            return sizes[name]


def _id_limits(model: ir.Model) -> dict[str, int]:
    """For each input that a Gather uses to look up rows of an initializer: the number of rows."""
    limits: dict[str, int] = {}
    for value in model.graph.inputs:
        pending = [value]
        while pending:
            for node, index in pending.pop().uses():
                table = node.inputs[0]
                if node.op_type in _VIEWS and index == 0:
                    pending.append(node.outputs[0])
                elif node.op_type == "Gather" and index == 1 and table is not None and table.const_value is not None:
                    rows = int(table.const_value.shape.numpy()[0])
                    limits[str(value.name)] = min(rows, limits.get(str(value.name), rows))
    return limits
