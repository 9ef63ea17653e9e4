"""Request bodies of OpenAI's interfaces. Types are checked strictly here, values by the validator.

Fields not named are ignored, with one line in the log. Those of validation.NOT_BUILT are carried as
they came. Lists fail at their first wrong element: a million of them cost one error.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.prompt import Message
from gateway.core.requests import RawRequest
from gateway.core.validation import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    NOT_BUILT,
    check_best_of,
    check_count,
    check_lengths,
    invalid,
)
from servicekit import logs

# JSON has one kind of number; booleans and strings are none.
StrictNumber = Annotated[float, Field(strict=True)]
MAX_LOGGED_FIELDS, MAX_LOGGED_CHARS = 16, 64
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Checked by `_prompts`: a union's branches would each list all that is wrong with a long list.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
# Keys and values are the validator's business: it names the limits of both.
Biases = Annotated[
    dict[StrictStr, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
_log = logs.get_logger("gateway.rest")


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class TextPart(BaseModel):
    """A part of a message's content; other types than text are refused by name."""

    type: StrictStr
    text: StrictStr | None = None


def _counted_parts(parts: Any) -> Any:
    if isinstance(parts, list) and len(parts) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} parts of a content, not {len(parts)}")
    return parts


def _counted_messages(messages: Any) -> Any:
    if isinstance(messages, list):
        check_lengths(num_messages=len(messages))
    return messages


# Counted before they are looked at, and in the validator's words.
Parts = Annotated[
    list[TextPart],
    Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(_counted_parts),
]


class ChatMessage(BaseModel):
    """One turn."""

    role: StrictStr
    content: StrictStr | Parts | None = None
    tool_calls: Any = None
    function_call: Any = None


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(_counted_messages),
]


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
    min_p: StrictNumber | None = None
    seed: StrictInt | None = None
    presence_penalty: StrictNumber | None = None
    frequency_penalty: StrictNumber | None = None
    repetition_penalty: StrictNumber | None = None
    logit_bias: Biases | None = None
    echo: StrictBool | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[StrictInt], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    priority: StrictInt | None = None
    deadline_ms: StrictInt | None = None
    cache_salt: StrictStr | None = None
    user: StrictStr | None = None
    n: StrictInt | None = None
    best_of: StrictInt | None = None
    return_token_ids: StrictBool | None = None

    @property
    def include_usage(self) -> bool:
        """A usage frame is asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Every frame is to have the usage so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def _common(self, *, tenant: str, client_id: str, traceparent: str) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        check_best_of(self.best_of, self.n)
        extras = self.model_extra or {}
        _log_ignored([name for name in extras if name not in NOT_BUILT], client_id)
        return {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "echo": bool(self.echo),
            "stop": stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "include_stop_str_in_output": bool(self.include_stop_str_in_output),
            "ignore_eos": bool(self.ignore_eos),
            "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens is not False,
            "priority": self.priority,
            "deadline_ms": self.deadline_ms,
            "cache_salt": self.cache_salt,
            "user": self.user,
            "n": self.n,
            "tenant": tenant,
            "traceparent": traceparent,
            "client_request_id": client_id,
            "extras": {k: v for k, v in extras.items() if k in NOT_BUILT},
        }


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: StrictInt | None = None
    add_special_tokens: StrictBool | None = None

    def to_raws(
        self, *, client_id: str, tenant: str = "", traceparent: str = ""
    ) -> list[RawRequest]:
        """One for each prompt, for the validator. Raises RequestRejected."""
        prompts: Sequence[str | list[int]] = _prompts(self.prompt)
        common = self._common(tenant=tenant, client_id=client_id, traceparent=traceparent)
        return [
            RawRequest(
                **common,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else prompt,
                prompt_name="prompt" if len(prompts) == 1 else f"prompt[{i}]",
                max_tokens=self.max_tokens,
                num_logprobs=self.logprobs,
                add_special_tokens=self.add_special_tokens is not False,
            )
            for i, prompt in enumerate(prompts)
        ]


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None

    def to_raws(
        self, *, client_id: str, tenant: str = "", traceparent: str = ""
    ) -> list[RawRequest]:
        """One, for the validator. Raises RequestRejected."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        newer = self.max_completion_tokens is not None
        return [
            RawRequest(
                **self._common(tenant=tenant, client_id=client_id, traceparent=traceparent),
                messages=to_messages(self.messages),
                max_tokens=self.max_completion_tokens if newer else self.max_tokens,
                max_tokens_name="max_completion_tokens" if newer else "max_tokens",
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                num_logprobs_name="top_logprobs",
                add_generation_prompt=self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
            )
        ]


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Text only. Raises RequestRejected."""
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> Message:
    param = f"messages[{index}]"
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise RequestRejected(
            RejectReason.UNSUPPORTED, f"{param}: tools are not supported yet.", param=param
        )
    content = message.content
    if content is None and message.role == "assistant":
        return Message(role=message.role, content="")
    if content is None:
        raise invalid(f"{param}.content", "is needed")
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


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Prompts of one kind, at least one. Raises RequestRejected."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        # type(True) is not int, so that no boolean is taken for a token.
        kinds = set(map(type, prompt))
        if kinds <= {int}:
            return [prompt]
        if kinds in ({str}, {list}):
            check_count(len(prompt))
            if kinds == {str} or all(set(map(type, ids)) <= {int} for ids in prompt):
                return prompt
    raise invalid(
        "prompt",
        "must be a string, a list of token ids, or a list of several of the one or of the other",
    )


def _log_ignored(names: list[str], client_id: str) -> None:
    if names:
        shown = [
            name[:MAX_LOGGED_CHARS].encode("ascii", "backslashreplace").decode()
            for name in names[:MAX_LOGGED_FIELDS]
        ]
        _log.info(
            "fields_ignored", fields=shown, num_fields=len(names), client_request_id=client_id
        )
