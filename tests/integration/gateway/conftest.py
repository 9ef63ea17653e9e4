"""A gateway in this process between a real Redis, a FakeWorker and a FakeScheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from quire.v1 import queue_pb2
from redis.asyncio import Redis

from gateway import settings as gateway_settings
from gateway.adapters.tokenizer_hf import HfTokenizer, load_model
from gateway.app import Gateway
from gateway.core.types import ModelInfo, RequestId
from servicekit import redis_client
from tests.integration.gateway.fakes import FakeScheduler, FakeWorker, Row
from tests.integration.scheduler.harness import PATIENT, RedisServer, redis_server
from tests.unit.gateway.model_folder import model_folder

MODEL = "tiny"


@dataclass
class World:
    """Everything around one gateway."""

    redis: Redis
    worker: FakeWorker
    scheduler: FakeScheduler
    tokenizer: HfTokenizer
    model: ModelInfo
    gateway: Gateway
    client: httpx.AsyncClient
    stop: asyncio.Event

    def shown(self, text: str) -> str:
        """What a client sees of tokens that Row writes for `text`."""
        return self.tokenizer.decode([ord(c) for c in text])

    async def until(self, condition: object, timeout_s: float = 20.0) -> None:
        """Waits until condition() holds."""
        assert callable(condition)
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (the condition is anything)
                await asyncio.sleep(0.02)

    async def request(self, number: int = 0) -> queue_pb2.QueuedRequest:
        """The request that was read as such a number, once the gateway knows that it is queued."""
        await self.until(lambda: len(self.scheduler.requests) > number)
        request = self.scheduler.requests[number]
        live = self.gateway.engine._live.get(RequestId(request.request_id))
        await self.until(lambda: live is None or live.admission or live.state.end)
        return request

    async def say(self, request: queue_pb2.QueuedRequest, text: str = "", **row: Any) -> None:
        """The worker sends tokens of a request."""
        await self.worker.send(
            request.reply_to, Row(request_id=request.request_id, text=text, **row)
        )

    def notice(self, request: queue_pb2.QueuedRequest, **fields: Any) -> queue_pb2.Notice:
        """Of the scheduler, about a request."""
        return queue_pb2.Notice(request_id=request.request_id, **fields)

    async def ready(self) -> None:
        """Waits until the gateway would serve."""
        await self.until(lambda: self.gateway.engine.ready)


@contextlib.asynccontextmanager
async def world_of(
    server: RedisServer, *, announcing: bool = True, **settings: str
) -> AsyncIterator[World]:
    """A running world; leaving it drains the gateway."""
    redis = redis_client.connect(server.url + PATIENT)
    model, tokenizer = load_model(model_folder(), name=MODEL, max_model_len=0, threads=1)
    environ = {
        "QUIRE_REDIS_URL": server.url + PATIENT,
        "QUIRE_PORT": "0",
        "QUIRE_GRPC_PORT": "0",
        "QUIRE_DRAIN_S": "0",
        **{f"QUIRE_{name.upper()}": value for name, value in settings.items()},
    }
    gateway = Gateway(gateway_settings.load([], environ), model, tokenizer)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    scheduler = FakeScheduler(redis, MODEL)
    reading = loop.create_task(scheduler.run())
    try:
        worker = FakeWorker(redis, MODEL, model.digest, announcing=announcing)
        async with worker.serving():
            running = loop.create_task(gateway.run(stop))
            while "ops" not in gateway.ports:  # noqa: ASYNC110 (it is bound in no time)
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{gateway.ports['rest']}"
            try:
                async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                    yield World(redis, worker, scheduler, tokenizer, model, gateway, client, stop)
            finally:
                stop.set()
                async with asyncio.timeout(30):
                    await running
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await redis.aclose()


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    """The embedded server."""
    async with redis_server() as running:
        yield running


@pytest.fixture
async def world(server: RedisServer) -> AsyncIterator[World]:
    """A world whose gateway is ready."""
    async with world_of(server) as found:
        await found.ready()
        yield found
