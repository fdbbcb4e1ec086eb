"""Tiny whole models with MoE layers as torch.onnx writes them (batched_mm), built by hand: no torch is needed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 40, 16, 12, 4, 2


def save_model(
    path: Path,
    *,
    layers: int = 2,
    unknown_layers: tuple[int, ...] = (),
    dense: bool = False,
    hidden: int = HIDDEN,
    experts: int = EXPERTS,
    external: bool = False,
) -> Path:
    """Write a model token ids -> logits with `layers` MoE layers to `path`.

    Experts of `unknown_layers` have an activation that HinaMoE does not know. `dense` leaves the MoE layers out.
    With `external` the weights lie in `<path>_data`.
    """
    graph = Graph(hidden, experts)
    model = build(graph, layers=layers, unknown_layers=unknown_layers, dense=dense)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}_data")
    else:
        onnx.save(model, path)
    return path


def build(graph: Graph, *, layers: int, unknown_layers: tuple[int, ...] = (), dense: bool = False) -> onnx.ModelProto:
    """The model of `save_model`, its weights made by `graph`."""
    value = graph.node("Gather", graph.weight("embed_tokens.weight", graph.vocabulary, graph.hidden), "input_ids")
    for layer in range(layers):
        name = f"model.layers.{layer}"
        block = graph.mlp(name, value) if dense else graph.moe(name, value, known=layer not in unknown_layers)
        value = graph.node("Add", value, block)
    graph.node("MatMul", value, graph.weight("lm_head.weight", graph.hidden, graph.vocabulary), output="logits")
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "tiny",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
            [helper.make_tensor_value_info("logits", graph.dtype, ["batch", "sequence", graph.vocabulary])],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()],
        ir_version=10,
    )
    return onnx.shape_inference.infer_shapes(model)


class Graph:
    """Nodes and weights of a model that `build` makes; a subclass may have weights of its own kind."""

    dtype = TensorProto.FLOAT
    opsets: ClassVar = {"": 18}

    def __init__(
        self,
        hidden: int = HIDDEN,
        experts: int = EXPERTS,
        intermediate: int = INTERMEDIATE,
        top_k: int = TOP_K,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.hidden, self.experts, self.intermediate = hidden, experts, intermediate
        self.top_k, self.vocabulary = top_k, vocabulary
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        values = self.random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        name = f"ints_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def node(self, op: str, *inputs: str, output: str = "", scope: str = "", **attributes: object) -> str:
        return self.nodes_of(op, *inputs, outputs=(output or f"v{len(self.nodes)}",), scope=scope, **attributes)[0]

    def nodes_of(
        self, op: str, *inputs: str, outputs: tuple[str, ...], scope: str = "", **attributes: object
    ) -> tuple[str, ...]:
        node = helper.make_node(op, inputs, outputs, name=f"{scope}/{op}_{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return outputs

    def mlp(self, scope: str, x: str) -> str:
        up = self.node("MatMul", x, self.weight(f"{scope}.up", self.hidden, self.intermediate), scope=scope)
        return self.node("MatMul", self.node("Relu", up), self.weight(f"{scope}.down", self.intermediate, self.hidden))

    def moe(self, scope: str, x: str, *, known: bool) -> str:
        def node(op: str, *inputs: str, **attributes: object) -> str:
            return self.node(op, *inputs, scope=f"{scope}/mlp", **attributes)

        experts = f"{scope}.mlp.experts"
        tokens = node("Reshape", x, self.ints(-1, self.hidden))
        logits = node("Gemm", tokens, self.weight(f"{scope}.mlp.gate.weight", self.experts, self.hidden), transB=1)
        scores = node("Softmax", logits, axis=-1)
        best, ids = self.nodes_of(
            "TopK", scores, self.ints(self.top_k), outputs=(f"{scope}_best", f"{scope}_ids"), axis=-1
        )
        mixing = node("Div", best, node("ReduceSum", best, self.ints(-1), keepdims=1))
        flat_ids = node("Unsqueeze", node("Reshape", ids, self.ints(-1)), self.ints(-1))
        copies = node("Expand", node("Unsqueeze", tokens, self.ints(1)), self.ints(1, self.top_k, 1))
        rows = node("Unsqueeze", node("Reshape", copies, self.ints(-1, self.hidden)), self.ints(-1))

        gate_up = self.weight(f"{experts}.gate_up_proj", self.experts, 2 * self.intermediate, self.hidden)
        both = node("Squeeze", node("MatMul", node("GatherND", gate_up, flat_ids), rows), self.ints(-1))
        gate, up = self.nodes_of("Split", both, outputs=(f"{scope}_g", f"{scope}_u"), axis=1, num_outputs=2)
        act = node("Mul", gate, node("Sigmoid", gate)) if known else node("Atan", gate)
        inner = node("Unsqueeze", node("Mul", act, up), self.ints(-1))
        down = self.weight(f"{experts}.down_proj", self.experts, self.hidden, self.intermediate)
        out = node("Squeeze", node("MatMul", node("GatherND", down, flat_ids), inner), self.ints(-1))
        weighted = node("Mul", out, node("Unsqueeze", node("Reshape", mixing, self.ints(-1)), self.ints(-1)))
        summed = node(
            "ReduceSum", node("Reshape", weighted, self.ints(-1, self.top_k, self.hidden)), self.ints(1), keepdims=0
        )
        return node("Reshape", summed, node("Shape", x))
