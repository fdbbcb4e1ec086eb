"""Routers and shared experts drawn into HinaMoE nodes that were handed ids and weights; what is not right is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import draw_in as module
from graph_passes.accuracy import relative_l2
from graph_passes.draw_in import draw_in
from graph_passes.matchers import router
from graph_passes.moe_node import all_nodes, is_hina_moe
from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import DOMAIN, OP_TYPE
from tests import graphs
from tests import node as nodes

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 16, 8
BLOCK = f"""(float[B, S, {HIDDEN}] x) => (float[B, S, {HIDDEN}] y) {{
    tokens = Reshape (x, flat)
    logits = Gemm <transB: int = 1> (tokens, router)
    scores = Softmax <axis: int = -1> (logits)
    values, ids = TopK (scores, k)
    total = ReduceSum <keepdims: int = 1> (values, last)
    mixing = Div (values, total)
    routed = com.microsoft.Experts (tokens, ids, mixing, up, down)
    summed = Identity (routed)
    shape = Shape (x)
    y = Reshape (summed, shape)
}}"""
SHARED = """first = MatMul (tokens, shared_up)
    active = Relu (first)
    added = MatMul (active, shared_down)
    summed = Add (routed, added)"""


def constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "up": (EXPERTS, INNER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INNER),
        "shared_up": (HIDDEN, INNER),
        "shared_down": (INNER, HIDDEN),
    }
    found: dict[str, np.ndarray] = {n: rng.standard_normal(s).astype(np.float32) / 4 for n, s in shapes.items()}
    found["fewer"] = found["router"][1:]
    return found | {"flat": np.array([-1, HIDDEN]), "k": np.array([TOP_K]), "last": np.array([-1])}


def model(*changes: tuple[str, str], **fields: Any) -> ir.Model:
    """The block with a HinaMoE node that takes ids and weights."""
    built = graphs.parse(graphs.replaced(BLOCK, *changes), constants())
    (old,) = (node for node in built.graph if node.op_type == "Experts")
    tokens, ids, mixing, *weights = old.inputs
    spec = MoeSpec(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=EXPERTS,
        top_k=TOP_K,
        weight_inputs=("up_proj", "down_proj"),
        router_input="topk_ids",
        activation="relu",
        **fields,
    )
    inputs = [tokens, None, None, None, ids, mixing, None, *weights]
    new = ir.Node(DOMAIN, OP_TYPE, inputs, ir.convenience.convert_attributes(spec.attributes()), name=f"moe/{OP_TYPE}")
    new.outputs[0].type, new.outputs[0].shape = tokens.type, tokens.shape  # type: ignore[union-attr]
    ir.convenience.replace_nodes_and_values(built.graph, old, [old], [new], old.outputs, new.outputs)
    built.graph.opset_imports[DOMAIN] = 1
    return built


def outputs(built: ir.Model) -> list[np.ndarray]:
    session = nodes.make_session(ir.to_proto(built))
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((batch, length, HIDDEN)).astype(np.float32) for batch, length in ((1, 1), (2, 9))]
    return [session.run(["y"], {"x": x})[0] for x in inputs]


def check_same(built: ir.Model, before: list[np.ndarray]) -> None:
    """The model computes what it did, and nothing of the stand-in is left in it."""
    for was, now in zip(before, outputs(built), strict=True):
        assert relative_l2(was, now) < 1e-6
    names = [*built.graph.initializers, *(v.name for node in all_nodes(built) for v in node.outputs)]
    assert not [name for name in names if "stand_in" in str(name)]
    assert [node.name for node in all_nodes(built) if is_hina_moe(node)] == [f"moe/{OP_TYPE}"]


def unread(built: ir.Model) -> None:
    """Let the experts' weights raise when they are read."""

    def fail() -> NoReturn:
        raise AssertionError("the experts were read")

    for name in ("up", "down"):
        value = built.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.LazyTensor(fail, value.const_value.dtype, value.const_value.shape, name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"apply_weights_to": "input"}], ids=str)
def test_the_router(fields: dict[str, Any]) -> None:
    built = model(**fields)
    before, weights = outputs(built), {name: built.graph.initializers[name].const_value for name in ("up", "down")}
    unread(built)
    (drawn,) = draw_in(built)
    assert (drawn.spec.router_input, drawn.spec.score_func, drawn.spec.norm_topk_prob) == (
        "router_weight",
        "softmax",
        True,
    )
    assert drawn.notes == () and drawn.spec.apply_weights_to == fields.get("apply_weights_to", "output")
    assert not {"TopK", "Softmax", "Gemm"} & {node.op_type for node in all_nodes(built)}
    for name, tensor in weights.items():
        built.graph.initializers[name].const_value = tensor
    check_same(built, before)


def test_the_shared_expert_too() -> None:
    built = model(("summed = Identity (routed)", SHARED))
    before = outputs(built)
    (drawn,) = draw_in(built)
    assert drawn.spec.shared_intermediate_size == INNER and drawn.spec.router_input == "router_weight"
    assert [node.op_type for node in all_nodes(built)] == [OP_TYPE]
    check_same(built, before)


def test_a_router_that_is_not_known_stays() -> None:
    """The weights depend on the tokens in a way that the op cannot say; the shared expert is drawn in all the same."""
    twist = "length = ReduceMax <keepdims: int = 1> (tokens, last)\n    doubled = Mul (values, length)"
    change = ("mixing = Div (values, total)", f"{twist}\n    mixing = Div (doubled, total)")
    built = model(change, ("summed = Identity (routed)", SHARED))
    before = outputs(built)
    (drawn,) = draw_in(built)
    assert drawn.spec.router_input == "topk_ids" and drawn.spec.has_shared_expert
    assert len(drawn.notes) == 1 and "router stays in the graph" in drawn.notes[0]
    check_same(built, before)


def wrong_norm(found: router.Router) -> router.Router:
    return replace(found, fields={**found.fields, "norm_topk_prob": False})


def wrong_score(found: router.Router) -> router.Router:
    return replace(found, fields={**found.fields, "score_func": "sigmoid"})


@pytest.mark.parametrize("change", [wrong_norm, wrong_score])
def test_what_is_not_proven_stays(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[router.Router], router.Router]
) -> None:
    recognise = router.recognise
    monkeypatch.setattr(module.router, "recognise", lambda *arguments: change(recognise(*arguments)))
    built = model()
    before = outputs(built)
    (drawn,) = draw_in(built)
    assert drawn.spec.router_input == "topk_ids" and "does not compute" in drawn.notes[0]
    check_same(built, before)


def test_a_router_of_fewer_experts_stays() -> None:
    built = model(("(tokens, router)", "(tokens, fewer)"))
    before = outputs(built)
    (drawn,) = draw_in(built)
    assert drawn.spec.router_input == "topk_ids"
    assert drawn.notes == (
        "the router scores 5 experts, but the weights hold 6: experts are missing or unused; export the model again",
    )
    check_same(built, before)
