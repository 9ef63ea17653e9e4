"""What a leader reads again from the queue: all of it, on a simulated Redis and clock."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from quire.v1 import common_pb2, queue_pb2

from scheduler_svc.adapters.inbox_redis import MAX_READ, RequestInbox
from scheduler_svc.adapters.outbox_redis import CompletionOutbox
from scheduler_svc.adapters.redis_access import FencedRedis, RedisHealth
from scheduler_svc.core.events import Event, RequestArrived
from scheduler_svc.ports import Completion
from scheduler_svc.sim.loop import VirtualLoop
from scheduler_svc.sim.redis_clients import RedisClient
from scheduler_svc.sim.redis_model import RedisServer
from servicekit import redis_keys

MODEL = "m"


class Leader:
    """Inbox and outbox of one term."""

    def __init__(self, server: RedisServer, epoch: int) -> None:
        server.set(redis_keys.epoch(MODEL), str(epoch))
        client: Any = RedisClient(server, f"leader {epoch}")
        health = RedisHealth(server.loop)
        access = FencedRedis(client, model=MODEL, epoch=epoch, health=health)
        self.outbox = CompletionOutbox(access)
        self.read: list[str] = []
        self.inbox = RequestInbox(
            access,
            clock=server.loop,
            sink=self,
            outbox=self.outbox,
            has_room=lambda: True,
            saw_gateway=lambda _: None,
        )
        self.tasks = [
            server.loop.create_task(work)
            for work in (self.inbox.run(), self.inbox.listen(client), self.outbox.run())
        ]

    async def put(self, event: Event) -> None:
        """EventSink."""
        assert isinstance(event, RequestArrived)
        self.read.append(event.entry_id)

    async def has_read(self, count: int) -> None:
        """Waits for so many requests; the loop's time is virtual."""
        async with asyncio.timeout(10.0):
            while len(self.read) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def add(server: RedisServer) -> str:
    """A gateway's request; returns its entry's id."""
    number = server.num_entries(redis_keys.requests(MODEL))
    request = queue_pb2.QueuedRequest(
        request_id=number.to_bytes(16),
        attempt=1,
        gateway_id="g",
        reply_to=b"r" * 16,
        prompt_token_ids=[1, 2],
        sampling=common_pb2.SamplingParams(max_tokens=4, top_p=1.0),
    )
    raw = queue_pb2.QueueEntry(request=request).SerializeToString()
    fields = ["entry", raw, "deadline_ms", str(server.now_ms + 60_000)]
    return server.xadd(redis_keys.requests(MODEL), fields).decode()


def run(work: Callable[[RedisServer], Coroutine[Any, Any, None]]) -> None:
    """With a server in a loop of its own."""
    loop = VirtualLoop()
    try:
        loop.run(work(RedisServer(loop, Random("redis"))))
    finally:
        loop.wind_up()


def test_what_a_lost_answer_named_is_read_again() -> None:
    """The server takes it for delivered: nothing but the pending list has it, once it has."""

    async def work(server: RedisServer) -> None:
        leader = Leader(server, epoch=1)
        await leader.inbox.recovered.wait()
        first = add(server)
        await leader.has_read(1)
        lost = add(server)
        server.trouble.lose(1)
        await leader.has_read(2)
        await asyncio.sleep(1.0)
        assert leader.read == [first, lost], "what is held is not read twice"

    run(work)


def test_a_new_leader_takes_over_all_that_the_old_one_had_read() -> None:
    """However many reads that takes: nobody else would ever see the rest."""

    async def work(server: RedisServer) -> None:
        entries = [add(server) for _ in range(2 * MAX_READ + 1)]
        old = Leader(server, epoch=1)
        await old.has_read(len(entries))
        new = Leader(server, epoch=2)
        await new.inbox.recovered.wait()
        assert new.read == entries

    run(work)


def test_what_comes_back_with_another_server_is_read_again() -> None:
    """It lacks the last writes, took over between two reads, and no command of ours has failed."""

    async def work(server: RedisServer) -> None:
        leader = Leader(server, epoch=1)
        await leader.inbox.recovered.wait()
        entry_id = add(server)
        await leader.has_read(1)
        saved = server.saved()
        leader.outbox.complete(Completion(entry_ids=(entry_id,)))
        assert await leader.outbox.flush(1.0)
        assert not server.num_entries(redis_keys.requests(MODEL))
        server.forget(saved)
        await leader.has_read(2)
        assert leader.read == [entry_id] * 2, "so that it ends again and leaves the queue"

    run(work)
