"""Requests through real sockets, a real Redis and a worker's stream."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import grpc.aio
import httpx
import pytest
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, queue_pb2
from redis.asyncio import Redis

from servicekit import grpc_server, redis_keys
from tests.integration.gateway.conftest import MODEL, World, world_of
from tests.integration.gateway.fakes import LENGTH, STOP, FakeWorker
from tests.integration.scheduler.harness import RedisServer

pytestmark = pytest.mark.redis


async def post(world: World, body: dict[str, Any], path: str = "completions") -> httpx.Response:
    """A whole answer."""
    return await world.client.post(f"/v1/{path}", json=body)


def start(world: World, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """A request in the background."""
    return asyncio.get_running_loop().create_task(post(world, body))


async def queue_length(redis: Redis) -> int:
    """Entries of the request stream."""
    return int(await redis.xlen(redis_keys.requests(MODEL)))


async def test_a_stream(world: World) -> None:
    """Pieces arrive as the worker sends them, over one stream that acknowledges."""
    body = {"prompt": "hello world", "max_tokens": 9, "stream": True, "seed": 3}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(world.request())
        streaming = world.client.stream("POST", "/v1/completions", json=body)
        group.create_task(first_token(world, asked))
        async with streaming as response:
            request = await asked
            lines = response.aiter_lines()
            first = json.loads((await anext(lines))[6:])
            assert first["choices"][0]["text"] == world.shown("ab")
            await world.say(request, "c", at=2, finish=LENGTH)
            rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert request.sampling.seed == 3
    assert list(request.sampling.stop_token_ids) == [1]
    assert world.tokenizer.decode(request.prompt_token_ids) == "hello world"
    await world.until(lambda: world.worker.acknowledged == 2)
    assert world.gateway.engine.num_live == 0


async def first_token(world: World, asked: asyncio.Task[queue_pb2.QueuedRequest]) -> None:
    """Says "ab" once the request has been read."""
    await world.say(await asked, "ab")


async def test_a_client_that_leaves_before_the_first_token(world: World) -> None:
    """A cancel follows its entry and reaches the workers; the queue is empty in the end."""
    task = start(world, {"prompt": "x", "stream": True})
    request = await world.request()
    task.cancel()
    await world.until(lambda: world.scheduler.cancels == [request.request_id])
    await world.until(lambda: world.worker.cancels == [request.request_id])
    await world.until(lambda: world.gateway.engine.num_live == 0)
    assert await queue_length(world.redis) == 0


async def test_a_client_that_leaves_in_a_stream(world: World) -> None:
    """The worker is told on its Tokens stream."""
    body = {"prompt": "x", "stream": True, "max_tokens": 99}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(world.request())
        group.create_task(first_token(world, asked))
        async with world.client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
            request = await asked
    await world.until(lambda: world.worker.cancels == [request.request_id])
    assert world.scheduler.cancels == []


async def test_a_client_that_does_not_read(server: RedisServer) -> None:
    """Its stream ends with a reason; others go on."""
    async with world_of(server, stream_buffer_tokens="8") as world:
        await world.ready()
        # A small window, so that few bytes are under way.
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", world.gateway.ports["rest"]))
        _, writer = await asyncio.open_connection(sock=connection)
        body = json.dumps({"prompt": "x", "stream": True, "return_token_ids": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        request = await world.request()
        at, step = 0, "ab" * 1000
        [live] = world.gateway.engine._live.values()
        while live.state.end is None:
            assert at < 2_000_000
            await world.say(request, step, at=at)
            at += len(step)
            while len(live.state.tokens) < at and live.state.end is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await world.until(lambda: world.worker.cancels == [request.request_id])
        other = start(world, {"prompt": "y"})
        await world.say(await world.request(1), "ok", finish=STOP)
        assert (await other).status_code == 200
        writer.close()


async def test_a_head_without_an_end(world: World) -> None:
    """The connection is closed, long before the memory is full."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.ports["rest"])
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof() and sent < 64 * 2**20:
            writer.write(b"y" * 65_536)
            sent += 65_536
            await writer.drain()
            await asyncio.sleep(0)
    assert sent < 32 * 2**20
    writer.close()


async def test_notices_become_statuses(world: World) -> None:
    """What the scheduler says before the first token."""
    for number, (reason, status) in enumerate(
        [("REJECTED", 400), ("DEADLINE", 504), ("UNAVAILABLE", 503), ("ERROR", 500)]
    ):
        task = start(world, {"prompt": "x", "stream": number % 2 == 0})
        request = await world.request(number)
        notice = queue_pb2.Notice(
            request_id=request.request_id,
            attempt=1,
            finish_reason=common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"),
            message="So it is.",
        )
        await world.scheduler.finish(request.request_id, notice)
        response = await task
        assert response.status_code == status
        assert response.json()["error"]["message"] == "So it is."
    assert await queue_length(world.redis) == 0


async def test_a_full_queue(server: RedisServer) -> None:
    """Refused by the number of requests, and by the tokens the leader publishes."""
    async with world_of(server, max_queued_requests="2", max_queued_tokens="100") as world:
        await world.ready()
        waiting = [start(world, {"prompt": "x"}) for _ in range(2)]
        requests = [await world.request(i) for i in range(2)]
        response = await post(world, {"prompt": "x"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        for request in requests:
            await world.say(request, "k", finish=STOP)
            await world.scheduler.finish(request.request_id)
        assert {(await task).status_code for task in waiting} == {200}
        backlog: Any = {"requests": 1, "tokens": 99, "tokens_per_s": 10}
        await world.redis.hset(redis_keys.backlog(MODEL), mapping=backlog)
        response = await post(world, {"prompt": [5, 6]})
        assert (response.status_code, response.headers["retry-after"]) == (429, "10")
        assert "tokens" in response.json()["error"]["message"]
        assert await queue_length(world.redis) == 0


async def test_grpc(world: World) -> None:
    """The same over gRPC: Started, deltas, Finished; refusals have a status."""
    async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            inference_pb2.GenerateRequest(text="hi", max_tokens=4, client_request_id="mine")
        )
        started = (await call.read()).started
        assert started.client_request_id == "mine"
        request = await world.request()
        assert started.request_id == request.request_id.hex()
        await world.say(request, "ab", cached=1)
        delta = (await call.read()).delta
        assert (delta.text, list(delta.token_ids)) == (world.shown("ab"), [97, 98])
        await world.say(request, "c", at=2, finish=STOP)
        assert (await call.read()).delta.token_ids == [99]
        finished = (await call.read()).finished
        assert finished.finish_reason == STOP
        usage = finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 3, 1)
        assert await call.read() is grpc.aio.EOF

        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        started = (await call.read()).started
        cancel = inference_pb2.CancelRequest(request_id=started.request_id)
        assert (await stub.Cancel(cancel)).found
        assert not (await stub.Cancel(cancel)).found
        finished = (await call.read()).finished
        assert finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED

        [model] = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.id, model.max_model_len) == (MODEL, 256)
        for bad, code in [
            (inference_pb2.GenerateRequest(text="x", max_tokens=0), "INVALID_ARGUMENT"),
            (inference_pb2.GenerateRequest(text="x", model="y"), "NOT_FOUND"),
            (inference_pb2.GenerateRequest(), "INVALID_ARGUMENT"),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(bad).read()
            assert caught.value.code().name == code


async def test_a_grpc_client_that_leaves(world: World) -> None:
    """Its request is cancelled."""
    async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        await call.read()
        request = await world.request()
        call.cancel()
        await world.until(lambda: world.scheduler.cancels == [request.request_id])


async def test_workers_of_another_model_are_not_used(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not ready; the log says so once."""
    async with world_of(server, announcing=False) as world:
        other = FakeWorker(world.redis, MODEL, "0" * 64, worker_id="other")
        async with other.serving():
            await world.until(lambda: world.gateway.fleet._foreign)
            assert (await world.client.get("/ready")).status_code == 503
            world.worker.announcing = True
            await world.ready()
            assert other.subscribes == [], "a worker found later has been dialled since"
    said = capsys.readouterr()
    assert (said.out + said.err).count("worker_not_used") == 1
