"""A TCP proxy that hands everything on a fixed time later, each way, as a longer line would."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class _Side(asyncio.Protocol):
    """One end of a connection. What it reads is written to `other` after the delay, in order.

    Nothing bounds what is under way: the load does, a plan or a result a step.
    """

    def __init__(self, delay_s: float) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._delay_s = delay_s
        self._chunks: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        asyncio.get_running_loop().call_later(self._delay_s, self._hand_on)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def _hand_on(self) -> None:
        chunk = self._chunks.popleft()
        assert self.other is not None
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write(chunk)


class _Front(_Side):
    """The end that a client has dialled; dials the target."""

    def __init__(self, target_port: int, delay_s: float) -> None:
        super().__init__(delay_s)
        self._target_port = target_port
        self._dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        assert self.transport is not None
        try:
            _, back = await asyncio.get_running_loop().create_connection(
                lambda: _Side(self._delay_s), "127.0.0.1", self._target_port
            )
        except OSError:
            self.transport.close()
            return
        self.other, back.other = back, self
        self.transport.resume_reading()


@contextlib.asynccontextmanager
async def delaying(target_port: int, delay_s: float) -> AsyncIterator[int]:
    """A port of this host whose connections end at target_port."""
    server = await asyncio.get_running_loop().create_server(
        lambda: _Front(target_port, delay_s), "127.0.0.1", 0
    )
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
