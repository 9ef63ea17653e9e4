"""What breaks between gateway, workers and Redis, and what the client sees of it: a pause."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from quire.v1 import common_pb2, queue_pb2

import gateway
from servicekit import redis_client, redis_keys
from tests.integration.gateway.conftest import MODEL, World, world_of
from tests.integration.gateway.fakes import LENGTH, STOP, FakeWorker, Row
from tests.integration.scheduler.harness import PATIENT, RedisServer
from tests.unit.gateway.model_folder import model_folder

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def half_way(
    world: World, text: str = "ab"
) -> AsyncIterator[tuple[queue_pb2.QueuedRequest, "asyncio.Task[httpx.Response]"]]:
    """A running request whose client has `text`."""
    body = {"prompt": "x", "max_tokens": 50, "return_token_ids": True}
    posting = world.client.post("/v1/completions", json=body)
    task = asyncio.get_running_loop().create_task(posting)
    number = len(world.scheduler.requests)
    request = await world.request(number)
    await world.say(request, text)
    [live] = world.gateway.engine._live.values()
    await world.until(lambda: len(live.state.tokens) == len(text))
    yield request, task


async def tokens_of(task: "asyncio.Task[httpx.Response]") -> str:
    """The output's tokens, as Row writes them."""
    async with asyncio.timeout(20):
        response = await task
    assert response.status_code == 200, response.text
    return "".join(map(chr, response.json()["choices"][0]["token_ids"]))


async def test_a_broken_stream_goes_on_where_it_was(world: World) -> None:
    """Subscribed again with the last batch's number; nothing is superseded."""
    async with half_way(world) as (request, task):
        world.worker.refusing = True
        await world.worker.break_streams()
        await world.say(request, "cd", at=2)
        await world.until(lambda: not world.gateway.engine.ready)
        world.worker.refusing = False
        await world.until(lambda: len(world.worker.subscribes) == 2)
        await world.say(request, "e", at=4, finish=STOP)
        assert await tokens_of(task) == "abcde"
    assert [s.last_sequence for s in world.worker.subscribes] == [0, 1]
    assert len(world.scheduler.requests) == 1


async def test_a_gap_is_superseded(world: World) -> None:
    """The old entry goes, a later attempt with the output comes, the stream goes on."""
    async with half_way(world) as (request, task):
        world.worker.gap = True
        await world.worker.break_streams()
        later = await world.request(1)
        assert (later.attempt, list(later.output_token_ids)) == (2, [97, 98])
        assert later.request_id == request.request_id
        assert later.sampling == request.sampling
        assert await world.redis.xlen(redis_keys.requests(MODEL)) == 1
        await world.say(request, "z", at=2)
        await world.say(later, "bcd", at=1, attempt=2, finish=LENGTH)
        assert await tokens_of(task) == "abcd"


async def test_another_worker_takes_over(world: World) -> None:
    """A later attempt from another stream, beginning with a repeat; then the cancel goes there."""
    async with (
        FakeWorker(world.redis, MODEL, world.model.digest, worker_id="second").serving() as second,
        half_way(world) as (request, task),
    ):
        await world.until(lambda: second.num_streams == 1)
        [live] = world.gateway.engine._live.values()
        row = Row(request_id=request.request_id, text="abcd", attempt=2)
        await second.send(request.reply_to, row)
        await world.until(lambda: live.state.attempt == 2)
        await world.say(request, "zz", at=2)
        await world.until(lambda: world.worker.acknowledged == 2)
        assert list(live.state.tokens) == [*b"abcd"]
        task.cancel()
        await world.until(lambda: second.cancels == [request.request_id])


async def test_a_worker_that_starts_anew(world: World) -> None:
    """Its new incarnation gets a stream of its own from the beginning; the old is given up."""
    world.worker.announcing = False
    restarted = FakeWorker(world.redis, MODEL, world.model.digest, incarnation=2)
    async with restarted.serving():
        await world.until(lambda: restarted.num_streams == 1)
        assert [s.last_sequence for s in restarted.subscribes] == [0]
        await world.worker.break_streams()
        await world.until(lambda: len(world.gateway.fleet._links) == 1)
        await world.until(lambda: world.worker.num_streams == 0)
        await world.ready()


async def test_redis_away_and_back(server: RedisServer) -> None:
    """Running streams go on, new requests get 503 at once, then all is as before."""
    async with world_of(server) as world:
        await world.ready()
        async with half_way(world) as (request, task):
            server.kill()
            await world.until(lambda: not world.gateway.queue.available)
            with patch.object(world.gateway.queue, "_admit") as asked:
                refused = await world.client.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, asked.called) == (503, False)
            await world.say(request, "cd", at=2)
            [live] = world.gateway.engine._live.values()
            await world.until(lambda: len(live.state.tokens) == 4)
            await server.start()
            await world.until(lambda: world.gateway.queue.available)
            await world.say(request, "e", at=4, finish=STOP)
            assert await tokens_of(task) == "abcde"
        await world.ready()
        found = await redis_client.members(world.redis, MODEL, "gateway")
        assert len(found) == 1
        number = len(world.scheduler.requests)
        body = {"prompt": "y"}
        again = asyncio.get_running_loop().create_task(
            world.client.post("/v1/completions", json=body)
        )
        later = await world.request(number)
        notice = queue_pb2.Notice(
            request_id=later.request_id,
            attempt=1,
            finish_reason=common_pb2.FINISH_REASON_DEADLINE,
            message="No.",
        )
        await world.scheduler.finish(later.request_id, notice)
        assert (await again).status_code == 504


async def test_a_cancel_while_redis_is_away_arrives_later(server: RedisServer) -> None:
    """The request had no token, so only the queue can be told."""
    async with world_of(server) as world:
        await world.ready()
        task = asyncio.get_running_loop().create_task(
            world.client.post("/v1/completions", json={"prompt": "x"})
        )
        request = await world.request()
        server.kill()
        task.cancel()
        await world.until(lambda: world.gateway.engine.num_live == 0)
        await server.start()
        await world.until(lambda: world.scheduler.cancels == [request.request_id])


class Process:
    """`python -m gateway` and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Until its end."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    async def line(self, event: str, **fields: str) -> dict[str, Any]:
        """The first line with an event."""
        async with asyncio.timeout(40):
            while True:
                for line in self.lines:
                    if line.get("event") == event and fields.items() <= line.items():
                        return line
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def process_of(**settings: str) -> AsyncIterator[Process]:
    """A gateway process, killed at the end if it still runs."""
    root = Path(gateway.__file__).parents[1]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    environ |= {f"QUIRE_{name.upper()}": value for name, value in settings.items()}
    environ["PYTHONPATH"] = f"{root}:{root / 'protos/gen'}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=root, stderr=PIPE
    )
    found = Process(process)
    reading = asyncio.get_running_loop().create_task(found.read())
    try:
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def test_the_process_drains_at_sigterm(server: RedisServer) -> None:
    """The running stream gets its time and an explicit error; the registration goes; exit 0."""
    redis = redis_client.connect(server.url)
    async with process_of(
        redis_url=server.url + PATIENT,
        model=str(model_folder()),
        served_model_name=MODEL,
        port="0",
        grpc_port="0",
        drain_s="4",  # the refusals come within it
    ) as found:
        await found.line("ready")
        port = (await found.line("listening", what="rest"))["port"]
        assert (await found.line("listening", what="grpc"))["port"]
        assert (await found.line("listening", what="ops"))["port"]
        assert len(await redis_client.members(redis, MODEL, "gateway")) == 1
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            body = {"prompt": "x", "stream": True}
            task = asyncio.get_running_loop().create_task(client.post("/v1/completions", json=body))
            await found.line("accepted")
            found.process.send_signal(signal.SIGTERM)
            await found.line("draining")
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            response = await task
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "draining"
        async with asyncio.timeout(20):
            assert await found.process.wait() == 0
    assert await redis_client.members(redis, MODEL, "gateway") == {}
    assert await redis.xlen(redis_keys.requests(MODEL)) == 2  # the request and its cancel
    await redis.aclose()


async def test_other_hosts_than_this_machine_are_refused() -> None:
    """The message names the setting."""
    root = Path(gateway.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'protos/gen'}", "QUIRE_HOST": "0.0.0.0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=root, stderr=PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"QUIRE_HOST" in said
