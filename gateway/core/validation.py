"""The one validator of both interfaces: what a client asked for to what will be run.

`check` needs no tokenizer; `fit` follows once the prompt's length is known. Both raise
RequestRejected with the field and the limit. Numbers are clamped nowhere but where said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.prompt import Message
from gateway.core.types import ModelInfo, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
COMPLETION_MAX_TOKENS = 16
MAX_TEMPERATURE = 2.0
_INT64 = 2**63
_INT32 = 2**31
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Parameters that are not built yet, with the values that mean they are not used.
NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "cache_salt": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "prompt_embeds": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """What a client asked for, typed but unchecked. Exactly one of the prompts is set.

    `extras` holds parameters of NOT_BUILT that the client named.
    """

    model: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    priority: int | None = None
    client_request_id: str = ""
    extras: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """All but the prompt's length is known to be good. max_tokens None: up to the context."""

    text: str | None
    token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    priority: int


def check(raw: RawRequest, model: ModelInfo) -> CheckedRequest:
    """Everything that can be said before tokenizing."""
    if raw.model not in ("", model.name):
        raise RequestRejected(
            RejectReason.MODEL_NOT_FOUND,
            f"The model {raw.model[:100]!r} is not served here.",
            param="model",
        )
    for name, value in raw.extras.items():
        if not _is_neutral(value, NOT_BUILT[name]):
            raise RequestRejected(
                RejectReason.UNSUPPORTED, f"{name} is not supported yet.", param=name
            )
    _check_prompt(raw, model)
    max_tokens = raw.max_tokens
    if max_tokens is None and raw.messages is None:
        max_tokens = COMPLETION_MAX_TOKENS
    _within(raw.max_tokens_name, max_tokens, 1, _INT64 - 1)
    min_tokens = raw.min_tokens or 0
    _within("min_tokens", min_tokens, 0, _INT32 - 1)
    if max_tokens is not None and min_tokens > max_tokens:
        raise _invalid("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    temperature = model.default_temperature if raw.temperature is None else raw.temperature
    top_p = model.default_top_p if raw.top_p is None else raw.top_p
    _within("temperature", temperature, 0.0, MAX_TEMPERATURE)
    if not 0.0 < top_p <= 1.0:
        raise _invalid("top_p", "must be above 0 and at most 1")
    top_k = model.default_top_k if raw.top_k is None else raw.top_k
    _within("top_k", top_k, -1, _INT64 - 1)
    _within("seed", raw.seed, -_INT64, _INT64 - 1)
    priority = raw.priority or 0
    _within("priority", priority, -_INT32, _INT32 - 1)
    return CheckedRequest(
        text=raw.text,
        token_ids=raw.token_ids,
        messages=_roles(raw.messages),
        max_tokens=max_tokens,
        temperature=temperature,
        # The wire's 32 bits would make 0 of less.
        top_p=max(top_p, 1e-6),
        # More than the vocabulary is the vocabulary.
        top_k=min(max(top_k, 0), model.vocab_size),
        seed=raw.seed,
        stops=_check_stops(raw.stop),
        stop_token_ids=_stop_tokens(raw, model),
        min_tokens=min_tokens,
        priority=priority,
    )


def fit(
    checked: CheckedRequest, num_prompt_tokens: int, max_model_len: int, *, random_seed: int
) -> Sampling:
    """The request in a context of max_model_len; max_tokens is clamped to what is left."""
    param = "messages" if checked.messages is not None else "prompt"
    if num_prompt_tokens == 0:
        raise _invalid(param, "must hold at least one token")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestRejected(
            RejectReason.INVALID,
            f"{param}: {num_prompt_tokens} tokens leave no room for output in the context of "
            f"{max_model_len} tokens.",
            param=param,
        )
    max_tokens = room if checked.max_tokens is None else min(room, checked.max_tokens)
    seed = random_seed if checked.seed is None else checked.seed
    return Sampling(
        max_tokens=max_tokens,
        temperature=checked.temperature,
        top_p=checked.top_p,
        top_k=checked.top_k,
        seed=seed % 2**64,
        stop_token_ids=checked.stop_token_ids,
        min_tokens=min(checked.min_tokens, max_tokens),
    )


def _check_prompt(raw: RawRequest, model: ModelInfo) -> None:
    given = [p for p in (raw.text, raw.token_ids, raw.messages) if p is not None]
    if len(given) != 1:
        raise _invalid("prompt", "exactly one prompt is needed")
    if raw.token_ids:
        low, high = min(raw.token_ids), max(raw.token_ids)
        if low < 0 or high >= model.vocab_size:
            raise _invalid(
                "prompt", f"token ids must be from 0 to {model.vocab_size - 1}, the vocabulary"
            )
    if raw.messages is not None and not raw.messages:
        raise _invalid("messages", "must hold at least one message")


def _roles(messages: Sequence[Message] | None) -> tuple[Message, ...] | None:
    if messages is None:
        return None
    for i, message in enumerate(messages):
        if message.role not in _ROLES:
            raise _invalid(f"messages[{i}].role", "must be system, developer, user or assistant")
    return tuple(Message(role=_ROLES[m.role], content=m.content) for m in messages)


def _check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"at most {MAX_STOPS} strings, not {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _invalid("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_tokens(raw: RawRequest, model: ModelInfo) -> tuple[int, ...]:
    ids = raw.stop_token_ids
    if len(ids) > MAX_STOP_TOKENS:
        raise _invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS} ids, not {len(ids)}")
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise _invalid("stop_token_ids", f"ids must be from 0 to {model.vocab_size - 1}")
    eos = () if raw.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*ids, *eos)))


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    # True == 1 in Python; a client that sends `true` for a number means something else.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def _within(param: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise _invalid(param, f"must be from {low} to {high}")


def _invalid(param: str, text: str) -> RequestRejected:
    return RequestRejected(RejectReason.INVALID, f"{param}: {text}.", param=param)
