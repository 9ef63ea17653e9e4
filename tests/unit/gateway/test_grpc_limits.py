"""What a client of the public gRPC port can ask for, and what floods leave behind: nothing."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from quire.v1 import inference_pb2, inference_pb2_grpc

from gateway import app, codec
from gateway.core.validation import check
from gateway.grpc_service import SERVICE_NAME, InferenceService
from servicekit.grpc_server import MAX_MESSAGE_BYTES, Server, channel
from tests.unit.gateway.answering import answering
from tests.unit.gateway.fakes import MODEL, Bench, make_bench

pytestmark = pytest.mark.slow

MAX_BYTES = 65_536
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
CANCEL, ENHANCE_YOUR_CALM = 8, 11


@contextlib.asynccontextmanager
async def serving(bench: Bench, max_calls: int = app.MAX_CALLS) -> AsyncIterator[str]:
    """The service as the gateway limits it; its address."""

    def register(server: grpc.aio.Server) -> None:
        add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        add(InferenceService(bench.engine), server)

    limits = app.public_limits(MAX_BYTES)
    server = Server(register, [SERVICE_NAME], [], limits, max_calls)
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(50):
        yield f"127.0.0.1:{port}"
    await server.stop(0)


def stub_of(found: grpc.aio.Channel) -> Any:
    """Of the service."""
    return inference_pb2_grpc.InferenceServiceStub(found)  # type: ignore[no-untyped-call]


async def text_of(stub: Any, **fields: Any) -> str:
    """The whole answer to a call."""
    call = stub.Generate(inference_pb2.GenerateRequest(**{"text": "x"} | fields))
    return "".join([event.delta.text async for event in call])


async def code_of(stub: Any, metadata: Any = (), **fields: Any) -> grpc.StatusCode:
    """How a call ends that is refused."""
    request = inference_pb2.GenerateRequest(**{"text": "x"} | fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, metadata=metadata).read()
    return caught.value.code()


async def test_messages_are_bounded() -> None:
    """By status, with both numbers; the connection goes on."""
    async with serving(make_bench()) as address, channel(address) as found:
        stub = stub_of(found)
        too_long = inference_pb2.GenerateRequest(text="x" * MAX_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(too_long).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"larger than max ({too_long.ByteSize()} vs. {MAX_BYTES})" in str(caught.value)
        assert await code_of(stub, max_tokens=0) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("context", "vocab_size", "bound"),
    [(131_072, 151_936, 2**20), (2**20, 200_019, 6 * 2**20 + 2**17)],
)
def test_the_largest_request_fits(context: int, vocab_size: int, bound: int) -> None:
    """The longest prompt in token ids, and all other fields at their limits."""
    model = replace(MODEL, max_model_len=context, vocab_size=vocab_size)
    text = "\U0001f600" * 1024
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[vocab_size - 1] * (context - 1)),
        stop=[text] * 16,
        stop_token_ids=[vocab_size - 1] * 128,
        logit_bias=dict.fromkeys(range(vocab_size - 1024, vocab_size), 1.0),
        client_request_id="x" * 1024,
        user=text[:256],
        cache_salt=text[:256],
        seed=-(2**63),
        priority=-(2**31),
        deadline_ms=2**63 - 1,
    )
    check(codec.decode_generate(request), model)
    assert app.message_bytes(0, model) == bound
    assert request.ByteSize() <= bound
    assert app.message_bytes(5000, model) == 5000


@pytest.mark.parametrize("context", [131_072, 262_144, 2**20])
def test_the_longest_prompt_fits_as_text(context: int) -> None:
    """Six bytes a token are more than long texts have in any language that a model was made for."""
    model = replace(MODEL, max_model_len=context)
    request = inference_pb2.GenerateRequest(text="sixty " * (context - 1))
    assert request.ByteSize() <= app.message_bytes(0, model)


def test_no_bound_is_above_what_channels_carry() -> None:
    model = replace(MODEL, max_model_len=10 * 2**20)
    assert app.message_bytes(0, model) == MAX_MESSAGE_BYTES


async def test_metadata_is_bounded() -> None:
    """The same bytes that a head of the REST interface may have are too many here."""
    async with serving(make_bench()) as address, channel(address) as found:
        stub = stub_of(found)
        small = await code_of(stub, (("x", "y" * 15_500),), max_tokens=0)
        assert small is grpc.StatusCode.INVALID_ARGUMENT
        large = await code_of(stub, (("x", "y" * app.MAX_METADATA_BYTES),), max_tokens=0)
        assert large is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_are_bounded() -> None:
    """One more than the bound is refused by status; room that is left is given again."""
    bench = make_bench()
    async with serving(bench, max_calls=3) as address, channel(address) as found:
        stub = stub_of(found)
        held = [stub.Generate(inference_pb2.GenerateRequest(text="x")) for _ in range(3)]
        for call in held:
            await call.read()
        assert await code_of(stub) is grpc.StatusCode.RESOURCE_EXHAUSTED
        held[0].cancel()
        codes = {await code_of(stub, max_tokens=0)}
        while grpc.StatusCode.INVALID_ARGUMENT not in codes:
            codes.add(await code_of(stub, max_tokens=0))
        assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in held:
            call.cancel()


async def test_calls_on_one_connection_are_bounded() -> None:
    """The client's own library keeps the rest waiting."""
    assert app.public_limits(1)["grpc.max_concurrent_streams"] == app.MAX_CALLS_PER_CONNECTION
    async with serving(make_bench()) as address:
        settings = await first_settings(address)
    assert settings[3] == app.MAX_CALLS_PER_CONNECTION  # SETTINGS_MAX_CONCURRENT_STREAMS
    assert settings[6] == app.MAX_METADATA_BYTES  # SETTINGS_MAX_HEADER_LIST_SIZE


async def test_a_flood_of_opened_and_cancelled_calls_leaves_nothing() -> None:
    """Over the client's library: live requests and tasks are back where they were."""
    bench = make_bench()
    async with serving(bench) as address, channel(address) as found:
        stub = stub_of(found)
        async with answering(bench):
            assert await text_of(stub) == "k"
        before = len(asyncio.all_tasks())
        for _ in range(30):
            calls = [stub.Generate(inference_pb2.GenerateRequest(text="x")) for _ in range(100)]
            await calls[0].read()
            for call in calls:
                call.cancel()
        await settled(bench, before)
        while not bench.queue.arrivals.empty():
            bench.queue.arrivals.get_nowait()
        async with answering(bench):
            assert await text_of(stub) == "k"


async def test_a_rapid_reset_leaves_nothing() -> None:
    """Thousands of streams opened and reset in one breath, below any library."""
    bench = make_bench()
    message = inference_pb2.GenerateRequest(text="x").SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    async with serving(bench) as address, channel(address) as found:
        async with answering(bench):
            assert await text_of(stub_of(found)) == "k"
        before = len(asyncio.all_tasks())
        _, writer = await opened(address)
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 6001, 2):
                writer.write(frame(HEADERS, 4, stream, HEAD) + frame(DATA, 1, stream, body))
                # Some at once, some when their handlers have begun.
                gone = stream if stream % 4 == 1 else stream - 400
                if gone > 0:
                    writer.write(frame(RST_STREAM, 0, gone, struct.pack(">I", CANCEL)))
                if stream % 20 == 1:
                    await writer.drain()
                    await asyncio.sleep(0.005)
        # Those that were not reset have handlers.
        while bench.queue.arrivals.empty():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()
        await settled(bench, before)
        while not bench.queue.arrivals.empty():
            bench.queue.arrivals.get_nowait()
        async with answering(bench):
            assert await text_of(stub_of(found)) == "k"


async def test_pings_are_bounded() -> None:
    """A client that only pings is told to calm down, and let go."""
    async with serving(make_bench()) as address:
        reader, writer = await opened(address)
        codes: list[int] = []

        async def read() -> None:
            async for kind, payload in frames(reader):
                if kind == GOAWAY:
                    codes.append(struct.unpack(">I", payload[4:8])[0])

        reading = asyncio.get_running_loop().create_task(read())
        while not reading.done():
            writer.write(frame(PING, 0, 0, b"12345678"))
            await asyncio.sleep(0.01)
        await reading
        assert ENHANCE_YOUR_CALM in codes
        writer.close()


async def settled(bench: Bench, num_tasks: int) -> None:
    """Waits until no request lives and no task is left."""
    while bench.engine.num_live or len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


# HTTP/2, as far as it is needed.


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def plain(name: bytes, value: bytes) -> bytes:
    """A header that is spelled out."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


HEAD = b"".join(
    plain(name, value)
    for name, value in [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{SERVICE_NAME}/Generate".encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
)


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has said what it is."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
    return reader, writer


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Kind and payload of each frame, until the connection ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(9)
            length = int.from_bytes(head[:3], "big")
            yield head[3], await reader.readexactly(length)


async def first_settings(address: str) -> dict[int, int]:
    """What the server says of itself."""
    reader, writer = await opened(address)
    async for kind, payload in frames(reader):
        if kind == SETTINGS and payload:
            writer.close()
            pairs = struct.iter_unpack(">HI", payload)
            return {int(name): int(value) for name, value in pairs}
    raise AssertionError("the server says nothing")
