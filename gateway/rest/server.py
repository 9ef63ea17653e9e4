"""uvicorn inside this process's loop, with bounds on what a client can hold before it is heard.

Bytes, lines and time of a request's head are bounded, and so is the number of connections. What a
client does not take is bounded by the kernel: a connection whose peer takes nothing for
UNREAD_TIMEOUT_S is cut, whatever lies in its buffers.
"""

import asyncio
import contextlib
import functools
import resource
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.core.errors import (
    GatewayError,
    RejectReason,
    RequestRejected,
    UnavailableError,
)
from gateway.rest.errors import body_of, to_json
from servicekit import listening

MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 10.0
LEFTOVER_TIMEOUT_S = 5.0
UNREAD_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 16_384
# Files that the process needs for other things than clients.
SPARE_FILES = 256
BACKLOG = 2048


class _HeadRefusedError(Exception):
    """Ends the parsing of a head that has been answered."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head of too many bytes or lines, 408 to a slow one, and closes.

    The parser keeps a head in memory until it is complete. One read more may be kept than the
    bound says, because a read may hold the end of the head and a part of the body.
    """

    def __init__(self, *args: Any, max_connections: int = MAX_CONNECTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._head_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A first request must follow within HEAD_TIMEOUT_S."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._answer(503, UnavailableError("Too many clients are connected."))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts, then parses."""
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._answer(431, _too_large(f"larger than {MAX_HEAD_BYTES} bytes"))
                return
            self._head_bytes += len(data)
            # Also bytes between requests that begin none count as the begin of a head.
            self._expect_head()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A head begins, perhaps in the middle of a read."""
        self._expect_head()
        super().on_message_begin()  # type: ignore[no-untyped-call]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts the lines."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._answer(431, _too_large(f"more than {MAX_HEADERS} lines"))
            raise _HeadRefusedError

    def on_headers_complete(self) -> None:
        """The rest is body."""
        self._in_head = False
        self._expect_nothing()
        super().on_headers_complete()  # type: ignore[no-untyped-call]

    def on_message_complete(self) -> None:
        """The next request begins."""
        self._in_head, self._head_bytes = True, 0
        if self.cycle.response_complete:
            self._expect_nothing()
            self._expect_head()
        super().on_message_complete()  # type: ignore[no-untyped-call]

    def on_response_complete(self) -> None:
        """What is left of a body that was answered before its end is read for a moment only.

        Closing at once would cost the client the answer.
        """
        super().on_response_complete()  # type: ignore[no-untyped-call]
        if self.cycle.response_complete and not self._in_head and self._timer is None:
            self._timer = self.loop.call_later(LEFTOVER_TIMEOUT_S, self.transport.abort)

    def drain(self) -> None:
        """Closes the connection if it is idle after an answer, or when the one under way ends."""
        if self.cycle is None:
            return
        if not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif self._in_head and self._head_bytes == 0:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in our own words, unless an answer has been given."""
        if not self.transport.is_closing():
            text = "The request is not valid HTTP."
            self._answer(400, RequestRejected(RejectReason.INVALID, text))

    def _expect_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_overdue)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_overdue(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of a later request: its time begins when the one before is answered.
            self._expect_head()
            return
        text = f"The head of the request did not come within {HEAD_TIMEOUT_S:.0f} s."
        self._answer(408, RequestRejected(RejectReason.SLOW_BODY, text))

    def _answer(self, status: int, error: GatewayError) -> None:
        """An answer without a request, and the end of the connection.

        Bytes of an answer under way are not mixed with: such a connection is only closed.
        """
        if self.cycle is None or self.cycle.response_complete:
            body = to_json(body_of(error))
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


class RestServer:
    """Signals stay with the process."""

    def __init__(self, app: ASGIApp, grace_s: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_CONNECTIONS
        if files != resource.RLIM_INFINITY:
            limit = max(1, min(limit, files - SPARE_FILES))
        http: Any = functools.partial(BoundedHttp, max_connections=limit)
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=grace_s,
        )
        self._config = config
        self._server = uvicorn.Server(config)

    def listen(self, host: str, port: int) -> socket.socket:
        """Binds; raises OSError."""
        listener = listening.listen(host, port, backlog=BACKLOG)
        with contextlib.suppress(OSError):
            # Connections inherit it. Linux only; elsewhere the bound is TCP's own.
            option = getattr(socket, "TCP_USER_TIMEOUT", None)
            if option is not None:
                milliseconds = int(UNREAD_TIMEOUT_S * 1000)
                listener.setsockopt(socket.IPPROTO_TCP, option, milliseconds)
        return listener

    def drain(self) -> None:
        """Lets clients go elsewhere: idle connections close, and every answer that begins from now
        on is the last one of its connection. The listener stays, for refusals with a reason."""
        close = (b"connection", b"close")
        state = self._server.server_state
        self._config.encoded_headers.append(close)
        state.default_headers = [*state.default_headers, close]
        for connection in list(state.connections):
            if isinstance(connection, BoundedHttp):
                connection.drain()

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`."""
        await self._server._serve([listener])

    def stop(self) -> None:
        """Closes the listener and, after a moment, the connections."""
        self._server.should_exit = True


def _too_large(what: str) -> RequestRejected:
    return RequestRejected(RejectReason.TOO_LARGE, f"The head of the request is {what}.")
