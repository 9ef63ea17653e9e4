"""The client's pool of connections, on a real server."""

import asyncio

import pytest

from servicekit import redis_client

pytestmark = pytest.mark.redis


async def test_more_calls_than_connections_wait_for_one(redis_url: str) -> None:
    """A burst of requests is no failure of Redis."""
    client = redis_client.connect(redis_url)
    count = 8 * redis_client.MAX_CONNECTIONS
    answers = await asyncio.gather(*(client.incr("burst") for _ in range(count)))
    assert sorted(answers) == list(range(1, count + 1))
    await client.aclose()


async def test_connections_closed_by_the_server_fail_no_call(redis_url: str) -> None:
    """As after a restart of Redis, when every connection of the pool is dead."""
    client = redis_client.connect(redis_url)
    await asyncio.gather(*(client.set(f"key-{i}", i) for i in range(8)))
    async with redis_client.connect(redis_url) as other:
        assert await other.client_kill_filter(_type="normal", skipme=True) >= 8
    # The loop must have seen the end of the streams, as it has in a service.
    readers = [pooled._reader for pooled in client.connection_pool._available_connections]
    async with asyncio.timeout(20):
        while not all(reader is None or reader.at_eof() for reader in readers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    answers = await asyncio.gather(*(client.get(f"key-{i}") for i in range(8)))
    assert answers == [str(i).encode() for i in range(8)]
    await client.aclose()
