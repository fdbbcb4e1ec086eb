"""Whole-model comparison: made-up inputs fit any signature, and differences are seen."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graph_passes.accuracy import relative_l2
from hina_ort.comparison import FULL, CheckError, Sizes, compare_in_full, compare_models, random_inputs
from tests.hina_ort import tiny


def argument(name: str, shape: list[int | str | None], kind: str = "int64") -> SimpleNamespace:
    return SimpleNamespace(name=name, shape=shape, type=f"tensor({kind})")


@pytest.mark.parametrize("seed", range(5))
def test_inputs_of_a_decoder_fit_together(seed: int) -> None:
    signature = [
        argument("input_ids", ["batch_size", "sequence_length"]),
        argument("attention_mask", ["batch_size", "past_sequence_length + sequence_length"]),
        argument("position_ids", ["batch_size", "sequence_length"]),
        argument("past_key_values.0.key", ["batch_size", 2, "past_sequence_length", 8], "float"),
        argument("past_key_values.0.value", ["batch_size", 2, "past_sequence_length", 8], "float16"),
    ]
    inputs, sizes = random_inputs(signature, {"input_ids": 11}, np.random.default_rng(seed))
    batch, past, new = (sizes[name] for name in ("batch_size", "past_sequence_length", "sequence_length"))
    assert min(batch, past, new) >= 1
    assert inputs["input_ids"].shape == (batch, new) and inputs["input_ids"].dtype == np.int64
    assert inputs["input_ids"].min() >= 0 and inputs["input_ids"].max() < 11
    assert inputs["attention_mask"].shape == (batch, past + new) and inputs["attention_mask"].all()
    assert (inputs["position_ids"] == np.arange(past, past + new)).all()
    key, value = inputs["past_key_values.0.key"], inputs["past_key_values.0.value"]
    assert key.shape == value.shape == (batch, 2, past, 8)
    assert (key.dtype, value.dtype) == (np.float32, np.float16) and key.std() > 0.1


@pytest.mark.parametrize("wanted", [None, Sizes(3, 5, 0)])
def test_the_batch_may_have_a_name_for_each_input(wanted: Sizes | None) -> None:
    signature = [argument("input_ids", ["s72", "s53"]), argument("attention_mask", ["s43", "s53"])]
    inputs, sizes = random_inputs(signature, {}, np.random.default_rng(3), wanted)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (sizes["s72"], sizes["s53"])
    assert wanted is None or inputs["input_ids"].shape == (3, 5)


def test_other_axes_and_types() -> None:
    signature = [
        argument("a", ["n", "2*n", "n + 3 - 1", None, 5], "bfloat16"),
        argument("b", ["weird name!", "weird name!"], "double"),
        argument("flag", [], "bool"),
        argument("ids", [4], "int32"),
    ]
    inputs, sizes = random_inputs(signature, {}, np.random.default_rng(0))
    n = sizes["n"]
    assert inputs["a"].shape[:3] == (n, 2 * n, n + 2) and inputs["a"].shape[4] == 5
    assert inputs["a"].dtype == ml_dtypes.bfloat16
    assert inputs["b"].shape == (sizes["weird name!"],) * 2
    assert inputs["flag"].shape == () and inputs["flag"].dtype == np.bool_
    assert set(inputs["ids"]) <= {0, 1}
    with pytest.raises(CheckError, match="text"):
        random_inputs([argument("text", ["n"], "string")], {}, np.random.default_rng(0))


def test_relative_l2() -> None:
    one = np.array([3.0, 4.0], np.float32)
    assert relative_l2(one, one) == 0.0
    assert relative_l2(one, one + np.float32([0.0, 0.5])) == pytest.approx(0.1)
    assert relative_l2(one, one[:1]) == math.inf
    assert relative_l2(one, one.astype(np.float64)) == math.inf
    assert relative_l2(np.zeros(2), np.ones(2)) == math.inf
    broken = np.array([np.nan, 4.0], np.float32)
    assert relative_l2(broken, broken) == 0.0
    assert relative_l2(broken, one) == relative_l2(one, broken) == math.inf


def test_a_changed_weight_is_seen(model: Path, tmp_path: Path) -> None:
    proto = onnx.load(model)
    tensor = next(t for t in proto.graph.initializer if t.name == "model.layers.1.mlp.experts.down_proj")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))
    changed = tmp_path / "changed.onnx"
    onnx.save(proto, changed)
    assert [check.relative_l2 for check in compare_models(model, model, 2)] == [0.0, 0.0]
    checks = compare_models(model, changed, 3)
    assert len({tuple(check.sizes.items()) for check in checks}) > 1
    assert all(1e-4 < check.relative_l2 < 0.1 and check.output == "logits" for check in checks)


def test_a_full_check_covers_batches_tokens_and_caches(model: Path) -> None:
    signature = [
        argument("input_ids", ["batch_size", "sequence_length"]),
        argument("attention_mask", ["batch_size", "total_sequence_length"]),
        argument("past_key_values.0.key", ["batch_size", 2, "past_sequence_length", 8], "float"),
        argument("other", ["s7", None], "float"),
    ]
    seen = []
    for wanted in FULL:
        inputs, sizes = random_inputs(signature, {}, np.random.default_rng(0), wanted)
        assert inputs["attention_mask"].shape[1] == wanted.past + wanted.tokens
        assert inputs["other"].shape[0] == sizes["s7"] == wanted.tokens
        seen.append((sizes["batch_size"], sizes["sequence_length"], sizes["past_sequence_length"]))
    for batch, tokens, past in ((1, 1, 0), (1, 1, 6), (2, 4, 0)):
        assert (batch, tokens, past) in seen
    assert any(batch > 1 and tokens > 1 and past for batch, tokens, past in seen)
    checks, skipped = compare_in_full(model, model)
    assert [check.sizes["sequence"] for check in checks] == [wanted.tokens for wanted in FULL] and not skipped


def test_sizes_that_the_original_does_not_run_with_are_skipped(tmp_path: Path) -> None:
    def save(name: str, target: list[int]) -> Path:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", 4])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
        graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.array(target), "shape")])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / name)
        return tmp_path / name

    free, one, seventh = save("free.onnx", [-1, 4]), save("one.onnx", [1, -1, 4]), save("seventh.onnx", [7, 1, 1, -1])
    assert len(compare_in_full(free, free)[0]) == len(FULL)
    checks, skipped = compare_in_full(seventh, seventh)
    assert [check.sizes["sequence"] for check in checks] == [7] and len(skipped) == len(FULL) - 1
    assert skipped[0].sizes == {"batch": 1, "sequence": 1} and "seventh.onnx" in skipped[0].reason
    with pytest.raises(CheckError, match=r"seventh\.onnx"):
        compare_in_full(one, seventh)  # what only the converted model cannot do is an error
    with pytest.raises(CheckError, match=r"cannot run .*never\.onnx"):
        compare_in_full(save("never.onnx", [1000]), free)


def test_models_in_bfloat16_are_compared(tmp_path: Path) -> None:
    axes = ["tokens", 4]
    kinds = (TensorProto.FLOAT, TensorProto.BFLOAT16)
    paths = []
    for factor in (1.0, 1.5):
        nodes = [
            helper.make_node("Cast", ["x"], ["wide"], to=kinds[0]),
            helper.make_node("Mul", ["wide", "factor"], ["scaled"]),
            helper.make_node("Cast", ["scaled"], ["y"], to=kinds[1]),
        ]
        x, y = (helper.make_tensor_value_info(name, kinds[1], axes) for name in "xy")
        graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.float32(factor), "factor")])
        paths.append(tmp_path / f"{factor}.onnx")
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), paths[-1])
    assert compare_models(paths[0], paths[0], 1)[0].relative_l2 == 0.0
    assert compare_models(*paths, 1)[0].relative_l2 == pytest.approx(0.5, rel=0.02)


def test_what_cannot_be_run_is_named(model: Path, tmp_path: Path) -> None:
    proto = onnx.load(model)
    proto.graph.node[0].op_type = "NoSuchOperator"
    broken = tmp_path / "broken.onnx"
    onnx.save(proto, broken)
    with pytest.raises(CheckError, match=r"broken\.onnx.*NoSuchOperator"):
        compare_models(model, broken, 1)


def test_sizes_that_the_original_cannot_run_with_are_named(tmp_path: Path) -> None:
    """It takes two tokens at a time; a full check is what goes round that."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2, 2])
    rows = numpy_helper.from_array(np.ones((2, 2), np.float32), "rows")
    graph = helper.make_graph([helper.make_node("Add", ["x", "rows"], ["y"])], "g", [x], [y], [rows])
    model = tmp_path / "two.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), model)
    with pytest.raises(CheckError, match=r"^with batch \d, sequence \d, .*two\.onnx: .*; --check full leaves out"):
        compare_models(model, model, 20)


def test_token_ids_stay_inside_the_vocabulary(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model.onnx")  # ONNX Runtime fails on an id outside the table
    assert len(compare_models(model, model, 20)) == 20
