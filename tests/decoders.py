"""Decoders with a KV cache in ONNX Runtime, fed and read by the names that optimum gives; and as transformers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import hina_ort

Array = npt.NDArray[Any]
Output = tuple[Array, Any]
"""Logits [batch, tokens, V], and what the next step starts with."""


class OnnxDecoder:
    """The decoder in the file or folder `path`; its cache are arrays by the names of inputs."""

    def __init__(self, path: Path) -> None:
        model = path / "model.onnx" if path.is_dir() else path
        options = hina_ort.session_options()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        given = ("input_ids", "attention_mask", "position_ids")
        self.states = {item.name: item for item in self.session.get_inputs() if item.name not in given}

    def step(self, ids: Array, mask: Array, past: Any) -> Output:
        """Read `ids` [batch, tokens]; `mask` is that of all tokens so far, `past` that of the step before or None."""
        cache = past or {name: self._empty(item.shape, len(ids)) for name, item in self.states.items()}
        fed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)[:, -ids.shape[1] :]}
        names = [output.name for output in self.session.get_outputs()]
        values = dict(zip(names, self.session.run(names, {**fed, **cache}), strict=True))
        next_cache = {name: values[present(name)] for name in self.states}
        return values["logits"], next_cache

    @staticmethod
    def _empty(shape: list[Any], batch: int) -> Array:
        return np.zeros([batch, *(size if isinstance(size, int) else 0 for size in shape[1:])], np.float32)


class TorchDecoder:
    """A causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def step(self, ids: Array, mask: Array, past: Any) -> Output:
        """Read `ids` [batch, tokens]; `mask` is that of all tokens so far, `past` the cache of the step before."""
        import torch

        tensors = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions(mask)[:, -ids.shape[1] :],
        }
        with torch.no_grad():
            result = self.model(
                **{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()},
                use_cache=True,
                **({"past_key_values": past} if past is not None else {}),
            )
        return result.logits.float().numpy(), result.past_key_values


def present(name: str) -> str:
    """The output that becomes the input `name` of the next step."""
    return f"present.{name.split('.', 1)[1]}"


def positions(mask: Array) -> Array:
    """Positions [batch, tokens] under a mask with padding on the left, as generate() of transformers counts them."""
    return np.maximum(mask.cumsum(axis=1) - 1, 0)


def padded(lengths: list[int], vocabulary: int, seed: int = 0) -> tuple[Array, Array]:
    """Random prompts of `lengths`, padded on the left: ids and mask [batch, longest]."""
    rng = np.random.default_rng([seed, *lengths])
    longest = max(lengths)
    mask = np.array([[0] * (longest - length) + [1] * length for length in lengths])
    return rng.integers(3, vocabulary, (len(lengths), longest)) * mask, mask


def read(decoder: Any, ids: Array, mask: Array, pieces: list[int]) -> Array:
    """Logits [batch, tokens, V] of `ids`, read in `pieces` of so many tokens, each with the cache of those before."""
    done, past, logits = 0, None, []
    for size in pieces:
        end = done + size
        part, past = decoder.step(ids[:, done:end], mask[:, :end], past)
        logits.append(part)
        done = end
    assert done == ids.shape[1]
    return np.concatenate(logits, axis=1)


def greedy(decoder: Any, ids: Array, mask: Array, tokens: int) -> Array:
    """The next `tokens` [batch, tokens], each the likeliest."""
    found: list[Array] = []
    past = None
    for _ in range(tokens):
        logits, past = decoder.step(ids, mask, past)
        ids = logits[:, -1].argmax(axis=-1)[:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
        found.append(ids)
    return np.concatenate(found, axis=1)


def distance(actual: Array, expected: Array, mask: Array) -> float:
    """Relative L2 distance of the logits of tokens that are no padding."""
    rows = mask.astype(bool)
    return float(np.linalg.norm(actual[rows] - expected[rows]) / np.linalg.norm(expected[rows]))
