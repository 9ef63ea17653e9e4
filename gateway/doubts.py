"""Requests whose only tokens may have gone with a worker, told apart by what the queue still holds.

A worker that is gone, or whose stream has a gap, may have said all of any request that has had no
token here; most of them just wait. A request's entry stands in the queue until its request has
ended. So while it stands the scheduler has the request: it runs it, or will run it, and all of its
tokens are said anew. One whose entry is gone without an end that came here has ended by words that
are lost, and only that one is superseded.

A request is in doubt until it has a token or an end here. Each LOOK_S the entries of MAX_ASKED are
asked for in one command, those first that were gone before and then those asked longest ago: an end
may still be on its way when its entry is gone, so an entry has to be gone twice.
"""

import asyncio
from collections.abc import Callable

from gateway.core.errors import UnavailableError
from gateway.live import LiveRequest
from gateway.ports import RequestQueue

LOOK_S = 0.5
# Redis reads each of the entries to tell whether it is there, with its prompt; one is always read.
MAX_ASKED = 128
MAX_ASKED_TOKENS = 1 << 18


class Doubts:
    """Bounded by the live requests. `supersede` is told of each that is lost, once."""

    def __init__(self, queue: RequestQueue, supersede: Callable[[LiveRequest], None]) -> None:
        self._queue = queue
        self._supersede = supersede
        # Whether the entry was gone at the last look, by request; next to be asked for first.
        self._gone: dict[LiveRequest, bool] = {}
        self._news = asyncio.Event()

    def add(self, live: LiveRequest) -> None:
        """It has had no token here, and a worker's tokens are lost."""
        self._gone.setdefault(live, False)
        self._news.set()

    def drop(self, live: LiveRequest) -> None:
        """It is over, as one whose admission failed is without an end."""
        self._gone.pop(live, None)

    async def run(self) -> None:
        """Looks as long as there are any, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._gone:
                await self._look()
                await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        self._gone = {live: gone for live, gone in self._gone.items() if _is_open(live)}
        # Of what is on its way into the queue nothing can be known yet.
        queued = [live for live in self._gone if live.admission and not live.superseding]
        queued.sort(key=lambda live: not self._gone[live])
        asked = [(live, live.admission) for live in _first(queued) if live.admission]
        if not asked:
            return
        try:
            stand = await self._queue.standing([admission.entry_id for _, admission in asked])
        except UnavailableError:
            return
        for (live, admission), stands in zip(asked, stand, strict=True):
            was_gone = self._gone.pop(live, None)
            if (
                was_gone is None
                or not _is_open(live)
                or live.admission is not admission
                or live.superseding
            ):
                continue
            if was_gone and not stands:
                self._supersede(live)
            else:
                self._gone[live] = not stands


def _first(queued: list[LiveRequest]) -> list[LiveRequest]:
    num_tokens = 0
    for count, live in enumerate(queued[:MAX_ASKED]):
        num_tokens += len(live.queued.prompt_token_ids)
        if count and num_tokens > MAX_ASKED_TOKENS:
            return queued[:count]
    return queued[:MAX_ASKED]


def _is_open(live: LiveRequest) -> bool:
    """Neither a token nor an end has come."""
    return live.link is None and live.state.end is None
