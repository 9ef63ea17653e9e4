"""Answers of the protocols beside OpenAI's: one live request, streamed as events or whole.

A comment goes out whenever nothing else has for KEEP_ALIVE_S.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.chunks import Chunks
from gateway.core.errors import GatewayError, error_of
from gateway.core.output import Chunk
from gateway.engine import Engine
from gateway.live import LiveRequest
from gateway.rest import live_answer
from gateway.rest.auth import shape_of
from gateway.rest.errors import response_of, to_json
from gateway.rest.live_answer import LiveAnswer

COMMENT = b": \n\n"


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
        super().__init__(engine, [live], client_id)
        self._frames = frames
        self._failure = failure

    async def _answer(self, chunks: Chunks, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._first(chunks)
        await self._begin(send)
        chunk = first[1] if first is not None else None
        while True:
            last = chunk is not None and chunk.end is not None
            data = COMMENT if chunk is None else self._bytes(chunk)
            if data or last:
                async with asyncio.timeout(live_answer.SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return
            chunk = await _next(chunks)

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
        super().__init__(engine, [live], client_id)
        self._build = build

    async def _answer(self, chunks: Chunks, scope: Scope, receive: Receive, send: Send) -> None:
        found: list[Chunk] = []
        while chunks.num_left:
            found.append((await chunks.next())[1])
        end = found[-1].end
        assert end is not None
        headers = {"x-request-id": self._request_id}
        error = error_of(end)
        if error is not None:
            response = response_of(error, shape_of(scope), headers)
        else:
            data = to_json(self._build(found))
            response = Response(data, headers=headers, media_type="application/json")
        await response(scope, receive, send)


async def _next(chunks: Chunks) -> Chunk | None:
    # Chunks are taken after the wait and at once, so that a timeout can't lose one.
    try:
        async with asyncio.timeout(live_answer.KEEP_ALIVE_S):
            return (await chunks.next())[1]
    except TimeoutError:
        return None
