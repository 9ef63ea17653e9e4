"""What the parts of the scheduler's shell ask of each other, and the values between them.

The driver owns the core; adapters own Redis and the workers' sessions. They meet here only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.events import Event
from scheduler_svc.core.ready import CoreStats, CoreView, Explanation, Ready, StepPlan
from scheduler_svc.core.types import (
    CostProfile,
    FaultScope,
    FinishReason,
    RequestId,
    Slot,
    WorkerCapacity,
    WorkerId,
)
from scheduler_svc.core.value import value


class Clock(Protocol):
    """Monotonic time; every `now_ns` and `deadline_ns` is on it."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary moment."""


class Core(Protocol):
    """The scheduler core as its driver sees it."""

    @property
    def stats(self) -> CoreStats:
        """Counters, read only."""

    def feed(self, event: Event) -> None:
        """Takes one event."""

    def take_ready(self) -> Ready:
        """What is to be done now."""

    def view(self) -> CoreView:
        """State between two events."""

    def explain(self, request_id: RequestId) -> Explanation | None:
        """A request's account; None if it is not known any more."""


class EventSink(Protocol):
    """Where adapters put what happened."""

    async def put(self, event: Event) -> None:
        """Queues an event; waits while the queue is full. The order of one caller is kept."""


class PlanSink(Protocol):
    """Where the driver sends plans. Neither call waits."""

    def send(self, plan: StepPlan) -> None:
        """Sends a plan to its worker; dropped if the worker has been lost meanwhile."""

    def give_up(self, worker_id: WorkerId, reason: str) -> None:
        """Closes the worker's session; it is dialled anew after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An end that a gateway has not heard from a worker."""

    gateway_id: str
    request_id: RequestId
    attempt: int
    reason: FinishReason
    message: str


@value(frozen=True, slots=True, kw_only=True)
class Completion:
    """Queue entries to acknowledge and delete, with the notice that goes with them."""

    entry_ids: tuple[str, ...]
    notice: Notice | None = None


class CompletionSink(Protocol):
    """Where ended entries go; written to Redis when it can be reached."""

    def complete(self, completion: Completion) -> None:
        """Keeps the completion until it is written. Does not wait."""


class RoundObserver(Protocol):
    """Sees what each round of the driver decided, for metrics."""

    def round_done(self, ready: Ready, core_s: float) -> None:
        """Called after plans and finishes have been handed out."""


class RoundRecorder(Protocol):
    """Keeps what goes into the core and what comes out, so that it can be replayed."""

    def fed(self, events: Sequence[Event]) -> None:
        """Called before the core is given the events of a round."""

    def answered(self, ready: Ready) -> None:
        """Called before the round is acted on."""


class LinkObserver(Protocol):
    """Sees the traffic of the workers' sessions, for metrics."""

    def plan_sent(self, num_bytes: int) -> None:
        """A plan was handed to the session."""

    def step_returned(self, seconds: float, idle_us: int) -> None:
        """A result came `seconds` after its plan; the worker had waited `idle_us` for it."""

    def stale_result(self) -> None:
        """A result of an older life or a repeated one was dropped."""

    def digest_mismatch(self) -> None:
        """A worker refused a plan because its tables differ."""

    def worker_lost(self) -> None:
        """A worker was declared lost."""


class TermObserver(RoundObserver, LinkObserver, Protocol):
    """Sees all of a term."""


# What a worker says on its session, decoded.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker's entry in the registry."""

    worker_id: WorkerId
    incarnation: int
    address: str
    model_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who the worker is and what it can hold."""

    min_schema_revision: int
    max_schema_revision: int
    worker_id: WorkerId
    incarnation: int
    model_digest: str
    capacity: WorkerCapacity
    cost: CostProfile
    last_applied_step: int
    first_result_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk:
    """Attempts of the requests that the worker holds or has lately ended."""

    attempts: Mapping[RequestId, int]
    gateway_ids: frozenset[str]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """An error of a step."""

    scope: FaultScope
    code: str
    slot: int
    message: str
    digest_mismatch: bool = False


@value(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step gave."""

    epoch: int
    step: int
    slots: tuple[Slot, ...]
    token_ids: tuple[int, ...]
    finished: tuple[tuple[Slot, FinishReason], ...]
    num_wasted_rows: int
    faults: tuple[FaultReport, ...]
    idle_us: int
    step_us: int = 0
    total_us: int = 0
    operations_done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life."""

    last_step: int
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriptions:
    """The gateways that read the worker's tokens now."""

    gateway_ids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancels:
    """Requests whose client is gone."""

    request_ids: Sequence[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The worker wants to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker knows a higher epoch."""

    highest_epoch: int


WorkerMessage = (
    Hello | SnapshotChunk | StepReport | Heartbeat | Subscriptions | Cancels | Draining | Refused
)
