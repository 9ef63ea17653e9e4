"""A rule-based machine over the scheduler core: any order of events keeps every promise.

Cluster checks after each event: the core's invariants, at most one end for each entry, plans that a
worker can carry out within its budget (FakeWorker), and tokens that a client can join without a gap
(FakeGateway). At the end all is healed and every request must end within a bounded number of steps.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.events import (
    GatewayLost,
    StepCompleted,
    StepFailed,
    WorkerDraining,
    WorkerSubscribed,
)
from scheduler_svc.core.types import FaultScope, FinishReason, RequestId, WorkerId
from tests.builders import GATEWAY, FakeWorker, expected_output, make_core, make_request
from tests.cluster import MS, Cluster

NAMES = ("w0", "w1")
OTHER = "other gateway"
MAX_STEPS_TO_END = 4000
# 0 is adapted, to times that are as different as can be.
DEPTHS = [1, 2, 4, 8, 0]
# Of these with the quick tests; all are in CI.
QUICK = {2, 0}
# Eight tokens, two blocks, cost as much as swapping three blocks out and in.
COSTS: dict[str, Any] = {"token_us": 3.0, "swap_gb_per_s": 1.0}
# How many operations a step names done: with 99 all.
NUM_DONE = st.sampled_from([99, 99, 0, 1])
SCORED: dict[str, Any] = {"num_logprobs": 0, "prompt_logprobs": True}


class CoreMachine(RuleBasedStateMachine):
    """Two workers, two gateways, any number of requests."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.results: list[StepCompleted | StepFailed] = []

    @initialize(
        policy=st.sampled_from(["fcfs", "fair", "fcfs", "static"]),
        chunk=st.sampled_from([0, 3]),
        caching=st.booleans(),
        max_skips=st.sampled_from([1, 16]),
        watermark=st.sampled_from([0.0, 0.1]),
        preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
    )
    def start(
        self,
        policy: str,
        chunk: int,
        caching: bool,
        max_skips: int,
        watermark: float,
        preemption: str,
    ) -> None:
        self.cluster = Cluster(
            make_core(
                max_inflight_steps=self.depth,
                scheduling_policy=policy,
                static_batch_size=3,
                prefill_chunk_tokens=chunk,
                enable_prefix_caching=caching,
                max_skips=max_skips,
                watermark=watermark,
                worker_wait_ns=2000 * MS,
                preemption_mode=preemption,
            )
        )
        self.cluster.join(
            NAMES[0],
            num_slots=4,
            num_blocks=12,
            max_num_batched_tokens=16,
            num_host_blocks=12,
            **COSTS,
        )

    # Requests

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 36),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 14),
        stop_after=st.none() | st.integers(1, 14),
        priority=st.sampled_from([0, 0, 1, -1]),
        tenant=st.sampled_from(["a", "b"]),
        deadline_ms=st.none() | st.integers(1, 200),
        gateway=st.sampled_from([GATEWAY, GATEWAY, GATEWAY, OTHER]),
        logprobs=st.sampled_from([{}, {}, {"num_logprobs": 1}, SCORED]),
        samples=st.booleans(),
    )
    def arrive(  # noqa: PLR0917  # the rule's parameters, given by name
        self,
        count: int,
        prompt: int,
        family: int,
        max_tokens: int,
        stop_after: int | None,
        priority: int,
        tenant: str,
        deadline_ms: int | None,
        gateway: str,
        logprobs: dict[str, Any],
        samples: bool,
    ) -> None:
        """Some that begin alike, or samples of one prompt, which are there together."""
        deadline_ns = None if deadline_ms is None else self.cluster.now_ns + deadline_ms * MS
        group = len(self.names).to_bytes(16) if samples else b""
        arrivals = []
        for extra in range(count):
            self.names.append(f"r{len(self.names)}")
            arrivals.append(
                make_request(
                    self.names[-1],
                    prompt=prompt if samples else prompt + extra,
                    sample_group=group,
                    sample_index=extra if samples else 0,
                    family=family,
                    max_tokens=max_tokens,
                    stop_after=stop_after,
                    priority=priority,
                    tenant=tenant,
                    deadline_ns=None if extra else deadline_ns,
                    gateway_id=gateway,
                    **logprobs,
                )
            )
        if samples:
            self.cluster.arrive_together(*arrivals)
        else:
            for arrival in arrivals:
                self.cluster.arrive(arrival)

    @rule(
        prompt=st.integers(1, 9),
        max_tokens=st.integers(8, 20),
        family=st.none() | st.integers(0, 1),
        tenant=st.sampled_from(["a", "b"]),
    )
    def crowd(self, prompt: int, max_tokens: int, family: int | None, tenant: str) -> None:
        """Requests that begin small and grow until blocks are short."""
        for _ in range(4):
            self.names.append(f"r{len(self.names)}")
            self.cluster.arrive(
                make_request(
                    self.names[-1],
                    prompt=prompt,
                    family=family,
                    max_tokens=max_tokens,
                    tenant=tenant,
                )
            )

    @precondition(lambda self: self.names)
    @rule(data=st.data(), told=st.sampled_from(["core", "worker", "worker, then core"]))
    def cancel(self, data: st.DataObject, told: str) -> None:
        """A client is gone. The core may hear it later than the worker, or never."""
        name = data.draw(st.sampled_from(self.names))
        stream = self.cluster.gateway.streams[RequestId(name.encode())]
        stream.end = stream.end or FinishReason.CANCELLED
        if "worker" in told:
            for worker in self.cluster.workers.values():
                worker.cancel(RequestId(name.encode()))
        if "core" in told:
            self.cluster.cancel(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        """A gateway that has waited too long, whether or not the core is at fault."""
        name = data.draw(st.sampled_from(self.names))
        if self.cluster.end(name) is None:
            self.cluster.supersede(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def repeat_entry(self, data: st.DataObject) -> None:
        """An entry again under its own id, or an old attempt under a new one."""
        name = data.draw(st.sampled_from(self.names))
        stream = self.cluster.gateway.streams[RequestId(name.encode())]
        if stream.end is None and f"{name}-1" not in self.cluster.finishes:
            known = name.encode() in self.cluster.core._requests
            entry_id = data.draw(st.sampled_from([f"{name}-1", f"{name}-repeat"]))
            if known:
                arrival = make_request(name, entry_id=entry_id)
                before = self.cluster.core.stats.num_stale_arrivals
                self.cluster.feed(arrival)
                assert self.cluster.core.stats.num_stale_arrivals == before + 1

    # Steps

    def busy(self) -> list[FakeWorker]:
        return [worker for worker in self.cluster.workers.values() if worker.plans]

    def answer(self, worker: FakeWorker, deliver: bool, num_done: int) -> None:
        """A worker's next answer; its tokens may reach the gateways later, or never."""
        self.cluster.now_ns += MS
        event = worker.next_result(now_ns=self.cluster.now_ns, num_done=num_done)
        self.results.append(event)
        if deliver:
            self.cluster.deliver(worker)
        self.cluster.feed(event)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), count=st.integers(1, 6), deliver=st.booleans(), num_done=NUM_DONE)
    def complete(self, data: st.DataObject, count: int, deliver: bool, num_done: int) -> None:
        """Some answers of one worker."""
        worker = data.draw(st.sampled_from(self.busy()))
        for _ in range(min(count, len(worker.plans))):
            self.answer(worker, deliver, num_done)

    @precondition(lambda self: self.busy())
    @rule(count=st.integers(1, 12), deliver=st.booleans(), num_done=NUM_DONE)
    def complete_in_turn(self, count: int, deliver: bool, num_done: int) -> None:
        """Answers of all workers in turn."""
        for number in range(count):
            busy = self.busy()
            if busy:
                self.answer(busy[number % len(busy)], deliver, num_done)

    @rule(name=st.sampled_from(NAMES))
    def deliver(self, name: str) -> None:
        if WorkerId(name) in self.cluster.workers:
            self.cluster.deliver(self.cluster.workers[WorkerId(name)])

    @precondition(lambda self: self.results)
    @rule(data=st.data())
    def repeat_result(self, data: st.DataObject) -> None:
        """A result comes twice, or late: after its worker was lost, or joined anew."""
        tokens = self.cluster.core.stats.num_generation_tokens
        self.cluster.feed(data.draw(st.sampled_from(self.results)))
        assert self.cluster.core.stats.num_generation_tokens == tokens

    @precondition(lambda self: self.busy())
    @rule(
        data=st.data(),
        scope=st.sampled_from([FaultScope.STEP] * 3 + [FaultScope.WORKER]),
        num_done=NUM_DONE,
    )
    def fail(self, data: st.DataObject, scope: FaultScope, num_done: int) -> None:
        worker = data.draw(st.sampled_from(self.busy()))
        event = worker.next_result(now_ns=self.cluster.now_ns, fail=True, num_done=num_done)
        assert isinstance(event, StepFailed)
        if scope is FaultScope.WORKER:
            event = replace(event, scope=scope)
        self.results.append(event)
        self.cluster.feed(event)

    # Workers and gateways

    @rule(
        name=st.sampled_from(NAMES),
        num_slots=st.sampled_from([2, 4]),
        num_blocks=st.sampled_from([8, 12, 20]),
        block_size=st.sampled_from([2, 4, 8]),
        budget=st.sampled_from([3, 16, 64]),
        reads=st.sampled_from([(GATEWAY,), (GATEWAY, OTHER)]),
        held=st.none() | st.integers(1, 4),
        num_host_blocks=st.sampled_from([0, 3, 20]),
    )
    def join(
        self,
        name: str,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        budget: int,
        reads: tuple[str, ...],
        held: int | None,
        num_host_blocks: int,
    ) -> None:
        """A worker comes, or comes back before anyone has seen it die."""
        snapshot = {} if held is None else {RequestId(n.encode()): held for n in self.names[-2:]}
        self.cluster.join(
            name,
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            gateways=reads,
            snapshot_attempts=snapshot,
            num_host_blocks=num_host_blocks,
            **COSTS,
        )

    @rule(
        name=st.sampled_from(NAMES),
        what=st.sampled_from(
            ["lose", "lose", "drain", "lose gateway", (), (GATEWAY,), (GATEWAY, OTHER)]
        ),
    )
    def disturb(self, name: str, what: str | tuple[str, ...]) -> None:
        """A worker is lost or drains, other gateways read it, or a gateway is lost."""
        now_ns, worker_id = self.cluster.now_ns, WorkerId(name)
        if isinstance(what, tuple):
            self.cluster.feed(
                WorkerSubscribed(now_ns=now_ns, worker_id=worker_id, gateway_ids=frozenset(what))
            )
        elif what == "drain":
            self.cluster.feed(WorkerDraining(now_ns=now_ns, worker_id=worker_id))
        elif what == "lose gateway":
            for stream in self.cluster.gateway.streams.values():
                if stream.arrival.gateway_id == OTHER:
                    stream.end = stream.end or FinishReason.CANCELLED
            self.cluster.feed(GatewayLost(now_ns=now_ns, gateway_id=OTHER))
        elif worker_id in self.cluster.workers:
            self.cluster.lose(name)

    @rule(duration_ms=st.sampled_from([1, 50, 150, 2500]))
    def advance(self, duration_ms: int) -> None:
        self.cluster.advance(duration_ms * MS)

    @invariant()
    def clients_have_the_right_tokens(self) -> None:
        for stream in self.cluster.gateway.streams.values() if self.names else ():
            output, reason = expected_output(stream.arrival)
            assert stream.tokens == output[: len(stream.tokens)]
            if stream.end in (FinishReason.STOP, FinishReason.LENGTH):
                assert (stream.tokens, stream.end) == (output, reason)

    def teardown(self) -> None:
        """Healthy workers that everyone reads, no more input: all ends, nothing is left."""
        if not hasattr(self, "cluster"):
            return
        for name in NAMES:
            self.cluster.join(name, gateways=(GATEWAY, OTHER), max_num_batched_tokens=16)
        self.cluster.run(max_steps=MAX_STEPS_TO_END)
        for _ in range(3):
            for stream in list(self.cluster.gateway.streams.values()):
                if stream.end is None:
                    # Its worker died with the end, or a gateway holds a higher attempt.
                    self.cluster.supersede(stream.arrival.request_id.decode())
            self.cluster.run(max_steps=MAX_STEPS_TO_END)
        self.clients_have_the_right_tokens()
        assert all(stream.end is not None for stream in self.cluster.gateway.streams.values())
        self.cluster.assert_idle()


def machine(depth: int) -> type[CoreMachine]:
    return type(f"CoreMachine{depth}", (CoreMachine,), {"depth": depth})


# No shrinking: it can take minutes. A failure is told at once, with its blob. One found at length
# is kept for the next run, which shortens it if Phase.shrink is added here.
SETTINGS = settings(
    deadline=None,
    print_blob=True,
    phases=(Phase.reuse, Phase.generate),
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "depth",
    [depth if depth in QUICK else pytest.param(depth, marks=pytest.mark.slow) for depth in DEPTHS],
)
def test_any_order_of_events(depth: int) -> None:
    run_state_machine_as_test(
        machine(depth),
        settings=settings(SETTINGS, max_examples=25, stateful_step_count=50, derandomize=True),
    )


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("depth", DEPTHS)
def test_any_order_of_events_at_length(depth: int) -> None:
    run_state_machine_as_test(
        machine(depth), settings=settings(SETTINGS, max_examples=100, stateful_step_count=80)
    )
