"""Redis as Quire uses it: a model of the server, and clients that stand for redis.asyncio.Redis.

Modelled: strings with a time to live, streams with one consumer group, sorted sets and hashes as
far as the registries and the backlog need them, a channel, the clock (which can jump), and every
script by a function of the same effect. Scripts are found by their text, so that one that is
changed without its model is a KeyError and no silent difference.

A command takes a moment and is then done at once. While the server is away commands fail at once or
hang until their time is over, and a command may be done although its answer is lost. Not modelled:
a server that comes back without its last writes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.adapters import queue_redis
from scheduler_svc.adapters import redis_scripts
from scheduler_svc.sim.loop import VirtualLoop
from servicekit import redis_client

EPOCH_MS = 1_800_000_000_000
HANG_S = 2.0
_StreamId = tuple[int, int]


@dataclass
class _Stream:
    """Entries in order; the one group's pending list and where it stands."""

    entries: dict[_StreamId, list[bytes]] = field(default_factory=dict)
    last_id: _StreamId = (0, 0)
    has_group: bool = False
    delivered: _StreamId = (0, 0)
    pending: dict[_StreamId, None] = field(default_factory=dict)
    waiters: list["asyncio.Future[None]"] = field(default_factory=list)


class RedisServer:
    """The data and the commands; nothing here waits."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.jumped_ms = 0
        self.away = False
        self.hangs = False
        # Names of processes whose commands fail, and how many answers are to get lost.
        self.cut_off: set[str] = set()
        self.num_answers_to_lose = 0
        self.num_failed = 0
        self._strings: dict[str, tuple[bytes, int | None]] = {}
        self._streams: dict[str, _Stream] = {}
        self._members: dict[str, dict[str, int]] = {}
        self._hashes: dict[str, dict[str, str]] = {}
        self._channels: dict[str, list[asyncio.Event]] = {}
        self._scripts: dict[str, Callable[[list[str], list[Any]], Any]] = {
            redis_scripts.READ: self._read,
            redis_scripts.FINISH: self._finish,
            redis_scripts.BACKLOG: self._backlog,
            redis_scripts.ACQUIRE: self._acquire,
            redis_scripts.RENEW: self._renew,
            redis_scripts.STEP_OVER: self._step_over,
            redis_scripts.RELEASE: self._release,
            queue_redis.ADMIT: self._admit,
            queue_redis.SUPERSEDE: self._supersede,
            redis_client.ANNOUNCE: self._announce,
        }

    @property
    def now_ms(self) -> int:
        """Of the server's clock."""
        return EPOCH_MS + self.jumped_ms + int(self.loop.time() * 1000)

    def fails(self, client: str) -> bool:
        """A command of this process would fail now."""
        return self.away or client in self.cut_off

    def go(self, *, hangs: bool) -> None:
        """Away; who waits for an answer is told."""
        self.away, self.hangs = True, hangs
        for stream in self._streams.values():
            _wake(stream)

    def num_entries(self, key: str) -> int:
        """Length of a stream."""
        return len(self._streams[key].entries) if key in self._streams else 0

    def num_pending(self, key: str) -> int:
        """Entries that the group has read and nobody has acknowledged."""
        return len(self._streams[key].pending) if key in self._streams else 0

    def eval(self, script: str, num_keys: int, *args: Any) -> Any:
        """Runs the model of a script."""
        return self._scripts[script]([str(k) for k in args[:num_keys]], list(args[num_keys:]))

    # Strings

    def get(self, key: str) -> bytes | None:
        """None if it is not there or has run out."""
        value, until_ms = self._strings.get(key, (None, None))
        if until_ms is not None and until_ms <= self.now_ms:
            del self._strings[key]
            return None
        return value

    def set(self, key: str, value: bytes | str, ttl_ms: int | None = None) -> None:
        """Sets it, with a time to live."""
        self._strings[key] = _bytes(value), None if ttl_ms is None else self.now_ms + ttl_ms

    def delete(self, key: str) -> int:
        """Also a stream."""
        self._streams.pop(key, None)
        return int(self._strings.pop(key, None) is not None)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """All of them."""
        return [self.get(key) for key in keys]

    # Registries, the backlog, the channel

    def zrange(self, key: str) -> list[bytes]:
        """Members by expiry."""
        members = self._members.get(key, {})
        return [name.encode() for name in sorted(members, key=lambda m: (members[m], m))]

    def zrem(self, key: str, member: str) -> None:
        """One member less."""
        self._members.get(key, {}).pop(member, None)

    def publish(self, channel: str) -> None:
        """Wakes who listens."""
        for event in self._channels.get(channel, ()):
            event.set()

    def subscribe(self, channel: str) -> asyncio.Event:
        """Set at each message."""
        event = asyncio.Event()
        self._channels.setdefault(channel, []).append(event)
        return event

    def unsubscribe(self, channel: str, event: asyncio.Event) -> None:
        """No more."""
        self._channels[channel].remove(event)

    # Streams

    def xgroup_create(self, key: str) -> None:
        """From the stream's begin; the stream is made."""
        stream = self._streams.setdefault(key, _Stream())
        if stream.has_group:
            raise ResponseError("BUSYGROUP Consumer Group name already exists")
        stream.has_group = True

    def xadd(self, key: str, fields: list[Any]) -> bytes:
        """The new entry's id."""
        stream = self._streams.setdefault(key, _Stream())
        last_ms, last_number = stream.last_id
        now_ms = self.now_ms
        new = (now_ms, 0) if now_ms > last_ms else (last_ms, last_number + 1)
        stream.last_id = new
        stream.entries[new] = [_bytes(value) for value in fields]
        _wake(stream)
        return _id_bytes(new)

    def after(self, key: str, last: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries after an id."""
        stream = self._streams.get(key)
        if stream is None:
            return []
        after = _id(last)
        new = [(i, flat) for i, flat in stream.entries.items() if i > after][:count]
        return [(_id_bytes(i), dict(zip(f[::2], f[1::2], strict=True))) for i, f in new]

    def waiter(self, key: str) -> "asyncio.Future[None]":
        """Done at the stream's next entry, or when the server goes."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._streams.setdefault(key, _Stream()).waiters.append(future)
        return future

    def _remove(self, key: str, ids: Sequence[Any]) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            for entry_id in ids:
                stream.pending.pop(_id(entry_id), None)
                stream.entries.pop(_id(entry_id), None)

    # Scripts of the scheduler

    def _refusal(self, key: str, epoch: Any) -> list[Any] | None:
        stored = self.get(key)
        return None if stored == _bytes(epoch) else [0, stored or b""]

    def _read(self, keys: list[str], args: list[Any]) -> list[Any]:
        if (refusal := self._refusal(keys[0], args[0])) is not None:
            return refusal
        stream = self._streams.get(keys[1])
        if stream is None or not stream.has_group:
            raise ResponseError("NOGROUP No such key or consumer group")
        count, after = int(args[3]), _text(args[4])
        if after == ">":
            ids = [i for i in stream.entries if i > stream.delivered][:count]
            stream.pending.update(dict.fromkeys(ids))
            stream.delivered = ids[-1] if ids else stream.delivered
        else:
            ids = sorted(i for i in stream.pending if i > _id(after))[:count]
        found = [[_id_bytes(i), stream.entries.get(i)] for i in ids]
        return [1, self.now_ms // 1000, self.now_ms % 1000 * 1000, found]

    def _finish(self, keys: list[str], args: list[Any]) -> list[Any]:
        if (refusal := self._refusal(keys[0], args[0])) is not None:
            return refusal
        count = int(args[4])
        notices = args[5 + count :]
        for index, notice in zip(notices[::2], notices[1::2], strict=True):
            self.xadd(keys[int(index) - 1], ["notice", notice])
        self._remove(keys[1], args[5 : 5 + count])
        return [1]

    def _backlog(self, keys: list[str], args: list[Any]) -> list[Any]:
        if (refusal := self._refusal(keys[0], args[0])) is not None:
            return refusal
        names = ("requests", "tokens", "tokens_per_s")
        self._hashes[keys[1]] = dict(zip(names, map(_text, args[1:4]), strict=True))
        return [1]

    def _held_by_another(self, lease: str, holder: Any) -> bool:
        held = self.get(lease)
        return held is not None and held != _bytes(holder)

    def _stored_epoch(self, key: str) -> int:
        return int(self.get(key) or b"0")

    def _acquire(self, keys: list[str], args: list[Any]) -> bytes | None:
        if self._held_by_another(keys[0], args[0]):
            return None
        epoch = str(max(self._stored_epoch(keys[1]) + 1, self.now_ms))
        self.set(keys[0], args[0], int(args[1]))
        self.set(keys[1], epoch)
        return epoch.encode()

    def _renew(self, keys: list[str], args: list[Any]) -> int:
        stored, epoch = self._stored_epoch(keys[1]), int(args[2])
        if self._held_by_another(keys[0], args[0]) or stored > epoch:
            return 0
        self.set(keys[0], args[0], int(args[1]))
        if stored < epoch:
            self.set(keys[1], str(epoch))
        return 1

    def _step_over(self, keys: list[str], args: list[Any]) -> int:
        if self._held_by_another(keys[0], args[0]) or self._stored_epoch(keys[1]) > int(args[1]):
            return 0
        self.set(keys[1], str(args[2]))
        self.delete(keys[0])
        return 1

    def _release(self, keys: list[str], args: list[Any]) -> int:
        if self.get(keys[0]) != _bytes(args[0]):
            return 0
        return self.delete(keys[0])

    # Scripts of the gateway and of the registries

    def _admit(self, keys: list[str], args: list[Any]) -> list[Any]:
        backlog = self._hashes.get(keys[1], {})
        waiting, rate = backlog.get("tokens", "0"), backlog.get("tokens_per_s", "0")
        if self.num_entries(keys[0]) + (len(args) - 4) // 2 > int(args[0]):
            return [0, b"requests", waiting.encode(), rate.encode()]
        if int(waiting) + int(args[2]) > int(args[1]):
            return [0, b"tokens", waiting.encode(), rate.encode()]
        admitted: list[Any] = [1]
        for entry, life_ms in zip(args[4::2], args[5::2], strict=True):
            deadline = str(self.now_ms + int(life_ms)).encode()
            admitted += [self.xadd(keys[0], ["entry", entry, "deadline_ms", deadline]), deadline]
        self.publish(_text(args[3]))
        return admitted

    def _supersede(self, keys: list[str], args: list[Any]) -> bytes:
        self._remove(keys[0], args[:1])
        new = self.xadd(keys[0], ["entry", args[1], "deadline_ms", str(args[2])])
        self.publish(_text(args[4]))
        return new

    def _announce(self, keys: list[str], args: list[Any]) -> int:
        member, record, ttl_ms = _text(args[0]), args[1], int(args[2])
        self.set(keys[0], record, ttl_ms)
        members = self._members.setdefault(keys[1], {})
        members[member] = self.now_ms + ttl_ms
        for old in [m for m, until_ms in members.items() if until_ms <= self.now_ms - 60_000]:
            del members[old]
        return 1


class RedisClient:
    """What redis.asyncio.Redis is to Quire, for one process."""

    def __init__(self, server: RedisServer, process: str) -> None:
        self._server = server
        self._process = process

    async def _command(self, function: Callable[..., Any], *args: Any) -> Any:
        server = self._server
        await asyncio.sleep(0.0002 + 0.0008 * server.random.random() ** 3)
        if server.fails(self._process):
            server.num_failed += 1
            if server.hangs:
                await asyncio.sleep(HANG_S)
                raise RedisTimeoutError("Timeout reading from socket")
            raise RedisConnectionError("Connection refused")
        answer = function(*args)
        if server.num_answers_to_lose:
            server.num_answers_to_lose -= 1
            server.num_failed += 1
            raise RedisConnectionError("Connection closed by server")
        return answer

    async def eval(self, script: str, num_keys: int, *args: Any) -> Any:
        """A script."""
        return await self._command(self._server.eval, script, num_keys, *args)

    def register_script(self, script: str) -> Callable[..., Any]:
        """A script to call with `keys` and `args`."""

        async def call(keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self.eval(script, len(keys), *keys, *args)

        return call

    async def config_get(self, _: str) -> dict[str, str]:
        """Nothing is ever evicted."""
        return dict(await self._command(lambda: {"maxmemory-policy": "noeviction"}))

    async def xgroup_create(self, key: str, _: str, **__: Any) -> None:
        """The group."""
        await self._command(self._server.xgroup_create, key)

    async def zrange(self, key: str, _: int, __: int) -> Any:
        """All members."""
        return await self._command(self._server.zrange, key)

    async def mget(self, keys: Sequence[str]) -> Any:
        """Values."""
        return await self._command(self._server.mget, keys)

    async def delete(self, key: str) -> Any:
        """One key less."""
        return await self._command(self._server.delete, key)

    async def xread(self, streams: dict[str, Any], count: int, block: int) -> Any:
        """New entries of one stream, within `block` milliseconds."""
        [(key, last)] = streams.items()
        server = self._server
        found: list[Any] = []
        until_s = server.loop.time() + block / 1000
        while not found:
            found = await self._command(server.after, key, _text(last), count)
            left_s = until_s - server.loop.time()
            if found or left_s <= 0:
                break
            waiter = server.waiter(key)
            timer = server.loop.call_later(left_s, _resolve, waiter)
            await waiter
            timer.cancel()
        return [[key.encode(), found]] if found else []

    def pubsub(self, **_: Any) -> "_PubSub":
        """A subscription."""
        return _PubSub(self._server, self._process)

    def pipeline(self, **_: Any) -> "_Pipeline":
        """Commands that are done together."""
        return _Pipeline(self)

    async def aclose(self) -> None:
        """There is nothing to close."""


class _PubSub:
    """Of one channel."""

    def __init__(self, server: RedisServer, process: str) -> None:
        self._server = server
        self._process = process
        self._channel = ""
        self._event: asyncio.Event | None = None

    async def subscribe(self, channel: str) -> None:
        """Raises while the server is away."""
        await asyncio.sleep(0.0005)
        self._check()
        self._channel, self._event = channel, self._server.subscribe(channel)

    async def get_message(self, timeout: float) -> bool | None:
        """True at a message, None without one."""
        assert self._event is not None
        self._check()
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            self._check()
            return None
        self._check()
        self._event.clear()
        return True

    async def aclose(self) -> None:
        """No more messages."""
        if self._event is not None:
            self._server.unsubscribe(self._channel, self._event)
            self._event = None

    def _check(self) -> None:
        if self._server.fails(self._process):
            raise RedisConnectionError("Connection refused")


class _Pipeline:
    """Collects commands."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._commands: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    async def __aenter__(self) -> "_Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def xadd(self, key: str, fields: dict[str, Any]) -> None:
        """An entry."""
        flat = [part for pair in fields.items() for part in pair]
        self._commands.append((self._client._server.xadd, (key, flat)))

    def publish(self, channel: str, _: str) -> None:
        """A message."""
        self._commands.append((self._client._server.publish, (channel,)))

    def delete(self, key: str) -> None:
        """One key less."""
        self._commands.append((self._client._server.delete, (key,)))

    def zrem(self, key: str, member: str) -> None:
        """One member less."""
        self._commands.append((self._client._server.zrem, (key, member)))

    async def execute(self) -> None:
        """All or nothing."""
        await self._client._command(self._all)

    def _all(self) -> None:
        for function, args in self._commands:
            function(*args)


def _wake(stream: _Stream) -> None:
    waiters, stream.waiters = stream.waiters, []
    for waiter in waiters:
        _resolve(waiter)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _id(value: Any) -> _StreamId:
    milliseconds, _, number = _text(value).partition("-")
    return int(milliseconds), int(number or 0)


def _id_bytes(value: _StreamId) -> bytes:
    return b"%d-%d" % value
