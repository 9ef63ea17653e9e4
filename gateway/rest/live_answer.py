"""What the answers of all protocols share: they live and end with their client.

A stream's headers wait for the first output, so that what goes wrong before has a status of its
own, but no longer than STATUS_WAIT_S. While requests run a watcher waits for the client to leave.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.chunks import Chunks
from gateway.core.errors import error_of
from gateway.core.output import Chunk
from gateway.engine import Engine
from gateway.live import CLIENT_GONE, LiveRequest
from servicekit import logs

STATUS_WAIT_S = 10.0
KEEP_ALIVE_S = 15.0
SEND_TIMEOUT_S = 30.0
_log = logs.get_logger("gateway.rest")


class LiveAnswer(Response):
    """Base: runs `_answer` while the client is there, and ends the requests with it.

    `lives` are in the order of the choices.
    """

    def __init__(self, engine: Engine, lives: Sequence[LiveRequest], client_id: str) -> None:
        super().__init__()
        self._engine = engine
        self._lives = lives
        self._request_id = client_id or lives[0].public_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        try:
            async with self._watching(receive), Chunks(self._engine, self._lives) as chunks:
                await self._answer(chunks, scope, receive, send)
        except (TimeoutError, OSError):
            _log.info("client_lost", request_id=self._lives[0].public_id)
        finally:
            self._cancel()

    async def _answer(self, chunks: Chunks, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _first(self, chunks: Chunks) -> tuple[int, Chunk] | None:
        """The first output, None if there is none in time. Raises GatewayError."""
        try:
            async with asyncio.timeout(STATUS_WAIT_S):
                while True:
                    index, chunk = await chunks.next()
                    if chunk.text or chunk.token_ids or chunk.end is not None:
                        break
        except TimeoutError:
            return None
        if chunk.end is not None and not chunk.token_ids:
            error = error_of(chunk.end)
            if error is not None:
                raise error
        return index, chunk

    async def _begin(self, send: Send) -> None:
        """A stream's headers."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _cancel(self) -> None:
        for live in self._lives:
            self._engine.cancel(live, CLIENT_GONE)

    @contextlib.asynccontextmanager
    async def _watching(self, receive: Receive) -> AsyncIterator[None]:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._cancel()

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])
