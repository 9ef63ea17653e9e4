"""The scheduler's link to Redis is cut, while gateways and workers have theirs."""

import asyncio

import pytest
from redis.asyncio import Redis

from servicekit import redis_keys
from tests.integration.link import link_to
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import (
    MODEL,
    RedisServer,
    add_request,
    eventually,
    expected_tokens,
    queued_request,
    scheduler,
    tokens_of,
    wait_queue_empty,
)
from tests.integration.scheduler.test_service import workers

pytestmark = pytest.mark.redis


async def test_a_request_is_queued_while_its_scheduler_is_cut_off(
    server: RedisServer, redis: Redis
) -> None:
    """Gateways are told nothing but that it waits; it is computed when the link is back."""
    worker = FakeWorkerServer(step_s=0.005)
    running, queued = queued_request(max_tokens=40), queued_request(max_tokens=5)
    async with link_to(server.port) as link:
        url = f"redis://127.0.0.1:{link.port}/0"
        async with workers(redis, worker), scheduler(url) as cut_off:
            await cut_off.ready()
            await add_request(redis, running)
            await eventually(lambda: len(worker.emissions) > 5)
            link.cut()
            await add_request(redis, queued)
            await eventually(lambda: any(e.finish for e in worker.emissions))
            await asyncio.sleep(0.2)
            assert await redis.xlen(redis_keys.requests(MODEL)) == 2, "ends can't be written"
            assert tokens_of(worker.emissions, queued.request_id) == []
            link.mend()
            await wait_queue_empty(redis)
    for request in (running, queued):
        assert tokens_of(worker.emissions, request.request_id) == expected_tokens(request)
