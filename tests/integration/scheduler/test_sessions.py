"""Sessions with workers over real gRPC: join, plan, resume, lose."""

import asyncio

import pytest
from quire.v1 import worker_pb2
from structlog.testing import capture_logs

from scheduler_svc.adapters import loss_rules
from scheduler_svc.core.events import (
    RequestCancelled,
    StepCompleted,
    StepFailed,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSubscribed,
)
from scheduler_svc.core.types import FaultScope, RequestId, WorkerId
from tests.builders import expected_output
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import eventually, tokens_of
from tests.integration.scheduler.rig import CLOCK, EPOCH, Rig, request


async def sessions(worker: FakeWorkerServer, count: int) -> None:
    """Waits for the count-th session."""
    await eventually(lambda: worker.num_sessions >= count)


async def test_a_worker_joins_computes_and_its_results_reach_the_core(
    worker: FakeWorkerServer,
) -> None:
    worker.snapshot_slots.append(
        worker_pb2.SlotState(slot=1, generation=1, request_id=b"o" * 16, attempt=4)
    )
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        arrival = request(prompt=11, max_tokens=9)
        rig.feed(arrival)
        await eventually(lambda: rig.finishes)
        await eventually(lambda: not any(w.num_steps_in_flight for w in rig.core.view().workers))
    joined = rig.of(WorkerJoined)[0]
    assert joined.capacity.num_slots == 32
    assert joined.gateway_ids == {"g1"}
    assert joined.snapshot_attempts == {b"o" * 16: 4}
    assert rig.digests == ["d" * 64]
    assert worker.plans[0].reset
    assert worker.plans[0].epoch == EPOCH
    tokens, _ = expected_output(arrival)
    assert tokens_of(worker.emissions, arrival.request_id) == tokens
    assert rig.finishes[0].num_output_tokens == 9
    assert rig.observer.num_results == len(worker.plans) == len(rig.observer.plan_bytes)


@pytest.mark.parametrize("lost_on_the_way", ["results", "plans"])
@pytest.mark.parametrize("depth", [2, 8])
async def test_a_broken_stream_is_resumed_without_a_trace(
    worker: FakeWorkerServer, lost_on_the_way: str, depth: int
) -> None:
    """With depth 8 the first break is within a plan of several steps."""
    worker.step_s = 0.002
    arrival = request(prompt=5, max_tokens=120)
    async with Rig(worker, depth=depth).running() as rig:
        await rig.saw(WorkerJoined)
        rig.feed(arrival)
        for num_sessions, count in enumerate((4, 30, 50, 70), start=2):
            await rig.saw(StepCompleted, count)
            if lost_on_the_way == "plans":
                worker.flow.clear()
            worker.cut()
            await sessions(worker, num_sessions)
            worker.flow.set()
        await eventually(lambda: rig.finishes)
    assert worker.num_sessions == 5
    assert (max(plan.num_steps for plan in worker.plans) > 2) == (depth > 2)
    assert rig.of(WorkerLost) == []
    assert len(rig.of(WorkerJoined)) == 1
    steps = [event.step for event in rig.of(StepCompleted)]
    assert steps == list(range(1, len(steps) + 1)), "each result once and in order"
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]
    assert {opening.incarnation for opening in worker.opens[1:]} == {worker.incarnation}


async def test_a_stream_gone_for_longer_than_the_grace_is_a_loss(worker: FakeWorkerServer) -> None:
    async with Rig(worker, grace_s=0.3).running() as rig:
        await rig.saw(WorkerJoined)
        begin = CLOCK.now_ns()
        with capture_logs() as said:
            await worker.stop()
            await rig.saw(WorkerLost)
        assert CLOCK.now_ns() - begin >= 0.3e9
        [lost] = [line for line in said if line["event"] == "worker_lost"]
        assert lost["reason"] == "the stream was gone for longer than the grace"
        port = int(worker.address.rpartition(":")[2])
        await worker.start(port)
        await rig.saw(WorkerJoined, 2)
    assert worker.opens[-1].incarnation == 0, "a new life, not a resync"


async def test_another_incarnation_is_a_loss_at_once(worker: FakeWorkerServer) -> None:
    async with Rig(worker, grace_s=30.0).running() as rig:
        await rig.saw(WorkerJoined)
        port = int(worker.address.rpartition(":")[2])
        await worker.stop()
        successor = FakeWorkerServer()
        await successor.start(port)
        rig.feed(request(max_tokens=5))
        await rig.saw(WorkerJoined, 2)
        assert [type(e) for e in rig.events if not isinstance(e, StepCompleted)] == [
            WorkerJoined,
            WorkerLost,
            WorkerJoined,
        ]
        # The registry still names the dead one for a moment: it must not end the new life.
        rig.link.announced(Rig.record(worker))
        await eventually(lambda: rig.finishes)
        await successor.stop()
    assert len(rig.of(WorkerLost)) == 1


async def test_the_registry_can_name_another_incarnation(worker: FakeWorkerServer) -> None:
    successor = FakeWorkerServer()
    await successor.start()
    async with Rig(worker, grace_s=30.0).running() as rig:
        await rig.saw(WorkerJoined)
        rig.link.announced(Rig.record(successor))
        await rig.saw(WorkerJoined, 2)
        assert len(rig.of(WorkerLost)) == 1
        assert successor.num_sessions == 1
        await successor.stop()


async def test_a_silent_worker_with_plans_is_lost(
    worker: FakeWorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        rig.feed(request(max_tokens=300))
        await rig.saw(StepCompleted, 3)
        worker.flow.clear()
        worker.silent = True
        with monkeypatch.context() as impatient:
            impatient.setattr(loss_rules, "SILENT_NS", 300_000_000)
            await rig.saw(WorkerLost)
        worker.flow.set()
        worker.silent = False
        await rig.saw(WorkerJoined, 2)
        await eventually(lambda: rig.finishes)
    assert rig.observer.num_lost == 1


async def test_a_silent_worker_without_plans_only_loses_its_stream(
    worker: FakeWorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        await rig.saw(StepCompleted)
        worker.silent = True
        monkeypatch.setattr(loss_rules, "SILENT_NS", 300_000_000)
        await eventually(lambda: worker.num_sessions >= 2)
        assert rig.of(WorkerLost) == []


async def test_heartbeats_do_not_excuse_a_step_that_never_ends(
    worker: FakeWorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        await rig.saw(StepCompleted)
        worker.flow.clear()
        begin = CLOCK.now_ns()
        rig.feed(request(max_tokens=50))
        with monkeypatch.context() as impatient:
            impatient.setattr(loss_rules, "STUCK_NS", 900_000_000)
            await rig.saw(WorkerLost)
        assert CLOCK.now_ns() - begin >= 0.9e9
        await eventually(lambda: len(worker.opens) == 2)
        await asyncio.sleep(1.2)  # two heartbeats
        assert len(rig.of(WorkerJoined)) == 1, "nothing is planned behind the step that hangs"
        assert len(worker.opens) == 2, "it waits in one session"
        worker.subscribe("g1", "g2")
        worker.say(worker_pb2.SessionResponse(draining=worker_pb2.Draining()))
        worker.flow.set()
        await rig.saw(WorkerDraining)
        assert rig.of(WorkerJoined)[1].gateway_ids == {"g1", "g2"}
        assert rig.link._patience == 2, "the next life has more time for the same work"


async def test_a_slow_worker_gets_its_work_back_once_it_is_free(
    worker: FakeWorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        await rig.saw(StepCompleted)
        worker.flow.clear()
        arrival = request(max_tokens=50)
        rig.feed(arrival)
        with monkeypatch.context() as impatient:
            impatient.setattr(loss_rules, "STUCK_NS", 300_000_000)
            await rig.saw(WorkerLost)
        worker.flow.set()
        await eventually(lambda: rig.finishes)
    assert len(rig.of(WorkerJoined)) == 2
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]


async def test_results_of_an_older_life_are_dropped(worker: FakeWorkerServer) -> None:
    worker.tells_busy = False
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        rig.feed(request(max_tokens=300))
        await rig.saw(StepCompleted, 5)
        worker.flow.clear()
        # Two plans are in flight, and no result is on its way.
        await eventually(lambda: rig.observer.num_results == worker.last_step)
        await eventually(lambda: len(worker.plans) == worker.last_step + 2)
        rig.link.give_up("planted")
        rig.feed(WorkerLost(now_ns=CLOCK.now_ns(), worker_id=WorkerId("w1")))
        await rig.saw(WorkerLost)
        rig.link._kick.set()  # does not wait for the pause
        await rig.saw(WorkerJoined, 2)
        worker.flow.set()
        await eventually(lambda: rig.finishes)
    assert rig.observer.num_stale == 2
    assert rig.core.stats.num_recovered == 1


async def test_a_refused_step_fails_and_work_goes_on_from_a_reset(
    worker: FakeWorkerServer,
) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        arrival = request(prompt=7, max_tokens=300)
        rig.feed(arrival)
        await rig.saw(StepCompleted, 5)
        worker.fault_next = worker_pb2.Fault(
            scope=worker_pb2.Fault.SCOPE_STEP,
            code=worker_pb2.Fault.CODE_DIGEST_MISMATCH,
            message="planted",
        )
        await eventually(lambda: rig.finishes)
    failed = rig.of(StepFailed)[0]
    assert failed.scope is FaultScope.STEP
    assert failed.reason == "DIGEST_MISMATCH: planted"
    assert rig.observer.num_mismatches == 1
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]


async def test_a_draining_worker_leaves_without_a_grace(worker: FakeWorkerServer) -> None:
    async with Rig(worker, grace_s=30.0).running() as rig:
        await rig.saw(WorkerJoined)
        worker.say(worker_pb2.SessionResponse(draining=worker_pb2.Draining()))
        await rig.saw(WorkerDraining)
        await worker.stop()
        await rig.saw(WorkerLost)


async def test_cancels_and_subscriptions_are_passed_on(worker: FakeWorkerServer) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        worker.subscribe("g1", "g2")
        worker.say(
            worker_pb2.SessionResponse(cancels=worker_pb2.Cancels(request_ids=[b"c" * 16, b"bad"]))
        )
        await rig.saw(RequestCancelled)
        assert rig.link.gateway_ids == {"g1", "g2"}
    assert [e.gateway_ids for e in rig.of(WorkerSubscribed)] == [{"g1", "g2"}]
    assert [e.request_id for e in rig.of(RequestCancelled)] == [RequestId(b"c" * 16)]


async def test_a_worker_of_another_schema_revision_is_not_used(worker: FakeWorkerServer) -> None:
    worker.min_schema_revision = worker.max_schema_revision = 2
    async with Rig(worker).running() as rig:
        await eventually(lambda: len(worker.opens) >= 2)
        assert rig.events == []


async def test_a_worker_that_left_the_registry_before_joining_is_forgotten(
    worker: FakeWorkerServer,
) -> None:
    await worker.stop()
    rig = Rig(worker)
    running = asyncio.get_running_loop().create_task(rig.link.run())
    await asyncio.sleep(0.1)
    rig.link.announced(None)
    async with asyncio.timeout(20):
        await running
    assert rig.events == []
