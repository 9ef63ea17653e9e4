"""What a client asks for, before and after the validator has looked at it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.prompt import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """What a client asked for, typed but unchecked. Exactly one of the prompts is set.

    `*_name` are what the client's interface calls a field, for errors. `extras` holds parameters of
    validation.NOT_BUILT that the client named. `tenant` comes from its key, never from itself.
    """

    model: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    prompt_name: str = "prompt"
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = None
    num_logprobs: int | None = None
    num_logprobs_name: str = "logprobs"
    echo: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    n: int | None = None
    tenant: str = ""
    traceparent: str = ""
    client_request_id: str = ""
    extras: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPrompt:
    """A prompt that can be turned into tokens. Exactly one of the first three is set."""

    text: str | None
    token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    name: str
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """All but the prompt's length is known to be good. max_tokens None: up to the context.

    `n` samples of its answer are wanted.

    With prompt_only the answer is the prompt alone (max_tokens 0 and echo): one token is computed,
    because a forward pass gives it anyway, and not shown.
    """

    prompt: CheckedPrompt
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    num_logprobs: int | None
    num_logprobs_name: str
    echo: bool
    prompt_only: bool
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    min_tokens: int
    skip_special_tokens: bool
    priority: int
    deadline_ms: int | None
    cache_salt: bytes
    n: int
    tenant: str
    traceparent: str
