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
from hina_ort.files import Progress
from hina_ort.genai import axis_sizes
from hina_ort.session import session_options

Array = npt.NDArray[Any]

NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
"""By ONNX Runtime's name of the type of a tensor."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of symbolic axes: sequences, new tokens of each, and cached ones."""

    batch: int
    tokens: int
    past: int

    def of(self, axis: str) -> int | None:
        """The size of an axis by what its name says; None when that is nothing known."""
        words = {"batch": self.batch, "total": self.past + self.tokens, "past": self.past, "sequence": self.tokens}
        return next((size for word, size in words.items() if word in axis), None)


FULL = (
    Sizes(1, 7, 0),
    Sizes(1, 1, 0),
    Sizes(1, 1, 6),
    Sizes(1, 33, 3),
    Sizes(2, 1, 5),
    Sizes(2, 4, 0),
    Sizes(3, 5, 2),
    Sizes(3, 1, 1),
)
"""The runs of a full check: one sequence and more, one token and more, with nothing cached and with something."""

_VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Comparison:
    """One run: the sizes given to symbolic axes, the output that differs most by relative L2 norm, and all outputs."""

    sizes: dict[str, int]
    output: str
    relative_l2: float
    outputs: dict[str, float] = field(default_factory=dict)


def in_words(sizes: Mapping[str, int]) -> str:
    """The sizes of axes, as reports and errors give them."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Skipped:
    """Sizes that could not be compared, because the original model does not run with them, and what it said."""

    sizes: dict[str, int]
    reason: str


class CheckError(Exception):
    """Two models cannot be compared, or differ; the message says where."""


class _RunError(CheckError):
    """ONNX Runtime does not load or run the model `path`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"ONNX Runtime cannot run {path}: {reason}")
        self.path = path


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
            raise _RunError(self.path, str(error).strip()) from error


def _from_ort(value: Any) -> Array:
    if value.element_type() != ir.DataType.BFLOAT16.value:
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    if bits.size:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16)


class _Pair:
    """Two models to be compared, and what their inputs of ids may hold."""

    def __init__(self, original: Path, converted: Path) -> None:
        self.original, self.converted = _Model(original), _Model(converted)
        self._limits = _id_limits(external_data.load(original))
        self._fixed = axis_sizes(original.parent)

    def inputs(self, seed: int, wanted: Sizes | None = None) -> tuple[dict[str, Array], dict[str, int]]:
        """Inputs for both, and the sizes of their symbolic axes."""
        signature = self.original.session.get_inputs()
        return random_inputs(signature, self._limits, np.random.default_rng(seed), wanted, self._fixed)

    def compare(self, inputs: dict[str, Array], sizes: dict[str, int]) -> Comparison:
        """Run both; CheckError when one does not run."""
        names = [output.name for output in self.original.session.get_outputs()]
        pairs = zip(names, self.original.run(names, inputs), self.converted.run(names, inputs), strict=True)
        outputs = {name: relative_l2(a, b) for name, a, b in pairs}
        worst = max(outputs, key=lambda name: outputs[name])
        return Comparison(sizes, worst, outputs[worst], outputs)


def compare_models(original: Path, converted: Path, runs: int, progress: Progress | None = None) -> list[Comparison]:
    """Run both models `runs` times on the same random inputs, batch, past and token counts varied.

    Raises CheckError when ONNX Runtime cannot run a model or an input cannot be made up (unknown type), and
    FileNotFoundError when the compiled library is missing.
    """
    pair, results = _Pair(original, converted), []
    for run in range(runs):
        inputs, sizes = pair.inputs(run)
        try:
            results.append(pair.compare(inputs, sizes))
        except _RunError as error:
            if error.path != original or not sizes:
                raise
            hint = "--check full leaves out what it cannot run with"
            raise CheckError(f"with {in_words(sizes)}, {error}; {hint}") from error
        if progress is not None:
            progress("checking", run + 1, runs)
    return results


def compare_in_full(
    original: Path, converted: Path, progress: Progress | None = None
) -> tuple[list[Comparison], list[Skipped]]:
    """Run both models once with each of the FULL sizes; sizes that `original` itself does not run with are skipped.

    Raises what `compare_models` does, and CheckError when `original` runs with none of them.
    """
    pair, results, skipped = _Pair(original, converted), [], []
    for run, wanted in enumerate(FULL):
        inputs, sizes = pair.inputs(run, wanted)
        try:
            results.append(pair.compare(inputs, sizes))
        except _RunError as error:
            if error.path != original:
                raise
            skipped.append(Skipped(sizes, str(error)))
        if progress is not None:
            progress("checking", run + 1, len(FULL))
    if not results:
        raise CheckError(skipped[0].reason)
    return results, skipped


def random_inputs(
    signature: list[Any],
    limits: Mapping[str, int],
    random: np.random.Generator,
    wanted: Sizes | None = None,
    fixed: Mapping[str, int] | None = None,
) -> tuple[dict[str, Array], dict[str, int]]:
    """Make one set of inputs for `signature` (`InferenceSession.get_inputs()`); return it with the sizes chosen.

    Symbolic axes that share a name share a size, random or as `wanted` or `fixed`; a `total` one is past and new
    tokens, and the first axis of ids, masks and caches is the batch, whatever it is called: exporters may name it anew.
    Integer inputs become token ids below their entry in `limits`, attention masks of ones, or positions that follow the
    cached ones; float inputs are standard normal. Raises CheckError for a type without random values.
    """
    sizes: dict[str, int] = {}
    common = wanted or Sizes(*(int(random.integers(1, high)) for high in (3, 9, 9)))

    def known(axis: str) -> int | None:
        return (fixed or {}).get(axis, common.of(axis))

    def choose(axis: str) -> int:
        size = known(axis)
        return size if size is not None else common.tokens if wanted else int(random.integers(1, 9))

    def choose_first(axis: str) -> int:
        size = known(axis)
        return size if size is not None else common.batch

    shapes = {}
    for arg in signature:
        flat = len(arg.shape) < 2 or (len(arg.shape) == 2 and "float" in arg.type)  # a row of features for each token
        first = choose if flat else choose_first
        shapes[arg.name] = tuple(_size(axis, sizes, choose if index else first) for index, axis in enumerate(arg.shape))
    total = max((shape[-1] for name, shape in shapes.items() if "attention_mask" in name and shape), default=0)
    inputs: dict[str, Array] = {}
    for arg in signature:
        if arg.type not in NUMPY_TYPES:
            raise CheckError(f"input {arg.name} has type {arg.type}, for which no random values can be made")
        shape, dtype = shapes[arg.name], np.dtype(NUMPY_TYPES[arg.type])
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


def _size(axis: int | str | None, sizes: dict[str, int], choose: Callable[[str], int]) -> int:
    """Size of one axis; a name not seen before gets one, an expression such as `past + new` is computed."""
    if isinstance(axis, int):
        return axis
    if axis is None:
        return choose("")
    try:
        tree: ast.expr = ast.parse(axis, mode="eval").body
    except SyntaxError:
        tree = ast.Name(axis)
    return _evaluate(tree, axis, sizes, choose)


def _evaluate(tree: ast.expr, text: str, sizes: dict[str, int], choose: Callable[[str], int]) -> int:
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = (_evaluate(side, text, sizes, choose) for side in (left, right))
            return _OPERATORS[type(op)](one, other)
        case _:
            name = tree.id if isinstance(tree, ast.Name) else text
            if name not in sizes:
                sizes[name] = choose(name)
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
