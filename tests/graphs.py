"""Graphs for tests: small ones from text, any of them run in ONNX Runtime and compared with the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from graph_passes import reference
from graph_passes.accuracy import relative_l2
from graph_passes.matchers import MATCHERS, Miss, MoeMatch, WeightSource
from graph_passes.normalize import normalize
from graph_passes.pipeline import fuse_model

Arrays = dict[str, np.ndarray]


def parse(text: str, initializers: Mapping[str, np.ndarray], *, opset: int = 20) -> ir.Model:
    """A model from ONNX text (`(inputs) => (outputs) { nodes }`) whose names in `initializers` are constants.

    Shapes are inferred; initializers that the text does not use are left out.
    """
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\ntest {text}')
    used = {name for node in proto.graph.node for name in node.input}
    for name, array in initializers.items():
        if name in used:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    proto = onnx.shape_inference.infer_shapes(proto)
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{index}"
    return ir.from_proto(proto)


def replaced(text: str, *replacements: tuple[str, str]) -> str:
    """`text` with its parts replaced; each replacement must change something."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Parts:
    """A graph from `x` `[T, hidden]` to `y` of the same shape, in `texts` each of which may be spelled otherwise."""

    texts: Mapping[str, str]
    constants: Mapping[str, np.ndarray]
    hidden: int

    def block(self, outputs: str = "", **parts: str) -> ir.Model:
        """The whole graph, with some of its parts spelled otherwise."""
        assert parts.keys() <= self.texts.keys()
        nodes, outputs = " ".join({**self.texts, **parts}.values()), outputs or f"float[T, {self.hidden}] y"
        return parse(f"(float[T, {self.hidden}] x) => ({outputs}) {{ {nodes} }}", self.constants)

    def changed(self, part: str, *replacements: tuple[str, str]) -> dict[str, str]:
        """A part with its text changed; each change must change something."""
        return {part: replaced(self.texts[part], *replacements)}


def check_fused(model: ir.Model, family: str) -> None:
    """The model, a block of `family` and nothing else, is proven and becomes one node."""
    report = fuse_model(model)
    assert report.refused == []
    assert [block.family for block in report.fused] == [family]
    assert [node.op_type for node in model.graph] == ["HinaMoE"]


def copy_of(model: ir.Model) -> ir.Model:
    """A copy of the graph; tensors are shared."""
    return ir.from_proto(ir.to_proto(model))


def run_original(
    model: Path | ir.Model,
    feeds: np.ndarray | Mapping[str, np.ndarray],
    values: Sequence[str] = (),
    options: ort.SessionOptions | None = None,
) -> list[np.ndarray]:
    """Run a model as ONNX Runtime runs it by default; return its outputs, or those of its inner values `values`.

    `feeds` may be one array, for a model with one input. `options` are for models with custom operators.
    """
    source = ir.load(model) if isinstance(model, Path) else copy_of(model)
    inputs = feeds if isinstance(feeds, Mapping) else {str(source.graph.inputs[0].name): feeds}
    named = {v.name: v for node in source.graph for v in node.outputs}
    if values:
        source.graph.outputs.clear()
        source.graph.outputs.extend(named[name] for name in dict.fromkeys(values) if name not in inputs)
    options = options or ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(ir.to_proto(source).SerializeToString(), options, ["CPUExecutionProvider"])
    wanted = [output.name for output in session.get_outputs()]
    found = dict(zip(wanted, session.run(wanted, {i.name: inputs[i.name] for i in session.get_inputs()}), strict=True))
    return [inputs[name] if name in inputs else found[name] for name in values or wanted]


def find(model: ir.Model) -> list[MoeMatch | Miss]:
    """Normalise the model in place and run every matcher on it."""
    normalize(model)
    return [result for matcher in MATCHERS for result in matcher(model.graph)]


def only_match(model: ir.Model) -> MoeMatch:
    """The one match in the model, which must hold no miss."""
    results = find(model)
    assert len(results) == 1 and isinstance(results[0], MoeMatch), results
    return results[0]


def only_miss(model: ir.Model) -> Miss:
    """The one miss in the model, which must hold no match."""
    results = find(model)
    assert len(results) == 1 and isinstance(results[0], Miss), results
    return results[0]


def array_of(source: WeightSource) -> np.ndarray:
    """The tensor that the op would read."""
    return np.asarray(source.tensor().numpy())


def check_match(model: ir.Model, family: str, expected: Mapping[str, Any]) -> None:
    """The model of `Parts` is one block of the family, with these MoeSpec fields, and the match is right."""
    match = only_match(model)
    assert match.family == family
    for tokens in (1, 23):
        x = np.random.default_rng(tokens).standard_normal((tokens, match.spec.hidden_size)).astype(np.float32)
        assert compare(model, match, x) < 1e-5
    assert {name: getattr(match.spec, name) for name in expected} == expected


def compare(model: ir.Model, match: MoeMatch, feeds: np.ndarray | Mapping[str, np.ndarray]) -> float:
    """Relative L2 distance of match.output, as the graph computes it, from the float64 reference of the match."""
    names = [match.hidden_states.name, match.output.name, *(v.name for v in match.inputs.values())]
    hidden_states, output, *rest = run_original(model, feeds, [str(name) for name in names])
    arguments: dict[str, Any] = dict(zip(match.inputs, rest, strict=True))
    arguments |= {name: array_of(source) for name, source in match.constants.items()}
    weights = {
        name: np.stack([array_of(s) for s in sources]) if len(sources) > 1 else array_of(sources[0])
        for name, sources in match.weights.items()
    }
    expected, _ = reference.hina_moe(match.spec, hidden_states, weights, **arguments)
    assert output.shape == hidden_states.shape
    return relative_l2(expected, output.astype(np.float64))
