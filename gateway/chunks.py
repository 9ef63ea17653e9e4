"""The chunks of one or several live requests, in the order in which they come."""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from gateway.core.output import Chunk
from gateway.core.types import FinishReason, Terminal
from gateway.engine import Engine
from gateway.live import LiveRequest
from servicekit import logs

FAILED = Terminal(
    reason=FinishReason.ERROR, message="The gateway failed on this request.", code="internal_error"
)
_log = logs.get_logger("gateway.chunks")


class Chunks:
    """A context. `next` gives the index of a request and a chunk; cancelling it loses nothing.

    One request is read directly. Of several each has a task that reads it, with a bounded queue
    between: a client that does not read still fills the requests' own buffers, which have bounds.
    """

    def __init__(self, engine: Engine, lives: Sequence[LiveRequest]) -> None:
        self._engine = engine
        self._lives = lives
        self._queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue(maxsize=len(lives))
        self._tasks: list[asyncio.Task[None]] = []
        self.num_left = len(lives)

    async def __aenter__(self) -> "Chunks":
        loop = asyncio.get_running_loop()
        if len(self._lives) > 1:
            self._tasks = [
                loop.create_task(self._read(i, live)) for i, live in enumerate(self._lives)
            ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def next(self) -> tuple[int, Chunk]:
        """The next chunk of any request that has not ended; `num_left` counts those."""
        assert self.num_left, "every request has ended"
        if self._tasks:
            index, chunk = await self._queue.get()
        else:
            index, chunk = 0, await self._engine.next_chunk(self._lives[0])
        if chunk.end is not None:
            self.num_left -= 1
        return index, chunk

    async def _read(self, index: int, live: LiveRequest) -> None:
        ended = False
        while not ended:
            try:
                chunk = await self._engine.next_chunk(live)
            except Exception:
                # One request's error must reach the client, not hang the others.
                _log.exception("read_failed", request_id=live.public_id)
                self._engine.cancel(live, FAILED)
                chunk = Chunk(text="", token_ids=(), end=FAILED)
            ended = chunk.end is not None
            await self._queue.put((index, chunk))
