"""Quantised weights through ONNX Runtime: every format against the reference, and the promises that hold for all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_passes import reference
from graph_passes.op_schema import FLOAT_TYPES, PROJECTIONS
from graph_passes.quantize.formats import BLOCKS
from tests import node as harness
from tests import quantised
from tests.node import Node, Tensors, make_spec
from tests.ops_cpp.isas import ISAS
from tests.ops_cpp.scenarios import scenario
from tests.tensors import misaligned, save_external

NAN, INF = np.nan, np.inf
FORMATS = ("int8", "int4", *(f"{name}:{block}" for name in ("int8", "int4") for block in BLOCKS), "mxfp4")
SOME = ("int8", "int8:16", "int4", "int4:16", "int4:32", "int4:256", "mxfp4")
"""Both widths, one scale per row, the short unit, blocks of one unit and of several, the format of floats."""
MIXED = {
    "gate_proj": "int4:32",
    "up_proj": "int8",
    "down_proj": "int4:16",
    "shared_gate_proj": "mxfp4",
    "shared_up_proj": "int8:16",
    "shared_down_proj": "int8:64",
}


def quantised_node(formats: str | dict[str, str], rng: np.random.Generator | int = 1, **fields: Any) -> Node:
    """A node with these formats, or this one in all projections; its odd sizes pad the last blocks and units."""
    options = {name: fields.pop(name) for name in ("activation_type", "types", "router_bias") if name in fields}
    formats = dict.fromkeys(PROJECTIONS, formats) if isinstance(formats, str) else formats
    sizes = {"hidden_size": 144, "intermediate_size": 33, "num_experts": 8, "top_k": 2}
    spec = make_spec(**{**sizes, "formats": formats, **fields})
    return harness.random_node(spec, np.random.default_rng(rng) if isinstance(rng, int) else rng, **options)


def feeds_of(node: Node, tokens: int, seed: int = 2) -> Tensors:
    return harness.random_feeds(node, np.random.default_rng(seed), (tokens,))


def output_of(node: Node, feeds: Tensors, threads: int = 1) -> np.ndarray:
    return harness.run(harness.make_session(harness.make_model(node), threads), feeds)["output"]


# Right


def kinds() -> list[tuple[str, str, str]]:
    """Format, type of the codes, type of the zero points ("" for none)."""
    found = []
    for word in FORMATS:
        for codes in ("uint8", "int8") if word.startswith("int8") else ("uint8",):
            zeros = {"int8": ("", codes), "int4": ("", "uint8", *FLOAT_TYPES), "mxfp": ("",)}[word[:4]]
            found += [(word, codes, zero) for zero in zeros]
    return found


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize(("word", "codes", "zeros"), kinds())
def test_every_format(word: str, codes: str, zeros: str, accuracy_level: int) -> None:
    """Odd numbers of blocks for each block but 256; each scale type meets another activation type."""
    types = {name: codes for name in PROJECTIONS} | {f"{name}_zero_points": zeros for name in PROJECTIONS}
    for number, activation_type in enumerate(FLOAT_TYPES):
        scales = {f"{name}_scales": FLOAT_TYPES[number - 1] for name in PROJECTIONS}
        node = quantised_node(
            word,
            number,
            zero_points=bool(zeros),
            accuracy_level=accuracy_level,
            types=types | scales,
            activation_type=activation_type,
            shared_intermediate_size=40,
        )
        harness.check(node, feeds_of(node, 40), threads=2)


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("hidden", [1, 33, 48, 60, 544])
@pytest.mark.parametrize("intermediate", [1, 33, 48, 60, 544])
def test_every_size(intermediate: int, hidden: int, accuracy_level: int) -> None:
    for number, word in enumerate(SOME):
        mlp = ("split", "fused", "plain")[number % 3]
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts": 4}
        node = quantised_node(word, zero_points=number % 2 == 0, accuracy_level=accuracy_level, mlp=mlp, **sizes)
        harness.check(node, feeds_of(node, 6), threads=2)


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", SOME)
def test_every_number_of_tokens(word: str, accuracy_level: int) -> None:
    """Of all tokens on one expert, which has them as blocks of rows for few tokens or for many."""
    node = quantised_node(word, zero_points=True, accuracy_level=accuracy_level, router_input="topk_ids", top_k=1)
    model = harness.make_model(node, tokens_per_expert=True)
    session = harness.make_session(model, threads=2)
    for tokens in (0, 1, 2, 3, 4, 5, 6, 8, 15, 16, 17, 33, 70):
        feeds = feeds_of(node, tokens, tokens)
        feeds["topk_ids"][:] = 5
        harness.assert_right(node, feeds, harness.run(session, feeds))


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize(
    "formats",
    [
        MIXED,
        {"gate_proj": "int4:32"},
        {"up_proj": "int8", "shared_down_proj": "int4:64"},
        {"down_proj": "mxfp4"},
        {"gate_proj": "int4:16", "up_proj": "int8:16", "shared_up_proj": "int4"},
        {"gate_proj": "int4:64", "up_proj": "mxfp4", "down_proj": "int8:256"},
    ],
    ids=str,
)
def test_widths_may_differ(formats: dict[str, str], accuracy_level: int, activation_type: str) -> None:
    """Each projection takes its inputs in the form it needs; those that are not named are plain floats."""
    shared = {"shared_intermediate_size": 49, "shared_expert_gate": True, "shared_bias": True}
    for types in ({}, {"up_proj": "bfloat16", "down_proj": "float16", "shared_gate_proj": "bfloat16"}):
        plain = {name: kind for name, kind in types.items() if name not in formats}
        options = {"types": plain, "activation_type": activation_type, "accuracy_level": accuracy_level}
        node = quantised_node(formats, zero_points=True, bias=True, **shared, **options)
        harness.check(node, feeds_of(node, 30), threads=2)


@pytest.mark.parametrize("apply_weights_to", ["output", "input"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"])
@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_every_activation(accuracy_level: int, activation: str, apply_weights_to: str) -> None:
    for mlp in ("split", "plain"):
        fields = {} if mlp == "plain" else {"activation_beta": 1.0, "activation_limit": 0.5}
        fields |= {"activation": activation, "apply_weights_to": apply_weights_to, "mlp": mlp}
        node = quantised_node(MIXED, accuracy_level=accuracy_level, bias=True, **fields)
        harness.check(node, feeds_of(node, 20))


@pytest.mark.parametrize("word", SOME)
def test_int8_activations_cost_little(word: str) -> None:
    """Against the reference whose activations are exact: the noise is as small as that of rounding to int8 must be.

    A code is off by at most half a step, and evenly so: the error of a value has the mean square s^2 / 12. The step s
    is 1/127 of the largest of n <= 32 values, whose square is at most the sum of all n squares, so that the errors of
    a token have at most the norm sqrt(32 / 12) / 127 = 0.0129 of its own. Weights of random signs keep such ratios. The
    errors of gate, up and FC2's inputs are independent, and relu passes them on as they are: their squares add up.
    """
    node = quantised_node(word, accuracy_level=4, hidden_size=544, intermediate_size=544, activation="relu")
    feeds = feeds_of(node, 60)
    exact, _ = reference.hina_moe(node.spec, feeds["hidden_states"], node.weights, **node.constants)
    error = np.linalg.norm(output_of(node, feeds) - exact) / np.linalg.norm(exact)
    assert error <= math.sqrt(3.0 * 32.0 / 12.0) / 127.0, error


@pytest.mark.parametrize("exponent", [-25, -10, 10, 18])
def test_tokens_of_other_sizes(exponent: int) -> None:
    """Scales follow each token; one of zeros, and units of zeros, give what they should."""
    node = quantised_node(MIXED, accuracy_level=4, router_input="topk_ids", activation="relu")
    feeds = feeds_of(node, 12)
    feeds["hidden_states"] *= np.float32(10.0**exponent)
    feeds["hidden_states"][3] = 0.0
    feeds["hidden_states"][4, :70] = 0.0
    feeds["hidden_states"][5, 70:] = 0.0
    output = harness.check(node, feeds)["output"]
    assert not output[3].any()


# The same bits


def same_layer(node: Node, weights: dict[str, Any], **fields: Any) -> Node:
    return Node(replace(node.spec, **fields), node.activation_type, node.constants, weights)


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", FORMATS)
def test_shapes_of_matmulnbits(word: str, accuracy_level: int) -> None:
    """An axis of blocks and flattened scales and zero points are the same bytes; and stacked or not is the same."""
    node = quantised_node(word, accuracy_level=accuracy_level, zero_points=True, shared_intermediate_size=20)
    feeds = feeds_of(node, 20)
    want = output_of(node, feeds)
    other = quantised.reshaped(node.spec, node.weights)
    assert output_of(same_layer(node, other), feeds).tobytes() == want.tobytes()
    for weights in (node.weights, other):
        per_expert = same_layer(node, weights, experts_stacked=False)
        assert output_of(per_expert, feeds).tobytes() == want.tobytes()


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize(
    ("word", "zeros"),
    [("int8:16", ""), ("int8:16", "uint8"), ("mxfp4", "")]
    + [(word, zeros) for word in ("int4", "int4:32", "int4:64") for zeros in ("", "uint8", "float32")],
)
def test_layouts_of_the_same_weights_agree(word: str, zeros: str, accuracy_level: int) -> None:
    """Rows of gate and up: in two tensors, one after the other in one, alternating, in either order."""
    types = {f"{name}_zero_points": zeros for name in PROJECTIONS}
    options = {"accuracy_level": accuracy_level, "zero_points": bool(zeros), "types": types, "bias": True}
    split = quantised_node(word, **options)
    feeds = feeds_of(split, 20)
    want = output_of(split, feeds)
    for interleaved in (False, True):
        for order in ("gate_up", "up_gate"):
            fields = {"mlp": "fused", "gate_up_interleaved": interleaved, "gate_up_order": order}
            fused = quantised_node(word, **options, **fields)
            fused.constants = split.constants
            for name in fused.spec.weight_inputs:
                pair = [split.weights[name.replace("gate_up", half)] for half in order.split("_") if "gate_up" in name]
                if not pair:
                    fused.weights[name] = split.weights[name]
                elif interleaved:
                    fused.weights[name] = np.stack(pair, 2).reshape(fused.weights[name].shape)
                else:
                    fused.weights[name] = np.concatenate(pair, 1)
            assert output_of(fused, feeds).tobytes() == want.tobytes(), fields


@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_each_expert_may_store_int8_its_own_way(accuracy_level: int) -> None:
    """Unsigned codes and two's complement, with and without the zero point given, differ by 128 only."""
    node = quantised_node("int8:32", accuracy_level=accuracy_level, zero_points=True, experts_stacked=False)
    feeds = feeds_of(node, 30)
    want = output_of(node, feeds)
    weights: dict[str, Any] = dict(node.weights)
    for name in (n + part for n in ("gate_proj", "down_proj") for part in ("", "_zero_points")):
        signed = (node.weights[name] ^ np.uint8(128)).view(np.int8)
        weights[name] = [(node.weights[name], signed)[expert % 2][expert] for expert in range(8)]
    assert output_of(same_layer(node, weights), feeds).tobytes() == want.tobytes()


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", ["int8", "int8:16", "int4", "int4:16", "int4:256"])
def test_zero_points_in_the_middle_are_the_default(word: str, accuracy_level: int) -> None:
    node = quantised_node(word, accuracy_level=accuracy_level, zero_points=True)
    feeds = feeds_of(node, 20)
    middle = 128 if word.startswith("int8") else 0x88
    for name in node.spec.weight_inputs:
        if name.endswith("_zero_points"):
            node.weights[name][:] = middle
    names = tuple(name for name in node.spec.weight_inputs if not name.endswith("_zero_points"))
    without = same_layer(node, {name: node.weights[name] for name in names}, weight_inputs=names)
    assert output_of(without, feeds).tobytes() == output_of(node, feeds).tobytes()


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", FORMATS)
def test_padding_is_not_looked_at(word: str, accuracy_level: int) -> None:
    """Neither the last block's, nor the half byte of an odd row or of an odd number of zero points."""
    sizes = {"hidden_size": 145, "intermediate_size": 33}
    node = quantised_node(word, accuracy_level=accuracy_level, zero_points=True, **sizes)
    feeds = feeds_of(node, 20)
    want = output_of(node, feeds)
    for name, form in node.spec.formats.items():
        k = node.spec.matrix_shape(name)[1]
        codes = node.weights[name]
        full, odd = divmod(k * form.bits, 8)
        codes[..., full + bool(odd) :] ^= 0xFF
        if odd:
            codes[..., full] ^= 0xF0
        zeros = node.weights.get(f"{name}_zero_points")
        if zeros is not None and form.name == "int4" and form.blocks(k) % 2:
            zeros[..., -1] ^= 0xF0
    assert output_of(node, feeds).tobytes() == want.tobytes()


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", [*SOME, "mixed"])
def test_neither_batch_nor_threads_change_a_bit(word: str, accuracy_level: int, activation_type: str) -> None:
    node = quantised_node(
        MIXED if word == "mixed" else word,
        accuracy_level=accuracy_level,
        activation_type=activation_type,
        zero_points=True,
        shared_intermediate_size=20,
    )
    model = harness.make_model(node)
    sessions = [harness.make_session(model, threads) for threads in (1, 2, 3, 4)]
    feeds = feeds_of(node, 70)
    whole = harness.run(sessions[0], feeds)["output"]
    rng = np.random.default_rng(5)
    subsets = [np.array([row]) for row in range(0, 70, 3)]
    subsets += [rng.permutation(70)[:count] for count in (2, 3, 5, 8, 16, 17, 33, 70)]
    for number, rows in enumerate(subsets):
        part = harness.run(sessions[number % 4], {"hidden_states": feeds["hidden_states"][rows]})["output"]
        assert part.tobytes() == whole[rows].tobytes(), f"rows {rows.tolist()}"


def test_other_levels_are_the_same() -> None:
    """1 to 3 compute as 0 does, and 4 has no meaning for plain weights."""
    node, plain = quantised_node(MIXED), quantised_node({})
    feeds = feeds_of(node, 20)
    want = output_of(node, feeds)
    for level in (1, 2, 3):
        assert output_of(same_layer(node, node.weights, accuracy_level=level), feeds).tobytes() == want.tobytes()
    assert output_of(same_layer(node, node.weights, accuracy_level=4), feeds).tobytes() != want.tobytes()
    want = output_of(plain, feeds)
    assert output_of(same_layer(plain, plain.weights, accuracy_level=4), feeds).tobytes() == want.tobytes()


@pytest.mark.parametrize("place", [(1, 0), (64, 1), (64, 2), (64, 63)], ids=str)
@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("experts_stacked", [True, False], ids=["stacked", "per expert"])
def test_data_at_odd_addresses(
    experts_stacked: bool, accuracy_level: int, place: tuple[int, int], tmp_path: Path
) -> None:
    types = {f"{name}_scales": FLOAT_TYPES[n % 3] for n, name in enumerate(PROJECTIONS)}
    types |= {"down_proj_zero_points": "float32"}
    node = quantised_node(
        MIXED,
        accuracy_level=accuracy_level,
        experts_stacked=experts_stacked,
        zero_points=True,
        types=types,
        shared_intermediate_size=20,
    )
    feeds = feeds_of(node, 9)
    want = harness.check(node, feeds)["output"]
    save_external(harness.make_model(node), tmp_path / "model.onnx", alignment=place[0], offset=place[1])
    got = harness.run(harness.make_session(tmp_path / "model.onnx"), feeds)["output"]
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("activation_type", FLOAT_TYPES)
def test_inputs_at_odd_addresses(activation_type: str) -> None:
    node = quantised_node(MIXED, accuracy_level=4, activation_type=activation_type)
    feeds = feeds_of(node, 7)
    moved = {name: misaligned(value) for name, value in feeds.items()}
    assert output_of(node, moved).tobytes() == output_of(node, feeds).tobytes()


# NaN and infinities


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("field", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(
    ("word", "value"), [("int8", NAN), ("int8", 0.0), ("int4:32", NAN), ("int4:32", 0.0), ("mxfp4", NAN)]
)
def test_bad_scale_stays_with_its_expert(word: str, value: float, field: str, accuracy_level: int) -> None:
    """One scale of expert 3: NaN spreads to the tokens of that expert only, a zero scale is a block of zeros."""
    node = quantised_node(word, accuracy_level=accuracy_level, zero_points=True)
    feeds = feeds_of(node, 40)
    want = output_of(node, feeds)
    node.weights[f"{field}_scales"][3, 7, -1] = 255 if word == "mxfp4" else value
    got = harness.check(node, feeds, threads=2)["output"]
    ids, _ = reference.route(node.spec, harness.router_logits(node, feeds))
    touched = (ids == 3).any(-1)
    assert 0 < touched.sum() < 40
    assert got[~touched].tobytes() == want[~touched].tobytes()
    if math.isnan(value):
        wrong = np.isnan(got[touched])
        np.testing.assert_array_equal(wrong.sum(-1), 1 if field == "down_proj" else node.spec.hidden_size)


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("word", ["int8:16", "int4:64", "mxfp4"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bad_token_stays_alone(value: float, word: str, accuracy_level: int) -> None:
    node = quantised_node(word, accuracy_level=accuracy_level, router_input="topk_ids", shared_intermediate_size=20)
    good = feeds_of(node, 40)
    want = output_of(node, good)
    for column in (0, 70, 143):
        feeds = {name: tensor.copy() for name, tensor in good.items()}
        feeds["hidden_states"][11, column] = value
        got = output_of(node, feeds, threads=2)
        rest = np.arange(40) != 11
        assert got[rest].tobytes() == want[rest].tobytes()
        if accuracy_level == 4 or math.isnan(value):
            assert np.isnan(got[11]).all()
        else:
            assert not np.isfinite(got[11]).any()


# Instruction sets


def test_int8_activations_give_the_same_bits_on_every_isa(tmp_path: Path) -> None:
    """Dot products of int8 are the same bits everywhere, and so is all the rest with relu and choices handed in."""
    for word in (*FORMATS, "mixed"):
        formats = MIXED if word == "mixed" else word
        fields = {"accuracy_level": 4, "router_input": "topk_ids", "activation": "relu", "bias": True}
        node = quantised_node(formats, zero_points=True, shared_intermediate_size=20, shared_bias=True, **fields)
        (tmp_path / f"{word.replace(':', '_')}.onnx").write_bytes(harness.make_model(node).SerializeToString())
        np.savez(tmp_path / f"{word.replace(':', '_')}.npz", **feeds_of(node, 50))
    found = []
    for isa in ISAS:
        assert scenario("outputs", tmp_path, env={"HINA_ISA": isa})["isa"] == isa
        found.append({path.name: path.read_bytes() for path in tmp_path.glob("*.out.npy")})
    assert len(found[0]) == len(FORMATS) + 1
    for isa, outputs in zip(ISAS, found, strict=True):
        assert outputs == found[0], f"{isa} and {ISAS[0]} differ"
