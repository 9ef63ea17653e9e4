"""Writes ended entries back: acknowledge, delete, tell the gateway. All of a batch or nothing.

Owns the entries that this process holds: read and not yet written as ended. Completions wait here
while Redis is away, at most `max_pending`; then the oldest are dropped and logged, and their
entries stay in the stream for the next leader.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from scheduler_svc import codec
from scheduler_svc.adapters import redis_scripts
from scheduler_svc.adapters.redis_access import FencedRedis, RedisAwayError
from scheduler_svc.ports import Completion
from servicekit import redis_keys
from servicekit.logs import get_logger

MAX_PENDING = 100_000
MAX_BATCH = 256
MAX_IN_HAND = 200_000
NOTICES_MAX_LEN = 10_000
NOTICES_TTL_MS = 600_000
RETRY_S = 0.2
_log = get_logger("scheduler.outbox")


class CompletionOutbox:
    """Implements ports.CompletionSink."""

    def __init__(self, access: FencedRedis, *, max_pending: int = MAX_PENDING) -> None:
        self._access = access
        self._max_pending = max_pending
        self._pending: deque[Completion] = deque()
        self._in_hand: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_pending(self) -> int:
        """Completions not yet written."""
        return len(self._pending)

    @property
    def num_held(self) -> int:
        """Entries read and not yet written as ended."""
        return len(self._in_hand)

    def hold(self, entry_id: str) -> None:
        """The entry has been read and goes to the core.

        At MAX_IN_HAND the oldest is forgotten: read again, it is a repeat that the core drops.
        """
        while len(self._in_hand) >= MAX_IN_HAND:
            del self._in_hand[next(iter(self._in_hand))]
        self._in_hand[entry_id] = None

    def held(self) -> frozenset[str]:
        """Entries read and not yet written as ended."""
        return frozenset(self._in_hand)

    def release(self, entry_ids: Iterable[str]) -> None:
        """The entries are no longer in the stream."""
        for entry_id in entry_ids:
            self._in_hand.pop(entry_id, None)

    def complete(self, completion: Completion) -> None:
        """Keeps the completion until it is written."""
        if len(self._pending) >= self._max_pending:
            dropped = self._pending.popleft()
            _log.error("finish_dropped", entry_ids=dropped.entry_ids, bound=self._max_pending)
        for entry_id in completion.entry_ids:
            self.hold(entry_id)
        self._pending.append(completion)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled. Raises DeposedError."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                try:
                    await self._write_batch()
                except RedisAwayError:
                    await asyncio.sleep(RETRY_S)
            self._idle.set()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until everything is written, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("finishes_left", count=len(self._pending))
            return False
        return True

    async def _write_batch(self) -> None:
        batch: list[Completion] = []
        entry_ids: list[str] = []
        for completion in self._pending:
            if batch and len(entry_ids) + len(completion.entry_ids) > MAX_BATCH:
                break
            batch.append(completion)
            entry_ids.extend(completion.entry_ids)
        keys = [redis_keys.requests(self._access.model)]
        key_indices: dict[str, int] = {}
        notices: list[str | bytes] = []
        for completion in batch:
            if completion.notice is None:
                continue
            key = redis_keys.notices(self._access.model, completion.notice.gateway_id)
            if key not in key_indices:
                keys.append(key)
                key_indices[key] = len(keys) + 1  # KEYS[1] is the epoch
            notices += [str(key_indices[key]), codec.encode_notice(completion.notice)]
        head = [redis_keys.GROUP, str(NOTICES_MAX_LEN), str(NOTICES_TTL_MS), str(len(entry_ids))]
        await self._access.run(redis_scripts.FINISH, keys, [*head, *entry_ids, *notices])
        for completion in batch:
            # At the bound a completion of this batch may have been dropped meanwhile.
            if self._pending and self._pending[0] is completion:
                self._pending.popleft()
        self.release(entry_ids)
