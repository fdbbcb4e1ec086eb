"""Valid models to make mutants of, and what a mutant is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from tests import node as harness
from tests.node import Node, Tensors, make_spec
from tests.tensors import make_tensor


@dataclass(frozen=True)
class Mutant:
    """A faulty model, inputs for a run should a session be made, and patterns that the message must match."""

    name: str
    model: ModelProto
    feeds: Tensors
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """A valid model to make mutants of."""

    name: str
    node: Node
    model: ModelProto
    feeds: Tensors

    def mutant(
        self, name: str, *patterns: str, model: ModelProto | None = None, feeds: Tensors | None = None
    ) -> Mutant:
        return Mutant(f"{self.name}: {name}", model or self.model, feeds or self.feeds, patterns)

    def copy(self) -> ModelProto:
        return copy.deepcopy(self.model)


def bases() -> list[Base]:
    """Nodes that together use every input, every kind of weight field and every format."""
    sizes = {"hidden_size": 12, "intermediate_size": 10, "num_experts": 6, "top_k": 3}
    shared = {"shared_intermediate_size": 5, "shared_expert_gate": True}
    bias = {"bias": True, "shared_bias": True}
    mixed = {"gate_proj": "int4:16", "up_proj": "int8", "down_proj": "mxfp4", "shared_up_proj": "int8:16"}
    fused = {"gate_up_proj": "int8:32", "down_proj": "int4"}
    specs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "router": ({}, {"router_bias": True}),
        "groups": ({"score_func": "sigmoid", "n_group": 3, "topk_group": 2, **shared}, {"correction_bias": True}),
        "logits": ({"mlp": "fused", "shared_mlp": "fused", **bias, **shared, "router_input": "router_logits"}, {}),
        "ids": ({"mlp": "plain", "experts_stacked": False, **bias, "router_input": "topk_ids"}, {}),
        "per expert": ({"experts_stacked": False, "router_input": "router_logits"}, {"activation_type": "float16"}),
        "quantised": ({"formats": mixed, "zero_points": True, "accuracy_level": 4, **shared}, {}),
        "quantised per expert": (
            {
                "formats": fused,
                "mlp": "fused",
                "zero_points": True,
                "experts_stacked": False,
                "gate_up_interleaved": True,
            },
            {"types": {"gate_up_proj": "int8", "down_proj_zero_points": "float16"}},
        ),
    }
    made = []
    for name, (fields, options) in specs.items():
        rng = np.random.default_rng(1)
        node = harness.random_node(make_spec(**{**sizes, **fields}), rng, **options)
        made.append(Base(name, node, harness.make_model(node), harness.random_feeds(node, rng, (4,))))
    return made


def edited_tensor(base: Base, name: str, value: np.ndarray) -> ModelProto:
    model = base.copy()
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(make_tensor(name, value))
    return model


def with_attribute(base: Base, name: str, value: Any) -> ModelProto:
    """The model with attribute `name` set, or removed when `value` is None."""
    model = base.copy()
    attributes = model.graph.node[0].attribute
    kept = [attribute for attribute in attributes if attribute.name != name]
    del attributes[:]
    attributes.extend(kept if value is None else [*kept, helper.make_attribute(name, value)])
    return model
