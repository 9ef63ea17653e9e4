"""The whole service with the real core: requests through Redis, steps through a fake worker."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest
from quire.v1 import common_pb2, queue_pb2, scheduler_pb2, scheduler_pb2_grpc
from redis.asyncio import Redis

from scheduler_svc import trace_file
from scheduler_svc.adapters import refusals
from scheduler_svc.app import EXIT_FAILED
from scheduler_svc.core import SchedulerCore
from scheduler_svc.core.events import Event, RequestArrived
from scheduler_svc.leadership import EXIT_DEPOSED, EXIT_STOPPED
from scheduler_svc.replay import replay
from servicekit import grpc_server, redis_keys
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import (
    MODEL,
    RedisServer,
    RunningScheduler,
    add_entry,
    add_request,
    eventually,
    expected_tokens,
    notices,
    queued_request,
    scheduler,
    tokens_of,
    wait_queue_empty,
)

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def workers(redis: Redis, *fakes: FakeWorkerServer) -> AsyncIterator[None]:
    """Running workers in the registry."""
    try:
        for fake in fakes:
            await fake.start()
            await fake.announce(redis, MODEL)
        yield
    finally:
        for fake in fakes:
            await fake.stop()


def requests(count: int, *, max_tokens: int) -> list[queue_pb2.QueuedRequest]:
    """Requests of different lengths."""
    return [queued_request(prompt=5 + 3 * i, max_tokens=max_tokens) for i in range(count)]


async def start_all(
    redis: Redis,
    running: RunningScheduler,
    asked: Sequence[queue_pb2.QueuedRequest],
    *fakes: FakeWorkerServer,
) -> None:
    """Adds requests; none gets a token before the core has all."""
    for fake in fakes:
        fake.flow.clear()
    for request in asked:
        await add_request(redis, request)
    await eventually(lambda: running.view.num_waiting + running.view.num_running == len(asked))
    for fake in fakes:
        fake.flow.set()


def assert_complete(asked: Sequence[queue_pb2.QueuedRequest], *fakes: FakeWorkerServer) -> None:
    """Every stream carries exactly its tokens."""
    emissions = [emission for fake in fakes for emission in fake.emissions]
    for request in asked:
        assert tokens_of(emissions, request.request_id) == expected_tokens(request)


async def test_requests_flow_and_leave_nothing_behind(server: RedisServer, redis: Redis) -> None:
    worker = FakeWorkerServer()
    asked = requests(20, max_tokens=9)
    async with workers(redis, worker), scheduler(server.url) as running:
        await running.ready()
        for request in asked:
            await add_request(redis, request)
        await wait_queue_empty(redis)
        assert_complete(asked, worker)
        assert await notices(redis) == []

        channel = grpc_server.channel(f"127.0.0.1:{running.app.ports['scheduler']}")
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        snapshot = await stub.Snapshot(scheduler_pb2.SnapshotRequest())
        async with asyncio.timeout(20):  # a step behind the last end may still be on its way
            while snapshot.workers[0].num_blocks_used:
                snapshot = await stub.Snapshot(scheduler_pb2.SnapshotRequest())
        found = await stub.Explain(scheduler_pb2.ExplainRequest(request_id=asked[3].request_id))
        for request_id, code in (
            (b"n" * 16, grpc.StatusCode.NOT_FOUND),
            (b"short", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Explain(scheduler_pb2.ExplainRequest(request_id=request_id))
            assert refused.value.code() is code
        await channel.close()
        assert (found.state, found.num_output_tokens) == (found.STATE_FINISHED, 9)
        assert snapshot.leader
        assert snapshot.epoch == int(await redis.get(redis_keys.epoch(MODEL)) or 0)
        (state,) = snapshot.workers
        assert (state.worker_id, state.address) == ("w1", worker.address)
        assert (state.num_blocks_used, state.num_requests_running) == (0, 0)

        base = f"http://127.0.0.1:{running.app.ports['ops']}"
        text = await asyncio.to_thread(_get, f"{base}/metrics")
        assert 'vllm:num_requests_running{model_name="m"} 0.0' in text
        assert 'vllm:request_queue_time_seconds_count{model_name="m"} 20.0' in text
        assert await asyncio.to_thread(_get, f"{base}/health/ready") == "ready\n"
        assert await running.stop() == EXIT_STOPPED
    assert await redis.get(redis_keys.lease(MODEL)) is None, "a successor need not wait"


async def test_a_modest_tenant_passes_a_greedy_ones_queue(
    server: RedisServer, redis: Redis
) -> None:
    worker = FakeWorkerServer(step_s=0.002)
    greedy = [queued_request(max_tokens=20, tenant="greedy") for _ in range(12)]
    modest = queued_request(max_tokens=2, tenant="modest", tenant_weight=1.0)
    fair = {"scheduling_policy": "fair", "max_num_seqs": "2"}
    for request in (*greedy, modest):
        await add_request(redis, request)
    async with workers(redis, worker), scheduler(server.url, **fair) as running:
        await running.ready()
        await wait_queue_empty(redis)
        assert_complete([*greedy, modest], worker)
    emissions = [*enumerate(worker.emissions)]
    first = {bytes(each.request_id): place for place, each in reversed(emissions)}
    before = sum(first[request.request_id] < first[modest.request_id] for request in greedy)
    assert before <= 4


async def test_a_recorded_term_replays(server: RedisServer, redis: Redis, tmp_path: Path) -> None:
    worker = FakeWorkerServer()
    asked = requests(12, max_tokens=100)
    folder = tmp_path / "traces"
    async with workers(redis, worker), scheduler(server.url, trace_dir=str(folder)) as running:
        await running.ready()
        for request in asked:
            await add_request(redis, request)
        await wait_queue_empty(redis)
        assert await running.stop() == EXIT_STOPPED
    (path,) = folder.iterdir()
    with path.open() as lines:
        trace = trace_file.read(lines)
    num_equal, difference = replay(trace)
    assert difference is None
    assert num_equal == len(trace.rounds) > 10
    assert asked[0].reply_to.hex() not in path.read_text()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as response:
        return str(response.read().decode())


async def test_a_restarted_scheduler_takes_up_what_its_predecessor_had(
    server: RedisServer, redis: Redis
) -> None:
    worker = FakeWorkerServer(step_s=0.005)
    asked = requests(8, max_tokens=60)
    async with workers(redis, worker):
        async with scheduler(server.url) as first:
            await first.ready()
            await start_all(redis, first, asked, worker)
            await eventually(lambda: len(worker.emissions) > 20)
            await first.crash()
        assert await redis.xlen(redis_keys.requests(MODEL)) == 8
        async with scheduler(server.url) as second:
            await second.ready()
            await wait_queue_empty(redis)
    assert_complete(asked, worker)
    assert worker.opens[-1].epoch > worker.opens[0].epoch


async def test_running_work_does_not_notice_that_redis_is_away(
    server: RedisServer, redis: Redis
) -> None:
    worker = FakeWorkerServer(step_s=0.005)
    asked = requests(6, max_tokens=80)
    async with workers(redis, worker), scheduler(server.url, lease_ttl_s="0.5") as running:
        await running.ready()
        epoch = await redis.get(redis_keys.epoch(MODEL))
        await start_all(redis, running, asked, worker)
        await eventually(lambda: len(worker.emissions) > 30)
        server.kill()
        ends = [e for e in worker.emissions if e.finish is not None]
        assert ends == []
        await eventually(lambda: len([e for e in worker.emissions if e.finish]) == 6)
        assert_complete(asked, worker)
        await asyncio.sleep(0.7)  # the lease has run out
        await server.start()
        await wait_queue_empty(redis)
        late = queued_request()
        await add_request(redis, late)
        await wait_queue_empty(redis)
        assert_complete([late], worker)
        assert await redis.get(redis_keys.epoch(MODEL)) == epoch, "the same leader goes on"
    assert worker.num_sessions == 1


async def test_a_killed_workers_requests_end_on_another(server: RedisServer, redis: Redis) -> None:
    first, second = FakeWorkerServer("w1", step_s=0.01), FakeWorkerServer("w2", step_s=0.01)
    asked = requests(10, max_tokens=60)
    async with workers(redis, first, second), scheduler(server.url) as running:
        await running.ready()
        await eventually(lambda: len(running.view.workers) == 2)
        await start_all(redis, running, asked, first, second)
        await eventually(lambda: len(first.emissions) > 20 and len(second.emissions) > 20)
        await first.stop()
        await wait_queue_empty(redis)
    moved = {e.request_id for e in second.emissions if e.attempt > 1}
    assert moved, "requests of the dead worker have moved"
    repeats = [
        next(e for e in second.emissions if e.request_id == request_id) for request_id in moved
    ]
    assert all(e.first_position == 0 for e in repeats), "the first batch repeats the output"
    assert_complete(asked, first, second)


async def test_what_can_never_fit_is_told_with_the_numbers(
    server: RedisServer, redis: Redis
) -> None:
    worker = FakeWorkerServer()
    async with workers(redis, worker), scheduler(server.url) as running:
        await running.ready()
        await eventually(lambda: worker.num_sessions)
        await add_request(redis, queued_request(prompt=1000, max_tokens=500))
        await wait_queue_empty(redis)
    (notice,) = await notices(redis)
    assert notice.finish_reason == common_pb2.FINISH_REASON_REJECTED
    assert "1000" in notice.message
    assert "500" in notice.message


async def test_deadlines_and_missing_workers_are_told(server: RedisServer, redis: Redis) -> None:
    async with scheduler(server.url, worker_wait_s="2") as running:
        await running.ready()
        short, long = queued_request(), queued_request()
        await add_request(redis, short, life_s=0.2)
        await add_request(redis, long)
        await wait_queue_empty(redis)
    told = {n.request_id: n.finish_reason for n in await notices(redis)}
    assert told == {
        short.request_id: common_pb2.FINISH_REASON_DEADLINE,
        long.request_id: common_pb2.FINISH_REASON_UNAVAILABLE,
    }


async def test_a_cancel_from_the_queue_frees_the_request(server: RedisServer, redis: Redis) -> None:
    async with scheduler(server.url) as running:
        await running.ready()
        request = queued_request()
        await add_request(redis, request)
        cancel = queue_pb2.QueuedCancel(request_id=request.request_id)
        await add_entry(redis, queue_pb2.QueueEntry(cancel=cancel))
        await wait_queue_empty(redis)
    assert await notices(redis) == [], "its gateway knows"


async def test_a_standby_leads_when_the_leader_stops(server: RedisServer, redis: Redis) -> None:
    # A lease far longer than the wait: it is given back, and the standby asks often enough.
    async with scheduler(server.url, lease_ttl_s="60") as leader:
        await leader.ready()
        async with scheduler(server.url, lease_ttl_s="60") as standby:
            await eventually(standby.app.is_ready)
            assert not standby.app.is_leading()
            assert await leader.stop() == EXIT_STOPPED
            await eventually(standby.app.is_leading, 15)


async def test_a_standby_is_ready_while_it_can_take_over(server: RedisServer, redis: Redis) -> None:
    """A rolling update goes on once the new pod could lead; a budget counts a standby in."""
    async with scheduler(server.url, lease_ttl_s="60") as leader:
        await leader.ready()
        async with scheduler(server.url, lease_ttl_s="60") as standby:
            assert not standby.app.is_ready(), "Redis has not said yet that another one leads"
            await eventually(standby.app.is_ready)
            assert not standby.app.is_leading()
            url = f"http://127.0.0.1:{standby.app.ports['ops']}/health/ready"
            assert await asyncio.to_thread(_get, url) == "ready\n"
            server.kill()
            await eventually(lambda: not standby.app.is_ready())
            assert leader.app.is_ready(), "its sessions go on"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(_get, url)
            await server.start()
            await eventually(standby.app.is_ready)


async def test_a_leader_that_lost_its_lease_ends_non_zero(
    server: RedisServer, redis: Redis
) -> None:
    async with scheduler(server.url, lease_ttl_s="0.5") as running:
        await running.ready()
        await redis.set(redis_keys.lease(MODEL), "somebody else")
        await redis.incr(redis_keys.epoch(MODEL))
        assert await running.exit_code() == EXIT_DEPOSED
    assert await redis.get(redis_keys.lease(MODEL)) == b"somebody else"


async def an_hour_ahead(redis: Redis) -> int:
    """An epoch that a leader could have had if Redis' clock has gone back since."""
    return (int((await redis.time())[0]) + 3600) * 1000


async def test_an_epoch_that_a_worker_has_outgrown_is_stepped_over(
    server: RedisServer, redis: Redis
) -> None:
    """Another one has not: Redis has lost its counter and a leader was back that had been."""
    outgrown, other = FakeWorkerServer("w1"), FakeWorkerServer("w2")
    outgrown.refuses_below = known = await an_hour_ahead(redis)
    async with workers(redis, outgrown, other), scheduler(server.url) as running:
        request = queued_request()
        await add_request(redis, request)
        await wait_queue_empty(redis)
        both = (outgrown, other)
        await eventually(lambda: {w.opens[-1].epoch for w in both if w.opens} == {known + 1})
        await running.ready()
    assert outgrown.num_sessions
    assert_complete([request], outgrown, other)


async def test_a_worker_that_claims_later_terms_for_ever_ends_a_few(
    server: RedisServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease knows of none, and the other worker takes each epoch as it is."""
    monkeypatch.setattr(refusals, "MIN_REFUSALS", 1)
    liar, honest = FakeWorkerServer("w1"), FakeWorkerServer("w2")
    liar.lies = True
    async with workers(redis, liar, honest), scheduler(server.url) as running:
        await running.ready()
        await eventually(lambda: len(liar.opens) > 2 * refusals.MAX_ENDED, 40)
        request = queued_request()
        await add_request(redis, request)
        await wait_queue_empty(redis)
    assert len({opening.epoch for opening in liar.opens}) == 1 + refusals.MAX_ENDED
    assert_complete([request], honest)


async def test_a_bug_in_the_core_ends_the_process(
    server: RedisServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = SchedulerCore.feed

    def broken(core: SchedulerCore, event: Event) -> None:
        assert not isinstance(event, RequestArrived), "planted"
        feed(core, event)

    monkeypatch.setattr(SchedulerCore, "feed", broken)
    async with scheduler(server.url) as running:
        await running.ready()
        await add_request(redis, queued_request())
        assert await running.exit_code() == EXIT_FAILED
