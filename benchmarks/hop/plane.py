"""A control plane under load: Redis, a scheduler and workers as processes, and a gateway's hand.

The caller's process plays the gateway: it puts requests into the queue, announces itself and reads
the workers' tokens without looking at them.
"""

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.v1 import common_pb2, queue_pb2, worker_pb2
from redis.asyncio import Redis

from benchmarks.hop.delay import delaying
from benchmarks.stack import ROOT, Process, cpu_seconds, wait_for
from deploy.local import ports, valkey
from servicekit import grpc_server, redis_client, redis_keys

MODEL, GATEWAY = "hop", "gateway-of-the-benchmark"
MAX_TOKENS = 8000
PROMPT_TOKENS = 8
_REPLY_TO = secrets.token_bytes(16)
_ACKNOWLEDGE_EVERY = 256
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is served. Workers are stubs in processes of their own, or sleepers in one process."""

    num_workers: int
    num_rows: int
    step_ms: float
    sleepers: bool = False
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one window of time showed.

    idle_share is the workers' waiting for plans by all their time; core_share the scheduler's CPU
    time by the window. depth and round_trip_us are means over the workers at its end.
    """

    seconds: float
    idle_share: float
    core_share: float
    steps_per_s: float
    tokens_per_s: float
    depth: float
    round_trip_us: float


class Plane:
    """Use `running`."""

    def __init__(self, folder: Path, load: Load) -> None:
        free = ports.FreePorts()
        self._load = load
        self._redis_port = free.take()
        self._url = f"redis://127.0.0.1:{self._redis_port}/0"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "STUB_"))}
        self._environ = {
            **inherited,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos' / 'gen'}",
            "QUIRE_MODEL": str(folder / "no-model"),
            "QUIRE_SERVED_MODEL_NAME": MODEL,
            "QUIRE_REDIS_URL": self._url,
            "QUIRE_DRAIN_S": "0",
            "QUIRE_MAX_NUM_SEQS": str(load.num_rows),
            "QUIRE_LOG_LEVEL": "info",
        }
        data = folder / "redis"
        data.mkdir()
        redis_command = valkey.command(valkey.binary(), self._redis_port, data)
        self._valkey = Process("redis", redis_command, inherited, folder / "redis.log")
        self.scheduler = self._process("scheduler", folder, ["-m", "scheduler_svc"], {})
        self._worker_ports = [free.take() for _ in range(load.num_workers)]
        self._workers: list[Process] = []
        self._folder = folder

    def _make_workers(self, dialled_ports: list[int]) -> list[Process]:
        """dialled_ports are those that lead to the workers' own."""
        load, folder = self._load, self._folder
        if load.sleepers:
            argv = ["-m", "benchmarks.hop.sleepers", "--gateway", GATEWAY, "--model", MODEL]
            argv += ["--redis-url", self._url, "--count", str(load.num_workers)]
            argv += ["--step-ms", str(load.step_ms), "--rows", str(load.num_rows)]
            return [self._process("sleepers", folder, argv, {})]
        settings = {
            "STUB_TOKENS": "seed",
            "STUB_STEP_MS": str(load.step_ms),
            "STUB_MAX_MODEL_LEN": str(4 * MAX_TOKENS),
            "STUB_NUM_BLOCKS": str(load.num_rows * (MAX_TOKENS // 16 + 4)),
            "STUB_VOCAB_SIZE": "49152",
        }
        return [
            self._process(
                f"worker-{number}",
                folder,
                ["-m", "tests.stub_worker"],
                {
                    **settings,
                    "QUIRE_WORKER_ID": f"worker-{number}",
                    "QUIRE_WORKER_PORT": str(own),
                    "QUIRE_WORKER_ADDRESS": f"127.0.0.1:{dialled}",
                },
            )
            for number, (own, dialled) in enumerate(
                zip(self._worker_ports, dialled_ports, strict=True)
            )
        ]

    def _process(
        self, name: str, folder: Path, argv: list[str], more: Mapping[str, str]
    ) -> Process:
        environ = {**self._environ, **more}
        return Process(name, [sys.executable, *argv], environ, folder / f"{name}.log")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Plane"]:
        """All processes, with every row of every worker decoding."""
        async with contextlib.AsyncExitStack() as stack:
            dialled = self._worker_ports
            if self._load.delay_s:
                proxies = [delaying(port, self._load.delay_s) for port in self._worker_ports]
                dialled = [await stack.enter_async_context(proxy) for proxy in proxies]
            self._workers = self._make_workers(dialled)
            try:
                await asyncio.to_thread(self._start)
                redis = redis_client.connect(self._url)
                stack.push_async_callback(redis.aclose)
                group = await stack.enter_async_context(asyncio.TaskGroup())
                tasks = [group.create_task(_announce(redis))]
                if not self._load.sleepers:
                    records = await self._records(redis)
                    tasks += [group.create_task(_read_tokens(record)) for record in records]
                await self._fill(redis)
                yield self
                for task in tasks:
                    task.cancel()
            finally:
                for process in (*self._workers, self.scheduler, self._valkey):
                    process.destroy()

    def _tails(self) -> str:
        processes = (self.scheduler, *self._workers)
        return "\n".join(f"{process.name}:\n{process.tail()}" for process in processes)

    def _start(self) -> None:
        self._valkey.start()
        wait_for(lambda: valkey.answers(self._redis_port), self._valkey.tail, _START_S)
        for process in (self.scheduler, *self._workers):
            process.start()
        self.scheduler.wait_event("ready", _START_S)

    async def _records(self, redis: Redis) -> list[queue_pb2.WorkerRecord]:
        async with asyncio.timeout(_START_S):
            while True:
                found = await redis_client.members(redis, MODEL, "worker")
                if len(found) == self._load.num_workers:
                    return [queue_pb2.WorkerRecord.FromString(raw) for raw in found.values()]
                await asyncio.sleep(0.1)

    async def _fill(self, redis: Redis) -> None:
        """Puts a request for each row into the queue and waits until all run."""
        await self._until("quire:workers", self._load.num_workers)
        num_requests = self._load.num_workers * self._load.num_rows
        for number in range(num_requests):
            await _queue(redis, number)
        await self._until("vllm:num_requests_running", num_requests)

    async def _until(self, gauge: str, value: int) -> None:
        def look() -> bool:
            return self.scheduler.metrics().total(gauge) >= value

        what = f"{gauge} reaches {value}"
        await asyncio.to_thread(wait_for, look, lambda: f"{what}\n{self._tails()}", _START_S)

    async def read(self, seconds: float) -> Reading:
        """Watches for so long."""
        before, cpu_before, started = await self._look()
        await asyncio.sleep(seconds)
        after, cpu_after, ended = await self._look()
        elapsed = ended - started
        num_workers = self._load.num_workers

        def rose(name: str) -> float:
            return after[name] - before[name]

        return Reading(
            seconds=elapsed,
            idle_share=rose("quire:worker_idle_seconds_sum") / (elapsed * num_workers),
            core_share=(cpu_after - cpu_before) / elapsed,
            steps_per_s=rose("quire:steps_total") / elapsed,
            tokens_per_s=rose("quire:scheduler_generation_tokens_total") / elapsed,
            depth=after["quire:inflight_steps"] / num_workers,
            round_trip_us=1e6 * after["quire:round_trip_seconds"] / num_workers,
        )

    async def _look(self) -> tuple[dict[str, float], float, float]:
        names = (
            "quire:worker_idle_seconds_sum",
            "quire:steps_total",
            "quire:scheduler_generation_tokens_total",
            "quire:inflight_steps",
            "quire:round_trip_seconds",
        )
        metrics = await asyncio.to_thread(self.scheduler.metrics)
        return (
            {name: metrics.total(name) for name in names},
            cpu_seconds(self.scheduler.pid),
            time.monotonic(),
        )


async def measure(load: Load, *, warm_up_s: float, seconds: float) -> Reading:
    """A plane of its own for this load."""
    with tempfile.TemporaryDirectory(prefix="quire-hop-") as folder:
        async with Plane(Path(folder), load).running() as plane:
            await asyncio.sleep(warm_up_s)
            return await plane.read(seconds)


async def _announce(redis: Redis) -> None:
    while True:
        await redis_client.announce(redis, MODEL, "gateway", GATEWAY, b"")
        await asyncio.sleep(1.0)


async def _queue(redis: Redis, number: int) -> None:
    """What a gateway's admission script does."""
    first = number * PROMPT_TOKENS
    entry = queue_pb2.QueueEntry(
        request=queue_pb2.QueuedRequest(
            request_id=secrets.token_bytes(16),
            attempt=1,
            gateway_id=GATEWAY,
            reply_to=_REPLY_TO,
            prompt_token_ids=[token % 49152 for token in range(first, first + PROMPT_TOKENS)],
            sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, top_p=1.0, seed=number),
        )
    )
    seconds, _ = await redis.time()
    deadline_ms = (seconds + 3600) * 1000
    await redis.xadd(
        redis_keys.requests(MODEL),
        {"entry": entry.SerializeToString(), "deadline_ms": str(deadline_ms)},
    )
    await redis.publish(redis_keys.wake(MODEL), b"")


async def _read_tokens(record: queue_pb2.WorkerRecord) -> None:
    """Reads and acknowledges batches as they are."""
    async with grpc_server.channel(record.address) as channel:
        method: Any = channel.stream_stream("/quire.v1.TokensService/Tokens")
        call = method()
        subscribe = worker_pb2.Subscribe(
            gateway_id=GATEWAY, reply_to=_REPLY_TO, incarnation=record.incarnation
        )
        await call.write(worker_pb2.TokensRequest(subscribe=subscribe).SerializeToString())
        await call.read()
        for sequence in range(1, 2**63):
            await call.read()
            if sequence % _ACKNOWLEDGE_EVERY == 0:
                read = worker_pb2.Acknowledge(sequence=sequence)
                await call.write(worker_pb2.TokensRequest(acknowledge=read).SerializeToString())
