"""What the service side of the worker asks of the compute side, and the values between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens of one row are chosen; see quire.v1.SamplingParams."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One request's part of a step.

    token_ids are the tokens to compute; the first stands at position `start`. block_ids is the
    whole block table, in order of position. With `samples` the last token's logits choose the next
    token, which becomes output number `output_position` (from 0).
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    output_position: int
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Of one step: token per sampling row (None where the row failed), in the order of those rows.

    failures holds (index into the step's rows, message) of rows whose own data raised.
    """

    token_ids: tuple[int | None, ...]
    failures: tuple[tuple[int, str], ...] = ()
    apply_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """Layers whose blocks are handed out together. window 0 is full attention."""

    window: int
    block_size: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What a loaded model offers; fills Hello."""

    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_group: CacheGroupSpec
    step_us: float
    token_us: float


class OutOfDeviceMemoryError(Exception):
    """The step did not fit; the device is fine."""


class BrokenDeviceError(Exception):
    """The device can't be used again by this process."""


class ModelRunner(Protocol):
    """Computes steps, one after the other, on one thread.

    `run` writes the rows' KV into their blocks and samples. It raises OutOfDeviceMemoryError,
    BrokenDeviceError, or any other exception for a step that failed as a whole. It keeps no
    state of requests.
    """

    @property
    def info(self) -> RunnerInfo:
        """Known once the model is loaded and warmed up."""

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Computes one step; `rows` is not empty."""
