"""The queue in Redis: admission, superseding, cancels, notices, this gateway's registration.

Three connections' worth of work: commands of requests, the once-a-second registration (whose
failure says at once that Redis is away), and the notices reader, which blocks on its own client.
No command per token.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway import codec
from gateway.core.errors import QueueFullError, UnavailableError
from gateway.core.types import Admission, Notice, QueuedRequest, RequestId
from servicekit import logs, redis_client, redis_keys

MAX_PENDING_CANCELS = 65_536
CANCELS_PER_ROUND = 256
ANNOUNCE_S = 1.0
NOTICES_PER_READ = 256
RETRY_S = 0.5
_FAILURES = (RedisError, OSError, TimeoutError)
# What a command is refused by for want of a right, in a script as well.
_NO_RIGHT = ("NOPERM", "ACL failure", "no permissions")

# KEYS requests, backlog. ARGV most requests, most tokens, tokens of these, wake channel, then each
# request's entry and life in ms. Answers {1, then each one's entry id and deadline} or {0, bound
# reached, tokens waiting, tokens/s}.
ADMIT = """
local waiting = tonumber(redis.call('HGET', KEYS[2], 'tokens') or '0') or 0
local rate = redis.call('HGET', KEYS[2], 'tokens_per_s') or '0'
if redis.call('XLEN', KEYS[1]) + (#ARGV - 4) / 2 > tonumber(ARGV[1]) then
  return {0, 'requests', tostring(waiting), rate}
end
if waiting + tonumber(ARGV[3]) > tonumber(ARGV[2]) then
  return {0, 'tokens', tostring(waiting), rate}
end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local admitted = {1}
for i = 5, #ARGV, 2 do
  local text = string.format('%.0f', now_ms + tonumber(ARGV[i + 1]))
  local id = redis.call('XADD', KEYS[1], '*', 'entry', ARGV[i], 'deadline_ms', text)
  admitted[#admitted + 1] = id
  admitted[#admitted + 1] = text
end
redis.call('PUBLISH', ARGV[4], '1')
return admitted
"""

# KEYS requests. ARGV old entry id, entry, deadline, group, wake channel. Answers the new entry id.
SUPERSEDE = """
redis.pcall('XACK', KEYS[1], ARGV[4], ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local id = redis.call('XADD', KEYS[1], '*', 'entry', ARGV[2], 'deadline_ms', ARGV[3])
redis.call('PUBLISH', ARGV[5], '1')
return id
"""

# KEYS requests. ARGV entry ids. Answers how many entries have each id.
STANDING = """
local found = {}
for i, id in ipairs(ARGV) do
  found[i] = #redis.call('XRANGE', KEYS[1], id, id)
end
return found
"""


class RedisQueue:
    """RequestQueue. `run` must be running. `blocking` is a client for reads that wait."""

    def __init__(
        self,
        *,
        redis: Redis,
        blocking: Redis,
        model: str,
        gateway_id: str,
        reply_to: bytes,
        max_requests: int,
        max_tokens: int,
    ) -> None:
        self._redis = redis
        self._blocking = blocking
        self._admit = self._redis.register_script(ADMIT)
        self._supersede = self._redis.register_script(SUPERSEDE)
        self._standing = self._redis.register_script(STANDING)
        self._model = model
        self._gateway_id = gateway_id
        self._reply_to = reply_to
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests = redis_keys.requests(model)
        self._wake = redis_keys.wake(model)
        self._cancels: deque[RequestId] = deque(maxlen=MAX_PENDING_CANCELS)
        self._cancel_news = asyncio.Event()
        self._available = False
        self._told_of_rights = False
        self._log = logs.get_logger("gateway.queue")

    @property
    def redis(self) -> Redis:
        """The client for commands that do not block."""
        return self._redis

    @property
    def available(self) -> bool:
        """Redis answered last time."""
        return self._available

    async def admit(self, requests: Sequence[QueuedRequest]) -> list[Admission]:
        """Adds all or none. Raises QueueFullError at the bound, UnavailableError without Redis."""
        if not self._available:
            raise _away()
        args: list[bytes | str | int | float] = [
            self._max_requests,
            self._max_tokens,
            sum(len(request.prompt_token_ids) for request in requests),
            self._wake,
        ]
        for request in requests:
            args.append(codec.encode_request(request, self._gateway_id, self._reply_to))
            args.append(request.life_ms)
        try:
            reply = await self._admit(
                keys=[self._requests, redis_keys.backlog(self._model)], args=args
            )
        except _FAILURES as error:
            self._set_available(False, error)
            raise _away() from error
        if reply[0] != 1:
            raise _full(reply[1].decode(), float(reply[2]), float(reply[3]))
        return [
            Admission(entry_id=entry_id.decode(), deadline_ms=int(deadline))
            for entry_id, deadline in zip(reply[1::2], reply[2::2], strict=True)
        ]

    async def supersede(self, old: Admission, request: QueuedRequest) -> Admission:
        """Replaces an entry by a later attempt. Never refused; raises UnavailableError."""
        entry = codec.encode_request(request, self._gateway_id, self._reply_to)
        args: list[bytes | str | int | float] = [
            old.entry_id,
            entry,
            old.deadline_ms,
            redis_keys.GROUP,
            self._wake,
        ]
        try:
            entry_id = await self._supersede(keys=[self._requests], args=args)
        except _FAILURES as error:
            raise _away() from error
        return Admission(entry_id=entry_id.decode(), deadline_ms=old.deadline_ms)

    async def standing(self, entry_ids: Sequence[str]) -> list[bool]:
        """Whether each of these entries is still there. Raises UnavailableError.

        Where Redis lets this user not ask, none: better computed twice than waited for in vain.
        """
        try:
            found = await self._standing(keys=[self._requests], args=list(entry_ids))
        except ResponseError as error:
            if not any(words in str(error) for words in _NO_RIGHT):
                raise _away() from error
            if not self._told_of_rights:
                self._told_of_rights = True
                self._log.error("Redis user may not read the queue: +xrange", reason=str(error))
            return [False] * len(entry_ids)
        except _FAILURES as error:
            raise _away() from error
        return [count > 0 for count in found]

    def cancel(self, request_id: RequestId) -> None:
        """Tells the scheduler. At the bound the oldest cancel is dropped.

        Its request then runs until its tokens come here, where nobody knows it, and is cancelled
        on the worker.
        """
        self._cancels.append(request_id)
        self._cancel_news.set()

    async def run(self, on_notice: Callable[[Notice], None]) -> None:
        """Registration, cancels and notices, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._announce())
            group.create_task(self._send_cancels())
            group.create_task(self._read_notices(on_notice))

    async def start(self) -> None:
        """The first registration. Raises the client's error if Redis is not there."""
        await redis_client.require_noeviction(self._redis)
        await self._announce_once()
        self._set_available(True)

    async def close(self) -> None:
        """Withdraws the registration, if Redis answers, and closes."""
        try:
            await redis_client.withdraw(self._redis, self._model, "gateway", self._gateway_id)
            await self._redis.delete(redis_keys.notices(self._model, self._gateway_id))
        except _FAILURES as error:
            self._log.warning("withdraw_failed", error=type(error).__name__)
        await self._redis.aclose()
        await self._blocking.aclose()

    async def flush(self, timeout_s: float) -> None:
        """Gives cancels a moment to leave before the end."""
        for _ in range(max(1, int(timeout_s / 0.05))):
            if not self._cancels:
                return
            await asyncio.sleep(0.05)

    async def _announce_once(self) -> None:
        record = codec.encode_gateway(self._gateway_id)
        await redis_client.announce(self._redis, self._model, "gateway", self._gateway_id, record)

    async def _announce(self) -> None:
        while True:
            try:
                await self._announce_once()
                self._set_available(True)
            except _FAILURES as error:
                self._set_available(False, error)
            await asyncio.sleep(ANNOUNCE_S)

    async def _send_cancels(self) -> None:
        while True:
            await self._cancel_news.wait()
            self._cancel_news.clear()
            while self._cancels:
                some = list(self._cancels)[:CANCELS_PER_ROUND]
                try:
                    async with self._redis.pipeline(transaction=True) as pipe:
                        for request_id in some:
                            entry = codec.encode_cancel(request_id)
                            # No deadline: a cancel is handled when read.
                            fields: Any = {"entry": entry, "deadline_ms": 0}
                            pipe.xadd(self._requests, fields)
                        pipe.publish(self._wake, "1")
                        await pipe.execute()
                except _FAILURES as error:
                    self._set_available(False, error)
                    await asyncio.sleep(ANNOUNCE_S)
                    continue
                sent = set(some)
                self._cancels = deque(
                    (i for i in self._cancels if i not in sent), maxlen=MAX_PENDING_CANCELS
                )

    async def _read_notices(self, on_notice: Callable[[Notice], None]) -> None:
        key = redis_keys.notices(self._model, self._gateway_id)
        last = b"0"
        while True:
            try:
                found = await self._blocking.xread(
                    {key: last}, count=NOTICES_PER_READ, block=redis_client.BLOCK_MS
                )
            except _FAILURES:
                await asyncio.sleep(RETRY_S)
                continue
            for entry_id, fields in _entries(found):
                last = entry_id
                try:
                    notice = codec.decode_notice(fields[b"notice"])
                except (codec.DecodeError, KeyError):
                    self._log.error("bad_notice", entry_id=entry_id.decode())
                    continue
                on_notice(notice)

    def _set_available(self, available: bool, error: BaseException | None = None) -> None:
        if available != self._available:
            self._available = available
            if available:
                self._log.info("redis_available")
            else:
                self._log.warning("redis_away", error=type(error).__name__)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries of the one stream read, in the client's older and newer reply forms."""
    if not found:
        return []
    streams = found.values() if isinstance(found, dict) else [pair[1] for pair in found]
    entries: list[tuple[bytes, dict[bytes, bytes]]] = []
    for stream in streams:
        nested = stream and isinstance(stream[0], list)
        entries += cast("list[tuple[bytes, dict[bytes, bytes]]]", stream[0] if nested else stream)
    return entries


def _away() -> UnavailableError:
    return UnavailableError("The request queue is not available now; try again.")


def _full(bound: str, waiting: float, rate: float) -> QueueFullError:
    retry = math.ceil(waiting / rate) if rate > 0 else 1
    return QueueFullError(
        f"The queue is full: its bound of {bound} is reached.", retry_after_s=min(max(retry, 1), 60)
    )
