"""Streams of the protocols beside OpenAI's: when headers go out, what fills silence, who leaves."""

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.core.types import FinishReason
from gateway.rest import live_answer
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_auth import listening

STOP = FinishReason.STOP
HEAD = (
    b"POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 15\r\nx-request-id: mine\x01\r\n\r\n"
)


@contextlib.asynccontextmanager
async def asked(bench: Bench) -> Any:
    """A stream that has been asked for over a socket: its reader and its request."""
    async with listening(bench, None) as port, asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b"\x01", b"") + b'{"inputs": "x"}')
        yield reader, writer, await bench.queue.arrivals.get()
        writer.close()


async def test_headers_wait_for_the_first_output_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Afterwards comments go out in silence, and what goes wrong is an event."""
    monkeypatch.setattr(live_answer, "STATUS_WAIT_S", 0.2)
    monkeypatch.setattr(live_answer, "KEEP_ALIVE_S", 0.1)
    bench = make_bench()
    async with asked(bench) as (reader, _, request):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"x-request-id: mine\r\n" in head
        for _ in range(3):
            assert b": \n\n" in await reader.readuntil(b"\n\n\r\n")
        bench.say(request.request_id, "a", num_top=0)
        while b": \n\n" in (frame := await reader.readuntil(b"\n\n\r\n")):
            pass
        assert b'"id":97' in frame
        assert b": \n\n" in await reader.readuntil(b"\n\n\r\n")
        bench.notify(request.request_id, FinishReason.DEADLINE, "Too late.")
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'data:{"error":"Too late.","error_type":"generation"}\n\n' in rest


async def test_no_token_is_lost_to_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come just as the silence is long enough."""
    monkeypatch.setattr(live_answer, "STATUS_WAIT_S", 0.001)
    monkeypatch.setattr(live_answer, "KEEP_ALIVE_S", 0.001)
    bench = make_bench()
    async with asked(bench) as (reader, _, request):
        for at in range(200):
            bench.say(request.request_id, chr(97 + at % 26), at=at, num_top=0)
            await asyncio.sleep(0.001)
        bench.say(request.request_id, "\3", at=200, finish=STOP, num_top=0)
        said = await reader.readuntil(b"0\r\n\r\n")
    assert said.count(b'"generated_text":null') == 200
    text = "".join(chr(97 + at % 26) for at in range(200))
    assert f'"generated_text":"{text}"'.encode() in said


async def test_a_client_that_leaves_ends_its_request() -> None:
    """Before its first token and after it."""
    for said in ("", "ab"):
        bench = make_bench()
        async with asked(bench) as (reader, writer, request):
            if said:
                bench.say(request.request_id, said, num_top=0)
                await reader.readuntil(b"\n\n\r\n")
            writer.close()
            while bench.engine.num_live:  # noqa: ASYNC110 (it ends in no time)
                await asyncio.sleep(0.01)
            cancelled = bench.link.cancelled if said else bench.queue.cancelled
            assert cancelled == [request.request_id]
