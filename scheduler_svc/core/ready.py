"""What the core wants done."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scheduler_svc.core.account import Account
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.types import (
    BlockId,
    FinishReason,
    OperationKind,
    PreemptionMode,
    PrefixStop,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerId,
)
from scheduler_svc.core.value import value


@value(frozen=True, slots=True, kw_only=True)
class Admit:
    """Brings a request into a slot; see quire.v1.Admit."""

    slot: Slot
    generation: int
    request_id: RequestId
    attempt: int
    reply_to: bytes
    token_ids: tuple[int, ...]
    prompt_len: int
    emit_from: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingSpec
    traceparent: str
    sample_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Whole blocks copied before the rows of a plan are computed; see quire.v1.Operation.

    Device blocks are BlockIds, host blocks numbers from 0 of their own.
    """

    op_id: int
    kind: OperationKind
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A request that lost its blocks, how, and what either way was expected to cost.

    None where it can't be told, or can't be done. `num_blocks` are copied to the host.
    """

    request_id: RequestId
    mode: PreemptionMode
    swap_us: int | None
    recompute_us: int | None
    num_blocks: int = 0


@value(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step of one worker as differences from its last one; see quire.v1.StepPlan.

    With num_steps above 1 it stands for as many equal steps of decodes from `step` on. Its growth
    is that of all of them, given before the first.

    `changed` holds (slot, num_tokens), `growth` (slot, block). num_scheduled_tokens, num_rows,
    num_chunks (rows that leave part of their prompt for later) and preemptions describe the step,
    for metrics and traces; max_steps_in_flight and round_trip_us say, where the depth is adapted,
    what it was.
    """

    worker_id: WorkerId
    epoch: int
    step: int
    based_on_step: int
    reset: bool
    releases: tuple[Slot, ...]
    admits: tuple[Admit, ...]
    changed: tuple[tuple[Slot, int], ...]
    growth: tuple[tuple[Slot, BlockId], ...]
    digest: int
    num_scheduled_tokens: int
    num_rows: int
    num_chunks: int
    operations: tuple[Operation, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    max_steps_in_flight: int = 0
    round_trip_us: int = 0
    num_steps: int = 1

    def and_then(self, then: "StepPlan") -> "StepPlan | None":
        """One plan for both, if all rows are decodes and the next step has the same; else None."""
        news = then.reset or then.releases or then.admits or then.changed or then.operations
        if news or then.preemptions:
            return None
        only_decodes = 0 < self.num_rows == self.num_scheduled_tokens
        if not only_decodes or then.worker_id != self.worker_id:
            return None
        return replace(
            self,
            num_steps=self.num_steps + then.num_steps,
            growth=self.growth + then.growth,
            digest=then.digest,
        )


def joined(steps: Sequence[StepPlan]) -> tuple[StepPlan, ...]:
    """Equal decode steps that follow each other as one plan."""
    plans: list[StepPlan] = []
    for step in steps:
        several = plans[-1].and_then(step) if plans else None
        if several is None:
            plans.append(step)
        else:
            plans[-1] = several
    return tuple(plans)


@value(frozen=True, slots=True, kw_only=True)
class Finish:
    """A request has ended: acknowledge and delete its entry.

    With `notify` the gateway has not been told by a worker and the same script adds a notice.
    """

    request_id: RequestId
    entry_id: str
    attempt: int
    gateway_id: str
    reason: FinishReason
    notify: bool
    message: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrived_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int
    account: Account


@value(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A worker that is not to be used any more, and a sentence of the core's own that says why."""

    worker_id: WorkerId
    reason: str


@value(frozen=True, slots=True, kw_only=True)
class Ready:
    """Everything to do after a round of events, in this order:

    1. send `plans`, in order, to their workers (a GPU may be waiting);
    2. write `finishes` in one batched script, and with them acknowledge and delete the entries in
       `discards`, which say nothing new (a repeat of a known request, an older attempt);
    3. close the sessions of `given_up` workers and forget them until they join anew;
    4. feed a Tick at `wake_at_ns`, or before, if it is not None.
    """

    plans: tuple[StepPlan, ...] = ()
    finishes: tuple[Finish, ...] = ()
    discards: tuple[str, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    wake_at_ns: int | None = None


@dataclass(slots=True, kw_only=True)
class CoreStats:
    """Counters since the start; only the core writes them."""

    # Requests that lost their blocks to others, by what became of their work.
    preemptions: dict[PreemptionMode, int] = field(
        default_factory=lambda: dict.fromkeys(PreemptionMode, 0)
    )
    # Swapped requests whose host blocks were of no use in the end, and which began anew.
    num_swaps_void: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_recovered: int = 0
    num_superseded: int = 0
    num_stale_arrivals: int = 0
    num_stale_results: int = 0
    # Results that could not be, whose workers were given up.
    num_bad_results: int = 0
    num_stale_tokens: int = 0
    num_wasted_rows: int = 0
    num_failed_steps: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Requests by why their first look into the prefix cache found no more.
    prefix_stops: dict[PrefixStop, int] = field(
        default_factory=lambda: dict.fromkeys(PrefixStop, 0)
    )
    num_held_back: int = 0
    num_forks: int = 0
    # By copy-on-write.
    num_copied_blocks: int = 0
    num_chunked_prefills: int = 0

    @property
    def num_preemptions(self) -> int:
        """All of them."""
        return sum(self.preemptions.values())

    def planned(self, steps: Sequence[StepPlan]) -> None:
        """Counts what the plans of single steps say of them."""
        self.num_steps += len(steps)
        for step in steps:
            self.num_chunked_prefills += step.num_chunks
            if step.operations:
                copies = [op for op in step.operations if op.kind is OperationKind.COPY]
                self.num_copied_blocks += sum(len(copy.targets) for copy in copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker, for Snapshot and metrics."""

    worker_id: WorkerId
    num_running: int
    num_blocks_used: int
    num_blocks: int
    num_steps_in_flight: int
    last_step: int
    draining: bool
    max_steps_in_flight: int
    round_trip_us: int
    num_swapped: int = 0
    num_host_blocks_used: int = 0
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A request, held or ended lately: where it stands and where its time went.

    `place` is how many requests of its queue are before it while it waits. `finish` is its end;
    the worker is the one it runs on.
    """

    request_id: RequestId
    state: RequestState
    attempt: int
    worker_id: WorkerId | None = None
    place: int | None = None
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int
    num_preemptions: int
    arrived_ns: int
    now_ns: int
    account: Account
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreView:
    """The core between two events. num_waiting counts neither running nor swapped requests."""

    epoch: int
    num_waiting: int
    num_running: int
    backlog_tokens: int
    workers: tuple[WorkerView, ...]
    num_swapped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What a CoreView holds of one worker, and how many wait for any."""

    num_waiting: int
    worker: WorkerView
