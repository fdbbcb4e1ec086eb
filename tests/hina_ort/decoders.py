"""Tiny decoders with a cache, built by hand: what they compute is known, and no torch is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, MOST_POSITIONS = 64, 8, 40
END = 1
"""The token that ends a text."""


def save_decoder(
    folder: Path, *, positions: int = 2, mask: bool = True, state: bool = False, logits: str = "FLOAT", **config: Any
) -> Path:
    """Write a decoder, a tokenizer of the words w0, w1, .. and the configuration `config` into `folder`; return it.

    It adds up the embeddings of all tokens so far, from a cache that grows and, with `state`, again from one of fixed
    size. `positions` is the rank of position_ids (0: none). `logits` is their type.
    """
    folder.mkdir(exist_ok=True)
    inputs: list[tuple[str, int, list[Any]]] = [("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    if mask:
        inputs.append(("attention_mask", TensorProto.INT64, ["batch", "past + sequence"]))
    if positions:
        inputs.append(("position_ids", TensorProto.INT64, [3, "batch", "sequence"][-positions:]))
    cache = [("past_key_values.0.key", "present.0.key", ["batch", "past", WIDTH])]
    if state:
        cache.append(("past.1.state", "present.1.state", ["batch", WIDTH]))
    inputs += [(name, TensorProto.FLOAT, shape) for name, _, shape in cache]
    outputs = [("logits", getattr(TensorProto, logits), ["batch", "sequence", VOCABULARY])]
    outputs += [(name, TensorProto.FLOAT, ["batch", *(n if n != "past" else "all" for n in shape[1:])])
                for _, name, shape in cache]  # fmt: skip
    graph = helper.make_graph(
        _nodes(positions, mask, state, getattr(TensorProto, logits)),
        "decoder",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in _constants().items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END} | config))
    return folder


def save_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """Write the tokenizer of the words w0, w1, .. into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def next_token(tokens: list[int], *, positions: int = 2, state: bool = False) -> int:
    """The likeliest token after `tokens`, computed anew from all of them."""
    constants = _constants()
    places = np.arange(len(tokens)) if positions else 0
    total = constants["embedding"][np.array(tokens) + places].sum(0) * np.float32(2 if state else 1)
    return int(np.argmax(np.sin(total) @ constants["head"]))


def _constants() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {
        "embedding": random.standard_normal((VOCABULARY + MOST_POSITIONS, WIDTH)).astype(np.float32),
        "head": random.standard_normal((WIDTH, VOCABULARY)).astype(np.float32),
        "zero": np.array(0, np.int64),
        "one": np.array([1], np.int64),
        "end": np.array([2**40], np.int64),
        "last": np.array([-1], np.int64),
    }


def _nodes(positions: int, mask: bool, state: bool, logits: int) -> list[onnx.NodeProto]:
    node = helper.make_node
    nodes = [node("Identity", ["input_ids"], ["ids"])]
    if positions == 3:
        nodes = [node("Gather", ["position_ids", "zero"], ["places"]), node("Add", ["input_ids", "places"], ["ids"])]
    elif positions:
        nodes = [node("Add", ["input_ids", "position_ids"], ["ids"])]
    nodes += [node("Gather", ["embedding", "ids"], ["new"])]
    nodes += [node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=1)]
    keys = "present.0.key"
    if mask:
        nodes += [node("Cast", ["attention_mask"], ["weights"], to=TensorProto.FLOAT)]
        nodes += [node("Unsqueeze", ["weights", "last"], ["columns"]), node("Mul", [keys, "columns"], ["kept"])]
        keys = "kept"
    nodes += [
        node("CumSum", [keys, "one"], ["sums"]),
        node("Shape", ["past_key_values.0.key"], ["past"], start=1, end=2),
        node("Slice", ["sums", "past", "end", "one"], ["total"]),
    ]
    total = "total"
    if state:
        nodes += [
            node("CumSum", ["new", "one"], ["own"]),
            node("Unsqueeze", ["past.1.state", "one"], ["before"]),
            node("Add", ["before", "own"], ["again"]),
            node("ReduceSum", ["new", "one"], ["added"], keepdims=0),
            node("Add", ["past.1.state", "added"], ["present.1.state"]),
            node("Add", ["total", "again"], ["twice"]),
        ]
        total = "twice"
    nodes += [node("Sin", [total], ["turned"]), node("MatMul", ["turned", "head"], ["product"])]
    return [*nodes, node("Cast", ["product"], ["logits"], to=logits)]
