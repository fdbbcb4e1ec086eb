"""Right graphs with one thing changed: each is fused and computes what it computed before, or is refused and untouched.

The table says which; EITHER where both are right. Mutations of single attributes and integers are made by machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.utils
import onnx_ir as ir
import pytest

import hina_ort
from graph_passes.accuracy import relative_l2
from graph_passes.pipeline import fuse_model
from models.qwen3_moe import build as qwen3_moe
from tests import dense_graphs
from tests.exports import dynamo_block
from tests.families import FAMILIES, tokens
from tests.graph_mutants import mutants
from tests.graph_passes import test_batched_mm, test_grouped_mm, test_moe_op
from tests.graphs import copy_of, parse, run_original
from tests.unrolled_graphs import Loop, rewritten

FUSED, REFUSED, EITHER = "fused", "refused", "either"
SCATTER_ND: dict[str, Any] = {"scatter_add": True, "weights": "gemm"}
RNG = np.random.default_rng(41)


def loop(*changes: tuple[str, str], outputs: str = "float[C, D, 8] y", **fields: Any) -> ir.Model:
    return rewritten(Loop(**fields), *changes, outputs=outputs, others=np.array([3]), two=np.float32(2.0))


def nd(*changes: tuple[str, str]) -> ir.Model:
    return loop(*changes, **SCATTER_ND)


def batched(part: str, *changes: tuple[str, str], **parts: Any) -> ir.Model:
    text = inspect.signature(test_batched_mm.block).parameters[part].default
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return test_batched_mm.block(**{part: text}, **parts)


def grouped(part: str, *changes: tuple[str, str]) -> ir.Model:
    return test_grouped_mm.block(**test_grouped_mm.changed(part, *changes))


def dense(part: str, *changes: tuple[str, str], form: dict[str, str] = dense_graphs.GPT_OSS) -> ir.Model:
    return dense_graphs.block(form, **dense_graphs.swapped(form, part, *changes))


def moe(**changes: Any) -> ir.Model:
    weights = test_moe_op.floats(test_moe_op.SWIGLU)
    return test_moe_op.model_of("MoE", {**test_moe_op.SWIGLU, **changes}, weights)


def with_weights(family: str, change: Callable[[np.ndarray], np.ndarray], *names: str) -> ir.Model:
    """The block of the family with the arrays of some initializers changed."""
    model = FAMILIES[family]()
    for name in names:
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = change(value.const_value.numpy().copy())
        value.const_value, value.shape = ir.Tensor(array, name=name), ir.Shape(array.shape)
    return model


def exchanged(family: str, *names: tuple[str, str]) -> ir.Model:
    """The block of the family with pairs of initializers exchanged."""
    model = FAMILIES[family]()
    for one, other in names:
        first, second = model.graph.initializers[one], model.graph.initializers[other]
        first.const_value, second.const_value = second.const_value, first.const_value
    return model


def exposed(family: str, *names: str) -> ir.Model:
    """The block of the family with inner values as graph outputs."""
    model = FAMILIES[family]()
    inner = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(inner[name] for name in names)
    return model


def as_input(family: str, name: str) -> ir.Model:
    """The block of the family with an initializer that a user may override."""
    model = FAMILIES[family]()
    model.graph.inputs.append(model.graph.initializers[name])
    return model


def renamed(family: str) -> ir.Model:
    """The block of the family with numbers for names, backwards, and nodes without any."""
    model = FAMILIES[family]()
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    for number, value in enumerate(dict.fromkeys(values)):
        value.name = f"{len(values) - number}"
    for node in model.graph:
        node.name = None
    return model


def two_layers(shared: str, **second: Any) -> ir.Model:
    """Two loops, one behind the other; initializers whose names begin with `shared` are the first's in both."""
    first, last = Loop(result="mid", prefix="a_"), Loop(source="mid", prefix="b_", seed=1, **second)
    text = last.text()
    for name in last.arrays:
        if name.startswith(f"b_{shared}"):
            text = text.replace(f"{name})", f"a_{name[2:]})").replace(f"{name}, ", f"a_{name[2:]}, ")
    nodes = f"{first.text()}\n{text}"
    return parse(f"(float[B, S, 8] x) => (float[B, S, 8] y) {{ {nodes} }}", {**first.arrays, **last.arrays})


def another(array: np.ndarray) -> np.ndarray:
    return RNG.standard_normal(array.shape).astype(array.dtype) * 0.5


def other_expert(array: np.ndarray) -> np.ndarray:
    """Experts 1 and 2 exchanged."""
    return array[[0, 2, 1, *range(3, len(array))]]


def one_bias(array: np.ndarray) -> np.ndarray:
    array[1] += 1.0
    return array


SPLIT_SWAPPED = ("g, u = Split", "u, g = Split")

MUTATIONS: dict[str, tuple[str, Callable[[], ir.Model]]] = {
    # Loops over experts.
    "loop: an expert removed": (REFUSED, lambda: loop(experts=[0, 1, 3])),
    "loop: the last expert removed": (REFUSED, lambda: loop(experts=[0, 1, 2], **SCATTER_ND)),
    "loop: branches in another order": (FUSED, lambda: loop(experts=[3, 1, 0, 2])),
    "loop: two experts swapped, ids kept": (
        FUSED,
        lambda: exchanged("loop", ("gate1", "gate2"), ("up1", "up2"), ("down1", "down2")),
    ),
    "loop: ids of two experts swapped": (
        FUSED,
        lambda: loop(("mask, id1)", "mask, id_)"), ("mask, id2)", "mask, id1)"), ("mask, id_)", "mask, id2)")),
    ),
    "loop: an id twice": (REFUSED, lambda: loop(("mask, id1)", "mask, id2)"))),
    "loop: an id beyond the last": (REFUSED, lambda: loop(("mask, id2)", "mask, others)"), width=3)),
    "loop: an id counted from the end": (EITHER, lambda: with_weights("loop", lambda a: a - 4, "id3")),
    "loop: a weight replaced": (FUSED, lambda: with_weights("loop", another, "gate1")),
    "loop: weights of one projection exchanged": (FUSED, lambda: exchanged("loop", ("down0", "down3"))),
    "loop: a wider expert": (REFUSED, lambda: loop(wide_expert=2)),
    "loop: a weight of only NaN": (FUSED, lambda: with_weights("loop", lambda a: a * np.float32("nan"), "down2")),
    "loop: gate and up exchanged in one expert": (FUSED, lambda: exchanged("loop", ("gate1", "up1"))),
    "loop: gate and up exchanged in the activation of one": (
        FUSED,
        lambda: loop(
            ("e1_s = Sigmoid(e1_g)", "e1_s = Sigmoid(e1_u)"),
            ("e1_a1 = Mul(e1_g, e1_s)", "e1_a1 = Mul(e1_u, e1_s)"),
            ("e1_h = Mul(e1_a1, e1_u)", "e1_h = Mul(e1_a1, e1_g)"),
        ),
    ),
    "loop: gate and up exchanged in all": (
        FUSED,
        lambda: exchanged("loop", *((f"gate{e}", f"up{e}") for e in range(4))),
    ),
    "loop: another activation in one expert": (REFUSED, lambda: loop(("e2_s = Sigmoid(e2_g)", "e2_s = Tanh(e2_g)"))),
    "loop: no activation in one expert": (REFUSED, lambda: loop(("e2_h = Mul(e2_a1, e2_u)", "e2_h = Mul(e2_g, e2_u)"))),
    "loop: a scaled gate in one expert": (
        REFUSED,
        lambda: loop(("e2_s = Sigmoid(e2_g)", "e2_g2 = Mul(e2_g, two)\ne2_s = Sigmoid(e2_g2)")),
    ),
    "loop: a bias in one expert": (
        REFUSED,
        lambda: loop(("e1_d = MatMul(e1_h, down1)", "e1_d0 = MatMul(e1_h, down1)\ne1_d = Add(e1_d0, bias1)")),
    ),
    "loop: biases in all": (FUSED, lambda: loop(bias=True)),
    "loop: k changed in TopK alone": (REFUSED, lambda: loop(("TopK(probs, k)", "TopK(probs, others)"))),
    "loop: k changed in the index alone": (REFUSED, lambda: with_weights("loop", lambda a: a + 1, "k_scalar")),
    "loop: k changed in the index of one expert": (
        REFUSED,
        lambda: loop(("e2_base = Mul(e2_token, k_scalar)", "e2_base = Mul(e2_token, id3)")),
    ),
    "loop: k changed everywhere": (FUSED, lambda: loop(top_k=3)),
    "loop: reduction of one scatter dropped": (
        REFUSED,
        lambda: nd(('acc2 = ScatterND<reduction="add">', "acc2 = ScatterND")),
    ),
    "loop: reduction of all scatters dropped": (REFUSED, lambda: nd(('ScatterND<reduction="add">', "ScatterND"))),
    "loop: products instead of sums": (REFUSED, lambda: nd(('reduction="add"', 'reduction="mul"'))),
    "loop: one maximum instead of a sum": (
        REFUSED,
        lambda: nd(('acc1 = ScatterND<reduction="add">', 'acc1 = ScatterND<reduction="max">')),
    ),
    "loop: a reduction where there was none": (
        EITHER,
        lambda: loop(
            ("e2_scattered = ScatterElements<axis=0>", 'e2_scattered = ScatterElements<axis=0, reduction="add">')
        ),
    ),
    "loop: an expert scatters over the sum": (
        REFUSED,
        lambda: loop(("ScatterElements<axis=0>(e2_zeros,", "ScatterElements<axis=0>(acc1,")),
    ),
    "loop: an expert added twice": (
        REFUSED,
        lambda: loop(
            ("acc3 = Add(acc2, e3_scattered)", "acc22 = Add(acc2, e2_scattered)\nacc3 = Add(acc22, e3_scattered)")
        ),
    ),
    "loop: an expert subtracted": (REFUSED, lambda: loop(("acc2 = Add(acc1,", "acc2 = Sub(acc1,"))),
    "loop: an expert not added": (REFUSED, lambda: loop(("acc3 = Add(acc2, e3_scattered)", "acc3 = Add(acc2, acc)"))),
    "loop: the sum begins with the tokens": (REFUSED, lambda: loop(("acc0 = Add(acc,", "acc0 = Add(flat,"))),
    "loop: the sum begins with ones": (
        REFUSED,
        lambda: loop(("acc = ConstantOfShape(", "acc = ConstantOfShape<value = float[1] {1.0}>(")),
    ),
    "loop: weights of slot 0 for one expert": (
        REFUSED,
        lambda: loop(("e1_index = Add(e1_slot, e1_base)", "e1_index = Add(id0, e1_base)")),
    ),
    "loop: one expert without mixing weights": (
        REFUSED,
        lambda: loop(("e1_out0 = Mul(e1_d, e1_w)", "e1_out0 = Neg(e1_d)")),
    ),
    "loop: one expert scaled": (
        REFUSED,
        lambda: loop(("e1_out0 = Mul(e1_d, e1_w)", "e1_m = Mul(e1_d, e1_w)\ne1_out0 = Mul(e1_m, two)")),
    ),
    "loop: one expert reads doubled tokens": (
        REFUSED,
        lambda: loop(("e1_x = Gather<axis=0>(flat,", "double = Add(flat, flat)\ne1_x = Gather<axis=0>(double,")),
    ),
    "loop: one expert reads by slot": (
        REFUSED,
        lambda: loop(("e1_x = Gather<axis=0>(flat, e1_token)", "e1_x = Gather<axis=0>(flat, e1_slot)")),
    ),
    "loop: one expert scatters by slot": (
        REFUSED,
        lambda: loop(("e1_at = Unsqueeze(e1_token, last)", "e1_at = Unsqueeze(e1_slot, last)")),
    ),
    "loop: token and slot exchanged": (REFUSED, lambda: loop(("perm=[2, 1, 0]", "perm=[2, 0, 1]"))),
    "loop: mixing weights not normalised": (
        FUSED,
        lambda: loop(("mixing = Div(values, total)", "mixing = Identity(values)")),
    ),
    "loop: mixing weights normalised by the token": (
        EITHER,
        lambda: loop(("ReduceSum<keepdims=1>(values, last)", "ReduceSum<keepdims=1>(values, axis0)")),
    ),
    "loop: softmax over tokens": (EITHER, lambda: loop(("Softmax<axis=1>", "Softmax<axis=0>"))),
    "loop: the worst experts": (EITHER, lambda: loop(("TopK(probs, k)", "TopK<largest=0>(probs, k)"))),
    "loop: experts in any order": (FUSED, lambda: loop(("TopK(probs, k)", "TopK<sorted=0>(probs, k)"))),
    "loop: one expert too many in OneHot": (EITHER, lambda: with_weights("loop", lambda a: a + 1, "depth")),
    "loop: OneHot of two": (EITHER, lambda: with_weights("loop", lambda a: a * 2, "off_on")),
    "loop: OneHot inverted": (REFUSED, lambda: with_weights("loop", lambda a: a[::-1].copy(), "off_on")),
    "loop: ids shifted in front of the mask": (
        REFUSED,
        lambda: loop(("hot = OneHot<axis=-1>(ids,", "moved = Sub(id3, ids)\nhot = OneHot<axis=-1>(moved,")),
    ),
    "loop: a fixed number of tokens": (REFUSED, lambda: loop(fixed_reshape=1)),
    "loop: a weight that may be overridden": (REFUSED, lambda: as_input("loop", "up2")),
    "loop: a router that may be overridden": (FUSED, lambda: as_input("loop", "router")),
    "loop: names are numbers": (FUSED, lambda: renamed("loop")),
    "loop: logits are an output": (FUSED, lambda: exposed("loop", "logits")),
    "loop: ids and weights are outputs": (FUSED, lambda: exposed("loop", "ids", "mixing")),
    "loop: an expert's output is an output": (EITHER, lambda: exposed("loop", "e1_d")),
    "loop: a partial sum is an output": (EITHER, lambda: exposed("loop", "acc1")),
    "loop: two layers share all weights": (FUSED, lambda: two_layers("")),
    "loop: two layers share the router": (FUSED, lambda: two_layers("router")),
    "loop: two layers share one expert": (FUSED, lambda: two_layers("gate2")),
    "loop: the second layer lacks an expert": (REFUSED, lambda: two_layers("", experts=[0, 2, 3])),
    # batched_mm.
    "batched: an expert removed from one weight": (
        REFUSED,
        lambda: with_weights("batched_mm", lambda a: a[:3], "down"),
    ),
    "batched: an expert removed from all weights": (
        REFUSED,
        lambda: with_weights("batched_mm", lambda a: a[:3], "down", "gate_up"),
    ),
    "batched: two experts swapped in all weights": (
        FUSED,
        lambda: with_weights("batched_mm", other_expert, "down", "gate_up"),
    ),
    "batched: two experts swapped in one weight": (FUSED, lambda: with_weights("batched_mm", other_expert, "down")),
    "batched: a weight replaced": (FUSED, lambda: with_weights("batched_mm", another, "gate_up")),
    "batched: gate and up exchanged": (FUSED, lambda: batched("activation", SPLIT_SWAPPED)),
    "batched: k changed in TopK alone": (REFUSED, lambda: batched("router", ("TopK(s, k)", "TopK(s, i1)"))),
    "batched: k changed in the sum alone": (REFUSED, lambda: batched("combine", ("by_k", "by_one"))),
    "batched: k changed in the copies alone": (REFUSED, lambda: batched("repeat", ("repeats", "ones"))),
    "batched: other ids for the second weight": (
        REFUSED,
        lambda: batched(
            "down",
            ("GatherND(down, idx)", "GatherND(down, others)"),
            router=test_batched_mm.ROUTER + " other = Sub(experts, idx) others = Sub(other, i1)",
        ),
    ),
    "batched: a mean instead of a sum": (REFUSED, lambda: batched("combine", ("ReduceSum", "ReduceMean"))),
    "batched: mixing weights of another token": (
        REFUSED,
        lambda: batched(
            "combine", ("wf = Reshape(w, last)", "wt = Transpose<perm = [1, 0]>(w) wf = Reshape(wt, last)")
        ),
    ),
    "batched: a score instead of softmax": (EITHER, lambda: batched("router", ("Softmax(l)", "Sigmoid(l)"))),
    "batched: ids are an output": (FUSED, lambda: exposed("batched_mm", "l", "w", "t")),
    "batched: an inner value is an output": (REFUSED, lambda: exposed("batched_mm", "o")),
    "batched: names are numbers": (FUSED, lambda: renamed("batched_mm")),
    # grouped_mm.
    "grouped: two experts swapped in one weight": (FUSED, lambda: with_weights("grouped_mm", other_expert, "gate_up")),
    "grouped: a weight replaced": (FUSED, lambda: with_weights("grouped_mm", another, "down")),
    "grouped: an expert removed from one weight": (
        REFUSED,
        lambda: with_weights("grouped_mm", lambda a: a[:3], "down"),
    ),
    "grouped: gate and up exchanged": (FUSED, lambda: grouped("activation", SPLIT_SWAPPED)),
    "grouped: two experts exchange their weights": (EITHER, lambda: grouped("gate_up", ("p_s1, p_s2", "p_s2, p_s1"))),
    "grouped: an expert begins one row late": (
        REFUSED,
        lambda: grouped("gate_up", ("Range(p_z0, p_z1", "Range(p_z1, p_z1")),
    ),
    "grouped: two runs exchanged": (REFUSED, lambda: grouped("down", ("o_m1, o_m2", "o_m2, o_m1"))),
    "grouped: k changed in TopK alone": (REFUSED, lambda: grouped("router", ("TopK(s, k)", "TopK(s, axis1)"))),
    "grouped: k changed in the tokens alone": (
        REFUSED,
        lambda: grouped("rows", ("Div(order, two)", "Div(order, three)")),
    ),
    "grouped: sorted downwards": (REFUSED, lambda: grouped("sort", ("largest = 0", "largest = 1"))),
    "grouped: the histogram not summed": (REFUSED, lambda: grouped("histogram", (', reduction = "add"', ""))),
    "grouped: wider bins": (REFUSED, lambda: grouped("histogram", ("bin)", "wide_bin)"))),
    "grouped: not put back in order": (
        REFUSED,
        lambda: grouped("combine", ("GatherND(weighted, inverse1)", "GatherND(weighted, order1)")),
    ),
    "grouped: mixing weights not sorted": (
        REFUSED,
        lambda: grouped("weights", ("GatherND(wf, order1)", "Identity(wf)")),
    ),
    "grouped: logits are an output": (FUSED, lambda: exposed("grouped_mm", "l", "ids")),
    "grouped: names are numbers": (FUSED, lambda: renamed("grouped_mm")),
    # Dense.
    "dense: an expert removed from one weight": (REFUSED, lambda: with_weights("dense", lambda a: a[:3], "down")),
    "dense: two experts swapped in one weight": (FUSED, lambda: with_weights("dense", other_expert, "gate_up")),
    "dense: a weight replaced": (FUSED, lambda: with_weights("dense", another, "down")),
    "dense: a bias in one expert changed": (FUSED, lambda: with_weights("dense", one_bias, "down_b")),
    "dense: gate and up exchanged": (
        EITHER,
        lambda: dense(
            "activation", ("p, i0, end", "p, i_, end"), ("p, i1, end", "p, i0, end"), ("p, i_, end", "p, i1, end")
        ),
    ),
    "dense: scores added": (
        EITHER,
        lambda: dense("scatter", ("ScatterElements<axis = 1>", 'ScatterElements<axis = 1, reduction = "add">')),
    ),
    "dense: scores scattered over tokens": (REFUSED, lambda: dense("scatter", ("axis = 1", "axis = 0"))),
    "dense: scores that are all one": (
        REFUSED,
        lambda: dense("scatter", ("fill = ConstantOfShape(ls)", "fill = ConstantOfShape<value = float[1] {1.0}>(ls)")),
    ),
    "dense: a mean instead of a sum": (REFUSED, lambda: dense("sum", ("ReduceSum", "ReduceMean"))),
    "dense: the router is an output": (FUSED, lambda: exposed("dense", "l", "ids", "w")),
    "dense: names are numbers": (FUSED, lambda: renamed("dense")),
    "dense, weights on the input: two experts swapped": (
        FUSED,
        lambda: with_weights("dense, weights on the input", other_expert, "down"),
    ),
    "dense, weights on the input: weights on the output": (
        EITHER,
        lambda: dense_graphs.block(
            dense_graphs.LLAMA4,
            **dense_graphs.swapped(dense_graphs.LLAMA4, "copies", ("tw = Mul(tt, sr)", "tw = Identity(tt)")),
        ),
    ),
    # com.microsoft::MoE and QMoE.
    "MoE: k changed": (FUSED, lambda: moe(k=3)),
    "MoE: normalised": (FUSED, lambda: moe(normalize_routing_weights=1)),
    "MoE: two experts swapped in one weight": (FUSED, lambda: with_weights("MoE", other_expert, "fc1")),
    "MoE: a bias in one expert changed": (FUSED, lambda: with_weights("MoE", one_bias, "fc2_b")),
    "MoE: an expert removed": (REFUSED, lambda: with_weights("MoE", lambda a: a[:7], "fc1")),
    "MoE: another limit": (FUSED, lambda: moe(swiglu_limit=0.25)),
    "MoE: logits are an output": (FUSED, lambda: exposed("MoE", "l")),
    "MoE: names are numbers": (FUSED, lambda: renamed("MoE")),
    "MoE: a weight that may be overridden": (REFUSED, lambda: as_input("MoE", "fc2")),
    "QMoE: two experts swapped in one weight": (FUSED, lambda: with_weights("QMoE", other_expert, "fc1")),
    "QMoE: other scales": (FUSED, lambda: with_weights("QMoE", lambda a: a * 2, "fc2_s")),
    "QMoE: scales of fewer experts": (REFUSED, lambda: with_weights("QMoE", lambda a: a[:7], "fc2_s")),
}


def feeds(model: ir.Model) -> Iterator[np.ndarray]:
    """One token, some, and many: enough to reach every expert, small and large."""
    for sequences, length in ((1, 1), (3, 11), (2, 40)):
        x = tokens(model, sequences, length, seed=length)
        x.reshape(-1, x.shape[-1])[::3] *= 4.0
        yield x


def runs(model: ir.Model) -> list[list[np.ndarray]] | None:
    """All outputs of the model on `feeds`; None when ONNX Runtime does not load or run it."""
    name = str(model.graph.inputs[0].name)
    try:
        return [run_original(model, {name: x}, options=hina_ort.session_options()) for x in feeds(model)]
    except Exception:  # ONNX Runtime has no base class for its errors
        return None


def outcome(model: ir.Model) -> str:
    """Fuse a copy of the model: "fused" when it computes the same, "refused" when it is untouched; else this fails."""
    fused = copy_of(model)
    before = ir.to_proto(fused)
    report = fuse_model(fused)
    if not report.applied:
        assert ir.to_proto(fused) == before
        assert all(miss.reason for miss in report.refused)
        return REFUSED
    expected, found = runs(model), runs(fused)
    assert expected is not None, "a model that does not run was fused"
    assert found is not None
    for one, other in zip(expected, found, strict=True):
        assert len(one) == len(other) == len(model.graph.outputs)
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert relative_l2(a.astype(np.float64), b.astype(np.float64)) <= 1e-5
    return FUSED


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_fused_and_equal_or_refused(name: str) -> None:
    expected, make = MUTATIONS[name]
    assert outcome(make()) in ((FUSED, REFUSED) if expected == EITHER else (expected,))


def check_small_changes(make: Callable[[], ir.Model]) -> None:
    """Every small change of what `make` gives is refused, or fused and computes the same; both happen."""
    counts = {FUSED: 0, REFUSED: 0}
    for what, model in mutants(make):
        if runs(model) is None:
            continue
        try:
            counts[outcome(model)] += 1
        except AssertionError as error:
            raise AssertionError(what) from error
    assert counts[FUSED] >= 1 and counts[REFUSED] >= 1, counts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("MoE")])
def test_small_changes(family: str) -> None:
    check_small_changes(FAMILIES[family])


@pytest.mark.slow
@pytest.mark.dynamo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_small_changes_of_a_dynamo_export(architecture: str) -> None:
    check_small_changes(lambda: ir.load(dynamo_block(architecture)))


@pytest.mark.slow
@pytest.mark.optimum
@pytest.mark.timeout(900)
def test_small_changes_of_an_optimum_export(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    checkpoint = qwen3_moe.build(tmp_path / "checkpoint", **sizes, num_experts=3, num_experts_per_tok=2)
    exported = onnx.load(qwen3_moe.export(checkpoint, tmp_path / "onnx"))
    (residual,) = (node for node in exported.graph.node if node.name == "/model/layers.0/Add_1")
    tokens = "/model/layers.0/post_attention_layernorm/Mul_1_output_0"
    result = next(name for name in residual.input if "/mlp/" in name)
    extractor = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(exported, data_prop=True))
    block = extractor.extract_model([tokens], [result])
    check_small_changes(lambda: ir.from_proto(block))
