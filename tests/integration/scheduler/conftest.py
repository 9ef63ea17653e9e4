"""Fixtures of the scheduler's integration tests."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from servicekit import redis_client
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import SERVERS, RedisServer, redis_server


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    """The embedded server."""
    async with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    """A client of it."""
    client = redis_client.connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture(params=SERVERS)
async def any_server(request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """The embedded server, and Redis itself where it is installed."""
    async with redis_server(request.param) as running:
        yield running


@pytest.fixture
async def any_redis(any_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of it."""
    client = redis_client.connect(any_server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorkerServer]:
    """A healthy worker."""
    fake = FakeWorkerServer()
    await fake.start()
    yield fake
    await fake.stop()
