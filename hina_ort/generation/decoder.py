"""A decoder in ONNX Runtime that reads a text piece by piece and keeps its cache in between."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from graph_passes import external_data
from graph_passes.cut import to_ort
from graph_passes.external_data import ModelFileError
from hina_ort.comparison import NUMPY_TYPES
from hina_ort.genai import axis_sizes, shares_cache
from hina_ort.generation.cache import cache_pairs, grows

Array = npt.NDArray[Any]

PIECE = 1024
"""Most tokens that are read at once: a decoder gives logits for each of them, 0.6 MB for a vocabulary of 152k."""

_BRANCH = "use_cache_branch"
"""Input of a decoder that optimum merged of one without past tokens and one with them."""
_FED = (
    "input_ids", "attention_mask", "position_ids", "cache_position", "num_logits_to_keep", "logits_to_keep", _BRANCH
)  # fmt: skip


class Decoder:
    """The decoder `source`; `model` is its path, or the same model with more outputs as bytes.

    Where a text will have `most` tokens, a model of onnxruntime-genai has a cache of that length, and each step adds to
    it in place. What others write is what they read in the next step: nothing is copied between steps.

    Raises ModelFileError when ONNX Runtime does not load it, or when its inputs are not those of a language model.
    """

    def __init__(self, source: Path, model: str | bytes, options: ort.SessionOptions, most: int = 0) -> None:
        self.source = source
        with self._clear_errors():
            try:
                self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            except Exception:  # whatever ONNX Runtime raised: it is raised again, unless a clearer error comes first
                external_data.load(source)  # names a file that is missing or cut off
                raise
        self._inputs = {arg.name: arg for arg in self._session.get_inputs()}
        outputs = [arg.name for arg in self._session.get_outputs()]
        self._pairs = cache_pairs(self._inputs, outputs)
        self._check(outputs)
        # A state of fixed size (of a convolution, say) is carried on for single tokens only by most exports, as is any
        # cache by decoders that were merged.
        growing = [name for name in self._pairs if grows(self._inputs[name].shape)]
        self._in_pieces = self.has_cache and len(growing) == len(self._pairs) and _BRANCH not in self._inputs
        sizes, length = axis_sizes(source.parent), most if shares_cache(source.parent) else 0
        self._past: list[int] = []
        self._cache = {name: to_ort(_empty(self._inputs[name], sizes, length)) for name in self._pairs}
        self._in_place = {self._pairs[name]: self._cache[name] for name in growing} if length else {}

    @property
    def has_cache(self) -> bool:
        """Whether tokens that were read before need not be read again."""
        return bool(self._pairs)

    def read(self, tokens: Sequence[int], also: Sequence[str] = ()) -> tuple[Array, list[Array]]:
        """Read `tokens` after those before; return float32 logits [V] of the next one.

        The second result has the values of the outputs `also`, added up over all tokens that were read.
        """
        size = PIECE if self._in_pieces else len(tokens)
        totals: list[Array] = []
        for begin in range(0, len(tokens), size):
            logits, values = self._run(list(tokens[begin : begin + size]), also)
            totals = [a + b for a, b in zip(totals, values, strict=True)] if totals else values
        return logits, totals

    def _run(self, tokens: list[int], also: Sequence[str]) -> tuple[Array, list[Array]]:
        if not self.has_cache:
            tokens, self._past = self._past + tokens, []
        past = len(self._past)
        fed = {name: to_ort(self._fed(name, tokens, past)) for name in self._inputs if name not in self._pairs}
        with self._clear_errors():
            binding = self._session.io_binding()
            for name, value in {**fed, **self._cache}.items():
                binding.bind_ortvalue_input(name, value)
            names = [self._logits, *self._pairs.values(), *also]
            for name in names:
                if name in self._in_place:
                    binding.bind_ortvalue_output(name, self._in_place[name])
                else:
                    binding.bind_output(name, "cpu")
            with self._blaming_tokens(tokens):
                self._session.run_with_iobinding(binding)
            values = dict(zip(names, binding.get_outputs(), strict=True))
        self._past += tokens
        self._cache = {name: self._in_place.get(output, values[output]) for name, output in self._pairs.items()}
        return _last_row(values[self._logits]), [values[name].numpy() for name in also]

    def _fed(self, name: str, tokens: list[int], past: int) -> Array:
        """The input `name` for new `tokens` after `past` ones."""
        arg, positions = self._inputs[name], np.arange(past, past + len(tokens))
        match name:
            case "input_ids":
                value: Array = np.array([tokens])
            case "attention_mask":
                value = np.ones((1, past + len(tokens)))
            case "position_ids":  # [batch, tokens], or [3, batch, tokens] for time, height and width of an image
                value = np.tile(positions, (*(n for n in arg.shape[:-2] if isinstance(n, int)), 1, 1))
            case "cache_position":
                value = positions
            case "use_cache_branch":
                value = np.full([1] * len(arg.shape), past > 0)
            case _:  # how many logits to keep
                value = np.ones([1] * len(arg.shape))
        return np.ascontiguousarray(value, NUMPY_TYPES[arg.type])

    def _check(self, outputs: list[str]) -> None:
        left = [name for name in outputs if name not in self._pairs.values() and "present" not in name]
        self._logits = "logits" if "logits" in left else left[0] if len(left) == 1 else ""
        if "input_ids" not in self._inputs or not self._logits:
            raise ModelFileError(
                f"{self.source} is no language model: it has the inputs {_listed(self._inputs)} and the outputs "
                f"{_listed(outputs)}, expected input_ids and logits"
            )
        for name, arg in self._inputs.items():
            if arg.type not in NUMPY_TYPES or not (name in self._pairs or name in _FED):
                raise ModelFileError(
                    f"{self.source} has the input {name} of type {arg.type}, which generate cannot give; export it "
                    "with the task text-generation-with-past"
                )

    @contextmanager
    def _blaming_tokens(self, tokens: list[int]) -> Iterator[None]:
        """Say so when the model failed at a token that it has no logit for; such a token may have an embedding."""
        try:
            yield
        except Exception as error:  # likewise of ONNX Runtime; raised again unless a token is to blame
            size = next(arg.shape[-1] for arg in self._session.get_outputs() if arg.name == self._logits)
            if isinstance(size, int) and max(tokens) >= size:
                raise ModelFileError(
                    f"{self.source} fails at token {max(tokens)}, and has a vocabulary of {size}: is the tokenizer "
                    "that of another model? Copy the one of the model's checkpoint"
                ) from error
            raise

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except ModelFileError:
            raise
        except Exception as error:  # the exceptions of ONNX Runtime have no base class of their own
            raise ModelFileError(f"ONNX Runtime cannot run {self.source}: {str(error).strip()}") from error


def _empty(arg: Any, sizes: dict[str, int], length: int) -> Array:
    """A cache of one sequence before the first token: zeros in a state, and `length` along an axis that grows."""
    shape = [axis if isinstance(axis, int) else sizes.get(axis, length) for axis in arg.shape[1:]]
    return np.zeros((1, *shape), NUMPY_TYPES[arg.type])


def _last_row(value: ort.OrtValue) -> Array:
    """The last row of `value`, as float32; the others are not copied."""
    shape, dtype = value.shape(), ir.DataType(value.element_type()).numpy()
    row: Array = np.empty(shape[-1], dtype)
    ctypes.memmove(row.ctypes.data, value.data_ptr() + (math.prod(shape) - shape[-1]) * dtype.itemsize, row.nbytes)
    return row.astype(np.float32)


def _listed(names: Any) -> str:
    shown = list(names)[:6]
    return ", ".join(shown) + (", ..." if len(list(names)) > len(shown) else "")
