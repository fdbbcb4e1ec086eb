"""Sampling and the text of tokens as they come, against what is obvious and slow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hina_ort.generation.sampling import Sampler, probabilities
from hina_ort.generation.text import TextStream

TEXT = "Köln 日本語 🙂🙃 \ufffd end"


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """Chances by sorting tokens one by one; no two logits are equal."""
    weights = {token: float(np.exp(value / temperature)) for token, value in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])[:top_k]
    total, kept, reached = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if reached < top_p:
            kept.append(token)
            reached += weights[token] / total
    left = sum(weights[token] for token in kept)
    return [weights[token] / left if token in kept else 0.0 for token in weights]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-4000, 4000), min_size=2, max_size=30, unique=True),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([None, 1, 2, 5, 100]),
    st.sampled_from([0.01, 0.5, 0.9, 1.0]),
)
def test_chances_are_those_of_the_definition(whole: list[int], temperature: float, k: int | None, p: float) -> None:
    logits = [value / 1000 for value in whole]
    found = probabilities(np.array(logits, np.float32).astype(np.float64), temperature, k, p)
    np.testing.assert_allclose(found, reference(np.float32(logits).tolist(), temperature, k, p), rtol=1e-9)


def test_equal_logits_at_the_edge_of_top_k_are_all_kept() -> None:
    np.testing.assert_allclose(probabilities(np.array([1.0, 2.0, 1.0, 0.0]), 1.0, 2, 1.0)[[0, 2, 3]] > 0, [1, 1, 0])
    assert probabilities(np.array([1e30, -np.inf, 1e30]), 1.0, None, 1.0).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (3, 1.0), (None, 0.8)])
def test_tokens_come_as_often_as_their_chances(top_k: int | None, top_p: float) -> None:
    logits = np.log(np.array([0.4, 0.05, 0.3, 0.05, 0.2]))
    sampler, draws = Sampler(1.0, top_k, top_p, seed=1), 20_000
    counts = np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=5)
    chances = probabilities(logits, 1.0, top_k, top_p)
    assert counts[chances == 0].sum() == 0
    # Five standard deviations of a binomial count.
    assert np.all(np.abs(counts - draws * chances) <= 5 * np.sqrt(draws * chances * (1 - chances)))


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampler().choose(np.array([1.0, 3.0, 3.0], np.float32)) == 1


def byte_level() -> Any:
    """A token is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Any:
    """As Llama's: words begin with a space that the decoder drops at the start; rare characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"Klnedö", "\u2581e", "nd", "\u2581end"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    merges = [("\u2581", "e"), ("n", "d"), ("\u2581e", "nd")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream(tokenizer: Any, tokens: list[int], begin: int) -> list[str]:
    text = TextStream(tokenizer.decode, tokens[:begin])
    return [*(text.push(token) for token in tokens[begin:]), text.finish()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_are_whole_characters_and_make_up_the_text(make: Any) -> None:
    tokenizer = make()
    for text in (TEXT, "end end end", "日本語日本語", " end"):
        tokens = tokenizer.encode(text).ids
        whole = tokenizer.decode(tokens)
        for begin in range(len(tokens)):
            before = tokenizer.decode(tokens[:begin])
            if begin and before.endswith("\ufffd"):
                continue  # a prompt is a whole text
            pieces = stream(tokenizer, tokens, begin)
            assert before + "".join(pieces) == whole
            assert "".join(pieces).count("\ufffd") == whole[len(before) :].count("\ufffd")


def test_text_comes_as_soon_as_it_is_sure() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("aé🙂b").ids
    assert stream(tokenizer, tokens, 0) == ["a", "", "é", "", "", "", "🙂", "b", ""]
    assert stream(tokenizer, tokens[:-2], 1)[-1] == "\ufffd"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*b"a\x80\xc3\xa9\xe6\x97\xa5\xf0\x9f\x99\x82\xff"]), max_size=40), st.integers(0, 3))
def test_bytes_that_are_no_characters_come_too(content: list[int], begin: int) -> None:
    tokenizer = byte_level()
    alphabet = {tokenizer.decode([n]): n for n in range(256)}
    names = _byte_tokens(tokenizer)
    assert alphabet["a"] == names[ord("a")]
    tokens = [names[ord("x")]] * begin + [names[byte] for byte in content]
    pieces = stream(tokenizer, tokens, begin)
    assert "x" * begin + "".join(pieces) == bytes([*b"x" * begin, *content]).decode(errors="replace")
    # No more than the last few bytes wait.
    shown = ["x" * begin + "".join(pieces[:n]) for n in range(len(pieces))]
    assert all(len(after) >= len(before) for before, after in pairwise(shown))
    assert len("".join(pieces)) - len("".join(pieces[:-1])) <= 4


def _byte_tokens(tokenizer: Any) -> list[int]:
    """The token of each byte: GPT-2's alphabet has printable bytes at their own place, and the others from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    characters = {byte: chr(byte) for byte in own} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [tokenizer.token_to_id(characters[byte]) for byte in range(256)]
