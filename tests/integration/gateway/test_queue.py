"""The gateway's queue against a real Redis: what it answers, and what it keeps when that fails."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire.v1 import queue_pb2
from redis.asyncio import Redis

from gateway import codec
from gateway.adapters.queue_redis import RedisQueue
from gateway.core.errors import UnavailableError
from gateway.core.types import QueuedRequest, RequestId, Sampling
from servicekit import redis_client, redis_keys
from tests.integration.gateway.conftest import MODEL
from tests.integration.scheduler.harness import PATIENT, RedisServer


@pytest.fixture
async def queue(server: RedisServer) -> AsyncIterator[RedisQueue]:
    """Registered, with nobody who sends its cancels."""
    redis = redis_client.connect(server.url + PATIENT)
    blocking = redis_client.connect(server.url + PATIENT, blocking=True)
    queue = RedisQueue(
        redis=redis, blocking=blocking, model=MODEL, gateway_id="g", reply_to=b"g",
        max_requests=10, max_tokens=1_000,
    )  # fmt: skip
    await queue.start()
    yield queue
    await redis.aclose()
    await blocking.aclose()


def request(name: bytes = b"r" * 16, attempt: int = 1) -> QueuedRequest:
    return QueuedRequest(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=4),
        life_ms=60_000,
    )


async def entries(redis: Redis) -> list[queue_pb2.QueueEntry]:
    found: Any = await redis.xrange(redis_keys.requests(MODEL))
    return [queue_pb2.QueueEntry.FromString(fields[b"entry"]) for _, fields in found]


async def test_what_supersede_answers_is_the_entry_that_stands(queue: RedisQueue) -> None:
    [old] = await queue.admit([request()])
    new = await queue.supersede(old, request(attempt=2))
    assert await queue.standing([old.entry_id, new.entry_id]) == [False, True]
    assert new.deadline_ms == old.deadline_ms
    newest = await queue.supersede(new, request(attempt=3))
    assert await queue.standing([new.entry_id, newest.entry_id]) == [False, True]


async def test_a_look_that_fails_does_not_say_that_entries_are_gone(queue: RedisQueue) -> None:
    [admission] = await queue.admit([request()])
    await queue.redis.delete(redis_keys.requests(MODEL))
    await queue.redis.set(redis_keys.requests(MODEL), "no stream")
    with pytest.raises(UnavailableError):
        await queue.standing([admission.entry_id])


async def test_cancels_that_come_while_others_are_sent_are_sent_too(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_cancel = codec.encode_cancel
    first, second = RequestId(b"1" * 16), RequestId(b"2" * 16)

    def and_another(request_id: RequestId) -> bytes:
        if request_id == first:
            queue.cancel(second)
        return encode_cancel(request_id)

    monkeypatch.setattr(codec, "encode_cancel", and_another)
    queue.cancel(first)
    running = asyncio.create_task(queue.run(lambda notice: None))
    await queue.flush(20.0)
    running.cancel()
    await asyncio.wait([running])
    cancelled = [entry.cancel.request_id for entry in await entries(queue.redis)]
    assert cancelled == [first, second]
