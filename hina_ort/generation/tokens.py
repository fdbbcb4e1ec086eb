"""What lies beside a language model: its tokenizer, where texts end, how long they may be, and its chat template."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_passes.external_data import ModelFileError
from hina_ort.files import UsageError
from hina_ort.genai import CONFIG_NAME

TOKENIZER = "tokenizer.json"
_LENGTHS = ("max_position_embeddings", "n_positions", "context_length")


@dataclass(frozen=True)
class Tokens:
    """A tokenizer (of the package tokenizers), the tokens that end a text, and the most tokens of one, if known."""

    folder: Path
    tokenizer: Any
    stop: frozenset[int]
    context: int | None

    @classmethod
    def read(cls, source: Path) -> Tokens:
        """Read what lies beside the model file `source`, or above its folder when that is called onnx.

        Raises ModelFileError when there is no tokenizer.json, or a file is none of its kind.
        """
        folder = source.parent
        if not (folder / TOKENIZER).is_file() and folder.absolute().name == "onnx":
            folder = folder.parent
        path = folder / TOKENIZER
        if not path.is_file():
            raise ModelFileError(
                f"{source.parent} holds no {TOKENIZER}; put the tokenizer of the model's checkpoint there"
            )
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise ModelFileError(f"{path} is no tokenizer ({error}); copy it from the checkpoint again") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        sections = list(_sections(folder))
        return cls(folder, tokenizer, _stop(folder, sections, tokenizer), _context(sections))

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """The tokens of `prompt`, as the user's turn of a conversation with `chat`; UsageError when it is empty."""
        if not prompt:
            raise UsageError("the prompt is empty; give some text")
        text = chat_prompt(self.folder, prompt) if chat else prompt
        try:
            # A chat template writes the special tokens itself.
            tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=not chat).ids
        except Exception as error:  # tokenizers raises Exception itself: a vocabulary may lack its unknown token
            raise ModelFileError(
                f"{self.folder / TOKENIZER} cannot split the prompt ({error}); copy it from the checkpoint again"
            ) from error
        if not tokens:
            raise UsageError(f"{self.folder / TOKENIZER} makes no token of the prompt; give another text")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`, without special ones."""
        text: str = self.tokenizer.decode(tokens)
        return text


def longest_text(folder: Path) -> int | None:
    """The most tokens of a text that the configurations in `folder` allow; ModelFileError when one is no JSON."""
    return _context(list(_sections(folder)))


def chat_prompt(folder: Path, prompt: str) -> str:
    """`prompt` as the first turn of a conversation, by the chat template in `folder`.

    Raises ModelFileError when there is none or it fails, UsageError when jinja2 is missing.
    """
    config = _read(folder / "tokenizer_config.json")
    template = _template(folder, config)
    if template is None:
        raise ModelFileError(f"{folder} holds no chat template; leave out --chat")
    try:
        sandbox = importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise UsageError("--chat needs jinja2: pip install jinja2") from error

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    # The settings of transformers' apply_chat_template.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    special = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    messages = [{"role": "user", "content": prompt}]
    try:
        text: str = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except Exception as error:  # a template can fail in any way
        raise ModelFileError(f"the chat template in {folder} fails: {error}; leave out --chat") from error
    return text


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    return found if isinstance(found, str) else None


def _sections(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What says where texts end and how long they may be, the most specific first."""
    yield _read(folder / "generation_config.json")
    config = _read(folder / "config.json")
    yield config
    for values in (config.get("text_config"), _read(folder / CONFIG_NAME).get("model")):
        if isinstance(values, Mapping):
            yield values


def _stop(folder: Path, sections: list[Mapping[str, Any]], tokenizer: Any) -> frozenset[int]:
    for values in sections:
        found = values.get("eos_token_id")
        found = found if isinstance(found, list) else [found]
        if ids := frozenset(token for token in found if _is_count(token)):
            return ids
    name = _text(_read(folder / "tokenizer_config.json").get("eos_token"))
    token = tokenizer.token_to_id(name) if name else None
    return frozenset() if token is None else frozenset({token})


def _context(sections: list[Mapping[str, Any]]) -> int | None:
    found = [values[name] for values in sections for name in _LENGTHS if _is_count(values.get(name))]
    return next((length for length in found if length), None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _text(token: Any) -> str:
    """A special token's text; configurations give that, or an object with it."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else ""


def _read(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`; an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is no JSON ({error}); copy it from the checkpoint again") from error
    return values if isinstance(values, Mapping) else {}
