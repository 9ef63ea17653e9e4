"""Redis connections and the registries of workers and gateways."""

import asyncio
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from servicekit import redis_keys

REGISTRY_TTL_MS = 5_000
BLOCK_MS = 2_000
MAX_CONNECTIONS = 16

ANNOUNCE = """
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], ms + ARGV[3], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ms - 60000)
redis.call('PEXPIRE', KEYS[2], 600000)
return 1
"""


class _Pool(BlockingConnectionPool):
    """Connects anew where the server has closed a connection that lay in the pool.

    redis-py's check misses that, so that each such connection would fail one call after a restart
    of the server; and to send a command again would not be safe.
    """

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Called before each use."""
        reader = connection._reader
        if reader is not None and (reader.at_eof() or reader.exception() is not None):
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)


class _Client(Redis):
    """Lets no cancellation be lost.

    asyncio.wait_for, which redis-py writes through, swallows a cancellation that comes as its
    inner call ends (before Python 3.12): the command would be answered and the task live on.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Called for each command outside pipelines."""
        task = asyncio.current_task()
        num_before = task.cancelling() if task is not None else 0
        answer = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError
        return answer


def connect(url: str, *, blocking: bool = False) -> Redis:
    """A client that answers bytes and fails fast.

    `blocking` gives one for reads with BLOCK (at most BLOCK_MS), whose socket must wait longer. A
    cancelled call drops its connection, so a late reply can't reach another caller. Calls beyond
    MAX_CONNECTIONS wait up to 2 s for one: many requests at once are no failure of Redis.
    """
    pool = _Pool.from_url(
        url,
        timeout=2.0,
        socket_timeout=BLOCK_MS / 1000 + 3 if blocking else 2.0,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
        max_connections=MAX_CONNECTIONS,
    )
    return _Client.from_pool(pool)


async def require_noeviction(redis: Redis) -> None:
    """Raises RuntimeError if the server may drop keys under memory pressure."""
    policy = (await redis.config_get("maxmemory-policy")).get("maxmemory-policy", "noeviction")
    if policy not in ("noeviction", b"noeviction"):
        raise RuntimeError(f"Redis maxmemory-policy is {policy!r}; Quire needs noeviction")


async def announce(redis: Redis, model: str, kind: str, member_id: str, record: bytes) -> None:
    """Sets or renews a registry member for REGISTRY_TTL_MS. Call every second."""
    keys = redis_keys.record(model, kind, member_id), redis_keys.registry(model, kind)
    await redis.eval(ANNOUNCE, 2, *keys, member_id, record, REGISTRY_TTL_MS)


async def withdraw(redis: Redis, model: str, kind: str, member_id: str) -> None:
    """Removes a registry member."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(redis_keys.record(model, kind, member_id))
        pipe.zrem(redis_keys.registry(model, kind), member_id)
        await pipe.execute()


async def members(redis: Redis, model: str, kind: str) -> dict[str, bytes]:
    """Records of the live members by id."""
    found = cast("list[bytes]", await redis.zrange(redis_keys.registry(model, kind), 0, -1))
    if not found:
        return {}
    ids = [member.decode() for member in found]
    values = cast(
        "list[bytes | None]",
        await redis.mget([redis_keys.record(model, kind, i) for i in ids]),
    )
    return {i: value for i, value in zip(ids, values, strict=True) if value is not None}
