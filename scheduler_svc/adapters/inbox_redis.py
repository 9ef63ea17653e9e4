"""Reads the request stream as the group's one consumer.

Rules: the own pending list is read first and after every failed read, because a reply that was
lost on the way leaves its entries there; entries already held are passed over. It is also read
after the wake channel's connection has broken: a server that was replaced between two reads by one
that lacks the last writes has entries in it again that had ended, and fails no read. New entries
are read only while the core has room: the stream is the queue, and gateways bound it. A wake
message starts a read at once; a poll every POLL_S covers lost messages.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from scheduler_svc import codec
from scheduler_svc.adapters import redis_scripts
from scheduler_svc.adapters.outbox_redis import CompletionOutbox
from scheduler_svc.adapters.redis_access import (
    FAILURES,
    FencedRedis,
    NoGroupError,
    RedisAwayError,
)
from scheduler_svc.core.events import RequestArrived, RequestCancelled
from scheduler_svc.ports import Clock, Completion, EventSink
from servicekit import redis_keys
from servicekit.logs import get_logger

MAX_READ = 64
YIELD_EVERY = 8
POLL_S = 0.1
RETRY_S = 0.2
_STALE_NS = 10_000_000_000
_log = get_logger("scheduler.inbox")


class RedisTime:
    """Turns Redis milliseconds into the own clock, from the TIME that each read brings.

    The sample with the shortest round trip counts; after 10 s any newer one does.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._round_trip_ns = 0
        self._taken_ns = 0

    def sample(self, *, before_ns: int, after_ns: int, redis_ns: int) -> None:
        """Redis said redis_ns somewhere between before_ns and after_ns."""
        round_trip_ns = after_ns - before_ns
        old = after_ns - self._taken_ns > _STALE_NS
        if self._offset_ns is None or old or round_trip_ns <= self._round_trip_ns:
            self._offset_ns = before_ns + round_trip_ns // 2 - redis_ns
            self._round_trip_ns = round_trip_ns
            self._taken_ns = after_ns

    def to_clock_ns(self, redis_ms: int) -> int:
        """Only after a sample."""
        assert self._offset_ns is not None
        return redis_ms * 1_000_000 + self._offset_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    entry_id: str
    fields: Mapping[bytes, bytes] | None


class RequestInbox:
    """Queue entries -> events."""

    def __init__(
        self,
        access: FencedRedis,
        *,
        clock: Clock,
        sink: EventSink,
        outbox: CompletionOutbox,
        has_room: Callable[[], bool],
        saw_gateway: Callable[[str], None],
    ) -> None:
        self._access = access
        self._clock = clock
        self._sink = sink
        self._outbox = outbox
        self._has_room = has_room
        self._saw_gateway = saw_gateway
        self._time = RedisTime()
        self._wake = asyncio.Event()
        self._must_recover = True
        self.recovered = asyncio.Event()

    def wake(self) -> None:
        """There may be something new."""
        self._wake.set()

    async def run(self) -> None:
        """Reads until cancelled. Raises DeposedError."""
        while True:
            try:
                if self._must_recover:
                    # Before it is done: what breaks meanwhile asks for it again.
                    self._must_recover = False
                    await self._create_group()
                    await self._read_pending()
                    self.recovered.set()
                self._wake.clear()
                if self._has_room() and await self._read_new() == MAX_READ:
                    continue
            except RedisAwayError as error:
                self._must_recover = True
                if not isinstance(error, NoGroupError):
                    await asyncio.sleep(RETRY_S)
                continue
            await self._wait()

    async def listen(self, redis: Redis) -> None:
        """Wakes the reader by the wake channel. `redis` is a client for blocking reads."""
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():
            pubsub, subscribed = redis.pubsub(ignore_subscribe_messages=True), False
            try:
                await pubsub.subscribe(redis_keys.wake(self._access.model))
                subscribed = True
                # redis-py may swallow a cancellation while it connects; the count stays.
                while not task.cancelling():
                    if await pubsub.get_message(timeout=1.0) is not None:
                        self.wake()
            except FAILURES:
                if subscribed:
                    self._must_recover = True
                    self.wake()
                await asyncio.sleep(RETRY_S)
            finally:
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _create_group(self) -> None:
        try:
            await self._access.redis.xgroup_create(
                redis_keys.requests(self._access.model), redis_keys.GROUP, id="0", mkstream=True
            )
        except FAILURES as error:
            if "BUSYGROUP" not in str(error):
                self._access.health.failed(error)
                raise RedisAwayError(str(error)) from error

    async def _read_pending(self) -> None:
        held = self._outbox.held()
        gone = set(held)
        after, num_new = "0", 0
        while True:
            entries = await self._read(after)
            if not entries:
                break
            after = entries[-1].entry_id
            gone.difference_update(entry.entry_id for entry in entries)
            for entry in entries:
                if entry.entry_id not in held:
                    num_new += 1
                    await self._deliver(entry)
        # Superseded by their gateway, or lost by Redis: nothing will ever acknowledge them.
        self._outbox.release(gone)
        if num_new:
            _log.info("pending_entries_read", count=num_new)

    async def _read_new(self) -> int:
        entries = await self._read(">")
        for number, entry in enumerate(entries, start=1):
            await self._deliver(entry)
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)  # long prompts must not hold up results
        return len(entries)

    async def _read(self, after: str) -> list[_Entry]:
        before_ns = self._clock.now_ns()
        seconds, micros, raw = await self._access.run(
            redis_scripts.READ,
            [redis_keys.requests(self._access.model)],
            [redis_keys.GROUP, redis_keys.CONSUMER, str(MAX_READ), after],
        )
        redis_ns = int(seconds) * 1_000_000_000 + int(micros) * 1000
        self._time.sample(before_ns=before_ns, after_ns=self._clock.now_ns(), redis_ns=redis_ns)
        return [_entry(item) for item in raw]

    async def _deliver(self, entry: _Entry) -> None:
        if entry.fields is None:  # deleted while it was pending
            self._outbox.complete(Completion(entry_ids=(entry.entry_id,)))
            return
        decoded = codec.decode_entry(
            entry.fields,
            entry_id=entry.entry_id,
            now_ns=self._clock.now_ns(),
            to_deadline_ns=self._time.to_clock_ns,
        )
        if isinstance(decoded, RequestArrived):
            self._outbox.hold(entry.entry_id)
            self._saw_gateway(decoded.gateway_id)
            await self._sink.put(decoded)
            return
        if isinstance(decoded, codec.CancelEntry):
            now_ns = self._clock.now_ns()
            await self._sink.put(RequestCancelled(now_ns=now_ns, request_id=decoded.request_id))
            self._outbox.complete(Completion(entry_ids=(entry.entry_id,)))
            return
        _log.warning("entry_rejected", entry_id=entry.entry_id, problem=decoded.problem)
        self._outbox.complete(Completion(entry_ids=(entry.entry_id,), notice=decoded.notice))


def _entry(item: list[Any]) -> _Entry:
    entry_id, flat = item[0].decode(), (item[1] if len(item) > 1 else None)
    if flat is None:
        return _Entry(entry_id=entry_id, fields=None)
    return _Entry(entry_id=entry_id, fields=dict(zip(flat[::2], flat[1::2], strict=True)))
