"""Clients of the simulated Redis: what redis.asyncio.Redis is to Quire, each for one process.

A command takes a moment and is then done at once, unless something is wrong (redis_trouble.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scheduler_svc.sim.redis_model import RedisServer, resolve, text
from scheduler_svc.sim.redis_trouble import HANG_S, Held, Outage

# Of the commands that a client gives up while the server hangs, those that it does when it wakes.
LATE_SHARE = 0.5


class RedisClient:
    """What redis.asyncio.Redis is to Quire, for one process."""

    def __init__(self, server: RedisServer, process: str) -> None:
        self._server = server
        self._process = process

    async def _command(self, function: Callable[..., Any], *args: Any) -> Any:
        server = self._server
        await asyncio.sleep(0.0002 + 0.0008 * server.random.random() ** 3)
        outage = server.trouble.outage_of(self._process)
        if outage is not None:
            outage.num_hit += 1
            if outage.hangs:
                return await self._wait(outage, function, args)
            raise RedisConnectionError("Connection refused")
        answer = function(*args)
        if server.trouble.takes_answer():
            raise RedisConnectionError("Connection closed by server")
        return answer

    async def _wait(
        self, outage: Outage, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        server = self._server
        stays = server.random.random() < LATE_SHARE
        held = Held(function, args, server.loop.create_future(), stays)
        outage.held.append(held)
        try:
            async with asyncio.timeout(HANG_S):
                return await held.answer
        except TimeoutError:
            raise RedisTimeoutError("Timeout reading from socket") from None
        finally:
            held.given_up = True

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
            found = await self._command(server.after, key, text(last), count)
            left_s = until_s - server.loop.time()
            if found or left_s <= 0:
                break
            waiter = server.waiter(key)
            timer = server.loop.call_later(left_s, resolve, waiter)
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
        # In which life of the server it was connected.
        self._life = server.num_lives

    async def subscribe(self, channel: str) -> None:
        """Raises while the server is away."""
        await asyncio.sleep(0.0005)
        self._life = self._server.num_lives
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
        outage = self._server.trouble.outage_of(self._process)
        if outage is not None:
            outage.num_hit += 1
            raise RedisConnectionError("Connection refused")
        if self._life != self._server.num_lives:
            raise RedisConnectionError("Connection closed by server")


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
