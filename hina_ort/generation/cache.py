"""Which inputs and outputs of a decoder are its cache, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CACHE = re.compile(r"past_key_values|present_key_values|past|present")


def cache_pairs(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """For each cache input, the output that it takes in the next step.

    Names are those of optimum and of onnxruntime-genai: `past_key_values.0.key` and `present.0.key`, `past.0.conv` and
    `present.0.conv`, `past_conv.0` and `present_conv.0`.
    """
    present = {_CACHE.sub("*", name): name for name in outputs if "present" in name}
    keys = {name: _CACHE.sub("*", name) for name in inputs if "past" in name}
    return {name: present[key] for name, key in keys.items() if key in present}


def grows(shape: Sequence[int | str | None]) -> bool:
    """Whether a cache of this `shape` ([batch, ...]; symbolic axes have names) holds more for every token."""
    return not all(isinstance(axis, int) for axis in shape[1:])
