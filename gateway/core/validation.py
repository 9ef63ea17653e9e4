"""The one validator of all interfaces: what a client asked for to what will be run.

`check` needs no tokenizer; `fit` follows once the prompt's length is known. Both raise
RequestRejected with the field and the limit. Numbers are clamped nowhere but where said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.labels import cache_partition, valid_traceparent
from gateway.core.prompt import Message
from gateway.core.requests import CheckedPrompt, CheckedRequest, RawRequest
from gateway.core.types import ModelInfo, Sampling

# Answers of one request: prompts, each counted n times.
MAX_PROMPTS = 128
MAX_SAMPLES = 128
MAX_MESSAGES = 4096
MAX_PROMPT_IDS = 2**20
MAX_LIST_TOKENS = 2**20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**20
MAX_NAME_CHARS = 256
COMPLETION_MAX_TOKENS = 16
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
# No vocabulary's tokens are longer; what has more characters need not be tokenized to be refused.
MAX_TOKEN_CHARS = 128
_INT64 = 2**63
_INT32 = 2**31
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Parameters that are not built yet, with the values that mean they are not used.
NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
}


def check_count(num_prompts: int) -> None:
    """How many prompts one request may bring."""
    if num_prompts > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts, not {num_prompts}")


def check_lengths(
    *,
    num_messages: int = 0,
    num_prompt_ids: int = 0,
    num_stops: int = 0,
    num_stop_tokens: int = 0,
    num_biases: int = 0,
) -> None:
    """How long lists may be. Comes first, and before anything is made of what they hold."""
    for param, what, most, count in (
        ("messages", "messages", MAX_MESSAGES, num_messages),
        ("prompt", "token ids", MAX_PROMPT_IDS, num_prompt_ids),
        ("stop", "strings", MAX_STOPS, num_stops),
        ("stop_token_ids", "ids", MAX_STOP_TOKENS, num_stop_tokens),
        ("logit_bias", "tokens", MAX_BIASES, num_biases),
    ):
        if count > most:
            raise invalid(param, f"at most {most} {what}, not {count}")


def check_all(raws: Sequence[RawRequest], model: ModelInfo) -> list[CheckedRequest]:
    """The prompts of one request, which share all else."""
    check_count(len(raws))
    checked = [check(raw, model) for raw in raws]
    n = checked[0].n
    count = len(raws) * n
    if count > MAX_PROMPTS:
        raise invalid(
            "n", f"{n} samples of {len(raws)} prompts are {count} answers, more than {MAX_PROMPTS}"
        )
    if count > 1:
        checked = [_with_share(c, count, model) for c in checked]
    most = [c.max_tokens or model.max_model_len for c in checked]
    total = n * sum(most)
    if count > 1 and total > MAX_LIST_TOKENS:
        what = f"{len(raws)} prompts" if n == 1 else f"{count} answers"
        raise invalid(
            raws[0].max_tokens_name,
            f"{what} with up to {max(most)} tokens each may be answered with "
            f"{total} tokens, more than {MAX_LIST_TOKENS}",
        )
    return checked


def _with_share(checked: CheckedRequest, count: int, model: ModelInfo) -> CheckedRequest:
    """One of `count` answers that name no max_tokens: all have the same part of what is allowed."""
    if checked.max_tokens is not None:
        return checked
    share = min(model.max_model_len, MAX_LIST_TOKENS // count)
    if checked.min_tokens > share:
        raise invalid(
            "min_tokens",
            f"{checked.min_tokens} is more than each of {count} answers may have, {share}",
        )
    return replace(checked, max_tokens=share)


def check_samples(n: int, num_tokens: int) -> None:
    """The prompts of one request, counted n times: each sample goes into the queue with its own."""
    if n > 1 and num_tokens > MAX_LIST_TOKENS:
        raise invalid(
            "n",
            f"{n} samples with their prompts are {num_tokens} tokens, more than {MAX_LIST_TOKENS}",
        )


def refuse_unbuilt(
    given: Mapping[str, object], table: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Refuses parameters that are not built, but in values that mean they are not used."""
    for name, neutral in table.items():
        if not _is_neutral(given.get(name), neutral):
            param = f"{prefix}{name}"
            raise RequestRejected(
                RejectReason.UNSUPPORTED, f"{param} is not supported yet.", param=param
            )


def check_best_of(best_of: int | None, n: int | None) -> None:
    """Known, and the same as n: to choose among more samples is not built."""
    if best_of is not None and best_of != (1 if n is None else n):
        raise RequestRejected(
            RejectReason.UNSUPPORTED,
            "best_of: other values than that of n are not supported yet.",
            param="best_of",
        )


def check(raw: RawRequest, model: ModelInfo) -> CheckedRequest:
    """Everything that can be said before tokenizing."""
    _check_lengths_of(raw)
    prompt = check_prompt(raw, model)
    refuse_unbuilt(raw.extras, NOT_BUILT)
    if raw.echo and raw.messages is not None:
        raise RequestRejected(
            RejectReason.UNSUPPORTED, "echo: is for prompts, not for messages.", param="echo"
        )
    max_tokens = _max_tokens(raw, model)
    min_tokens = raw.min_tokens or 0
    _within("min_tokens", min_tokens, 0, _INT32 - 1)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    top_p = _or_default(raw.top_p, model.default_top_p)
    if not 0.0 < top_p <= 1.0:
        raise invalid("top_p", "must be above 0 and at most 1")
    top_k = model.default_top_k if raw.top_k is None else raw.top_k
    priority = raw.priority or 0
    _within("top_k", top_k, -1, _INT64 - 1)
    _within("seed", raw.seed, -_INT64, _INT64 - 1)
    _within("priority", priority, -_INT32, _INT32 - 1)
    _within("deadline_ms", raw.deadline_ms, 1, _INT64 - 1)
    _within("n", raw.n, 1, MAX_SAMPLES)
    _within(raw.num_logprobs_name, raw.num_logprobs, 0, MAX_LOGPROBS)
    _check_name("user", raw.user, least=0)
    _check_name("cache_salt", raw.cache_salt, least=1)
    return CheckedRequest(
        prompt=prompt,
        max_tokens=None if max_tokens is None else max(max_tokens, 1),
        temperature=_number(
            "temperature", raw.temperature, model.default_temperature, 0.0, MAX_TEMPERATURE
        ),
        # The wire's 32 bits would make 0 of less.
        top_p=max(top_p, 1e-6),
        # More than the vocabulary is the vocabulary.
        top_k=min(max(top_k, 0), model.vocab_size),
        min_p=_number("min_p", raw.min_p, model.default_min_p, 0.0, 1.0),
        seed=raw.seed,
        presence_penalty=_penalty("presence_penalty", raw.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", raw.frequency_penalty),
        repetition_penalty=_number(
            "repetition_penalty",
            raw.repetition_penalty,
            model.default_repetition_penalty,
            MIN_REPETITION,
            MAX_REPETITION,
        ),
        logit_bias=_biases(raw.logit_bias or {}, model),
        num_logprobs=raw.num_logprobs,
        num_logprobs_name=raw.num_logprobs_name,
        echo=raw.echo,
        prompt_only=max_tokens == 0,
        stops=_check_stops(raw.stop),
        stop_token_ids=_stop_tokens(raw, model),
        include_stop_str_in_output=raw.include_stop_str_in_output,
        min_tokens=min_tokens,
        skip_special_tokens=raw.skip_special_tokens,
        priority=priority,
        deadline_ms=raw.deadline_ms,
        cache_salt=cache_partition(raw.tenant, raw.cache_salt or ""),
        n=1 if raw.n is None else raw.n,
        tenant=raw.tenant,
        traceparent=valid_traceparent(raw.traceparent),
    )


def fit(
    checked: CheckedRequest, num_prompt_tokens: int, max_model_len: int, *, random_seed: int
) -> Sampling:
    """The request in a context of max_model_len; max_tokens is clamped to what is left."""
    param = checked.prompt.name
    if num_prompt_tokens == 0:
        raise invalid(param, "must hold at least one token")
    _check_room(param, num_prompt_tokens, max_model_len)
    room = max_model_len - num_prompt_tokens
    scoring = checked.echo and checked.num_logprobs is not None
    num_values = checked.n * num_prompt_tokens * ((checked.num_logprobs or 0) + 1)
    if scoring and num_values > MAX_PROMPT_LOGPROBS:
        raise invalid(
            checked.num_logprobs_name,
            f"{checked.n * num_prompt_tokens} prompt tokens with {checked.num_logprobs} logprobs "
            "each are "
            f"{num_values} values, more than {MAX_PROMPT_LOGPROBS}",
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
        min_p=checked.min_p,
        presence_penalty=checked.presence_penalty,
        frequency_penalty=checked.frequency_penalty,
        repetition_penalty=checked.repetition_penalty,
        logit_bias=checked.logit_bias,
        num_logprobs=checked.num_logprobs,
        prompt_logprobs=scoring,
    )


def check_prompt(raw: RawRequest, model: ModelInfo) -> CheckedPrompt:
    """The prompt alone, and the model it is for."""
    if raw.model not in ("", model.name):
        raise RequestRejected(
            RejectReason.MODEL_NOT_FOUND,
            f"The model {raw.model[:100]!r} is not served here.",
            param="model",
        )
    token_ids = raw.token_ids
    given = [p for p in (raw.text, token_ids, raw.messages) if p is not None]
    if len(given) != 1:
        raise invalid("prompt", "exactly one prompt is needed")
    messages = None
    name = raw.prompt_name
    if raw.messages is not None:
        name = "messages"
        messages = _check_messages(raw, raw.messages, model)
    elif raw.text is not None:
        _check_length(name, len(raw.text), model)
        _check_text(name, raw.text)
    elif token_ids:
        _check_room(name, len(token_ids), model.max_model_len)
        token_ids = list(token_ids)
        check_token_ids(name, token_ids, model)
    return CheckedPrompt(
        text=raw.text,
        token_ids=token_ids,
        messages=messages,
        name=name,
        add_special_tokens=raw.add_special_tokens,
        add_generation_prompt=raw.add_generation_prompt,
        continue_final_message=raw.continue_final_message,
    )


def check_token_ids(param: str, ids: Sequence[int], model: ModelInfo) -> None:
    """Nothing else may index a table."""
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise invalid(param, f"token ids must be from 0 to {model.vocab_size - 1}, the vocabulary")


def _check_lengths_of(raw: RawRequest) -> None:
    check_lengths(
        num_messages=len(raw.messages or ()),
        num_prompt_ids=len(raw.token_ids or ()),
        num_stops=len(raw.stop),
        num_stop_tokens=len(raw.stop_token_ids),
        num_biases=len(raw.logit_bias or ()),
    )


def _check_messages(
    raw: RawRequest, messages: Sequence[Message], model: ModelInfo
) -> tuple[Message, ...]:
    if not messages:
        raise invalid("messages", "must hold at least one message")
    for i, message in enumerate(messages):
        if message.role not in _ROLES:
            raise invalid(f"messages[{i}].role", "must be system, developer, user or assistant")
        _check_text(f"messages[{i}].content", message.content)
    _check_length("messages", sum(len(m.content) for m in messages), model)
    if raw.continue_final_message:
        if raw.add_generation_prompt:
            raise invalid(
                "continue_final_message", "can't be true while add_generation_prompt is true"
            )
        if not messages[-1].content.strip():
            raise invalid("continue_final_message", "the last message has nothing to continue")
    return tuple(Message(role=_ROLES[m.role], content=m.content) for m in messages)


def _max_tokens(raw: RawRequest, model: ModelInfo) -> int | None:
    if raw.max_tokens is None:
        return None if raw.messages is not None else COMPLETION_MAX_TOKENS
    least = 0 if raw.echo else 1
    if raw.max_tokens < least:
        raise invalid(raw.max_tokens_name, f"must be at least {least}")
    if raw.max_tokens > model.max_model_len:
        raise invalid(
            raw.max_tokens_name,
            f"{_shown(raw.max_tokens)} is more than the context of {model.max_model_len} tokens",
        )
    return raw.max_tokens


def _check_room(param: str, num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise invalid(
            param,
            f"{num_tokens} tokens leave no room for output in the context of "
            f"{max_model_len} tokens",
        )


def _check_length(param: str, num_chars: int, model: ModelInfo) -> None:
    if num_chars > MAX_TOKEN_CHARS * model.max_model_len:
        raise invalid(
            param,
            f"{num_chars} characters can't fit into the context of {model.max_model_len} tokens",
        )


def _check_text(param: str, text: str) -> None:
    """Any character is text, NUL too; half a surrogate pair is no character."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid(param, "holds a lone surrogate") from None


def _check_name(param: str, name: str | None, *, least: int) -> None:
    if name is None:
        return
    if not least <= len(name) <= MAX_NAME_CHARS:
        raise invalid(param, f"must have {least} to {MAX_NAME_CHARS} characters")
    if "\0" in name:
        raise invalid(param, "must not hold a NUL character")
    _check_text(param, name)


def _check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
        _check_text("stop", stop)
    return tuple(stops)


def _stop_tokens(raw: RawRequest, model: ModelInfo) -> tuple[int, ...]:
    ids = raw.stop_token_ids
    check_token_ids("stop_token_ids", ids, model)
    eos = () if raw.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*ids, *eos)))


def _biases(
    bias: Mapping[str, float] | Mapping[int, float], model: ModelInfo
) -> tuple[tuple[int, float], ...]:
    # Keys first: a map has no order, and which of two faults is named must not hang on it.
    found = (_token_of(key) for key in bias)
    tokens = [t for t in found if t is not None and 0 <= t < model.vocab_size]
    if len(tokens) != len(bias):
        raise invalid("logit_bias", f"keys must be token ids from 0 to {model.vocab_size - 1}")
    for value in bias.values():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -MAX_BIAS <= value <= MAX_BIAS:
            raise invalid(
                "logit_bias", f"values must be numbers from {-MAX_BIAS:.0f} to {MAX_BIAS:.0f}"
            )
    return tuple(sorted(zip(tokens, map(float, bias.values()), strict=True)))


def _token_of(key: str | int) -> int | None:
    """JSON has no keys but strings; only the shortest form is a number."""
    if isinstance(key, int):
        return key
    plain = key.isascii() and key.isdigit() and len(key) <= 10 and (key == "0" or key[0] != "0")
    return int(key) if plain else None


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    # True == 1 in Python; a client that sends `true` for a number means something else.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    found = _or_default(value, default)
    _within(param, found, low, high)
    return float(found)


def _penalty(param: str, value: float | None) -> float:
    return _number(param, value, 0.0, -MAX_PENALTY, MAX_PENALTY)


def _within(param: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(param, f"must be from {low} to {high}")


def _shown(value: int) -> str:
    """A client's number, unless it would fill the message."""
    return str(value) if abs(value) < _INT64 else "a number of 64 bits or more"


def invalid(param: str, text: str) -> RequestRejected:
    """A refusal that names its field."""
    return RequestRejected(RejectReason.INVALID, f"{param}: {text}.", param=param)
