"""Ids and small values of the core."""

import enum
from dataclasses import dataclass
from typing import NewType

from scheduler_svc.core.value import value

RequestId = NewType("RequestId", bytes)
WorkerId = NewType("WorkerId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
Slot = NewType("Slot", int)

NO_SLOT = Slot(-1)
# What queue entries and workers' messages can name.
MAX_ATTEMPT = 2**31 - 1


class FinishReason(enum.IntEnum):
    """Why a request ended; values equal those of quire.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    REJECTED = 5
    DEADLINE = 6
    UNAVAILABLE = 7


class FaultScope(enum.IntEnum):
    """How far an error reaches; values equal those of quire.v1.Fault.Scope."""

    REQUEST = 1
    STEP = 2
    WORKER = 3


class OperationKind(enum.IntEnum):
    """What a copy of blocks is for; values equal those of quire.v1.Operation.Kind."""

    COPY = 1
    SWAP_OUT = 2
    SWAP_IN = 3


class PreemptionMode(enum.Enum):
    """How a request lost its blocks: copied to the host, computed anew, or moved to a worker."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    MOVE = "move"


class PrefixStop(enum.Enum):
    """Why a look into the prefix cache found no more than it did."""

    # Members are single objects; Enum's own hash, of their names, costs a call at each look-up.
    __hash__ = object.__hash__

    END = "all that can be shared was there"
    COLD = "nothing of the kind was computed here lately"
    EVICTED = "it was there until its block was needed"
    COLLISION = "a block of that name holds other tokens"
    ELSEWHERE = "another worker has more of it"
    SHORT = "there is no full block to share"
    LOGPROBS = "the prompt's logprobs have to be computed"
    OFF = "prefix caching is off"


@value(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen. The core reads max_tokens and what of logprobs is wanted only.

    num_logprobs is how many of the most likely tokens go with each token, None for no logprobs.
    """

    max_tokens: int
    temperature: float = 0.0
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
class WorkerCapacity:
    """What a worker can hold, from its Hello.

    `num_blocks` counts device blocks of group 0, num_host_blocks those in host memory; a block has
    block_bytes, 0 if unknown.
    """

    num_slots: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    num_host_blocks: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Time of a step: step_us + tokens * token_us. Bandwidths in 10^9 bytes/s, 0 if unknown."""

    step_us: float = 0.0
    token_us: float = 0.0
    swap_out_gb_per_s: float = 0.0
    swap_in_gb_per_s: float = 0.0
