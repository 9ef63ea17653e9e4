"""The queue in a real server: reading, ending, fencing, and what survives an outage."""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from quire.v1 import common_pb2, queue_pb2
from redis.asyncio import Redis

from scheduler_svc.adapters import inbox_redis, redis_scripts
from scheduler_svc.adapters.backlog_redis import BacklogPublisher
from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.inbox_redis import MAX_READ, RequestInbox
from scheduler_svc.adapters.outbox_redis import CompletionOutbox
from scheduler_svc.adapters.redis_access import DeposedError, FencedRedis, RedisHealth
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import RequestArrived, RequestCancelled
from scheduler_svc.core.ready import CoreStats, CoreView
from scheduler_svc.core.types import FinishReason, RequestId
from scheduler_svc.ports import Completion, Notice
from servicekit import redis_client, redis_keys
from tests.integration.scheduler.harness import (
    MODEL,
    PATIENT,
    Recorder,
    RedisServer,
    add_entry,
    add_request,
    eventually,
    notices,
    queued_request,
    wait_queue_empty,
)

pytestmark = pytest.mark.redis
EPOCH = 7
CLOCK = MonotonicClock()


class Queue:
    """Inbox and outbox of one leader, as tasks."""

    def __init__(self, redis: Redis, *, epoch: int = EPOCH, max_pending: int = 100) -> None:
        self.sink = Recorder()
        self.gateways: list[str] = []
        self.has_room = True
        self.health = RedisHealth(CLOCK)
        self.access = FencedRedis(redis, model=MODEL, epoch=epoch, health=self.health)
        self.outbox = CompletionOutbox(self.access, max_pending=max_pending)
        self.inbox = RequestInbox(
            self.access,
            clock=CLOCK,
            sink=self.sink,
            outbox=self.outbox,
            has_room=lambda: self.has_room,
            saw_gateway=self.gateways.append,
        )
        self.tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator["Queue"]:
        """Reads and writes until the end of the block."""
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self.inbox.run()), loop.create_task(self.outbox.run())]
        try:
            yield self
        finally:
            for task in self.tasks:
                task.cancel()

    async def saw(self, count: int) -> None:
        """Waits for the count-th arrival."""
        await eventually(lambda: len(self.arrived) >= count)

    @property
    def arrived(self) -> list[RequestArrived]:
        """Requests that reached the core."""
        return self.sink.of(RequestArrived)


async def lead(redis: Redis, epoch: int = EPOCH) -> None:
    """Stores an epoch as the lease does."""
    await redis.set(redis_keys.epoch(MODEL), epoch)


async def listened(redis: Redis) -> None:
    """Waits until the server knows of a listener to the wake channel."""
    async with asyncio.timeout(20):
        while dict(await redis.pubsub_numsub(redis_keys.wake(MODEL))) != {  # noqa: ASYNC110
            redis_keys.wake(MODEL).encode(): 1
        }:
            await asyncio.sleep(0.01)


def notice_for(request_id: bytes, gateway_id: str = "g1") -> Notice:
    """A rejection."""
    return Notice(
        gateway_id=gateway_id,
        request_id=RequestId(request_id),
        attempt=1,
        reason=FinishReason.REJECTED,
        message="no",
    )


async def test_an_entry_becomes_an_arrival_on_the_own_clock(any_redis: Redis) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as queue:
        await queue.inbox.recovered.wait()
        request = queued_request(prompt=5, priority=-3, cache_salt=b"tenant", traceparent="00-x")
        # Redis' time is known to half a round trip at most, and written in milliseconds.
        error_ns = queue.inbox._time._round_trip_ns / 2 + 2e6
        before_ns = CLOCK.now_ns()
        entry_id = await add_request(any_redis, request, life_s=30)
        after_ns = CLOCK.now_ns()
        await eventually(lambda: queue.arrived)
    arrival = queue.arrived[0]
    assert arrival.request_id == request.request_id
    assert arrival.entry_id == entry_id
    assert arrival.prompt_token_ids == (1, 2, 3, 4, 5)
    assert (arrival.priority, arrival.cache_salt) == (-3, b"tenant")
    assert arrival.deadline_ns is not None
    assert before_ns - error_ns <= arrival.deadline_ns - 30e9 <= after_ns + error_ns
    assert queue.gateways == ["g1"]


async def test_a_wake_message_starts_a_read(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_redis, "POLL_S", 3600.0)
    await lead(redis)
    queue = Queue(redis)
    with queue.running():
        listening = asyncio.get_running_loop().create_task(queue.inbox.listen(redis))
        await queue.inbox.recovered.wait()
        await listened(redis)
        for count in range(1, 6):
            await add_request(redis, queued_request())
            await queue.saw(count)
        listening.cancel()


async def test_a_broken_wake_channel_has_the_pending_list_read_again(redis: Redis) -> None:
    """The server that has closed it may be another one now, with entries that had ended."""
    await lead(redis)
    queue = Queue(redis)
    with queue.running():
        listening = asyncio.get_running_loop().create_task(queue.inbox.listen(redis))
        await queue.inbox.recovered.wait()
        entry_id = await add_request(redis, queued_request())
        await queue.saw(1)
        queue.outbox.release([entry_id])  # as if it had ended and come back
        await listened(redis)
        await asyncio.sleep(0.3)
        assert len(queue.arrived) == 1
        await redis.client_kill_filter(_type="pubsub")
        await queue.saw(2)
        listening.cancel()


async def test_the_pending_list_is_read_again_by_the_next_leader(any_redis: Redis) -> None:
    await lead(any_redis)
    count = 2 * MAX_READ + 5
    with Queue(any_redis).running() as first:
        for _ in range(count):
            await add_request(any_redis, queued_request())
        await eventually(lambda: len(first.arrived) == count)
    await lead(any_redis, EPOCH + 1)
    with Queue(any_redis, epoch=EPOCH + 1).running() as second:
        await second.inbox.recovered.wait()
        assert [a.entry_id for a in second.arrived] == [a.entry_id for a in first.arrived]


async def test_a_reply_lost_on_the_way_is_found_in_the_pending_list(redis: Redis) -> None:
    await lead(redis)
    queue = Queue(redis)
    with queue.running():
        await add_request(redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 1)
        queue.has_room = False
        lost = await add_request(redis, queued_request())
        # The server hands it out, and nobody gets the answer.
        keys = [redis_keys.requests(MODEL)]
        args = [redis_keys.GROUP, redis_keys.CONSUMER, "10", ">"]
        await queue.access.run(redis_scripts.READ, keys, args)
        await asyncio.sleep(0.3)
        assert len(queue.arrived) == 1
        queue.has_room = True
        await redis.delete(redis_keys.epoch(MODEL))  # makes the next read fail
        await eventually(lambda: queue.inbox._must_recover)
        await lead(redis)
        await eventually(lambda: len(queue.arrived) == 2)
        await asyncio.sleep(0.2)
    assert [a.entry_id for a in queue.arrived][1:] == [lost], "held entries are not read twice"


async def test_nothing_is_read_while_the_core_has_no_room(redis: Redis) -> None:
    await lead(redis)
    queue = Queue(redis)
    queue.has_room = False
    with queue.running():
        await add_request(redis, queued_request())
        await asyncio.sleep(0.3)
        assert queue.arrived == []
        assert await redis.xlen(redis_keys.requests(MODEL)) == 1
        queue.has_room = True
        await eventually(lambda: len(queue.arrived) == 1)


async def test_a_deposed_leader_can_neither_read_nor_end(any_redis: Redis) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as old:
        entry_id = await add_request(any_redis, queued_request())
        await eventually(lambda: old.arrived)
        await lead(any_redis, EPOCH + 1)
        await add_request(any_redis, queued_request())
        old.outbox.complete(Completion(entry_ids=(entry_id,), notice=notice_for(b"x" * 16)))
        await asyncio.wait(old.tasks, timeout=20)
        for task in old.tasks:
            assert isinstance(task.exception(), DeposedError)
    assert len(old.arrived) == 1
    assert await any_redis.xlen(redis_keys.requests(MODEL)) == 2
    pending = await any_redis.xpending(redis_keys.requests(MODEL), redis_keys.GROUP)
    assert pending["pending"] == 1
    assert await notices(any_redis) == []


async def test_an_end_is_acknowledged_deleted_and_told(any_redis: Redis) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as queue:
        request = queued_request()
        entry_id = await add_request(any_redis, request)
        silent = await add_request(any_redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 2)
        queue.outbox.complete(
            Completion(entry_ids=(entry_id,), notice=notice_for(request.request_id))
        )
        queue.outbox.complete(Completion(entry_ids=(silent,)))
        await wait_queue_empty(any_redis)
    (notice,) = await notices(any_redis)
    assert notice.request_id == request.request_id
    assert notice.finish_reason == common_pb2.FINISH_REASON_REJECTED
    ttl_ms = await any_redis.pttl(redis_keys.notices(MODEL, "g1"))
    assert 590_000 < ttl_ms <= 600_000
    assert queue.outbox.held() == frozenset()


async def test_a_batch_is_written_whole_or_not_at_all(any_redis: Redis) -> None:
    await lead(any_redis)
    bad_key = redis_keys.notices(MODEL, "broken")
    await any_redis.set(bad_key, "not a stream")
    with Queue(any_redis).running() as queue:
        first = await add_request(any_redis, queued_request())
        second = await add_request(any_redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 2)
        queue.outbox.complete(Completion(entry_ids=(first,)))
        queue.outbox.complete(
            Completion(entry_ids=(second,), notice=notice_for(b"y" * 16, "broken"))
        )
        await asyncio.sleep(0.3)
        assert await any_redis.xlen(redis_keys.requests(MODEL)) == 2
        assert queue.outbox.num_pending == 2
        await any_redis.delete(bad_key)
        await wait_queue_empty(any_redis)
    assert len(await notices(any_redis, "broken")) == 1


async def test_ends_wait_for_redis_and_are_written_later(
    any_server: RedisServer, any_redis: Redis
) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as queue:
        requests = [queued_request() for _ in range(300)]
        entries = [await add_request(any_redis, request) for request in requests]
        await eventually(lambda: len(queue.arrived) == 300)
        any_server.kill()
        for entry_id in entries[:90]:
            queue.outbox.complete(Completion(entry_ids=(entry_id,)))
        await eventually(lambda: queue.health.away)
        assert queue.outbox.num_pending == 90
        await any_server.start()
        await eventually(lambda: queue.outbox.num_pending == 0)
        await add_request(any_redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 301)
        assert await any_redis.xlen(redis_keys.requests(MODEL)) == 211
    assert not queue.health.away


async def test_at_the_bound_the_oldest_end_is_dropped_and_its_entry_stays(redis: Redis) -> None:
    await lead(redis)
    queue = Queue(redis, max_pending=3)
    with queue.running():
        entries = [await add_request(redis, queued_request()) for _ in range(5)]
        await eventually(lambda: len(queue.arrived) == 5)
        for entry_id in entries:  # no write can begin before this loop ends
            queue.outbox.complete(Completion(entry_ids=(entry_id,)))
        assert queue.outbox.num_pending == 3
        await eventually(lambda: queue.outbox.num_pending == 0)
    left: Any = await redis.xrange(redis_keys.requests(MODEL))
    assert [entry_id.decode() for entry_id, _ in left] == entries[:2]


async def test_a_malformed_entry_is_answered_and_removed(any_redis: Redis) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as queue:
        empty = queued_request(prompt=0)
        unknown = queued_request(required_features=["vision"])
        await add_request(any_redis, empty)
        await add_request(any_redis, unknown)
        await add_entry(any_redis, b"\xff\xff not a message")
        await add_entry(any_redis, queue_pb2.QueueEntry())
        await any_redis.xadd(redis_keys.requests(MODEL), {"other": b"field"})
        await add_request(any_redis, queued_request())
        await eventually(lambda: queue.arrived)
        await eventually(lambda: queue.outbox.num_pending == 0)
    assert await any_redis.xlen(redis_keys.requests(MODEL)) == 1
    told = {n.request_id: n.message for n in await notices(any_redis)}
    assert told.keys() == {empty.request_id, unknown.request_id}
    assert "prompt_token_ids" in told[empty.request_id]
    assert "vision" in told[unknown.request_id]


async def test_a_cancel_reaches_the_core_and_leaves_the_stream(any_redis: Redis) -> None:
    await lead(any_redis)
    with Queue(any_redis).running() as queue:
        await queue.inbox.recovered.wait()
        cancel = queue_pb2.QueuedCancel(request_id=secrets.token_bytes(16))
        await add_entry(any_redis, queue_pb2.QueueEntry(cancel=cancel))
        await wait_queue_empty(any_redis)
    (event,) = queue.sink.of(RequestCancelled)
    assert event.request_id == cancel.request_id


async def test_a_flushed_server_gets_its_group_back(redis: Redis) -> None:
    await lead(redis)
    queue = Queue(redis)
    with queue.running():
        await add_request(redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 1)
        await redis.flushall()
        await lead(redis)  # what the lease's renewal does
        await add_request(redis, queued_request())
        await eventually(lambda: len(queue.arrived) == 2)


class LookClock:
    """A clock by which each look comes 0.2 s after the one before."""

    def __init__(self) -> None:
        self._ns = 0

    def now_ns(self) -> int:
        self._ns += 200_000_000
        return self._ns


async def test_the_backlog_is_published_while_it_is_ours(
    any_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lead(any_redis)
    stats = CoreStats()
    view = CoreView(epoch=EPOCH, num_waiting=3, num_running=2, backlog_tokens=70, workers=())
    access = FencedRedis(any_redis, model=MODEL, epoch=EPOCH, health=RedisHealth(CLOCK))
    core = SchedulerCore(CoreConfig())
    core.stats = stats
    monkeypatch.setattr(core, "view", lambda: view)
    publisher = BacklogPublisher(access, clock=LookClock(), core=core)
    task = asyncio.get_running_loop().create_task(publisher.run())
    await asyncio.sleep(0)  # the first look
    stats.num_generation_tokens = 100
    key = redis_keys.backlog(MODEL)
    async with asyncio.timeout(20):
        while (await any_redis.hgetall(key)).get(b"tokens_per_s") in {None, b"0.0"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    found = await any_redis.hgetall(key)
    assert found == {b"requests": b"5", b"tokens": b"70", b"tokens_per_s": b"500.0"}
    assert 0 < await any_redis.pttl(key) <= 10_000
    await lead(any_redis, EPOCH + 1)
    stats.num_generation_tokens = 200
    await asyncio.wait({task}, timeout=20)
    assert isinstance(task.exception(), DeposedError)


async def test_no_cancellation_is_lost_in_a_redis_call(server: RedisServer) -> None:
    """Wherever in a call it comes; redis-py alone loses some."""

    async def call_for_ever(redis: Redis) -> None:
        while True:
            await redis.eval("return 1", 0)

    for num_turns in range(80):
        client = redis_client.connect(server.url + PATIENT)
        task = asyncio.get_running_loop().create_task(call_for_ever(client))
        for _ in range(num_turns % 40):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=20)
        assert done, f"still running after a cancellation at turn {num_turns}"
        await client.aclose()
