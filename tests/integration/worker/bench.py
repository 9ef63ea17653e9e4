"""A whole worker in this process: real gRPC, a made-up model."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from gpu_worker import app, settings
from servicekit import grpc_server
from tests.stub_worker.fake_runner import FakeOptions, FakeRunner
from tests.worker_builders import GATEWAY_A
from tests.worker_clients import Gateway, Scheduler

OPTIONS = FakeOptions(
    step_ms=0.0, vocab_size=100, num_blocks=64, block_size=4, max_model_len=40, max_num_seqs=8
)
NO_REDIS = "redis://127.0.0.1:1/0"


class Bench:
    """A running worker with a channel for each peer."""

    def __init__(self, options: FakeOptions, environ: dict[str, str]) -> None:
        self.options = options
        read = settings.load(
            [],
            {"QUIRE_REDIS_URL": NO_REDIS, "QUIRE_DRAIN_S": "30", "QUIRE_WORKER_ID": "w", **environ},
        )
        self.worker = app.Worker(read, lambda _settings, _log: FakeRunner(options))
        self.stop = asyncio.Event()
        self.running: asyncio.Task[int] | None = None
        self.channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        self.running = asyncio.ensure_future(self.worker.run(self.stop))
        for _ in range(2000):
            if self.worker.port or self.running.done():
                return
            await asyncio.sleep(0.01)
        pytest.fail("the worker does not listen")

    def channel(self) -> grpc.aio.Channel:
        channel = grpc_server.channel(f"127.0.0.1:{self.worker.port}")
        self.channels.append(channel)
        return channel

    def scheduler(self) -> Scheduler:
        return Scheduler(self.channel())

    def gateway(self, reply_to: bytes = GATEWAY_A, name: str = "a") -> Gateway:
        return Gateway(self.channel(), reply_to, name)

    async def subscribed(self, reply_to: bytes = GATEWAY_A, name: str = "a") -> Gateway:
        gateway = self.gateway(reply_to, name)
        await gateway.subscribe(self.worker.incarnation)
        return gateway

    async def exit_code(self) -> int:
        assert self.running is not None
        async with asyncio.timeout(20):
            return await self.running

    async def close(self) -> None:
        self.stop.set()
        for channel in self.channels:
            await channel.close()
        if self.running is not None:
            self.running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.running


MakeBench = Callable[..., Any]
