"""The answer to a live request, as a stream or whole.

A streamed answer begins with its first output, so that what goes wrong before has a status of its
own. While a request runs a watcher waits for the client to leave.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.core.errors import error_of
from gateway.core.output import Chunk
from gateway.engine import CLIENT_GONE, Engine, LiveRequest
from gateway.rest.errors import response_of
from gateway.rest.sse import Framer, Head, whole_answer
from servicekit import logs

SEND_TIMEOUT_S = 30.0
_log = logs.get_logger("gateway.rest")


class Answer(Response):
    """The answer to a live request, as a stream or whole. Ends the request if the client goes."""

    def __init__(
        self, engine: Engine, live: LiveRequest, head: Head, *, stream: bool, client_id: str
    ) -> None:
        super().__init__()
        self._engine = engine
        self._live = live
        self._head = head
        self._stream = stream
        self._request_id = client_id or live.public_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        try:
            async with self._watching(receive):
                if self._stream:
                    await self._send_stream(send)
                else:
                    response = await self._whole()
                    await response(scope, receive, send)
        except (TimeoutError, OSError):
            _log.info("client_lost", request_id=self._live.public_id)
        finally:
            self._engine.cancel(self._live)

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

    async def _send_stream(self, send: Send) -> None:
        framer = Framer(self._head)
        chunk = await self._engine.next_chunk(self._live)
        while not chunk.text and not chunk.token_ids and chunk.end is None:
            chunk = await self._engine.next_chunk(self._live)
        if chunk.end is not None and not chunk.token_ids:
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
        frames = framer.opening(self._live.queued.prompt_token_ids)
        while True:
            frames += self._frames(framer, chunk)
            last = chunk.end is not None
            if frames or last:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(
                        {"type": "http.response.body", "body": frames, "more_body": not last}
                    )
            if last:
                return
            chunk = await self._engine.next_chunk(self._live)
            frames = b""

    def _frames(self, framer: Framer, chunk: Chunk) -> bytes:
        frames = framer.delta(chunk)
        if chunk.end is None:
            return frames
        error = error_of(chunk.end)
        if error is not None:
            return frames + framer.error(error)
        return frames + framer.ending(chunk.end.reason, self._live.usage)

    async def _whole(self) -> Response:
        pieces: list[str] = []
        token_ids: list[int] = []
        while True:
            chunk = await self._engine.next_chunk(self._live)
            pieces.append(chunk.text)
            token_ids += chunk.token_ids
            if chunk.end is not None:
                break
        error = error_of(chunk.end)
        if error is not None:
            return response_of(error)
        data = whole_answer(
            self._head,
            "".join(pieces),
            chunk.end.reason,
            self._live.usage,
            (self._live.queued.prompt_token_ids, token_ids),
        )
        headers = {"x-request-id": self._request_id}
        return Response(data, headers=headers, media_type="application/json")
