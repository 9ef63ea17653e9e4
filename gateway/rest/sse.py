"""Frames of OpenAI's answers: server-sent events, and whole bodies.

A stream's frames differ in few places, so the rest is written once per request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from gateway.core.errors import GatewayError
from gateway.core.output import Chunk
from gateway.core.types import FinishReason, Usage
from gateway.rest.errors import body_of, to_json

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every frame of an answer repeats."""

    public_id: str
    created: int
    model: str
    chat: bool
    include_usage: bool = False
    return_token_ids: bool = False

    @property
    def answer_id(self) -> str:
        """The id in the answer."""
        return ("chatcmpl-" if self.chat else "cmpl-") + self.public_id


class Framer:
    """Chunks of one answer to frames."""

    def __init__(self, head: Head) -> None:
        self._head = head
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        start = to_json(
            {
                "id": head.answer_id,
                "object": kind,
                "created": head.created,
                "model": head.model,
            }
        ).decode()
        self._start = f"data: {start[:-1]}"
        usage = ',"usage":null' if head.include_usage else ""
        open_, close = ('"delta":{"content":', "}") if head.chat else ('"text":', "")
        self._before_text = f'{self._start},"choices":[{{"index":0,{open_}'
        self._after_text = f'{close},"logprobs":null,"finish_reason":'
        self._end = f"}}]{usage}}}\n\n"

    def opening(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The first frame: a chat's role, and the prompt's tokens where they are asked for."""
        prompt = ""
        if self._head.return_token_ids:
            prompt = f',"prompt_token_ids":{to_json(list(prompt_token_ids)).decode()}'
        if self._head.chat:
            delta = '"delta":{"role":"assistant","content":""}'
            choice = f'{{"index":0,{delta},"logprobs":null,"finish_reason":null}}'
            frame = f'{self._start},"choices":[{choice}]{prompt}{self._end[2:]}'
        elif prompt:
            frame = f'{self._before_text}""{self._after_text}null{prompt}{self._end}'
        else:
            frame = ""
        return frame.encode()

    def delta(self, chunk: Chunk) -> bytes:
        """A frame of text; nothing where there is none to show."""
        extra = ""
        if self._head.return_token_ids:
            if not chunk.text and not chunk.token_ids:
                return b""
            extra = f',"token_ids":{to_json(list(chunk.token_ids)).decode()}'
        elif not chunk.text:
            return b""
        text = encode_basestring(chunk.text)
        return f"{self._before_text}{text}{self._after_text}null{extra}{self._end}".encode()

    def ending(self, reason: FinishReason, usage: Usage) -> bytes:
        """The frame with the finish reason, the usage if asked for, and [DONE]."""
        word = f'"{reason.name.lower()}"'
        if self._head.chat:
            last = f'{self._start},"choices":[{{"index":0,"delta":{{}},"logprobs":null'
            frame = f'{last},"finish_reason":{word}{self._end}'
        else:
            frame = f'{self._before_text}""{self._after_text}{word}{self._end}'
        if self._head.include_usage:
            cost = to_json(usage_object(usage)).decode()
            frame += f'{self._start},"choices":[],"usage":{cost}}}\n\n'
        return frame.encode() + DONE

    @staticmethod
    def error(error: GatewayError) -> bytes:
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


def whole_answer(
    head: Head,
    text: str,
    reason: FinishReason,
    usage: Usage,
    token_ids: tuple[Sequence[int], Sequence[int]],
) -> bytes:
    """The body of an answer that is not streamed; token_ids are the prompt's and the output's."""
    choice: dict[str, Any] = {"index": 0}
    if head.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": reason.name.lower()}
    body: dict[str, Any] = {
        "id": head.answer_id,
        "object": "chat.completion" if head.chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
        "usage": usage_object(usage),
    }
    if head.return_token_ids:
        place = body if head.chat else choice
        place["prompt_token_ids"], choice["token_ids"] = list(token_ids[0]), list(token_ids[1])
    return to_json(body)
