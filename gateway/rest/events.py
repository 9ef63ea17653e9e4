"""Answers of the protocols beside OpenAI's: one live request, streamed as events or whole.

A stream's headers wait for its first output, but no longer than FIRST_OUTPUT_S, so that what goes
wrong before has a status of its own. Then a comment goes out whenever nothing else has for
COMMENT_S. While a request runs a watcher waits for the client to leave.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.core.errors import GatewayError, error_of
from gateway.core.output import Chunk
from gateway.engine import Engine
from gateway.live import CLIENT_GONE, LiveRequest
from gateway.rest.auth import shape_of
from gateway.rest.errors import response_of, to_json
from servicekit import logs

FIRST_OUTPUT_S = 10.0
COMMENT_S = 15.0
SEND_TIMEOUT_S = 30.0
COMMENT = b": \n\n"
_log = logs.get_logger("gateway.rest")


class LiveAnswer(Response):
    """Base: runs `_answer` while the client is there, and ends the request with it."""

    def __init__(self, engine: Engine, live: LiveRequest, client_id: str) -> None:
        super().__init__()
        self._engine = engine
        self._live = live
        self._request_id = client_id or live.public_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        try:
            async with self._watching(receive):
                await self._answer(scope, receive, send)
        except (TimeoutError, OSError):
            _log.info("client_lost", request_id=self._live.public_id)
        finally:
            self._engine.cancel(self._live)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def _watching(self, receive: Receive) -> AsyncIterator[None]:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._engine.cancel(self._live, CLIENT_GONE)

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])


class EventAnswer(LiveAnswer):
    """A stream: `frames` makes events of a chunk, `failure` the last event of an error."""

    def __init__(
        self,
        engine: Engine,
        live: LiveRequest,
        client_id: str,
        *,
        frames: Callable[[Chunk], bytes],
        failure: Callable[[GatewayError], bytes],
    ) -> None:
        super().__init__(engine, live, client_id)
        self._frames = frames
        self._failure = failure

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunk = await self._first()
        if chunk is not None and chunk.end is not None and not chunk.token_ids:
            error = error_of(chunk.end)
            if error is not None:
                raise error
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            last = chunk is not None and chunk.end is not None
            data = COMMENT if chunk is None else self._bytes(chunk)
            if data or last:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return
            chunk = await self._next(COMMENT_S)

    async def _first(self) -> Chunk | None:
        """The first chunk that says something; None if there is none in time."""
        try:
            async with asyncio.timeout(FIRST_OUTPUT_S):
                while True:
                    chunk = await self._engine.next_chunk(self._live)
                    if chunk.text or chunk.token_ids or chunk.end is not None:
                        return chunk
        except TimeoutError:
            return None

    async def _next(self, timeout_s: float) -> Chunk | None:
        # Chunks are taken after the wait and at once, so that a timeout can't lose one.
        try:
            async with asyncio.timeout(timeout_s):
                return await self._engine.next_chunk(self._live)
        except TimeoutError:
            return None

    def _bytes(self, chunk: Chunk) -> bytes:
        error = error_of(chunk.end) if chunk.end is not None else None
        return self._frames(chunk) if error is None else self._failure(error)


class WholeAnswer(LiveAnswer):
    """A body: `build` makes it of all chunks."""

    def __init__(
        self,
        engine: Engine,
        live: LiveRequest,
        client_id: str,
        *,
        build: Callable[[list[Chunk]], Any],
    ) -> None:
        super().__init__(engine, live, client_id)
        self._build = build

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: list[Chunk] = []
        while not chunks or chunks[-1].end is None:
            chunks.append(await self._engine.next_chunk(self._live))
        end = chunks[-1].end
        assert end is not None
        headers = {"x-request-id": self._request_id}
        error = error_of(end)
        if error is not None:
            response = response_of(error, shape_of(scope), headers)
        else:
            data = to_json(self._build(chunks))
            response = Response(data, headers=headers, media_type="application/json")
        await response(scope, receive, send)
