"""The registries of workers and gateways, on a real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from deploy.local.ports import FreePorts
from servicekit import redis_client, redis_keys

pytestmark = pytest.mark.redis


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client on an empty server."""
    client = redis_client.connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


async def test_members_are_those_announced_and_not_withdrawn(redis: Redis) -> None:
    """Per model and kind."""
    await redis_client.announce(redis, "m", "worker", "w0", b"\x00one")
    await redis_client.announce(redis, "m", "worker", "w1", b"two")
    await redis_client.announce(redis, "m", "gateway", "g0", b"three")
    await redis_client.announce(redis, "other", "worker", "w9", b"four")
    assert await redis_client.members(redis, "m", "worker") == {"w0": b"\x00one", "w1": b"two"}
    assert await redis_client.members(redis, "m", "gateway") == {"g0": b"three"}
    await redis_client.withdraw(redis, "m", "worker", "w0")
    assert await redis_client.members(redis, "m", "worker") == {"w1": b"two"}
    assert await redis_client.members(redis, "nobody", "worker") == {}


async def test_a_renewal_replaces_the_record(redis: Redis) -> None:
    """And does not make a second member."""
    await redis_client.announce(redis, "m", "worker", "w0", b"one")
    await redis_client.announce(redis, "m", "worker", "w0", b"two")
    assert await redis_client.members(redis, "m", "worker") == {"w0": b"two"}
    assert await redis.zcard(redis_keys.registry("m", "worker")) == 1


async def test_a_member_that_is_not_renewed_expires(redis: Redis) -> None:
    """Its record first; its name goes with a later announcement."""
    await redis_client.announce(redis, "m", "worker", "w0", b"one")
    record = redis_keys.record("m", "worker", "w0")
    assert 0 < await redis.pttl(record) <= redis_client.REGISTRY_TTL_MS
    await redis.pexpire(record, 1)
    await asyncio.sleep(0.01)
    assert await redis_client.members(redis, "m", "worker") == {}


async def test_names_long_gone_are_swept(redis: Redis) -> None:
    """The set of names does not grow for ever."""
    await redis.zadd(redis_keys.registry("m", "worker"), {"old": 1})
    await redis_client.announce(redis, "m", "worker", "w0", b"one")
    assert await redis.zrange(redis_keys.registry("m", "worker"), 0, -1) == [b"w0"]


async def test_a_server_that_evicts_is_refused(redis: Redis) -> None:
    """A dropped key would be a lost request."""
    await redis_client.require_noeviction(redis)
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(RuntimeError, match="noeviction"):
            await redis_client.require_noeviction(redis)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")


async def test_a_missing_server_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hidden retries: the caller decides."""
    num_dialled = 0
    dial = asyncio.open_connection

    async def counting(*args: Any, **options: Any) -> Any:
        nonlocal num_dialled
        num_dialled += 1
        return await dial(*args, **options)

    monkeypatch.setattr(asyncio, "open_connection", counting)
    client = redis_client.connect(f"redis://127.0.0.1:{FreePorts().take()}/0")
    with pytest.raises(RedisConnectionError):
        await client.ping()
    assert num_dialled == 1
    await client.aclose()
