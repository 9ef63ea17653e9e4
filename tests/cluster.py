"""The scheduler core between FakeWorkers and a FakeGateway, with every promise checked.

Cluster plays the shell: it feeds events, takes Ready, hands plans to workers, and asserts after
each round what must hold whatever happened.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_svc.core import Ready, SchedulerCore
from scheduler_svc.core.depth import MAX_STEPS
from scheduler_svc.core.events import (
    Event,
    RequestArrived,
    RequestCancelled,
    StepCompleted,
    StepFailed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.ready import Finish
from scheduler_svc.core.types import FinishReason, RequestId, WorkerId
from tests.builders import Emission, FakeWorker, make_worker, token_at

MS = 1_000_000


@dataclass(slots=True)
class Stream:
    """One client request as its gateway sees it. `attempt` is the highest seen."""

    arrival: RequestArrived
    attempt: int
    tokens: list[int]
    end: FinishReason | None = None


@dataclass(slots=True)
class FakeGateway:
    """Appends tokens by (attempt, position) and asserts that they are the right ones, in order."""

    streams: dict[RequestId, Stream] = field(default_factory=dict)
    num_repeats: int = 0

    def open(self, arrival: RequestArrived) -> None:
        """A client's request."""
        self.streams[arrival.request_id] = Stream(
            arrival=arrival, attempt=arrival.attempt, tokens=list(arrival.output_token_ids)
        )

    def receive(self, emission: Emission) -> None:
        """A worker's tokens."""
        stream = self.streams[emission.request_id]
        assert emission.reply_to == stream.arrival.reply_to
        if emission.attempt < stream.attempt or stream.end is not None:
            return
        stream.attempt = emission.attempt
        for offset, token in enumerate(emission.token_ids):
            position = emission.first_position + offset
            assert position <= len(stream.tokens), "tokens are missing"
            assert token == token_at(emission.request_id, position)
            if position == len(stream.tokens):
                stream.tokens.append(token)
            else:
                self.num_repeats += 1
        if emission.finish is not None:
            stream.end = emission.finish

    def notice(self, finish: Finish) -> None:
        """An end that the scheduler tells."""
        stream = self.streams[finish.request_id]
        if stream.end is None and finish.attempt >= stream.attempt:
            stream.end = finish.reason

    def supersede(self, request_id: RequestId, now_ns: int) -> RequestArrived:
        """The request again with all the client has been given, under a higher attempt."""
        stream = self.streams[request_id]
        stream.attempt += 1
        return replace(
            stream.arrival,
            now_ns=now_ns,
            attempt=stream.attempt,
            entry_id=f"{request_id.decode()}-{stream.attempt}",
            output_token_ids=tuple(stream.tokens),
        )


class Cluster:
    """Feed through this and the promises are checked; `finishes` holds every end by entry."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.now_ns = 0
        self.gateway = FakeGateway()
        self.workers: dict[WorkerId, FakeWorker] = {}
        # Who emits an attempt of a request, and the attempts that snapshots have shown.
        self.sessions: dict[tuple[RequestId, int], FakeWorker] = {}
        self.held: dict[RequestId, int] = {}
        self.finishes: dict[str, Finish] = {}
        self.discards: list[str] = []
        self.given_up: list[WorkerId] = []
        self.why_given_up: list[str] = []
        self.last = Ready()
        # Results bring times, so that an adapted depth changes and holds plans back.
        self.tells_times = core.config.max_inflight_steps == 0

    # Events

    def feed(self, event: Event) -> Ready:
        """One event and its Ready."""
        self.core.feed(event)
        self.check()
        return self.round()

    def check(self) -> None:
        """The core's invariants hold."""
        check_all(self.core)

    def round(self) -> Ready:
        """Takes Ready and acts on it."""
        ready = self.last = self.core.take_ready()
        self.check()
        for plan in ready.plans:
            worker = self.workers[plan.worker_id]
            worker.take(plan)
            for admit in plan.admits:
                key = (admit.request_id, admit.attempt)
                assert self.sessions.setdefault(key, worker) is worker, "two emit one attempt"
                assert admit.attempt >= self.held.get(admit.request_id, 0)
        for finish in ready.finishes:
            assert finish.entry_id not in self.finishes, "an entry ends twice"
            self.finishes[finish.entry_id] = finish
            if finish.notify:
                self.gateway.notice(finish)
        for entry_id in ready.discards:
            assert entry_id not in self.finishes
            self.discards.append(entry_id)
        for given_up in ready.given_up:
            self.given_up.append(given_up.worker_id)
            self.why_given_up.append(given_up.reason)
            del self.workers[given_up.worker_id]
        assert ready.wake_at_ns is None or ready.wake_at_ns > self.now_ns
        limit = self.core.config.max_inflight_steps or MAX_STEPS
        assert all(w.num_steps_in_flight <= limit for w in self.core.view().workers)
        return ready

    def join(self, name: str = "w", **options: Any) -> FakeWorker:
        """A worker joins with numbers as of make_worker."""
        return self.join_as(make_worker(name, now_ns=self.now_ns, **options))

    def join_as(self, joined: WorkerJoined) -> FakeWorker:
        """A worker joins."""
        for request_id, attempt in joined.snapshot_attempts.items():
            self.held[request_id] = max(attempt, self.held.get(request_id, 0))
        worker = self.workers[joined.worker_id] = FakeWorker(joined)
        self.feed(joined)
        return worker

    def begin(self, name: str = "w", **options: Any) -> FakeWorker:
        """A worker joins and has answered the plan that made it start from nothing."""
        worker = self.join(name, **options)
        self.step(name)
        return worker

    def lose(self, name: str) -> Ready:
        """A worker dies with all that it has not sent."""
        del self.workers[WorkerId(name)]
        return self.feed(WorkerLost(now_ns=self.now_ns, worker_id=WorkerId(name)))

    def arrive(self, arrival: RequestArrived) -> Ready:
        """A client's request."""
        self.gateway.open(arrival)
        return self.feed(replace(arrival, now_ns=self.now_ns))

    def arrive_together(self, *arrivals: RequestArrived) -> Ready:
        """Requests that are all there before the next plan."""
        for arrival in arrivals:
            self.gateway.open(arrival)
            self.core.feed(replace(arrival, now_ns=self.now_ns))
        return self.round()

    def supersede(self, name: str) -> Ready:
        """The gateway asks anew."""
        return self.feed(self.gateway.supersede(RequestId(name.encode()), self.now_ns))

    def cancel(self, name: str) -> Ready:
        """The client is gone: its gateway ends the stream itself."""
        request_id = RequestId(name.encode())
        stream = self.gateway.streams[request_id]
        stream.end = stream.end or FinishReason.CANCELLED
        return self.feed(RequestCancelled(now_ns=self.now_ns, request_id=request_id))

    def advance(self, duration_ns: int) -> Ready:
        """Time passes."""
        self.now_ns += duration_ns
        return self.feed(Tick(now_ns=self.now_ns))

    # Steps

    def result(
        self, name: str = "w", *, fail: bool = False, num_done: int | None = None
    ) -> StepCompleted | StepFailed:
        """A worker's next result; its tokens have reached the gateway."""
        worker = self.workers[WorkerId(name)]
        event = worker.next_result(now_ns=self.now_ns, fail=fail, num_done=num_done)
        if self.tells_times and isinstance(event, StepCompleted):
            event = _with_times(event)
        self.deliver(worker)
        return event

    def deliver(self, worker: FakeWorker) -> None:
        """All that a worker has emitted reaches the gateway."""
        for emission in worker.outbox:
            self.gateway.receive(emission)
        worker.outbox.clear()

    def step(self, name: str = "w", *, fail: bool = False, num_done: int | None = None) -> Ready:
        """A worker answers its oldest plan, with so many operations done, all unless told."""
        self.now_ns += MS
        return self.feed(self.result(name, fail=fail, num_done=num_done))

    def steps(self, count: int, name: str = "w") -> Ready:
        """So many answers of a worker."""
        for _ in range(count):
            self.step(name)
        return self.last

    def run(self, *, max_steps: int = 20_000, until: Callable[[], bool] | None = None) -> int:
        """Answers plans, one worker after the other, until none is left; returns the count."""
        self.round()
        for count in range(max_steps):
            if until is not None and until():
                return count
            busy = [w for w in self.workers.values() if w.plans]
            if not busy:
                return count
            self.step(busy[count % len(busy)].worker_id)
        raise AssertionError(f"still busy after {max_steps} steps: {self.core.view()}")

    # What tests ask

    def output(self, name: str) -> list[int]:
        """What the client of a request has been given."""
        return self.gateway.streams[RequestId(name.encode())].tokens

    def end(self, name: str) -> FinishReason | None:
        """How the client's stream ended, as its gateway knows."""
        return self.gateway.streams[RequestId(name.encode())].end

    def finish(self, name: str, attempt: int = 1) -> Finish:
        """The core's end of an entry."""
        return self.finishes[f"{name}-{attempt}"]

    def row(self, name: str, worker: str = "w") -> int:
        """The tokens of a request in the step that the worker computed last."""
        fake = self.workers[WorkerId(worker)]
        for slot, row in fake.slots.items():
            if row.admit.request_id == name.encode():
                return fake.steps[-1].get(slot, 0)
        return 0

    def assert_idle(self) -> None:
        """Nothing is held anywhere."""
        view = self.core.view()
        assert (view.num_waiting, view.num_running, view.backlog_tokens) == (0, 0, 0)
        assert view.num_swapped == 0
        for worker in view.workers:
            assert worker.num_running == worker.num_blocks_used == worker.num_steps_in_flight == 0
            assert worker.num_host_blocks_used == 0


def _with_times(event: StepCompleted) -> StepCompleted:
    """Times as different as can be: what is learnt from them is nothing to rely on."""
    step = event.step
    step_us = (0, 300, 4000, 900, 0, 20_000)[step // 16 % 6]
    total_us = step_us + step % 7 * 400 if step_us else 0
    return replace(event, step_us=step_us, total_us=total_us, idle_us=step % 3 * 100)
