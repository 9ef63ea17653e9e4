"""Values that cross the gateway's modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

RequestId = NewType("RequestId", bytes)
MIN_LOGPROB = -9999.0


class FinishReason(IntEnum):
    """Why a request ended; numbers as in quire.v1.FinishReason."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    REJECTED = 5
    DEADLINE = 6
    UNAVAILABLE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; see quire.v1.SamplingParams."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request as it goes into the queue. Output is non-empty only in a later attempt.

    `life_ms` counts from its admission. `cache_salt` is the partition of the prefix cache, b"" the
    shared one. The samples of one prompt have the same `sample_group`, b"" where there is one.
    """

    request_id: RequestId
    attempt: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    sampling: Sampling
    priority: int = 0
    life_ms: int
    cache_salt: bytes = b""
    traceparent: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    sample_group: bytes = b""
    sample_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Where the queue put a request, and its deadline in Redis milliseconds."""

    entry_id: str
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's natural log-probability and the most likely tokens in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _floored(value: float) -> float:
    # Also what is no number compares false.
    return value if value > MIN_LOGPROB else MIN_LOGPROB


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Logprobs as they come: a row per position, `num_prompt_rows` of the prompt before the tokens.

    Columns, because a prompt's may be many.
    """

    num_prompt_rows: int
    logprobs: Sequence[float]
    num_top: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]

    def row(self, index: int, token_id: int) -> TokenLogprob:
        """The row of a token that the caller knows. JSON has no infinities, so all have a floor."""
        at = index * self.num_top
        ids = self.top_token_ids[at : at + self.num_top]
        top = self.top_logprobs[at : at + self.num_top]
        return TokenLogprob(
            token_id=token_id,
            logprob=_floored(self.logprobs[index]),
            top=tuple((i, _floored(value)) for i, value in zip(ids, top, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one step of one worker: columns, one entry per request.

    `logprobs` holds rows by entry, for those entries whose request wants them.
    """

    sequence: int
    request_ids: bytes
    attempts: Sequence[int]
    first_positions: Sequence[int]
    num_tokens: Sequence[int]
    token_ids: Sequence[int]
    finish_reasons: Sequence[int]
    num_cached_tokens: Sequence[int]
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An end that no worker has said."""

    request_id: RequestId
    attempt: int
    finish_reason: FinishReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker in the registry."""

    worker_id: str
    incarnation: int
    address: str
    model_digest: str
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The one end of a request. `code` names the cause of ends that are errors."""

    reason: FinishReason
    message: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request has cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the model's files say. Defaults are for parameters a client leaves out."""

    name: str
    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_min_p: float = 0.0
    default_repetition_penalty: float = 1.0
