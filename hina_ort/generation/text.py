"""From tokens to text while they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNKNOWN = "\ufffd"
_LONGEST = 4
"""Bytes of the longest character in UTF-8: so many tokens that complete none cannot become one."""


class TextStream:
    """Text of tokens as they come; characters that are not complete yet wait for their other tokens.

    What a token adds depends on those before (a space, the first bytes of a character), so that each is decoded
    together with the last ones that were given out, and what these make alone is left out. `decode` makes a text of
    tokens, `before` are those of the prompt. The pieces make up the text of all tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)
        self._read = len(self._tokens)
        self._shown = len(decode(self._tokens))

    def push(self, token: int) -> str:
        """The text that is sure now that `token` is known; often empty."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        waiting = len(text) - len(text.rstrip(_UNKNOWN))
        # Bytes that can become no character are given out, but for the last, which may begin one.
        hopeless = len(self._tokens) - self._read >= _LONGEST
        end = len(text) - (min(waiting, 1) if hopeless else waiting)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if not waiting and piece:
            self._tokens, self._read = self._tokens[self._read :], len(self._tokens) - self._read
            self._shown = len(self._decode(self._tokens))
        return piece

    def finish(self) -> str:
        """What is left when no token follows."""
        text = self._decode(self._tokens)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece
