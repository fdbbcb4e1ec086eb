"""Models as large as real ones that take hardly any disk: their weights are files of holes with few numbers in them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import DOMAIN, OP_TYPE, OPSET_VERSION
from tests.hina_ort import tiny

PAGE = 4096


def save_model(
    path: Path, layers: int, *, exported: int | None = None, dtype: int = TensorProto.BFLOAT16, **sizes: int
) -> Path:
    """Write a model of `tiny` to `path`, its weights to `<path>_data`; sizes are those of Qwen3-30B-A3B unless given.

    The first `exported` of the layers, all unless given, are as an exporter writes them, the others HinaMoE nodes.
    """
    qwen3 = {"hidden": 2048, "experts": 128, "intermediate": 768, "top_k": 8, "vocabulary": 151936}
    graph = Graph(path.with_name(f"{path.name}_data"), layers if exported is None else exported, dtype, qwen3 | sizes)
    onnx.save(tiny.build(graph, layers=layers), path)
    return path


class Graph(tiny.Graph):
    """Weights in the file `data`: each matrix starts with a page of normal numbers, the rest of it are holes."""

    opsets: ClassVar = tiny.Graph.opsets | {DOMAIN: OPSET_VERSION}

    def __init__(self, data: Path, exported: int, dtype: int, sizes: dict[str, int]) -> None:
        super().__init__(**sizes)
        self.dtype, self.data, self.exported, self.bytes = dtype, data, exported, 0
        data.write_bytes(b"")

    def moe(self, scope: str, x: str, *, known: bool) -> str:
        """A layer, as an exporter writes it or as a HinaMoE node."""
        if self.exported > 0:
            self.exported -= 1
            return super().moe(scope, x, known=known)
        spec = MoeSpec(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_experts=self.experts,
            top_k=self.top_k,
            weight_inputs=("gate_up_proj", "down_proj"),
            norm_topk_prob=True,
        )
        inputs = [x, self.weight(f"{scope}.mlp.gate.weight", self.experts, self.hidden), "", "", "", "", ""]
        inputs.append(self.weight(f"{scope}.gate_up_proj", self.experts, 2 * self.intermediate, self.hidden))
        inputs.append(self.weight(f"{scope}.down_proj", self.experts, self.hidden, self.intermediate))
        return self.node(OP_TYPE, *inputs, scope=scope, domain=DOMAIN, **spec.attributes())

    def weight(self, name: str, *shape: int) -> str:
        """An initializer of this shape, of zeros but for the first numbers of each matrix; the router is dense."""
        item = helper.tensor_dtype_to_np_dtype(self.dtype)
        size = math.prod(shape) * item.itemsize
        matrix = math.prod(shape[-2:]) * item.itemsize
        page = matrix if name.endswith("gate.weight") else min(PAGE, matrix)
        with self.data.open("r+b") as file:
            for start in range(0, size, matrix):
                file.seek(self.bytes + start)
                file.write(self.random.standard_normal(page // item.itemsize, np.float32).astype(item).tobytes())
            file.truncate(self.bytes + size)
        tensor = TensorProto(name=name, dims=shape, data_type=self.dtype, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": self.data.name, "offset": self.bytes, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        self.bytes += -(-size // PAGE) * PAGE
        return name
