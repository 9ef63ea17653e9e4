"""What the service side of the worker asks of the compute side, and the values between them."""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens of one row are chosen; see quire.v1.SamplingParams.

    The last two are derived, since they are asked for at every step: whether logits are changed by
    more than stop tokens, and whether by the tokens that are there already.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    sample_index: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    shifts_logits: bool = field(init=False, repr=False, compare=False)
    penalizes: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        penalizes = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
        object.__setattr__(self, "penalizes", penalizes)
        object.__setattr__(self, "shifts_logits", penalizes or bool(self.logit_bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One request's part of a step.

    token_ids are the tokens to compute; the first stands at position `start`. block_ids is the
    whole block table, in order of position. With `samples` the last token's logits choose the next
    token, which becomes output number `output_position` (from 0).

    scored_token_ids are known tokens whose logprobs are wanted: the last of them follows the last
    of token_ids (the last but one where the row samples), the others those before it. `history` is
    prompt and output, for penalties; None where there are none.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    output_position: int
    sampling: SamplingSpec
    scored_token_ids: Sequence[int] = ()
    history: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Natural logprobs of tokens and of the num_top most likely ones beside each.

    Of the model's own logits, before anything else changes them. The columns of the most likely
    ones hold num_top entries for each token, most likely first, equal ones by token id.
    """

    num_top: int
    logprobs: "array[float]"
    top_token_ids: "array[int]"
    top_logprobs: "array[float]"

    @classmethod
    def from_bytes(
        cls, num_top: int, logprobs: bytes, top_token_ids: bytes, top_logprobs: bytes
    ) -> "LogprobRows":
        """From columns of 32-bit numbers in memory."""
        return cls(
            num_top=num_top,
            logprobs=array("f", logprobs),
            top_token_ids=array("i", top_token_ids),
            top_logprobs=array("f", top_logprobs),
        )

    def then(self, other: "LogprobRows") -> "LogprobRows":
        """Both, one after the other."""
        return LogprobRows(
            num_top=self.num_top,
            logprobs=self.logprobs + other.logprobs,
            top_token_ids=self.top_token_ids + other.top_token_ids,
            top_logprobs=self.top_logprobs + other.top_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Of one step: token per sampling row (None where the row failed), in the order of those rows.

    failures holds (index into the step's rows, message) of rows whose own data raised. logprobs
    holds (index, those of the row's scored tokens and, where it sampled, of that token) of rows
    that want some.
    """

    token_ids: tuple[int | None, ...]
    failures: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, LogprobRows], ...] = ()
    apply_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


class OperationKind(enum.IntEnum):
    """From where to where blocks are copied."""

    COPY = 1
    SWAP_OUT = 2
    SWAP_IN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Whole blocks to copy, pair by pair; see quire.v1.Operation. `kind` may be an unknown one."""

    op_id: int
    kind: int
    group: int = 0
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """Layers whose blocks are handed out together. window 0 is full attention.

    num_blocks are on the device; num_host_blocks in host memory, none without swap.
    """

    window: int
    block_size: int
    block_bytes: int
    num_blocks: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What a loaded model offers; fills Hello. The bandwidths are 0 without host blocks."""

    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_group: CacheGroupSpec
    step_us: float
    token_us: float
    swap_out_gb_per_s: float = 0.0
    swap_in_gb_per_s: float = 0.0


class OutOfDeviceMemoryError(Exception):
    """The step did not fit; the device is fine."""


class BrokenDeviceError(Exception):
    """The device can't be used again by this process."""


class ModelRunner(Protocol):
    """Computes steps, one after the other, on one thread.

    `run` writes the rows' KV into their blocks and samples. It raises OutOfDeviceMemoryError,
    BrokenDeviceError, or any other exception for a step that failed as a whole. It keeps no
    state of requests.

    Operations are begun in order, between the steps before and those after. COPY takes its place
    among the steps; swaps may run beside later steps, in order among themselves, until
    `finished_operations` names them. What these two raise leaves blocks in an unknown state.
    """

    @property
    def info(self) -> RunnerInfo:
        """Known once the model is loaded and warmed up."""

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Computes one step; `rows` is not empty."""

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """Copies blocks, or begins to. The replica has checked the operations."""

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """Ids of operations done since the last call; with `wait` of all that have been begun."""
