"""Frames of OpenAI's answers: server-sent events, and whole bodies.

A stream's frames differ in few places, so the rest is written once per answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from gateway.core.errors import GatewayError
from gateway.core.output import Chunk
from gateway.core.types import FinishReason, TokenLogprob, Usage
from gateway.rest.errors import body_of, to_json
from gateway.rest.logprobs import LogprobWriter, joined

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every frame of an answer repeats."""

    public_id: str
    created: int
    model: str
    chat: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False

    @property
    def answer_id(self) -> str:
        """The id in the answer."""
        return ("chatcmpl-" if self.chat else "cmpl-") + self.public_id

    def opened(self, kind: str) -> dict[str, Any]:
        """The first fields of an object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that its client wants back, and the logprobs of its tokens but the first."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]


class Framer:
    """Chunks of one choice to frames. `usage` is asked where every frame has it."""

    def __init__(
        self,
        head: Head,
        index: int,
        usage: Callable[[], Usage],
        writer: LogprobWriter | None = None,
    ) -> None:
        self._head = head
        self._usage = usage
        self._writer = writer
        start = to_json(head.opened(_kind(head))).decode()
        self._start = f"data: {start[:-1]}"
        self._choice = f'{self._start},"choices":[{{"index":{index},'
        open_, close = ('"delta":{"content":', "}") if head.chat else ('"text":', "")
        self._before_text = self._choice + open_
        self._close = close
        self._after_text = f'{close},"logprobs":null,"finish_reason":'
        self._plain = writer is None and not (head.return_token_ids or head.continuous_usage)
        self._end = f"}}]{_USAGE_NULL if head.include_usage else ''}}}\n\n"

    def opening(self, prompt_token_ids: Sequence[int], echo: Echo | None = None) -> bytes:
        """The first frame: a chat's role, an echo, the prompt's tokens where they are asked for."""
        prompt = ""
        if self._head.return_token_ids:
            prompt = f',"prompt_token_ids":{to_json(list(prompt_token_ids)).decode()}'
        if self._head.chat:
            delta = '"delta":{"role":"assistant","content":""}'
            rest = f',"logprobs":null,"finish_reason":null}}]{prompt}{self._ended()[2:]}'
            return f"{self._choice}{delta}{rest}".encode()
        if echo is not None:
            logprobs = None
            if self._writer is not None:
                logprobs = self._writer.prompt(echo.token_ids, echo.logprobs, echo.text)
            return self._frame(echo.text, logprobs, "null", prompt)
        return self._frame("", None, "null", prompt) if prompt else b""

    def delta(self, chunk: Chunk) -> bytes:
        """A frame of text; nothing where there is none to show."""
        if self._plain:
            if not chunk.text:
                return b""
            text = encode_basestring(chunk.text)
            return f"{self._before_text}{text}{self._after_text}null{self._end}".encode()
        logprobs = None
        if self._writer is not None and chunk.logprobs:
            logprobs = self._writer.output(chunk.logprobs)
        elif not chunk.text and not (self._head.return_token_ids and chunk.token_ids):
            return b""
        return self._frame(chunk.text, logprobs, "null", self._ids(chunk))

    def ending(self, reason: FinishReason) -> bytes:
        """The frame with the finish reason."""
        word = f'"{reason.name.lower()}"'
        if not self._head.chat:
            return self._frame("", None, word, "")
        rest = f'"delta":{{}},"logprobs":null,"finish_reason":{word}{self._ended()}'
        return f"{self._choice}{rest}".encode()

    def _frame(self, text: str, logprobs: dict[str, Any] | None, word: str, extra: str) -> bytes:
        shown = to_json(logprobs).decode()
        before = f"{self._before_text}{encode_basestring(text)}{self._close}"
        rest = f',"logprobs":{shown},"finish_reason":{word}{extra}{self._ended()}'
        return f"{before}{rest}".encode()

    def _ids(self, chunk: Chunk) -> str:
        if not self._head.return_token_ids:
            return ""
        return f',"token_ids":{to_json(list(chunk.token_ids)).decode()}'

    def _ended(self) -> str:
        if not self._head.continuous_usage:
            return self._end
        return f'}}],"usage":{to_json(usage_object(self._usage())).decode()}}}\n\n'


def closing(head: Head, usage: Usage) -> bytes:
    """The end of a stream: the usage if it is asked for, and [DONE]."""
    if not head.include_usage:
        return DONE
    body = head.opened(_kind(head)) | {"choices": [], "usage": usage_object(usage)}
    return b"data: " + to_json(body) + b"\n\n" + DONE


def failing(error: GatewayError) -> bytes:
    """The end of a stream that can't go on."""
    return b"data: " + to_json(body_of(error)) + b"\n\n" + DONE


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(slots=True, kw_only=True)
class Choice:
    """What one request has answered so far; `reason` once it has ended."""

    prompt_token_ids: Sequence[int]
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason = FinishReason.UNSPECIFIED

    def add(self, chunk: Chunk) -> None:
        """More of it."""
        self.pieces.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.end is not None:
            self.reason = chunk.end.reason

    def shown(
        self, head: Head, index: int, echo: Echo | None, writer: LogprobWriter | None
    ) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        text = "".join(self.pieces)
        choice: dict[str, Any] = {"index": index}
        if head.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text if echo is None else echo.text + text
        choice["logprobs"] = None
        if writer is not None:
            parts = []
            if echo is not None:
                parts.append(writer.prompt(echo.token_ids, echo.logprobs, echo.text))
            parts.append(writer.output(self.logprobs))
            choice["logprobs"] = parts[0] if len(parts) == 1 else joined(parts)
        choice["finish_reason"] = self.reason.name.lower()
        if head.return_token_ids:
            if not head.chat:
                choice["prompt_token_ids"] = list(self.prompt_token_ids)
            choice["token_ids"] = self.token_ids
        return choice


def whole_answer(head: Head, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    kind = "chat.completion" if head.chat else "text_completion"
    return head.opened(kind) | {"choices": choices, "usage": usage_object(usage)}


_USAGE_NULL = ',"usage":null'


def _kind(head: Head) -> str:
    return "chat.completion.chunk" if head.chat else "text_completion"
