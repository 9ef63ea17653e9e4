"""What the worker is told and what it says, as plain values; codec.py turns them into messages.

Pure. Values of the enums equal those of quire.v1. Columns of a plan are taken as they came: the
replica checks them, since a plan is never trusted.
"""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_worker.ports import Operation, SamplingSpec

# Logprobs, those of likely tokens included, that one message to a gateway may hold: at 9 bytes each
# at most, well under the bound of a gRPC message.
MAX_BATCH_LOGPROBS = 2**20
# Tokens, five bytes each at most: rows that come from other workers repeat all their output.
MAX_BATCH_TOKENS = 2**20


class FinishReason(enum.IntEnum):
    """Why a row ended, as far as a worker can say."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class FaultScope(enum.IntEnum):
    """How far an error reaches."""

    REQUEST = 1
    STEP = 2
    WORKER = 3


class FaultCode(enum.IntEnum):
    """What kind of error it is."""

    DIGEST_MISMATCH = 1
    INVALID_PLAN = 2
    COMPUTE = 3
    OUT_OF_MEMORY = 4
    AWAITING_RESET = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """First message of a session."""

    epoch: int
    min_schema_revision: int
    max_schema_revision: int
    last_result_step: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Brings a request into a slot; see quire.v1.Admit."""

    slot: int
    generation: int
    request_id: bytes
    attempt: int
    reply_to: bytes
    token_ids: Sequence[int]
    prompt_len: int
    emit_from: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: Sequence[int]
    sampling: SamplingSpec
    generates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step as differences from the one before, or several equal ones; see quire.v1.StepPlan."""

    epoch: int
    step: int
    num_steps: int = 1
    reset: bool = False
    release_slots: Sequence[int] = ()
    admits: Sequence[Admit] = ()
    changed_slots: Sequence[int] = ()
    changed_num_tokens: Sequence[int] = ()
    grow_slots: Sequence[int] = ()
    grow_block_ids: Sequence[int] = ()
    digest: int = 0
    operations: Sequence[Operation] = ()

    @property
    def last_step(self) -> int:
        """The last step that the plan stands for; num_steps 0 means 1."""
        return self.step + max(1, self.num_steps) - 1

    def single_steps(self) -> "list[StepPlan]":
        """A plan for each step: all differences in the first, none in the others."""
        first = replace(self, num_steps=1)
        others = range(self.step + 1, self.last_step + 1)
        return [
            first,
            *(StepPlan(epoch=self.epoch, step=step, digest=self.digest) for step in others),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error and how far it reaches. slot is meaningful for scope REQUEST."""

    scope: FaultScope
    code: FaultCode
    message: str
    slot: int = 0
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Microseconds of a step's parts; see quire.v1.StepTimes."""

    idle_us: int = 0
    apply_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    total_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave; see quire.v1.StepResult."""

    epoch: int
    step: int
    digest: int
    slots: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    finished_slots: Sequence[int] = ()
    finish_reasons: Sequence[int] = ()
    num_wasted_rows: int = 0
    faults: Sequence[Fault] = ()
    times: StepTimes = StepTimes()
    operations_done: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life."""

    last_step: int
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriptions:
    """The gateways whose Tokens stream is open."""

    gateway_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancels:
    """Requests whose client is gone."""

    request_ids: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The worker takes no more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """A live row of the slot table."""

    slot: int
    generation: int
    request_id: bytes
    attempt: int
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that ended on this worker lately."""

    request_id: bytes
    attempt: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The worker's state, or a chunk of it."""

    slots: Sequence[SlotState] = ()
    recent_finishes: Sequence[FinishedRequest] = ()
    gateway_ids: Sequence[str] = ()
    last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of one entry of a batch; see quire.v1.TokenLogprobs."""

    entry: int
    num_prompt_rows: int
    num_top: int
    logprobs: "array[float]"
    top_token_ids: "array[int]"
    top_logprobs: "array[float]"

    @property
    def num_values(self) -> int:
        """How many logprobs it holds."""
        return len(self.logprobs) + len(self.top_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one step for one gateway, one entry per request; see quire.v1.TokenBatch.

    Its sequence belongs to the outbox. finish_reasons holds 0 while a request goes on.
    """

    step: int
    request_ids: Sequence[bytes]
    attempts: Sequence[int]
    first_positions: Sequence[int]
    num_tokens: Sequence[int]
    token_ids: Sequence[int]
    finish_reasons: Sequence[int]
    num_cached_tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """First message of a Tokens stream."""

    gateway_id: str
    reply_to: bytes
    incarnation: int
    last_sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """Batches up to and including `sequence` have been received."""

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRow:
    """The client of a request is gone."""

    request_id: bytes


SessionMessage = StepResult | Heartbeat | Subscriptions | Cancels | Draining | Snapshot
TokensMessage = Subscribe | Acknowledge | CancelRow
