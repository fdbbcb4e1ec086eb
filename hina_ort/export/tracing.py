"""A decoder of transformers as an ONNX graph with KV cache, traced without any of its weights.

Parameters are fake tensors: they have shapes and types, and no data. Inputs and outputs are called as optimum calls
them: input_ids, attention_mask, position_ids, past_key_values.N.key and .value; logits, present.N.key and .value.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from hina_ort import __version__
from hina_ort.export import cache, experts
from hina_ort.export.adaptations import adapted
from hina_ort.export.cache import BATCH, SEQUENCE, TOTAL

_SCOPES = "pkg.torch.onnx.name_scopes"


def build(config: Any) -> Any:
    """The language model of `config` without data: its parameters lie on the meta device; buffers are real."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for part in module.modules():
        names = [name for name in part._non_persistent_buffers_set if part._buffers.get(name) is not None]
        for name in names:
            part._buffers[name] = torch.zeros_like(part._buffers[name], device="cpu")
        if names:
            with torch.no_grad():
                module._init_weights(part)  # rotary frequencies are computed of the configuration
    return module.eval().requires_grad_(False)


@dataclass(frozen=True)
class Traced:
    """A graph, and the states that it carries from step to step.

    Its initializers without data are parameters of the module, and have their names; those with data are constants.
    """

    model: ir.Model
    states: list[cache.State]


def has_experts(module: Any) -> bool:
    """Whether `module` has experts that can become HinaMoE nodes."""
    return any(experts.is_experts(part) for part in module.modules())


def trace(module: Any, opset: int) -> Traced:
    """The graph of `module`, which `build` made."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with _quiet(), experts.symbolic(module), adapted(module), torch.no_grad(), _faked(module, mode):
        wrapped = _wrapper(module)
        with mode:
            states = cache.layout(module.config, wrapped(*_tokens(0), [])[1])
        arguments, dynamic = _arguments(states)
        program = torch.export.export(wrapped, arguments, dynamic_shapes=dynamic, strict=False)
        exported = torch.onnx.export(program, args=(), dynamo=True, optimize=False, opset_version=opset, verbose=False)
    assert exported is not None
    model: ir.Model = exported.model
    _name_values(model, states)
    parameters = _take_parameters(model, module)
    _optimise(model, parameters)
    _drop_metadata(model)
    return Traced(model, states)


def _wrapper(module: Any) -> Any:
    """`module` with a flat signature: (input_ids, attention_mask, position_ids, states) -> (logits, states)."""
    import torch

    # transformers 5.24 gives the argument a new name in one model after another.
    argument = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, states: list[Any]) -> Any:
            past = cache.filled(module.config, states)
            result = self.module(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                **{argument: past},
            )
            return result.logits, cache.tensors(past)

    return Flat().eval()


def _tokens(past: int) -> tuple[Any, Any, Any]:
    """Inputs for two sequences of three tokens after `past` others: no sizes are alike, none is 1."""
    import torch

    ids = torch.zeros(2, 3, dtype=torch.int64)
    return ids, torch.ones(2, past + 3, dtype=torch.int64), torch.arange(past, past + 3).expand(2, 3).clone()


def _arguments(states: list[cache.State]) -> tuple[Any, Any]:
    """Example arguments of the wrapper, and which of their axes vary."""
    import torch

    past, vary = 5, torch.export.Dim.DYNAMIC
    tensors = [torch.zeros(state.shape(2, past)) for state in states]
    axes = [{axis: vary for axis in state.dims} for state in states]
    rows = {0: vary, 1: vary}
    return (*_tokens(past), tensors), (rows, rows, rows, axes)


@contextmanager
def _faked(module: Any, mode: Any) -> Iterator[None]:
    """Fake tensors of `mode` in the place of parameters and buffers without data while the body runs."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    before: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, Any] = {}  # tied parameters stay one
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is None or value.device.type != "meta":
                    continue
                before.append((values, name, value))
                if id(value) not in fakes:
                    fake = FakeTensor(mode, value.data, torch.device("cpu"))
                    is_parameter = isinstance(value, torch.nn.Parameter)
                    fakes[id(value)] = torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                values[name] = fakes[id(value)]
    try:
        yield
    finally:
        for values, name, value in before:
            values[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch says about itself from the user."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _name_values(model: ir.Model, states: list[cache.State]) -> None:
    """Give inputs, outputs and their dimensions names, and the model ours as producer."""
    graph = model.graph
    names = ["input_ids", "attention_mask", "position_ids", *(state.past for state in states)]
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name
    for value, name in zip(graph.outputs, ["logits", *(state.present for state in states)], strict=True):
        value.name = name
    dims: list[dict[int, str]] = [{0: BATCH, 1: SEQUENCE}, {1: TOTAL}, {}, *(state.dims for state in states)]
    symbols: dict[str, str] = {}
    for value, axes in zip(graph.inputs, dims, strict=True):
        for axis, name in axes.items():
            if value.shape is not None and isinstance(symbol := value.shape[axis], ir.SymbolicDim):
                symbols.setdefault(str(symbol.value), name)
    for node in graph.all_nodes():
        for value in node.outputs:
            _rename_dims(value, symbols)
    for value in graph.inputs:
        _rename_dims(value, symbols)
    model.producer_name, model.producer_version = "hina-ort", __version__


def _rename_dims(value: ir.Value, symbols: Mapping[str, str]) -> None:
    if value.shape is None:
        return
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            text = symbols.get(dim.value) or re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), dim.value)
            value.shape[axis] = ir.SymbolicDim(text)


def _drop_metadata(model: ir.Model) -> None:
    """Drop stack traces and the like; the modules that nodes come from stay."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        scopes = node.metadata_props.get(_SCOPES)
        node.metadata_props.clear()
        if scopes is not None:
            node.metadata_props[_SCOPES] = scopes
        for value in node.outputs:
            value.metadata_props.clear()


def _take_parameters(model: ir.Model, module: Any) -> list[ir.Value]:
    """Take the fake data of parameters away, and the name of the wrapper; return them."""
    names = {f"module.{name}": name for name in module.state_dict()}
    found = [value for name, value in model.graph.initializers.items() if name in names]
    for value in found:
        model.graph.initializers.pop(str(value.name))
        value.name, value.const_value = names[str(value.name)], None
    return found


def _optimise(model: ir.Model, parameters: list[ir.Value]) -> None:
    """Fold what is constant without parameters; these are inputs meanwhile, so that nothing looks into them.

    The rewriting rules of onnxscript are left out: they take a third of the time, and change nothing that matters here.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    model.graph.inputs.extend(parameters)
    optimizer.inline(model)
    optimizer.fold_constants(model)
    common.RemoveUnusedNodesPass()(model)
    for value in parameters:
        model.graph.inputs.remove(value)
        if value.uses():
            model.graph.initializers[str(value.name)] = value
