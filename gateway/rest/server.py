"""uvicorn inside this process's loop, with a bound on the bytes of a request's head."""

import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
BACKLOG = 2048


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not end within MAX_HEAD_BYTES.

    The parser keeps them in memory until they are complete. One read more may be kept than the
    bound says, because a read may hold the end of the head and a part of the body.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        """Counts, then parses."""
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.close()
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The rest is body."""
        self._in_head = False
        super().on_headers_complete()  # type: ignore[no-untyped-call]

    def on_message_complete(self) -> None:
        """The next request begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()  # type: ignore[no-untyped-call]


class RestServer:
    """Signals stay with the process."""

    def __init__(self, app: ASGIApp, grace_s: int) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = uvicorn.Server(config)

    def listen(self, host: str, port: int) -> socket.socket:
        """Binds; raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`."""
        await self._server._serve([listener])

    def stop(self) -> None:
        """Closes the listener and, after a moment, the connections."""
        self._server.should_exit = True
