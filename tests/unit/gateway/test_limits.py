"""What a client can hold before it is heard: heads, bodies, connections, and answers not read."""

import asyncio
import contextlib
import gzip
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from gateway.rest import bodies, server
from tests.unit.gateway.answering import answering
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_auth import listening, status_of

pytestmark = pytest.mark.slow

MAX_BODY = 65_536
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture
async def bench() -> Bench:
    """An engine."""
    return make_bench()


@pytest.fixture
async def port(bench: Bench) -> AsyncIterator[int]:
    """Without keys."""
    async with listening(bench, None) as found:
        yield found


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and error of an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(li.split(b":")[1]) for li in lines if li.startswith(b"content-length"))
    body = json.loads(await reader.readexactly(length))
    return int(head.split()[1]), body.get("error", body)


async def test_a_head_of_too_many_bytes(port: int) -> None:
    """431 naming the bound, long before the memory is full; the connection is closed."""
    async with connected(port) as (reader, writer), asyncio.timeout(40):
        writer.write(GET + b"x: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * 2**20 and not reader.at_eof():
                writer.write(b"y" * 16_384)
                sent += 16_384
                await writer.drain()
                await asyncio.sleep(0)
                if reader._buffer:  # type: ignore[attr-defined]
                    break
        status, error = await answer_of(reader)
    assert status == 431
    assert "65536 bytes" in error["message"]
    assert sent < 16 * 2**20


@pytest.mark.parametrize(
    ("extra", "status"), [(server.MAX_HEADERS - 1, 200), (server.MAX_HEADERS, 431)]
)
async def test_a_head_of_too_many_lines(port: int, extra: int, status: int) -> None:
    """At the bound it is served."""
    lines = b"".join(b"x-%d: y\r\n" % i for i in range(extra))
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(GET + lines + b"\r\n")
        found, error = await answer_of(reader)
        assert found == status
        if status != 200:
            assert "128 lines" in error["message"]
            assert await reader.read() == b""


@pytest.mark.parametrize(
    "start", [b"", b"GET /health", GET, GET + b"x: y", b"\r\n\r\n", b"\r\n" * 100]
)
async def test_a_slow_head_is_ended(
    port: int, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408 after the time for a head, however it drips."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.4)
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(start)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await asyncio.sleep(0.05)
                    writer.write(b"\r\n" if start[:1] in (b"", b"\r") else b"a")

        dripping = asyncio.get_running_loop().create_task(drip())
        status, error = await answer_of(reader)
        dripping.cancel()
        assert status == 408
        assert "did not come within" in error["message"]


async def test_a_slow_second_head_is_ended_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes between two requests do not put the end of a connection off."""
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(GET + b"\r\n")
        assert (await answer_of(reader))[0] == 200
        # From here on each head comes as a whole, however late it is written.
        monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.3)
        writer.write(GET + b"\r\n")
        assert (await answer_of(reader))[0] == 200
        await asyncio.sleep(0.5)
        writer.write(GET + b"\r\n")
        assert (await answer_of(reader))[0] == 200
        writer.write(b"\r\n")
        assert (await answer_of(reader))[0] == 408
        assert await reader.read() == b""


async def test_a_slow_answer_is_no_slow_head(
    bench: Bench, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request runs on for longer than a head may take, with a half head of the next behind it."""
    body = b'{"prompt": "x"}'
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(GET + b"\r\n")
        assert (await answer_of(reader))[0] == 200
        monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.2)
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
        request = await bench.queue.arrivals.get()
        await asyncio.sleep(0.7)
        bench.say(request.request_id, "ok\3", finish=1)  # type: ignore[arg-type]
        assert b"200 OK" in await reader.readline()
        with contextlib.suppress(ConnectionError):
            assert b"408" in await reader.read()


async def test_a_slow_body(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """408 naming the time; what comes after the answer is not waited for."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "LEFTOVER_TIMEOUT_S", 0.3)
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(POST + b"content-length: 100\r\n\r\n{")
        status, error = await answer_of(reader)
        assert status == 408
        assert "did not come within" in error["message"]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize("said", [b"content-length: %d" % (2**30), b"content-length: 99e9"])
async def test_a_body_that_says_it_is_too_large(port: int, said: bytes) -> None:
    """Refused before a byte of it has come."""
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(POST + said + b"\r\n\r\n")
        status, error = await answer_of(reader)
    assert status in (400, 413)
    assert error["message"]


async def test_an_endless_body(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """413 while it is read; memory stays flat, and the sender is cut off soon after."""
    monkeypatch.setattr(server, "LEFTOVER_TIMEOUT_S", 0.3)
    tracemalloc.start()
    async with connected(port) as (reader, writer), asyncio.timeout(40):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0

        async def pour() -> None:
            nonlocal sent
            while True:
                writer.write(b"4000\r\n" + b" " * 16_384 + b"\r\n")
                sent += 16_384
                await writer.drain()
                await asyncio.sleep(0)

        pouring = asyncio.get_running_loop().create_task(pour())
        status, error = await answer_of(reader)
        assert status == 413
        assert str(MAX_BODY) in error["message"]
        with pytest.raises(ConnectionError):
            await pouring
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


async def test_a_packed_body_is_not_unpacked(port: int) -> None:
    """415, before it is read."""
    bomb = gzip.compress(b" " * 2**24)
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(POST + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb))
        writer.write(bomb)
        assert (await answer_of(reader))[0] == 415


async def test_what_is_left_of_a_refused_body_does_not_harm_the_next_request(port: int) -> None:
    """A small one is read to its end, and the connection goes on."""
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(POST.replace(b"application/json", b"text/plain"))
        writer.write(b"content-length: 10\r\n\r\n01234")
        assert (await answer_of(reader))[0] == 415
        writer.write(b"56789" + GET + b"\r\n")
        assert (await answer_of(reader))[0] == 200


async def test_too_many_connections(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the bound is answered 503 and closed; room that is left is given again."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    async with listening(bench, None) as port, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(port)) for _ in range(4)]
        for reader, writer in held:
            writer.write(GET + b"\r\n")
            assert (await answer_of(reader))[0] == 200
        async with connected(port) as (reader, _):
            assert (await answer_of(reader))[0] == 503
            assert await reader.read() == b""
        held[0][1].close()
        async with asyncio.timeout(20):
            while await status_of(port, GET + b"\r\n") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such bound")
async def test_connections_inherit_the_bound_on_what_is_not_read(bench: Bench) -> None:
    """The kernel cuts a connection whose peer takes nothing."""
    listener = server.RestServer(lambda *_: None, 1).listen("127.0.0.1", 0)  # type: ignore[arg-type, return-value]
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    found = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert found == server.UNREAD_TIMEOUT_S * 1000
    for sock in (client, accepted, listener):
        sock.close()


async def test_a_thousand_clients_that_do_not_read_leave_a_canary_alone(bench: Bench) -> None:
    """Their answers lie in their own buffers; another client's answer comes as fast as before."""
    body = b'{"prompt": "x", "stream": true}'
    head = POST + b"content-length: %d\r\n\r\n" % len(body)
    async with (
        listening(bench, None) as port,
        answering(bench, "k" * 200 + "\3"),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(1000):
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(head + body)
        slowest = 0.0
        for _ in range(10):
            async with connected(port) as (reader, writer):
                began = time.monotonic()
                writer.write(head + body)
                assert b"200 OK" in await reader.readline()
                slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2.0
    assert bench.engine.num_live == 0


@pytest.mark.parametrize(
    "line",
    [b"GET /health HTTP/9.9\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET\r\n\r\n", b"\0" * 64],
)
async def test_what_is_no_http_is_told_so_in_our_own_words(port: int, line: bytes) -> None:
    """In the same shape as any error, with nothing of the parser's."""
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(line + b"\r\n\r\n")
        status, error = await answer_of(reader)
    assert status == 400
    assert error["message"] == "The request is not valid HTTP."
