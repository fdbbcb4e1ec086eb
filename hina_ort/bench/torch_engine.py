"""torch: the experts in a loop or in two grouped products, as transformers runs them, whichever is faster."""

from __future__ import annotations

import importlib
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from hina_ort.bench.engine import Arithmetic, Engine, Unavailable
from hina_ort.bench.inputs import Floats, Inputs
from hina_ort.bench.options import LayerOptions, Shape
from hina_ort.bench.weights import WeightFile, matrices, own_reading

TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def import_torch() -> Any:
    """The package torch; Unavailable, saying what to install, when there is none."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise Unavailable("torch is not installed: pip install torch") from error


def to_torch(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    """The same memory as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def route(torch: Any, logits: Any, top_k: int) -> tuple[Any, Any]:
    """Mixing weights, the softmax over the k largest logits, and their experts, both `[T, k]`."""
    values, ids = torch.topk(logits, top_k, dim=-1, sorted=False)
    return torch.softmax(values, -1), ids


def activate(torch: Any, shape: Shape, gate: Any, up: Any) -> Any:
    """act(gate) * (up + beta)."""
    if not math.isinf(shape.limit):
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    if shape.alpha == 1.0 and shape.beta == 0.0:
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(shape.alpha * gate) * (up + shape.beta)


class TorchBound:
    """Inputs as tensors, and what the engine makes of them."""

    def __init__(self, torch: Any, engine: Any, inputs: Inputs, kind: str) -> None:
        self._engine = engine
        self._outputs: list[Any] = []
        self._x = torch.from_numpy(inputs.x).to(getattr(torch, TYPES[kind]))
        self._logits = [torch.from_numpy(logits) for logits in inputs.logits]

    def run(self) -> None:
        """Compute all layers."""
        self._outputs = [self._engine.compute(i, self._x, logits) for i, logits in enumerate(self._logits)]

    def outputs(self) -> list[Floats]:
        """Results as float32."""
        return [value.float().numpy() for value in self._outputs]


class TorchEngine(Engine):
    """Weights of plain floats, where they lie; activations have their type."""

    name, label, note, extra_bytes = "torch", "torch", "", 0

    def __init__(self, options: LayerOptions) -> None:
        self._torch = import_torch()
        if options.format is not None:
            raise Unavailable(f"torch has no kernel for experts in {options.weights} on CPU")
        self.version = self._torch.__version__
        self.options, self.reading = options, own_reading(options)
        # Rounded to the type: gate, up, silu, the product, down, the mixing weight, weighted, and each partial sum.
        roundings = 0 if options.weights == "f32" else 7 + options.shape.top_k
        self.arithmetic = Arithmetic(options.weights, roundings)
        itemsize = 4 if options.weights == "f32" else 2
        sizes = (options.shape.hidden_size, options.shape.intermediate_size)
        aligned = all(size * itemsize % 16 == 0 for size in sizes)  # grouped_mm wants that of rows
        self._ways = (self._loop, self._grouped) if aligned else (self._loop,)
        self._fastest: dict[int, Any] = {}

    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """Map the weights."""
        self._torch.set_num_threads(self.options.threads)
        self._fields = [
            {m.name: to_torch(self._torch, file.array(f"{layer}.{m.name}")) for m in matrices(self.options.shape)}
            for layer in range(layers)
        ]
        if self.options.shape.shared_gated:
            for layer, fields in enumerate(self._fields):
                fields["gate"] = to_torch(self._torch, file.array(f"{layer}.shared_expert_gate"))

    def bind(self, inputs: Inputs) -> TorchBound:
        """Make tensors; find out which way is faster when the number of tokens is new."""
        bound = TorchBound(self._torch, self, inputs, self.options.weights)
        if inputs.tokens not in self._fastest:
            seconds = {}
            for way in self._ways:
                self._fastest[inputs.tokens] = way
                bound.run()
                start = time.perf_counter()
                bound.run()
                seconds[way] = time.perf_counter() - start
            self._fastest[inputs.tokens] = min(seconds, key=lambda way: seconds[way])
        return bound

    def compute(self, layer: int, x: Any, logits: Any) -> Any:
        """One layer: `[T, H]`."""
        with self._torch.inference_mode():
            fields, way = self._fields[layer], self._fastest[len(x)]
            weights, ids = route(self._torch, logits, self.options.shape.top_k)
            output = way(fields, x, weights.to(x.dtype), ids)
            return output + self._shared(fields, x) if self.options.shape.shared_intermediate_size else output

    def _mlp(self, both: Any) -> Any:
        """Rows of gate and up alternate."""
        return activate(self._torch, self.options.shape, both[..., ::2], both[..., 1::2])

    def _loop(self, fields: dict[str, Any], x: Any, weights: Any, ids: Any) -> Any:
        linear, output = self._torch.nn.functional.linear, self._torch.zeros_like(x)
        for expert in self._torch.unique(ids).tolist():
            tokens, slots = self._torch.where(ids == expert)
            hidden = self._mlp(linear(x[tokens], fields["gate_up_proj"][expert]))
            result = linear(hidden, fields["down_proj"][expert]) * weights[tokens, slots, None]
            output.index_add_(0, tokens, result)
        return output

    def _grouped(self, fields: dict[str, Any], x: Any, weights: Any, ids: Any) -> Any:
        torch = self._torch
        order = torch.argsort(ids.flatten())
        tokens = order // ids.shape[1]
        counts = torch.bincount(ids.flatten(), minlength=self.options.shape.num_experts)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        product = torch.nn.functional.grouped_mm
        hidden = self._mlp(product(x[tokens], fields["gate_up_proj"].transpose(1, 2), offs=ends))
        result = product(hidden, fields["down_proj"].transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, tokens, result * weights.flatten()[order, None])

    def _shared(self, fields: dict[str, Any], x: Any) -> Any:
        linear = self._torch.nn.functional.linear
        gate, up = linear(x, fields["shared_gate_proj"]), linear(x, fields["shared_up_proj"])
        result = linear(activate(self._torch, self.options.shape, gate, up), fields["shared_down_proj"])
        if self.options.shape.shared_gated:
            result = result * self._torch.sigmoid(linear(x, fields["gate"].to(x.dtype)))
        return result
