"""The way of a token through the libraries alone: the floor of what a gateway adds to it.

python -m benchmarks.gateway.bare source NUM_STREAMS STEP_MS: a grpc.aio server that sends one
TokenBatch a step, with the time at which it gave it (CLOCK_MONOTONIC) as its step.
python -m benchmarks.gateway.bare relay NUM_STREAMS ADDRESS: reads them, and at each wakes the
generators of that many StreamingResponses under uvicorn, which each give one frame.

Each prints the port on which it listens. Nothing is checked, counted, looked up or detokenized.
"""

import asyncio
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import uvicorn
import uvloop
from quire.v1 import worker_pb2, worker_pb2_grpc
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_FRAME = (
    b'data: {"id":"cmpl-%032x","object":"text_completion","created":%d,"model":"bench",'
    b'"choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null}]}\n\n'
)


def given_in(pieces: Sequence[tuple[int, bytes]]) -> dict[int, int]:
    """When the source gave each token of a stream: by position."""
    body = b"".join(data for _, data in pieces)
    return {i: int(found[1]) for i, found in enumerate(re.finditer(rb'"created":(\d+)', body))}


def _told(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


class _Source(worker_pb2_grpc.TokensServiceServicer):
    def __init__(self, num_streams: int, step_s: float) -> None:
        self._num_streams = num_streams
        self._step_s = step_s

    async def Tokens(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.TokensRequest], context: Any
    ) -> None:
        """Until it is cancelled."""
        ones, ids = [1] * self._num_streams, bytes(16 * self._num_streams)
        due_s = time.monotonic()
        while True:
            due_s = max(due_s, time.monotonic()) + self._step_s
            await asyncio.sleep(due_s - time.monotonic())
            batch = worker_pb2.TokenBatch(
                step=time.monotonic_ns(),
                request_ids=ids,
                attempts=ones,
                first_positions=ones,
                num_tokens=ones,
                token_ids=ones,
                num_cached_tokens=ones,
            )
            await context.write(worker_pb2.TokensResponse(batch=batch))


async def source(num_streams: int, step_ms: float) -> None:
    """Serves until it is ended."""
    server = grpc.aio.server()
    servicer = _Source(num_streams, step_ms / 1000)
    worker_pb2_grpc.add_TokensServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _told(port)
    await server.wait_for_termination()


class Relay:
    """The application, and what reads the source."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[int]] = []
        self._num_opened = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream that never ends."""
        self._num_opened += 1
        frames = self._frames(self._num_opened)
        await StreamingResponse(frames, media_type="text/event-stream")(scope, receive, send)

    async def _frames(self, number: int) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while True:
            news: asyncio.Future[int] = loop.create_future()
            self._waiting.append(news)
            yield _FRAME % (number, await news)

    async def read(self, address: str) -> None:
        """Hands on what comes, for ever."""
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = worker_pb2_grpc.TokensServiceStub(channel).Tokens(iter(()))  # type: ignore[arg-type]
            while True:
                message = await call.read()
                waiting, self._waiting = self._waiting, []
                for news in waiting:
                    if not news.done():
                        news.set_result(message.batch.step)


async def relay(address: str) -> None:
    """Serves until it is ended."""
    application = Relay()
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, access_log=False, http="httptools"
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    _told(int(listener.getsockname()[1]))
    async with asyncio.TaskGroup() as group:
        group.create_task(application.read(address))
        group.create_task(server._serve([listener]))


if __name__ == "__main__":
    role, argument = sys.argv[1], sys.argv[3]
    uvloop.run(source(int(sys.argv[2]), float(argument)) if role == "source" else relay(argument))
