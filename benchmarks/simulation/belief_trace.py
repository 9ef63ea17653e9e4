"""What a scheduler's trace says of its worker: the rows of each step, and when results came.

A trace holds plans as text, so its events are fed to a new core, which plans them again (that it
plans the same is what scheduler_svc.replay checks). All times are the scheduler's monotonic clock,
which on one machine is the clients' clock, too.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core import SchedulerCore
from scheduler_svc.core.events import RequestArrived, StepCompleted, StepFailed, WorkerJoined
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import RequestId
from scheduler_svc.sim.cost import kv_tokens
from scheduler_svc.trace_file import Trace


class BeliefError(Exception):
    """What was recorded can't be compared; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step as the worker computed it. Counts as in StepCost.seconds; times in s.

    `follows`: its plan went out before the result of the step before it came.
    """

    planned_s: float
    returned_s: float
    step_s: float
    total_s: float
    follows: bool
    num_decode_tokens: int
    num_prefill_tokens: int
    kv_tokens_read: int
    copied_bytes: int

    @property
    def round_trip_s(self) -> float:
        """From the plan to the result, less what the worker had it for."""
        return self.returned_s - self.planned_s - self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """When the scheduler read a request, and when the result with its first token came."""

    prompt: tuple[int, ...]
    arrived_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All of a trace with one worker."""

    worker: WorkerJoined
    steps: tuple[Step, ...]
    requests: tuple[Request, ...]


@dataclass(slots=True)
class _Row:
    """A slot's request: tokens that are known and computed, and those of its row in each step."""

    request_id: RequestId
    known: int
    computed: int
    num_tokens: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Due:
    """A step that was planned. Steps behind the first of a plan have none of its changes."""

    step: int
    plan: StepPlan | None
    planned_s: float
    follows: bool


class Reader:
    """Follows the slots of one worker through its plans and results."""

    def __init__(self, block_bytes: int) -> None:
        self.first_token_s: dict[RequestId, float] = {}
        self._block_bytes = block_bytes
        self._rows: dict[int, _Row] = {}
        self._due: deque[_Due] = deque()

    def planned(self, plan: StepPlan, planned_s: float) -> None:
        """A plan went out."""
        for number in range(plan.num_steps):
            self._due.append(
                _Due(plan.step + number, None if number else plan, planned_s, bool(self._due))
            )

    def returned(self, event: StepCompleted) -> Step:
        """A result came. Raises BeliefError if it is not that of the next step."""
        if not self._due or self._due[0].step != event.step:
            raise BeliefError(f"the result of step {event.step} came out of turn")
        due = self._due.popleft()
        copied = 0 if due.plan is None else self._apply(due.plan)
        sampled, now_s = set(event.slots), event.now_ns / 1e9
        num_decodes = num_prefill = num_kv = 0
        for slot, row in self._rows.items():
            if row.ended or not row.num_tokens:
                continue
            num_kv += kv_tokens(row.computed, row.num_tokens)
            row.computed += row.num_tokens
            if slot in sampled:
                row.known += 1
                self.first_token_s.setdefault(row.request_id, now_s)
            if slot in sampled and row.num_tokens == 1:
                num_decodes += 1
            else:
                num_prefill += row.num_tokens
        for slot, _ in event.finished:
            self._rows[slot].ended = True
        return Step(
            planned_s=due.planned_s,
            returned_s=now_s,
            step_s=event.step_us / 1e6,
            total_s=event.total_us / 1e6,
            follows=due.follows,
            num_decode_tokens=num_decodes,
            num_prefill_tokens=num_prefill,
            kv_tokens_read=num_kv,
            copied_bytes=copied,
        )

    def _apply(self, plan: StepPlan) -> int:
        """Bytes that its operations copy."""
        if plan.reset:
            self._rows.clear()
        for slot in plan.releases:
            self._rows.pop(slot, None)
        for admit in plan.admits:
            self._rows[admit.slot] = _Row(
                admit.request_id, len(admit.token_ids), admit.num_computed_tokens
            )
        for slot, num_tokens in plan.changed:
            if slot in self._rows:
                self._rows[slot].num_tokens = num_tokens
        return sum(len(op.targets) for op in plan.operations) * self._block_bytes


def read(trace: Trace) -> Recorded:
    """Plans everything again. Raises BeliefError if there was not one worker, or a step failed."""
    core = SchedulerCore(trace.config)
    worker: WorkerJoined | None = None
    reader: Reader | None = None
    steps: list[Step] = []
    arrived: dict[RequestId, RequestArrived] = {}
    for recorded in trace.rounds:
        for event in recorded.events:
            core.feed(event)
            match event:
                case WorkerJoined():
                    if worker is not None:
                        raise BeliefError("more than one worker has joined")
                    worker, reader = event, Reader(event.capacity.block_bytes)
                case RequestArrived():
                    arrived.setdefault(event.request_id, event)
                case StepFailed():
                    raise BeliefError(f"step {event.step} has failed: {event.reason}")
                case StepCompleted() if reader is not None:
                    steps.append(reader.returned(event))
        if recorded.ready is None:
            break
        for plan in core.take_ready().plans:
            assert reader is not None, "a plan without a worker"
            reader.planned(plan, recorded.events[-1].now_ns / 1e9)
    if worker is None or reader is None:
        raise BeliefError("no worker has joined")
    first = reader.first_token_s
    requests = tuple(
        Request(
            prompt=of.prompt_token_ids,
            arrived_s=of.now_ns / 1e9,
            first_token_s=first[request_id],
        )
        for request_id, of in arrived.items()
        if request_id in first
    )
    return Recorded(worker=worker, steps=tuple(steps), requests=requests)


def between(steps: Iterable[Step], begin_s: float, end_s: float) -> list[Step]:
    """Steps planned and returned within these times."""
    return [step for step in steps if begin_s <= step.planned_s and step.returned_s <= end_s]
