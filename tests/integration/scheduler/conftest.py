"""Fixtures of the scheduler's integration tests."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from scheduler_svc.adapters import loss_rules, worker_link
from servicekit import redis_client
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import PATIENT, SERVERS, RedisServer, redis_server


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no worker that is silent."""
    monkeypatch.setattr(loss_rules, "SILENT_NS", 30_000_000_000)
    monkeypatch.setattr(loss_rules, "STUCK_NS", 30_000_000_000)
    monkeypatch.setattr(worker_link, "HELLO_TIMEOUT_S", 30.0)
    monkeypatch.setattr(worker_link, "SILENT_TIMEOUT_S", 30.0)


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    """The embedded server."""
    async with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    """A client of it."""
    client = redis_client.connect(server.url + PATIENT)
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
    client = redis_client.connect(any_server.url + PATIENT)
    yield client
    await client.aclose()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorkerServer]:
    """A healthy worker."""
    fake = FakeWorkerServer()
    await fake.start()
    yield fake
    await fake.stop()
