"""Request bodies. Types are checked strictly here, values by the one validator.

Fields not named are ignored. Those of validation.NOT_BUILT are carried as they came.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.prompt import Message
from gateway.core.validation import NOT_BUILT, RawRequest

# JSON has one kind of number; booleans and strings are none.
StrictNumber = Annotated[float, Field(strict=True)]
MAX_MESSAGES = 4096
MAX_LIST = 2**21


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: StrictBool | None = None


class TextPart(BaseModel):
    """A part of a message's content; other types than text are refused by name."""

    type: StrictStr
    text: StrictStr | None = None


class ChatMessage(BaseModel):
    """One turn."""

    role: StrictStr
    content: StrictStr | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Any = None
    function_call: Any = None


class CommonBody(BaseModel):
    """What both interfaces share."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = ""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    temperature: StrictNumber | None = None
    top_p: StrictNumber | None = None
    top_k: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[StrictInt], Field(max_length=65536)] | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    priority: StrictInt | None = None
    return_token_ids: StrictBool | None = None

    @property
    def include_usage(self) -> bool:
        """A usage chunk is asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _common(self) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        extras = self.model_extra or {}
        return {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "ignore_eos": bool(self.ignore_eos),
            "min_tokens": self.min_tokens,
            "priority": self.priority,
            "extras": {k: v for k, v in extras.items() if k in NOT_BUILT},
        }


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: (
        StrictStr
        | Annotated[list[StrictInt], Field(max_length=MAX_LIST)]
        | Annotated[list[StrictStr], Field(max_length=MAX_LIST)]
        | Annotated[list[list[StrictInt]], Field(max_length=MAX_LIST)]
    )

    def to_raw(self, client_request_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise RequestRejected(
                    RejectReason.UNSUPPORTED,
                    f"prompt: several prompts in one request ({len(prompt)}) are not supported "
                    "yet.",
                    param="prompt",
                )
            prompt = prompt[0]
        return RawRequest(
            **self._common(),
            text=prompt if isinstance(prompt, str) else None,
            token_ids=prompt if isinstance(prompt, list) else None,
            max_tokens=self.max_tokens,
            client_request_id=client_request_id,
        )


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: StrictInt | None = None

    def to_raw(self, client_request_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        newer = self.max_completion_tokens is not None
        return RawRequest(
            **self._common(),
            messages=[_message(i, m) for i, m in enumerate(self.messages)],
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_name="max_completion_tokens" if newer else "max_tokens",
            client_request_id=client_request_id,
        )


def _message(index: int, message: ChatMessage) -> Message:
    param = f"messages[{index}]"
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise RequestRejected(
            RejectReason.UNSUPPORTED, f"{param}: tools are not supported yet.", param=param
        )
    content = message.content
    if content is None:
        raise RequestRejected(
            RejectReason.INVALID, f"{param}.content: is needed.", param=f"{param}.content"
        )
    if isinstance(content, str):
        return Message(role=message.role, content=content)
    for part in content:
        if part.type != "text" or part.text is None:
            raise RequestRejected(
                RejectReason.UNSUPPORTED,
                f"{param}.content: only parts of type text are supported yet.",
                param=f"{param}.content",
            )
    return Message(role=message.role, content="\n".join(p.text or "" for p in content))
