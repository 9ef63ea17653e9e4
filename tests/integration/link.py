"""A TCP way to a port of this host that can be cut and mended, one client's alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Link:
    """While it is cut, connections end at once; those that stood have been broken off."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """From now on nothing passes."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """New connections pass again."""
        self._is_cut = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        if self._is_cut:
            writer.transport.abort()
            return
        onward, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        both = {writer, back}
        if self._is_cut:  # meanwhile
            for end in both:
                end.transport.abort()
            return
        self._writers |= both
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, back)),
                    asyncio.ensure_future(_copy(onward, writer)),
                ]
            )
        finally:
            self._writers -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def link_to(target_port: int) -> AsyncIterator[Link]:
    """Listens on a port of its own."""
    link = Link(target_port)
    server = await asyncio.start_server(link.carry, "127.0.0.1", 0)
    link.port = int(server.sockets[0].getsockname()[1])
    try:
        yield link
    finally:
        server.close()
        link.cut()
        await server.wait_closed()
