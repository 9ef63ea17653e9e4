"""Logprobs in the shapes of OpenAI's two interfaces.

A token is shown as its text, or where its bytes are no whole characters as `bytes:\\xe2\\x80`.
Offsets count characters of the answer's text before stop strings are cut off.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gateway.core.detokenizer import Detokenizer
from gateway.core.types import TokenLogprob

TokenBytes = Callable[[int], bytes]


class LogprobWriter(Protocol):
    """Writes the logprobs of one answer in order."""

    def prompt(
        self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text: str
    ) -> dict[str, Any]:
        """Those of an echoed prompt, whose first token has none."""

    def output(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Those of more output."""


class ChatLogprobs:
    """Of chats: an object per token, with its bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def prompt(
        self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text: str
    ) -> dict[str, Any]:
        """Chats are not echoed."""
        raise AssertionError("validation refuses echo with messages")

    def output(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Content; refusals are not told apart."""
        content = []
        for entry in logprobs:
            shown = self._entry(entry.token_id, entry.logprob)
            shown["top_logprobs"] = [self._entry(*top) for top in entry.top]
            content.append(shown)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token_id)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """Of completions: columns. The token itself stands among its top ones, as clients expect."""

    def __init__(
        self, token_bytes: TokenBytes, prompt: Callable[[], Detokenizer], output: Detokenizer
    ) -> None:
        self._token_bytes = token_bytes
        self._prompt_detokenizer = prompt
        self._output_detokenizer = output
        self._offset = 0

    def prompt(
        self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text: str
    ) -> dict[str, Any]:
        """Those of an echoed prompt, whose first token has none."""
        columns, detokenizer = self._columns(), self._prompt_detokenizer()
        self._add(columns, detokenizer, prompt[0], None)
        for entry in logprobs:
            self._add(columns, detokenizer, entry.token_id, entry)
        self._offset = len(text)
        return columns

    def output(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Those of more output."""
        columns = self._columns()
        for entry in logprobs:
            self._add(columns, self._output_detokenizer, entry.token_id, entry)
        return columns

    @staticmethod
    def _columns() -> dict[str, list[Any]]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def _add(
        self,
        columns: dict[str, list[Any]],
        detokenizer: Detokenizer,
        token_id: int,
        entry: TokenLogprob | None,
    ) -> None:
        columns["text_offset"].append(self._offset)
        self._offset += len(detokenizer.push(token_id))
        text = token_text(self._token_bytes(token_id))
        columns["tokens"].append(text)
        columns["token_logprobs"].append(None if entry is None else entry.logprob)
        top: dict[str, float] | None = None
        if entry is not None:
            top = {}
            # Of tokens with equal texts the likeliest stands.
            for other, logprob in (*entry.top, (token_id, entry.logprob)):
                top.setdefault(token_text(self._token_bytes(other)), logprob)
        columns["top_logprobs"].append(top)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns one after the other."""
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}


def token_text(data: bytes) -> str:
    """A token as clients see it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
