"""python -m benchmarks.gateway.floor: server CPU of a chunk through uvicorn and StreamingResponse.

The least that a gateway on this machine could do for a token: an application that gives the same
frame again and again to one client, over the HTTP protocol that Quire's gateway uses. Prints
microseconds of the loop's thread for a chunk. The client is a thread that only takes bytes.
"""

import asyncio
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

NUM_CHUNKS, ROUNDS = 20_000, 3
FRAME = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","object":"text_completion",'
    b'"created":1700000000,"model":"smollm2-135m","choices":[{"index":0,"text":" the",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def _frames() -> AsyncIterator[bytes]:
    for _ in range(NUM_CHUNKS):
        yield FRAME


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    await StreamingResponse(_frames(), media_type="text/event-stream")(scope, receive, send)


def _take_all(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(_REQUEST)
        while connection.recv(1 << 18):
            pass


async def measure() -> float:
    """Microseconds of CPU of a chunk, the median of ROUNDS streams."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_application, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.get_running_loop().create_task(server._serve([listener]))
    found = []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        await asyncio.to_thread(_take_all, listener.getsockname()[1])
        found.append((time.thread_time() - began_s) / NUM_CHUNKS * 1e6)
    server.should_exit = True
    await serving
    return statistics.median(found)


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(measure()):.2f}\n")
