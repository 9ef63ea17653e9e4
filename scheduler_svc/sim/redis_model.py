"""Redis as Quire uses it: a model of the server. Its clients are in redis_clients.py.

Modelled: strings with a time to live, streams with one consumer group, sorted sets and hashes as
far as the registries and the backlog need them, a channel, the clock (which can jump), and every
script by a function of the same effect. Scripts are found by their text, so that one that is
changed without its model is a KeyError and no silent difference.

A key that has run out is gone at the next look at it. `saved` is what the server's file holds at a
moment; a server that dies comes back with that (`forget`). Not modelled: a stream's cap is exact,
which Redis' own is not; ids of entries go on where they were, though Redis may give one anew that
it has lost if its clock has gone back meanwhile, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any

from redis.exceptions import ResponseError

from gateway.adapters import queue_redis
from scheduler_svc.adapters import redis_scripts
from scheduler_svc.sim.loop import VirtualLoop
from scheduler_svc.sim.redis_trouble import Outage, Trouble
from servicekit import redis_client

EPOCH_MS = 1_800_000_000_000
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


@dataclass(frozen=True)
class Saved:
    """All keys of a moment."""

    until_ms: dict[str, int]
    strings: dict[str, tuple[bytes, int | None]]
    streams: dict[str, _Stream]
    members: dict[str, dict[str, int]]
    hashes: dict[str, dict[str, str]]


class RedisServer:
    """The data and the commands; nothing here waits."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.jumped_ms = 0
        self.trouble = Trouble()
        # Connections of an earlier life are broken.
        self.num_lives = 1
        # Until when keys other than strings live, if not for ever.
        self._until_ms: dict[str, int] = {}
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
            queue_redis.STANDING: self._standing,
            redis_client.ANNOUNCE: self._announce,
        }

    @property
    def now_ms(self) -> int:
        """Of the server's clock."""
        return EPOCH_MS + self.jumped_ms + int(self.loop.time() * 1000)

    def jump(self, seconds: int) -> int:
        """The clock jumps. Returns how many keys that lived have run out by it."""
        before_ms = self.now_ms
        self.jumped_ms += seconds * 1000
        lives = [until_ms for _, until_ms in self._strings.values() if until_ms is not None]
        lives += self._until_ms.values()
        return sum(before_ms < until_ms <= self.now_ms for until_ms in lives)

    def go(self, outage: Outage) -> None:
        """An outage begins; who waits for an entry is told."""
        self.trouble.begin(outage)
        for stream in self._streams.values():
            _wake(stream)

    def saved(self) -> Saved:
        """What the file holds now."""
        return Saved(
            until_ms=dict(self._until_ms),
            strings=dict(self._strings),
            streams={
                key: replace(of, entries=dict(of.entries), pending=dict(of.pending), waiters=[])
                for key, of in self._streams.items()
            },
            members={key: dict(of) for key, of in self._members.items()},
            hashes={key: dict(of) for key, of in self._hashes.items()},
        )

    def forget(self, saved: Saved) -> tuple[list[list[bytes]], int]:
        """Dies, and will know only what was saved, which is the server's from now on.

        Returns the entries of streams that are lost by it, and how many come back that were gone.
        """
        self.trouble.reset()
        self.num_lives += 1
        for event in chain.from_iterable(self._channels.values()):
            event.set()
        lost: list[list[bytes]] = []
        num_back = 0
        for key in {**self._streams, **saved.streams}:
            now, old = self._streams.get(key, _Stream()), saved.streams.setdefault(key, _Stream())
            lost += [flat for i, flat in now.entries.items() if i not in old.entries]
            num_back += len(old.entries.keys() - now.entries.keys())
            old.last_id, old.waiters = max(now.last_id, old.last_id), now.waiters
        self._until_ms, self._strings, self._streams, self._members, self._hashes = (
            saved.until_ms, saved.strings, saved.streams, saved.members, saved.hashes,
        )  # fmt: skip
        return lost, num_back

    def num_entries(self, key: str) -> int:
        """Length of a stream."""
        stream = self._stream(key)
        return len(stream.entries) if stream else 0

    def num_pending(self, key: str) -> int:
        """Entries that the group has read and nobody has acknowledged."""
        stream = self._stream(key)
        return len(stream.pending) if stream else 0

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

    # The life of other keys

    def _live_for(self, key: str, ttl_ms: int) -> None:
        self._until_ms[key] = self.now_ms + ttl_ms

    def _expire(self, key: str) -> None:
        """Drops a key that has run out; who waits for a stream's next entry goes on waiting."""
        if self._until_ms.get(key, self.now_ms + 1) > self.now_ms:
            return
        del self._until_ms[key]
        self._hashes.pop(key, None)
        self._members.pop(key, None)
        if key in self._streams:
            self._streams[key] = _Stream(waiters=self._streams[key].waiters)

    def _stream(self, key: str) -> _Stream | None:
        self._expire(key)
        return self._streams.get(key)

    # Registries, the backlog, the channel

    def zrange(self, key: str) -> list[bytes]:
        """Members by expiry."""
        self._expire(key)
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
        self._expire(key)
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
        stream = self._stream(key)
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

    def _trim(self, key: str, max_len: int) -> None:
        entries = self._streams[key].entries
        for entry_id in list(entries)[: max(len(entries) - max_len, 0)]:
            del entries[entry_id]

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
        count, after = int(args[3]), text(args[4])
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
            key = keys[int(index) - 1]
            self.xadd(key, ["notice", notice])
            self._trim(key, int(args[2]))
            self._live_for(key, int(args[3]))
        if not count:
            raise ResponseError("wrong number of arguments for 'xack' command")
        self._remove(keys[1], args[5 : 5 + count])
        return [1]

    def _backlog(self, keys: list[str], args: list[Any]) -> list[Any]:
        if (refusal := self._refusal(keys[0], args[0])) is not None:
            return refusal
        names = ("requests", "tokens", "tokens_per_s")
        self._hashes[keys[1]] = dict(zip(names, map(text, args[1:4]), strict=True))
        self._live_for(keys[1], int(args[4]))
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
        self._expire(keys[1])
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
        self.publish(text(args[3]))
        return admitted

    def _supersede(self, keys: list[str], args: list[Any]) -> bytes:
        self._remove(keys[0], args[:1])
        new = self.xadd(keys[0], ["entry", args[1], "deadline_ms", str(args[2])])
        self.publish(text(args[4]))
        return new

    def _standing(self, keys: list[str], args: list[Any]) -> list[int]:
        stream = self._stream(keys[0])
        return [int(stream is not None and _id(entry_id) in stream.entries) for entry_id in args]

    def _announce(self, keys: list[str], args: list[Any]) -> int:
        member, record, ttl_ms = text(args[0]), args[1], int(args[2])
        self.set(keys[0], record, ttl_ms)
        self._expire(keys[1])
        members = self._members.setdefault(keys[1], {})
        members[member] = self.now_ms + ttl_ms
        for old in [m for m, until_ms in members.items() if until_ms <= self.now_ms - 60_000]:
            del members[old]
        self._live_for(keys[1], 600_000)
        return 1


def _wake(stream: _Stream) -> None:
    waiters, stream.waiters = stream.waiters, []
    for waiter in waiters:
        resolve(waiter)


def resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def text(value: Any) -> str:
    """As Redis' answers are read."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _id(value: Any) -> _StreamId:
    milliseconds, _, number = text(value).partition("-")
    return int(milliseconds), int(number or 0)


def _id_bytes(value: _StreamId) -> bytes:
    return b"%d-%d" % value
