"""Cut one block out of a model and run it alone in ONNX Runtime.

The cut starts at the inputs of a MoeMatch and ends at its output. Large weights become inputs of the cut, so that they
are read where they are mapped; only what the block itself makes of them is copied (a gather of each token's experts,
say). Values outside the block of which only the shape is read (sequence lengths taken from the token ids, say) become
inputs too, and are fed with zeros of a fitting shape. ONNX Runtime has few bfloat16 kernels on CPU, so a block in
bfloat16 runs in float32; its weights are widened where they are used.

Quantised weights are inputs whatever their size: com.microsoft::QMoE rounds its activations to int8 only where it could
pack constant weights, so what runs here is what the block means, and no bound has to allow for a kernel's rounding.
A block with a MoE node that has no CPU kernel is evaluated in numpy instead, see `contrib_moe`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir import serde

from graph_passes import contrib_moe
from graph_passes.external_data import EXTERNAL_BYTES, release
from graph_passes.matchers.match import MoeMatch
from graph_passes.moe_spec import split_field

BATCH = 3
"""A run whose number of tokens is a multiple of this is a batch of so many sequences."""

_OUTSIDE_STEPS = 64
"""How far back a value of which only the shape is read is followed to see whether it belongs to the block."""

_GATHERS = ("Gather", "GatherND")

Feeds = Mapping[ir.Value, npt.NDArray[Any]]


class CutError(Exception):
    """The block cannot be cut out or run; the message says why."""


class Cut:
    """A block that runs alone: see the module docstring.

    `dtype` is the type of hidden_states in the cut. Raises CutError when the block depends on a value that the match
    does not name, or when ONNX Runtime refuses it.
    """

    def __init__(self, model: ir.Model, match: MoeMatch) -> None:
        self._match = match
        self.dtype = _widened(match.hidden_states.dtype or match.output.dtype or _weight_dtype(match))
        sources = [match.hidden_states, *match.inputs.values()]
        nodes, self._shape_only = _collect(match.output, sources)
        used = {v: None for node in nodes for v in _read_by(node) if v.const_value is not None and v.is_initializer()}
        fed = {source.value for source in match.constants.values()} | _quantised(match)
        self._weights = [v for v in used if v in fed or _is_large(v)]
        inputs = [*sources, *self._shape_only, *self._weights]
        view = ir.GraphView(
            inputs,
            [match.output],
            nodes=nodes,
            initializers=[v for v in used if v not in self._weights],
            opset_imports=model.graph.opset_imports,
            name="block",
        )
        graph = view.clone()
        self._names = {value: f"in{index}" for index, value in enumerate(inputs)}
        for value, clone in zip(inputs, graph.inputs, strict=True):
            clone.const_value = None
            clone.name = self._names[value]
            clone.type = ir.TensorType(self._dtype(value))
            clone.shape = None
        graph.outputs[0].name = "out"
        graph.outputs[0].type, graph.outputs[0].shape = ir.TensorType(self.dtype), None
        _read_files(graph)
        _widen(graph)
        for clone in graph.inputs:
            if clone.dtype == ir.DataType.BFLOAT16:
                _widen_uses(clone)
        block = ir.Model(graph, ir_version=min(model.ir_version, 10))
        runs = all(contrib_moe.runs_on_cpu(node) for node in nodes if contrib_moe.is_contrib_moe(node))
        self._compute = _onnx_runtime(_session(block)) if runs else contrib_moe.evaluator(block)

    def run(self, feeds: Feeds, tokens: int) -> npt.NDArray[Any]:
        """Run on `feeds` (one row per token) and return the block's output, shaped as hidden_states.

        `feeds` may also hold initializers, to be used in place of what they contain. Raises CutError when the block
        fails, when a value cannot have the shape it is fed with, or when the output has another shape.
        """
        hidden = self._match.hidden_states
        leading = _leading_shape(hidden.shape, tokens)
        known = _symbols(hidden.shape, leading)
        named: dict[str, npt.NDArray[Any]] = {}
        for value in (hidden, *self._match.inputs.values()):
            shape = leading if value.shape is not None and len(value.shape) == len(leading) + 1 else (tokens,)
            shape = leading if value is hidden else shape
            rows = feeds[value].reshape(*shape, feeds[value].shape[-1])
            if _contradicts(value, rows, hidden):
                raise CutError(f"{value.name} is {_shown(value.shape)}, and would be read as {list(rows.shape)}")
            named[self._names[value]] = rows.astype(self._dtype(value).numpy(), copy=False)
        for value in self._shape_only:
            named[self._names[value]] = np.zeros(_guess_shape(value, leading, known), self._dtype(value).numpy())
        for value in self._weights:
            assert value.const_value is not None
            named[self._names[value]] = feeds[value] if value in feeds else value.const_value.numpy()
        expected = named[self._names[hidden]].shape
        try:
            output = self._compute(named)
        except Exception as error:  # ONNX Runtime has no base class for its errors
            raise CutError(_first_line(error)) from error
        named.clear()
        for value in self._weights:
            release(value.const_value)
        if output.shape != expected:
            raise CutError(f"its output is {list(output.shape)} for hidden states {list(expected)}")
        return output

    def _dtype(self, value: ir.Value) -> ir.DataType:
        if value in self._weights:
            assert value.const_value is not None
            return value.const_value.dtype
        if value is self._match.inputs.get("topk_ids"):
            return value.dtype or ir.DataType.INT64
        return _widened(value.dtype or self.dtype)


def to_ort(array: npt.NDArray[Any]) -> ort.OrtValue:
    """An OrtValue on the memory of `array`; ONNX Runtime knows bfloat16 only as the bits of it."""
    if array.dtype == ir.DataType.BFLOAT16.numpy():
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ir.DataType.BFLOAT16.value)
    return ort.OrtValue.ortvalue_from_numpy(array)


def block_values(match: MoeMatch) -> set[ir.Value]:
    """Values that the block of `match` computes from its inputs, its output among them."""
    boundary = {match.hidden_states, *match.inputs.values()}
    return _between(boundary, _ancestors(match.output, boundary)) - boundary


def _widened(dtype: ir.DataType) -> ir.DataType:
    return ir.DataType.FLOAT if dtype == ir.DataType.BFLOAT16 else dtype


def _read_files(graph: ir.Graph) -> None:
    """Take the initializers of `graph` into memory: it will be run from no folder."""
    for value in graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)


def _widen(graph: ir.Graph) -> None:
    """Turn every bfloat16 of `graph` into float32."""
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == ir.DataType.BFLOAT16:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if (
                attribute.type == ir.AttributeType.INT
                and name in ("to", "dtype")
                and attribute.as_int() == ir.DataType.BFLOAT16
            ):
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.BFLOAT16:
                tensor = ir.Tensor(attribute.as_tensor().numpy().astype(np.float32))
                node.attributes[name] = ir.AttrTensor(name, tensor)
    for value in [v for node in graph.all_nodes() for v in node.outputs] + list(graph.initializers.values()):
        if value.dtype == ir.DataType.BFLOAT16:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_uses(value: ir.Value) -> None:
    """Let each use of the bfloat16 `value` see float32: what a Gather takes of it is cast, else all of it."""
    for node, index in list(value.uses()):
        assert node.graph is not None
        if node.op_type in _GATHERS and index == 0:
            taken = node.outputs[0]
            users = list(taken.uses())
            cast = _cast_of(taken)
            node.graph.insert_after(node, cast)
            taken.type = ir.TensorType(ir.DataType.BFLOAT16)
            for user, place in users:
                user.replace_input_with(place, cast.outputs[0])
        else:
            cast = _cast_of(value)
            node.graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])


def _cast_of(value: ir.Value) -> ir.Node:
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(ir.DataType.FLOAT))], num_outputs=1)


def _weight_dtype(match: MoeMatch) -> ir.DataType:
    return next(sources[0].dtype for sources in match.weights.values())


def _quantised(match: MoeMatch) -> set[ir.Value]:
    """The initializers of quantised projections, codes, scales and zero points, of types that NumPy knows."""
    formats = match.spec.formats
    sources = (s for name, each in match.weights.items() if split_field(name)[0] in formats for s in each)
    return {s.value for s in sources if s.stored.dtype not in (ir.DataType.INT4, ir.DataType.UINT4)}


def _is_large(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.nbytes >= EXTERNAL_BYTES and tensor.dtype.is_floating_point()


def _read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Values the node reads: its inputs, and those its subgraphs take from outside."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        graphs: Sequence[ir.Graph] = ()
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = (attribute.as_graph(),)
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = attribute.as_graphs()
        for graph in graphs:
            inner = list(graph.all_nodes())
            own = {value for n in inner for value in n.outputs} | set(graph.inputs) | set(graph.initializers.values())
            yield from (v for n in inner for v in n.inputs if v is not None and v not in own)


def _collect(output: ir.Value, sources: Sequence[ir.Value]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Nodes between `sources` and `output` in topological order, and the outside values only Shape nodes read."""
    boundary = set(sources)
    inside = _between(boundary, _ancestors(output, boundary))
    outside: dict[ir.Value, None] = {}
    ordered: list[ir.Node] = []
    entered: set[ir.Node] = set()
    done: set[ir.Node] = set()
    start = output.producer()
    pending = [start] if start is not None else []
    while pending:
        node = pending[-1]
        if node in done:
            pending.pop()
            continue
        missing = []
        for value in _read_by(node) if node not in entered else ():
            if value in boundary or value in outside or value.is_initializer():
                continue
            if node.op_type == "Shape" and not _reaches(value, inside):
                outside[value] = None
                continue
            producer = value.producer()
            if producer is None:
                raise CutError(f"it reads {value.name}, which has no place in the pattern; report this model")
            missing.append(producer)
        entered.add(node)
        waiting = [producer for producer in missing if producer not in done]
        pending.extend(waiting)
        if not waiting:
            done.add(node)
            ordered.append(node)
            pending.pop()
    return ordered, list(outside)


def _ancestors(output: ir.Value, boundary: set[ir.Value]) -> set[ir.Value]:
    """Values that `output` is computed from without going through Shape nodes."""
    found: set[ir.Value] = set()
    pending = [output]
    while pending:
        value = pending.pop()
        if value in found or value in boundary:
            continue
        found.add(value)
        node = value.producer()
        if node is not None and node.op_type != "Shape":
            pending.extend(_read_by(node))
    return found


def _between(boundary: set[ir.Value], ancestors: set[ir.Value]) -> set[ir.Value]:
    """`boundary` and the values among `ancestors` that are computed from it."""
    found: set[ir.Value] = set()
    pending = list(boundary)
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            pending.extend(v for node in value.consumers() for v in node.outputs if v in ancestors)
    return found


def _reaches(value: ir.Value, inside: set[ir.Value]) -> bool:
    """Whether `value` belongs to the block: it is computed from a value `inside` it within a few steps."""
    seen: set[ir.Value] = set()
    pending = deque([value])
    while pending and len(seen) < _OUTSIDE_STEPS:
        current = pending.popleft()
        if current in inside:
            return True
        node = current.producer()
        if current not in seen and node is not None:
            pending.extend(_read_by(node))
        seen.add(current)
    return False


def _contradicts(value: ir.Value, rows: npt.NDArray[Any], hidden: ir.Value) -> bool:
    """Whether `value` is known to have another shape than `rows`.

    Token axes that hidden_states fixes as well are not compared: the probe varies them all the same.
    """
    if value.shape is None:
        return False
    if len(value.shape) != rows.ndim:
        return True
    *leading, last = value.shape
    if isinstance(last, int) and last != rows.shape[-1]:
        return True
    fixed = [] if hidden.shape is None else list(hidden.shape)[:-1]
    if fixed and all(isinstance(d, int) for d in fixed):
        return False
    same_rank = len(fixed) == len(leading)
    return any(
        isinstance(d, int) and d != size and not (same_rank and fixed[axis] == d)
        for axis, (d, size) in enumerate(zip(leading, rows.shape, strict=False))
    )


def _shown(shape: ir.Shape | None) -> str:
    return "of unknown shape" if shape is None else f"[{', '.join(str(d) for d in shape)}]"


def _leading_shape(shape: ir.Shape | None, tokens: int) -> tuple[int, ...]:
    """Token axes of hidden_states for `tokens` tokens: [1, T], a real batch where it divides, or what is fixed."""
    axes = 2 if shape is None else len(shape) - 1
    if axes <= 1:
        return (tokens,)
    last = None if shape is None or isinstance(shape[0], int) else shape[axes - 1]
    if isinstance(last, int) and last > 0 and tokens % last == 0:  # as one token for each sequence, in a decoder's step
        return (tokens // last, *([1] * (axes - 2)), last)
    batch = BATCH if tokens % BATCH == 0 else 1
    if shape is not None and isinstance(shape[0], int) and shape[0] > 0:
        batch = shape[0] if tokens % shape[0] == 0 else 1
    return (batch, *([1] * (axes - 2)), tokens // batch)


def _symbols(shape: ir.Shape | None, leading: Sequence[int]) -> dict[str, int]:
    """Sizes of the named axes of hidden_states."""
    if shape is None:
        return {}
    return {d.value: size for d, size in zip(shape, leading, strict=False) if isinstance(d, ir.SymbolicDim) and d.value}


def _guess_shape(value: ir.Value, leading: Sequence[int], known: Mapping[str, int]) -> tuple[int, ...]:
    """A shape for an outside value: named axes as in hidden_states, others by their place."""
    if value.shape is None:
        return (*leading, 1)
    sizes = []
    if len(value.shape) <= len(leading) and isinstance(value.shape[-1], int):  # one row for each token
        leading = (math.prod(leading),)
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, int):
            sizes.append(dim)
        else:
            sizes.append(known.get(dim.value or "", leading[axis] if axis < len(leading) else 1))
    return tuple(sizes)


def _session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # it would grow to twice what the largest run needs, and keep it
    try:
        data = serde.serialize_model(model).SerializeToString()
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no base class for its errors
        raise CutError(f"ONNX Runtime does not load it: {_first_line(error)}") from error


def _onnx_runtime(session: ort.InferenceSession) -> Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[Any]]:
    def compute(inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        (result,) = session.run_with_ort_values(["out"], {name: to_ort(a) for name, a in inputs.items()})
        output: npt.NDArray[Any] = result.numpy()
        return output

    return compute


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
