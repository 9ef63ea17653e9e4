"""The chunks of one or several live requests, in the order in which they come."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from gateway.core.output import Chunk
from gateway.core.types import FinishReason, Terminal
from gateway.engine import Engine
from gateway.live import LiveRequest
from servicekit import logs

FAILED = Terminal(
    reason=FinishReason.ERROR, message="The gateway failed on this request.", code="internal_error"
)
# Takes the index of a request and a chunk of it; False if what follows has to wait.
Write = Callable[[int, Chunk], bool]
_log = logs.get_logger("gateway.chunks")


class Chunks:
    """A context, and the Reader of its requests. Cancelling `next` loses nothing.

    Nothing is read ahead: what a client does not take waits in the requests' own buffers, which
    have bounds. Beside them a note for each request that has news, and one chunk, are kept.
    """

    def __init__(self, engine: Engine, lives: Sequence[LiveRequest]) -> None:
        self._engine = engine
        self._lives = lives
        self._index = {live: index for index, live in enumerate(lives)}
        # In the order in which they had news that nobody has read.
        self._ready: dict[LiveRequest, None] = {}
        self._refused: deque[tuple[int, Chunk]] = deque(maxlen=1)
        self._waiter: asyncio.Future[None] | None = None
        self._write: Write | None = None
        self.num_left = len(lives)

    async def __aenter__(self) -> "Chunks":
        for live in self._lives:
            assert live.reader is None, "a request has one reader"
            live.reader = self
            if live.has_news:
                self._ready[live] = None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for live in self._lives:
            live.reader = None

    @property
    def waiting(self) -> bool:
        """See Reader."""
        return self._waiter is not None

    async def next(self, write: Write | None = None) -> tuple[int, Chunk]:
        """The next chunk of any request that has not ended; `num_left` counts those.

        With `write` the next one for which that says False: it is called with each chunk before,
        while this waits within the very call that brings its tokens.
        """
        assert self.num_left, "every request has ended"
        while not self._refused:
            if self._ready:
                live = next(iter(self._ready))
                del self._ready[live]
                self._read(live, write)
            else:
                await self._wait(write)
        index, chunk = self._refused.pop()
        if chunk.end is not None:
            self.num_left -= 1
        return index, chunk

    def on_news(self, live: LiveRequest) -> None:
        """See Reader."""
        if self._write is not None:
            self._read(live, self._write)
            if not self._refused:
                return
            self._write = None
        else:
            self._ready[live] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, write: Write | None) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._write = write
        try:
            await self._waiter
        finally:
            self._waiter = self._write = None

    def _read(self, live: LiveRequest, write: Write | None) -> None:
        index = self._index[live]
        try:
            chunk = self._engine.read(live)
            taken = write is not None and write(index, chunk)
        except Exception:
            # One request's error must reach its client, and neither hang nor end the others.
            _log.exception("read_failed", request_id=live.public_id)
            live.reader = None
            self._engine.cancel(live, FAILED)
            chunk, taken = Chunk(text="", token_ids=(), end=FAILED), False
        if not taken:
            self._refused.append((index, chunk))
