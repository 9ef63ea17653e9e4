"""Token ids to text, one token at a time.

Rule: the pieces joined, with what `flush` gives, are the text of all tokens decoded at once, and
no piece ends inside a character. Two ways: `ByteDetokenizer` for byte-level vocabularies, where a
token is a fixed run of bytes, and `WindowDetokenizer` over any decode function.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# A character is at most four bytes and a token at least one, so a longer run that still ends in
# a replacement character is not a character waiting for its end.
_MAX_PENDING = 8


class Detokenizer(Protocol):
    """Turns the tokens of one request into text."""

    def push(self, token: int) -> str:
        """The text that is certain once `token` is known."""

    def flush(self) -> str:
        """The rest, after the last token."""


class ByteDetokenizer:
    """Looks up each token's bytes; tokens outside the table and special ones have no text."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._midway = False  # within a character

    def push(self, token: int) -> str:
        """The text that is certain once `token` is known."""
        if token >= len(self._bytes):
            return ""
        data = self._bytes[token]
        if not self._midway:
            # Nearly all tokens are whole characters, and the decoder costs many times this.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._midway = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """A character that was never completed, as a replacement character."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes a short window again and gives what came on top of it.

        ids   ... a b c | d e | f        [prefix:read] gave text already, [read:] is pending
                    prefix    read

    The window keeps the context that decoders need at a piece's start (spaces of word pieces);
    `after` are the tokens before the first one, whose text is not given.
    """

    def __init__(self, decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(after)
        self._num_read = len(after)
        self._given = len(decode(self._window)) if after else 0

    def push(self, token: int) -> str:
        """The text that is certain once `token` is known."""
        self._window.append(token)
        text = self._decode(self._window)
        pending = len(self._window) - self._num_read
        if text.endswith(_REPLACEMENT) and pending <= _MAX_PENDING:
            return ""
        if text.endswith(_REPLACEMENT):
            # Invalid bytes: only the last replacement character may still become another one.
            delta = self._give(text[:-1])
            self._window = self._window[-4:]
            self._num_read = 0
            self._given = len(self._decode(self._window)) - 1
            return delta
        delta = self._give(text)
        self._slide()
        return delta

    def flush(self) -> str:
        """Text held back at the end."""
        return self._give(self._decode(self._window)) if self._window else ""

    def _give(self, text: str) -> str:
        delta = text[self._given :]
        self._given = max(self._given, len(text))
        return delta

    def _slide(self) -> None:
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._given = len(self._decode(self._window))
