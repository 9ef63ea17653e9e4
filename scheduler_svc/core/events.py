"""What can happen to the core. Every event carries the time, so the core needs no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.types import (
    CostProfile,
    FaultScope,
    FinishReason,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerCapacity,
    WorkerId,
)
from scheduler_svc.core.value import value


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameLeader:
    """First event of an epoch. Plans carry the epoch; the core starts empty."""

    now_ns: int
    epoch: int


@value(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""

    now_ns: int


@value(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """An entry of the queue. A known id with a higher attempt supersedes; else it is dropped.

    output_token_ids is output the client has been given, kept as a fixed prefix. entry_id names the
    queue entry and returns in Finish. deadline_ns is on the clock of now_ns. Samples of one prompt
    have one sample_group, empty if there is only one, and differ in sample_index.
    """

    now_ns: int
    request_id: RequestId
    entry_id: str
    attempt: int = 1
    gateway_id: str
    reply_to: bytes = b""
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    sampling: SamplingSpec
    priority: int = 0
    deadline_ns: int | None = None
    cache_salt: bytes = b""
    traceparent: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    sample_index: int = 0
    sample_group: bytes = b""


@value(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The client is gone. Unknown ids are ignored."""

    now_ns: int
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLost:
    """A gateway has left the registry for longer than its grace: its requests are cancelled."""

    now_ns: int
    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A session has opened with a worker that holds nothing this core placed.

    The first plan it gets carries `reset`. snapshot_attempts are the attempts of requests it holds
    from an earlier epoch: new attempts of those start above them.
    """

    now_ns: int
    worker_id: WorkerId
    capacity: WorkerCapacity
    cost: CostProfile = field(default_factory=CostProfile)
    gateway_ids: frozenset[str] = frozenset()
    snapshot_attempts: Mapping[RequestId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The worker will not answer again under this id until it joins anew."""

    now_ns: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDraining:
    """The worker takes no more requests."""

    now_ns: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSubscribed:
    """The gateways that read this worker's tokens now."""

    now_ns: int
    worker_id: WorkerId
    gateway_ids: frozenset[str]


@value(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """Results of one step, in step order per worker. Columns of slots and sampled tokens.

    step_us is the time the worker took to compute it, total_us that from receiving the plan to
    having the result, idle_us that before it in which the worker had no plan; 0 if unknown.
    operations_done are ids of operations, of this plan or earlier ones; each is named once.
    """

    now_ns: int
    worker_id: WorkerId
    step: int
    slots: tuple[Slot, ...] = ()
    token_ids: tuple[int, ...] = ()
    finished: tuple[tuple[Slot, FinishReason], ...] = ()
    num_wasted_rows: int = 0
    step_us: int = 0
    total_us: int = 0
    idle_us: int = 0
    operations_done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step was not computed (scope STEP), or its worker can't go on (scope WORKER).

    operations_done as in StepCompleted.
    """

    now_ns: int
    worker_id: WorkerId
    step: int
    scope: FaultScope
    reason: str
    operations_done: tuple[int, ...] = ()


Event = (
    BecameLeader
    | Tick
    | RequestArrived
    | RequestCancelled
    | GatewayLost
    | WorkerJoined
    | WorkerLost
    | WorkerDraining
    | WorkerSubscribed
    | StepCompleted
    | StepFailed
)
