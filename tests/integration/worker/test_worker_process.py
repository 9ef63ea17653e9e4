"""The stub worker as a process: registration, readiness, metrics, the end by signal."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import queue_pb2, worker_pb2

from deploy.local import ports, valkey
from servicekit import grpc_server, redis_client
from tests.worker_builders import PlanScript, make_admit
from tests.worker_clients import Scheduler

ROOT = Path(__file__).parents[3]
MODEL = "stub-model"


class Stub:
    """A `python -m tests.stub_worker` and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    async def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next log line of this kind; lines before it are kept."""
        assert self.process.stderr is not None
        async with asyncio.timeout(40):
            while line := await self.process.stderr.readline():
                entry: dict[str, Any] = json.loads(line)
                self.events.append(entry)
                if entry["event"] == event and fields.items() <= entry.items():
                    return entry
        raise AssertionError(f"no {event} among {self.events}")

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    stubs: list[Stub] = []

    async def start_one(*argv: str, **environ: str) -> Stub:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.stub_worker", *argv,
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{ROOT}:{ROOT / 'protos/gen'}",
                "QUIRE_MODEL": MODEL,
                **environ,
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        stubs.append(Stub(process))
        return stubs[-1]

    yield start_one
    for stub in stubs:
        with contextlib.suppress(ProcessLookupError):
            stub.process.kill()
        await stub.process.communicate()


class Redis:
    """A server of the test's own, which can go away and come back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # None that the kernel may give to a client's connection while the server is away.
        self.port = ports.FreePorts().take()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *valkey.command(valkey.binary(), self.port, self.folder),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for _ in range(2000):
            if valkey.answers(self.port):
                return
            await asyncio.sleep(0.01)
        pytest.fail("Valkey does not answer")

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None

    async def workers(self) -> dict[str, queue_pb2.WorkerRecord]:
        client = redis_client.connect(self.url)
        try:
            found = await redis_client.members(client, MODEL, "worker")
        finally:
            await client.aclose()
        return {name: queue_pb2.WorkerRecord.FromString(raw) for name, raw in found.items()}


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    server = Redis(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    return await asyncio.to_thread(fetch)


@pytest.mark.redis
async def test_a_worker_registers_serves_and_withdraws(start: Start, redis: Redis) -> None:
    stub = await start(QUIRE_REDIS_URL=redis.url, QUIRE_WORKER_ID="w1", QUIRE_DRAIN_S="1")
    ops_port = (await stub.until("listening", what="ops"))["port"]
    port = (await stub.until("listening", what="worker"))["port"]
    await stub.until("ready")
    ((name, record),) = (await redis.workers()).items()
    assert (name, record.worker_id, record.address) == ("w1", "w1", f"127.0.0.1:{port}")
    assert await get(ops_port, "/health") == (200, "ok\n")
    assert await get(ops_port, "/health/ready") == (200, "ready\n")

    async with grpc_server.channel(record.address) as channel:
        scheduler, script = Scheduler(channel), PlanScript()
        await scheduler.open()
        assert scheduler.hello.incarnation == record.incarnation
        await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
        await scheduler.results(1)
        await scheduler.send(script.plan(reset=True, releases=[]))
        await scheduler.send(script.plan(releases=[7]))
        *_, refused = await scheduler.results(2)
        assert refused.faults[0].code == worker_pb2.Fault.CODE_INVALID_PLAN
        scheduler.call.cancel()

    _, text = await get(ops_port, "/metrics")
    label = f'model_name="{MODEL}"'
    assert f"quire:worker_steps_total{{{label}}} 3.0" in text
    assert f'quire:plan_refusals_total{{code="invalid_plan",{label}}} 1.0' in text
    assert f"quire:token_batches_total{{{label}}} 1.0" in text
    assert f"quire:slots_used{{{label}}} 0.0" in text
    assert f"quire:outbox_batches{{{label}}} 1.0" in text
    assert f"vllm:iteration_tokens_total_sum{{{label}}} 5.0" in text
    for part in ("idle", "apply", "forward", "sample"):
        assert f'quire:worker_step_seconds_count{{{label},part="{part}"}} 3.0' in text
    assert f"quire:worker_step_outside_forward_seconds_count{{{label}}} 1.0" in text
    assert "quire:worker_idle_seconds_total" in text
    assert 'vllm:cache_config_info{block_size="16"' in text

    stub.process.send_signal(signal.SIGTERM)
    assert await stub.exit_code() == 0
    assert await redis.workers() == {}


@pytest.mark.redis
async def test_a_worker_serves_while_redis_is_away(start: Start, redis: Redis) -> None:
    await redis.stop()
    stub = await start(QUIRE_REDIS_URL=redis.url)
    ops_port = (await stub.until("listening", what="ops"))["port"]
    port = (await stub.until("listening", what="worker"))["port"]
    await stub.until("Redis does not answer, trying on")
    assert (await get(ops_port, "/health/ready"))[0] == 503
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        scheduler = Scheduler(channel)
        await scheduler.open()
        await scheduler.send(PlanScript().plan(admits=[make_admit()], schedule=[(0, 5)]))
        assert len((await scheduler.results(1))[0].token_ids) == 1
        scheduler.call.cancel()
    await redis.start()
    await stub.until("ready")
    assert len(await redis.workers()) == 1
    await redis.stop()
    await stub.until("Redis does not answer, trying on")
    await redis.start()
    await stub.until("registered again")


async def test_health_answers_while_the_model_loads(start: Start) -> None:
    stub = await start(STUB_LOAD_S="60")
    ops_port = (await stub.until("listening", what="ops"))["port"]
    assert await get(ops_port, "/health") == (200, "ok\n")
    assert (await get(ops_port, "/health/ready"))[0] == 503
    stub.process.send_signal(signal.SIGTERM)
    assert await stub.exit_code() == 0


async def test_a_broken_device_ends_the_process_with_an_error(start: Start) -> None:
    stub = await start(STUB_FAIL_AT_STEP="broken@1", QUIRE_REDIS_URL="redis://127.0.0.1:1/0")
    port = (await stub.until("listening", what="worker"))["port"]
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        scheduler = Scheduler(channel)
        await scheduler.open()
        await scheduler.send(PlanScript().plan(admits=[make_admit()], schedule=[(0, 5)]))
        (result,) = await scheduler.results(1)
        assert result.faults[0].scope == worker_pb2.Fault.SCOPE_WORKER
        assert await stub.exit_code() == 1


async def test_an_unknown_variable_stops_the_process_by_name(start: Start) -> None:
    stub = await start(QUIRE_BLOK_SIZE="16")
    assert await stub.exit_code() == 2
    assert stub.process.stderr is not None
    assert b"QUIRE_BLOK_SIZE" in await stub.process.stderr.read()
