"""genai_config.json and the library of HinaMoE beside an exported model, for onnxruntime-genai."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hina_ort.export.architectures import GENAI_TYPES
from hina_ort.export.cache import State
from hina_ort.files import MODEL_NAME
from hina_ort.genai import CONFIG_NAME, OPTION
from hina_ort.runtime import LIBRARY_NAME, get_library_path


def write(folder: Path, config: Any, states: Sequence[State], generation: dict[str, Any]) -> bool:
    """Write both into `folder` when onnxruntime-genai has a decoder for `config`, a text configuration; say if it has.

    `generation` are the values of generation_config.json, if there is one.
    """
    kind, sizes = GENAI_TYPES.get(config.model_type), {state.sizes[1:2] + state.sizes[3:] for state in states}
    if kind is None or len(sizes) != 1:  # it makes all keys and values alike
        return False
    ((heads, width),) = sizes
    tokens = {name: generation.get(name, getattr(config, name, None)) for name in _TOKENS}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", OPTION: LIBRARY_NAME, "provider_options": []},
        "filename": MODEL_NAME,
        "head_size": width,
        "hidden_size": config.hidden_size,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": len(states) // 2,
        "num_key_value_heads": heads,
    }
    model: dict[str, Any] = {
        **{name: token for name, token in tokens.items() if token is not None},
        "context_length": config.max_position_embeddings,
        "decoder": decoder,
        "type": kind,
        "vocab_size": config.vocab_size,
    }
    if tokens["pad_token_id"] is None:
        end = tokens["eos_token_id"]
        model["pad_token_id"] = end[0] if isinstance(end, list) else end
    search: dict[str, Any] = {
        "do_sample": generation.get("do_sample", False),
        "max_length": config.max_position_embeddings,
        "past_present_share_buffer": False,
        **{name: generation[name] for name in ("temperature", "top_k", "top_p") if name in generation},
    }
    (folder / CONFIG_NAME).write_text(json.dumps({"model": model, "search": search}, indent=4), encoding="utf-8")
    shutil.copyfile(get_library_path(), folder / LIBRARY_NAME)
    return True


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
