"""The REST interface, byte for byte: frames, whole answers, errors and their statuses."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.core.errors import QueueFullError, UnavailableError
from gateway.core.types import FinishReason
from gateway.rest.routes import Rest
from tests.unit.gateway.fakes import Bench, make_bench

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ID = "ID"


def client_of(bench: Bench, max_body_bytes: int = 4096) -> httpx.AsyncClient:
    """Over the ASGI application, no sockets."""
    app = Rest(bench.engine, bench.registry, max_body_bytes).app()
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def ask(
    bench: Bench, path: str, body: dict[str, Any], *said: dict[str, Any]
) -> httpx.Response:
    """Posts; the worker says each of `said` in turn."""
    async with client_of(bench) as client:
        task = asyncio.get_running_loop().create_task(client.post(f"/v1/{path}", json=body))
        request = await bench.queue.arrivals.get()
        for what in said:
            if "reason" in what:
                bench.notify(request.request_id, what["reason"], what.get("message", ""))
            else:
                bench.say(request.request_id, **what)
            for _ in range(10):
                await asyncio.sleep(0)
        return await task


def plain(response: httpx.Response) -> str:
    """The body with the id and the time taken out."""
    text = re.sub(r'(cmpl-)[0-9a-f]{32}"', rf'\1{ID}"', response.text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def test_the_frames_of_a_chat() -> None:
    """Role first, one frame per piece, the reason, the usage, [DONE]."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await ask(
        make_bench(),
        "chat/completions",
        body,
        {"text": 'é"', "cached": 1},
        {"text": "\n!\3", "at": 2, "finish": STOP},
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    start = (
        'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny",'
        '"choices":['
    )
    assert plain(response) == (
        start + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        + start
        + '{"index":0,"delta":{"content":"é\\""},"logprobs":null,"finish_reason":null}],'
        '"usage":null}\n\n'
        + start
        + '{"index":0,"delta":{"content":"\\n!"},"logprobs":null,"finish_reason":null}],'
        '"usage":null}\n\n'
        + start
        + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n'
        + start
        + '],"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_the_frames_of_a_completion() -> None:
    """With the token ids, where they are asked for."""
    body = {"prompt": "hi", "stream": True, "return_token_ids": True, "max_tokens": 2}
    response = await ask(
        make_bench(), "completions", body, {"text": "a"}, {"text": "b", "at": 1, "finish": LENGTH}
    )
    start = (
        'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny",'
        '"choices":[{"index":0,"text":'
    )
    assert plain(response) == (
        start
        + '"","logprobs":null,"finish_reason":null,"prompt_token_ids":[104,105]}]}\n\n'
        + start
        + '"a","logprobs":null,"finish_reason":null,"token_ids":[97]}]}\n\n'
        + start
        + '"b","logprobs":null,"finish_reason":null,"token_ids":[98]}]}\n\n'
        + start
        + '"","logprobs":null,"finish_reason":"length"}]}\n\n'
        "data: [DONE]\n\n"
    )


async def test_whole_answers() -> None:
    """A chat and a completion from token ids."""
    said = {"text": "ok", "finish": STOP}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    response = await ask(make_bench(), "chat/completions", chat, said)
    assert response.headers["content-type"] == "application/json"
    assert plain(response) == (
        '{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"tiny","choices":'
        '[{"index":0,"message":{"role":"assistant","content":"ok"},"logprobs":null,'
        '"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":2,'
        '"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    bench = make_bench()
    response = await ask(bench, "completions", {"prompt": [5, 6, 7]}, said)
    assert list(bench.queue.admitted[0].prompt_token_ids) == [5, 6, 7]
    assert response.json()["choices"] == [
        {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (FinishReason.REJECTED, 400, "invalid_request_error"),
        (FinishReason.DEADLINE, 504, "timeout_error"),
        (FinishReason.UNAVAILABLE, 503, "service_unavailable_error"),
        (FinishReason.ERROR, 500, "server_error"),
    ],
)
async def test_ends_before_the_first_token_have_a_status(
    stream: bool, reason: FinishReason, status: int, kind: str
) -> None:
    """Streamed or not."""
    body = {"prompt": "hi", "stream": stream}
    response = await ask(
        make_bench(), "completions", body, {"reason": reason, "message": "It can't be."}
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["message"], error["param"]) == (kind, "It can't be.", None)


async def test_an_end_within_a_stream_is_an_event() -> None:
    """Then [DONE]."""
    body = {"prompt": "hi", "stream": True}
    said = {"text": "ab"}, {"reason": FinishReason.DEADLINE, "message": "Too late."}
    response = await ask(make_bench(), "completions", body, *said)
    assert response.status_code == 200
    assert response.text.endswith(
        'data: {"error":{"message":"Too late.","type":"timeout_error","param":null,'
        '"code":"deadline_exceeded"}}\n\ndata: [DONE]\n\n'
    )


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFullError("full", retry_after_s=7), 429, "7"),
        (UnavailableError("away"), 503, "1"),
    ],
)
async def test_requests_the_queue_does_not_take(error: Exception, status: int, retry: str) -> None:
    """With the time after which to try again."""
    bench = make_bench()
    bench.queue.error = error
    async with client_of(bench) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (status, retry)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "max_tokens": "2"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": "1"}, "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": True}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
async def test_refused_bodies(body: dict[str, Any], param: str) -> None:
    """400 with the field; nothing reaches the queue."""
    bench = make_bench()
    async with client_of(bench) as client:
        response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert bench.queue.admitted == []


@pytest.mark.parametrize(
    ("message", "status", "word"),
    [
        ({"role": "user"}, 400, "content"),
        ({"role": "tool", "content": "x"}, 400, "tools"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, 400, "tools"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, 400, "text"),
        ({"role": "nobody", "content": "x"}, 400, "role"),
    ],
)
async def test_refused_messages(message: dict[str, Any], status: int, word: str) -> None:
    """Named by their place."""
    async with client_of(make_bench()) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == status
    assert word in response.json()["error"]["message"]
    assert response.json()["error"]["param"].startswith("messages")


async def test_unknown_fields_are_ignored() -> None:
    """Newer clients send more than is known."""
    body = {"prompt": "hi", "user": "me", "metadata": {"a": [1]}, "n": 1, "logit_bias": {}}
    response = await ask(make_bench(), "completions", body, {"text": "x", "finish": STOP})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "host",
    ["example.com", "127.0.0.1.example.com", "127.0.0.1@example.com", "127.0.0.1:80/x", "", "a:b"],
)
async def test_other_hosts_are_refused(host: str) -> None:
    """A page of another site must not reach a local server."""
    async with client_of(make_bench()) as client:
        response = await client.get("/v1/models", headers={"host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]", "[::1]:80"])
async def test_this_machine_is_served(host: str) -> None:
    """By any of its names."""
    async with client_of(make_bench()) as client:
        response = await client.get("/v1/models", headers={"host": host})
    assert response.status_code == 200


async def test_content_types_and_sizes() -> None:
    """Refused before the body is looked at, or as soon as it is too long."""
    bench = make_bench()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            sent.append(1)
            yield b" " * 1024

    sent: list[int] = []
    json_type = {"content-type": "application/json"}
    async with client_of(bench) as client:
        post = client.post
        text = await post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        packed = await post(
            "/v1/completions", content=b"x", headers={**json_type, "content-encoding": "gzip"}
        )
        long = await post("/v1/completions", content=b" " * 5000, headers=json_type)
        chunked = await post("/v1/completions", content=endless(), headers=json_type)
        broken = await post("/v1/completions", content=b'{"prompt": "\xff', headers=json_type)
    assert [r.status_code for r in (text, packed, long, chunked, broken)] == [
        415, 415, 413, 413, 400,
    ]  # fmt: skip
    assert len(sent) < 10


async def test_routes_without_a_body() -> None:
    """Models, health, version, metrics, and what is not there."""
    bench = make_bench()
    async with client_of(bench) as client:
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["id"] == "tiny"
        assert models["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        missing = await client.get("/v1/models/other")
        assert missing.status_code == 404
        assert (await client.get("/nowhere")).json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/completions")).status_code == 405
        assert "quire:gateway_streams" in (await client.get("/metrics")).text
        assert (await client.get("/version")).json() == {"version": "0.1.0"}
        assert (await client.get("/ready")).status_code == 200
        bench.fleet.usable = False
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        await bench.engine.drain(0)
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503


async def test_the_clients_id_is_only_echoed() -> None:
    """Two requests with one id do not meet; line breaks do not reach a header."""
    bench = make_bench()
    async with client_of(bench) as client:
        headers = {"x-request-id": "mine\x01"}
        loop = asyncio.get_running_loop()
        tasks = []
        for _ in range(2):
            post = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            tasks.append(loop.create_task(post))
        for _ in tasks:
            request = await bench.queue.arrivals.get()
            text = str(len(bench.queue.admitted))
            bench.say(request.request_id, text, finish=STOP)
        answers = [await task for task in tasks]
    assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
    assert len({json.loads(a.text)["id"] for a in answers}) == 2
    assert len({r.request_id for r in bench.queue.admitted}) == 2
