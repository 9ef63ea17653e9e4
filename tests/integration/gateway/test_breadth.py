"""What a request can ask for, through real sockets, a real Redis and a worker's stream."""

import asyncio
import json
from typing import Any

import grpc.aio
import httpx
import pytest
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, queue_pb2

from gateway import grpc_service
from servicekit import grpc_server, redis_keys
from tests.integration.gateway.conftest import MODEL, World, world_of
from tests.integration.gateway.fakes import LENGTH, STOP
from tests.integration.scheduler.harness import RedisServer

pytestmark = pytest.mark.redis
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def start(world: World, body: dict[str, Any], **headers: str) -> "asyncio.Task[httpx.Response]":
    """A completion in the background."""
    post = world.client.post("/v1/completions", json=body, headers=headers)
    return asyncio.get_running_loop().create_task(post)


async def now_ms(world: World) -> int:
    """Redis time."""
    seconds, micros = await world.redis.time()  # type: ignore[misc]
    return int(seconds) * 1000 + int(micros) // 1000


async def deadline_ms(world: World) -> int:
    """Of the one entry of the request stream."""
    entries: Any = await world.redis.xrange(redis_keys.requests(MODEL))
    [(_, fields)] = entries
    return int(fields[b"deadline_ms"])


async def test_all_that_a_request_asks_for_is_in_its_entry(world: World) -> None:
    """Under the names of the contract; the salt only as a digest."""
    body = {
        "prompt": "hello",
        "min_p": 0.25,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"70": -100, "5": 2.5},
        "logprobs": 3,
        "echo": True,
        "cache_salt": "mine",
        "user": "me",
    }
    task = start(world, body, traceparent=TRACE)
    request = await world.request()
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty) == (0.25, -1.5)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 1.25)
    assert list(sampling.logit_bias_token_ids) == [5, 70]
    assert list(sampling.logit_biases) == [2.5, -100.0]
    assert (sampling.num_logprobs, sampling.prompt_logprobs) == (3, True)
    assert len(request.cache_salt) == 32
    assert request.traceparent == TRACE
    prompt_rows = len(request.prompt_token_ids) - 1
    await world.say(request, "12", finish=STOP, num_top=3, prompt_rows=prompt_rows)
    [choice] = (await task).json()["choices"]
    assert choice["text"] == "hello" + world.shown("12")
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == prompt_rows + 3
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * (prompt_rows + 2)]
    assert logprobs["text_offset"][-2] == len("hello")


async def test_requests_of_one_salt_share_what_others_do_not(world: World) -> None:
    """The shared partition is the one without a name."""
    salts = []
    for number, fields in enumerate([{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}]):
        task = start(world, {"prompt": "x", **fields})
        request = await world.request(number)
        salts.append(request.cache_salt)
        await world.say(request, "k", finish=STOP)
        await task
    assert salts[0] == salts[3] == b""
    assert len(set(salts)) == 3


async def test_a_clients_deadline(world: World) -> None:
    """Counted by Redis from the admission, and said by the scheduler: 504."""
    before = await now_ms(world)
    task = start(world, {"prompt": "x", "deadline_ms": 5000})
    request = await world.request()
    assert before + 5000 <= await deadline_ms(world) <= await now_ms(world) + 5000
    notice = {"attempt": 1, "finish_reason": common_pb2.FINISH_REASON_DEADLINE}
    await world.scheduler.finish(request.request_id, world.notice(request, **notice))
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_deadline_is_no_longer_than_the_gateways(server: RedisServer) -> None:
    """More is that."""
    async with world_of(server, default_deadline_s="7") as world:
        await world.ready()
        before = await now_ms(world)
        task = start(world, {"prompt": "x", "deadline_ms": 10**9})
        request = await world.request()
        assert before + 7000 <= await deadline_ms(world) <= await now_ms(world) + 7000
        await world.say(request, "k", finish=STOP)
        assert (await task).status_code == 200


async def test_several_prompts_are_queued_together_or_not_at_all(server: RedisServer) -> None:
    """One script: the bound counts all of them."""
    async with world_of(server, max_queued_requests="3", max_queued_tokens="6") as world:
        await world.ready()
        for prompt, word in ((["x"] * 4, "requests"), ([[5] * 4, [5] * 3], "tokens")):
            response = await start(world, {"prompt": prompt})
            assert response.status_code == 429
            assert word in response.json()["error"]["message"]
        assert await world.redis.xlen(redis_keys.requests(MODEL)) == 0
        assert world.scheduler.requests == []
        task = start(world, {"prompt": [[70], [71, 72], [73]], "stream": True})
        for number, text in enumerate("abc"):
            request = await world.request(number)
            assert len(request.prompt_token_ids) == (2 if number == 1 else 1)
            await world.say(request, text, finish=LENGTH)
        frames = [json.loads(line[6:]) for line in (await task).text.split("\n\n")[:-2]]
        texts = {f["choices"][0]["index"]: f["choices"][0]["text"] for f in frames[::2]}
        assert texts == {i: world.shown(c) for i, c in enumerate("abc")}


async def both_asked(world: World) -> tuple[queue_pb2.QueuedRequest, queue_pb2.QueuedRequest]:
    """The first two requests, the first of which has tokens."""
    running, waiting = await world.request(0), await world.request(1)
    await world.say(running, "ab")
    return running, waiting


async def test_a_client_of_several_prompts_leaves(world: World) -> None:
    """Each is cancelled where it may be: one on its worker, one in the queue too."""
    body = {"prompt": ["x", "y"], "stream": True, "max_tokens": 99}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(both_asked(world))
        async with world.client.stream("POST", "/v1/completions", json=body) as response:
            running, waiting = await asked
            await anext(response.aiter_lines())
    gone = {running.request_id, waiting.request_id}
    await world.until(lambda: set(world.worker.cancels) == gone)
    await world.until(lambda: world.scheduler.cancels == [waiting.request_id])
    assert world.gateway.engine.num_live == 0


async def test_grpc(world: World) -> None:
    """The prompt before the output, logprobs with both, a trace from the metadata."""
    async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[70, 71]),
                max_tokens=2,
                logprobs=1,
                echo=True,
                cache_salt="s",
            ),
            metadata=(("traceparent", TRACE),),
        )
        request = await world.request()
        assert (request.traceparent, len(request.cache_salt)) == (TRACE, 32)
        await world.say(request, "1", num_top=1, prompt_rows=1)
        await world.say(request, "2", at=1, finish=LENGTH, num_top=1)
        events = [event async for event in call]
        assert [e.WhichOneof("event") for e in events] == [
            "started", "echo", "delta", "delta", "finished",
        ]  # fmt: skip
        echo = events[1].echo
        assert (echo.text, list(echo.token_ids)) == (world.tokenizer.decode([70, 71]), [70, 71])
        assert [row.HasField("logprob") for row in echo.logprobs] == [False, True]
        [row] = events[2].delta.logprobs
        assert (row.token_id, row.logprob, row.top[0].token_id) == (49, -0.5, 49)
        assert row.token.decode() == events[2].delta.text
        bad = stub.Generate(inference_pb2.GenerateRequest(text="x", logprobs=21))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "logprobs: must be from 0 to 20."


async def test_a_long_prompt_comes_back_in_pieces(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each far below the size that clients take; the text is in the first."""
    monkeypatch.setattr(grpc_service, "ECHO_TOKENS", 2)
    async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        ids = [70, 71, 72, 73, 74]
        tokens = inference_pb2.TokenIds(ids=ids)
        call = stub.Generate(
            inference_pb2.GenerateRequest(token_ids=tokens, max_tokens=0, logprobs=0, echo=True)
        )
        request = await world.request()
        await world.say(request, "a", finish=LENGTH, num_top=0, prompt_rows=4)
        events = [event async for event in call]
    echoes = [event.echo for event in events if event.HasField("echo")]
    assert [list(echo.token_ids) for echo in echoes] == [[70, 71], [72, 73], [74]]
    assert [echo.text for echo in echoes] == [world.tokenizer.decode(ids), "", ""]
    rows = [row for echo in echoes for row in echo.logprobs]
    assert [row.token_id for row in rows] == ids
    assert [row.HasField("logprob") for row in rows] == [False, *[True] * 4]
    assert not [event for event in events if event.HasField("delta")]
    assert events[-1].finished.usage.completion_tokens == 0


BROKEN = b"\x0a\x02\xff\xfe"  # field 1, which is a text or a message nearly everywhere


async def answers(channel: grpc.aio.Channel, path: str, kind: str, data: bytes) -> list[bytes]:
    """Of a method that is sent bytes as they are."""
    call: Any = getattr(channel, kind)(path)
    if kind == "unary_unary":
        return [await call(data)]
    return [answer async for answer in call(iter([data]) if kind == "stream_stream" else data)]


async def test_bytes_that_are_no_message(world: World) -> None:
    """Told so on every kind of method, without the exception's words."""
    methods = {
        "/quire.v1.InferenceService/Generate": "unary_stream",
        "/quire.v1.InferenceService/Cancel": "unary_unary",
        "/grpc.health.v1.Health/Check": "unary_unary",
        "/grpc.health.v1.Health/Watch": "unary_stream",
        "/inference.GRPCInferenceService/ModelInfer": "unary_unary",
        "/inference.GRPCInferenceService/ModelStreamInfer": "stream_stream",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
    }
    async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
        for path, kind in methods.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(channel, path, kind, BROKEN)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, path
            assert caught.value.details() == "The request is not a valid message.", path
        check = "/grpc.health.v1.Health/Check"
        assert await answers(channel, check, "unary_unary", b"") == [b"\x08\x01"]
