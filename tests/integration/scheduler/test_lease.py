"""Leadership in a real server: one leader, rising epochs, and what an outage does to it."""

import asyncio

import pytest
from redis.asyncio import Redis

from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.lease import LeaderLease
from scheduler_svc.adapters.redis_access import DeposedError, RedisHealth
from servicekit import redis_keys
from tests.integration.scheduler.harness import MODEL, RedisServer

pytestmark = pytest.mark.redis


def lease(redis: Redis, ttl_s: float = 6.0) -> LeaderLease:
    """A candidate, by default one that stands still for seconds and still renews in time."""
    return LeaderLease(redis, model=MODEL, ttl_s=ttl_s, health=RedisHealth(MonotonicClock()))


async def stored_epoch(redis: Redis) -> int:
    """The fence as scripts see it."""
    return int(await redis.get(redis_keys.epoch(MODEL)) or 0)


async def redis_ms(redis: Redis) -> int:
    """The server's time."""
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def renewed(redis: Redis) -> None:
    """Waits until the lease has longer to run than a moment ago."""
    key = redis_keys.lease(MODEL)
    before_ms = left_ms = await redis.pttl(key)
    async with asyncio.timeout(20):
        while left_ms <= before_ms:
            await asyncio.sleep(0.02)
            before_ms, left_ms = left_ms, await redis.pttl(key)


async def test_one_leads_and_the_next_has_a_higher_epoch(any_redis: Redis) -> None:
    first, second = lease(any_redis), lease(any_redis)
    before_ms = await redis_ms(any_redis)
    epoch = await first.acquire()
    assert before_ms <= epoch <= await redis_ms(any_redis)
    assert await stored_epoch(any_redis) == epoch
    waiting = asyncio.get_running_loop().create_task(second.acquire())
    keeping = asyncio.get_running_loop().create_task(first.keep(epoch))
    await renewed(any_redis)
    assert not waiting.done()
    keeping.cancel()
    await first.release()
    holder = await any_redis.get(redis_keys.lease(MODEL))
    assert holder != first.holder.encode(), "released: no need to wait for the TTL"
    assert await asyncio.wait_for(waiting, 20) > epoch


async def test_an_epoch_exceeds_the_stored_one_whatever_the_clock_says(any_redis: Redis) -> None:
    future = await redis_ms(any_redis) + 10**9
    await any_redis.set(redis_keys.epoch(MODEL), future)
    assert await lease(any_redis).acquire() == future + 1
    assert await stored_epoch(any_redis) == future + 1


async def test_a_leader_that_slept_finds_another_one(any_redis: Redis) -> None:
    first, second = lease(any_redis, 0.3), lease(any_redis)
    epoch = await first.acquire()
    await second.acquire()  # after the TTL
    with pytest.raises(DeposedError):
        await first.keep(epoch)
    await second.release()
    with pytest.raises(DeposedError):
        await first.keep(epoch)  # the lease is free, but somebody has led since


async def test_a_release_by_another_does_nothing(any_redis: Redis) -> None:
    first, second = lease(any_redis), lease(any_redis)
    await first.acquire()
    await second.release()
    assert await any_redis.get(redis_keys.lease(MODEL)) == first.holder.encode()


@pytest.mark.parametrize("stored", ["kept", "older", "lost"])
async def test_after_an_outage_the_lease_is_taken_back_with_its_epoch(
    server: RedisServer, redis: Redis, stored: str
) -> None:
    held = lease(redis, 0.3)
    epoch = await held.acquire()
    keeping = asyncio.get_running_loop().create_task(held.keep(epoch))
    server.kill()
    await asyncio.sleep(0.5)
    await server.start()
    if stored == "lost":
        await redis.delete(redis_keys.epoch(MODEL))
    elif stored == "older":
        await redis.set(redis_keys.epoch(MODEL), epoch - 5)
    # Last: what takes it back has seen the epoch.
    await redis.delete(redis_keys.lease(MODEL))
    async with asyncio.timeout(20):
        while await redis.get(redis_keys.lease(MODEL)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await stored_epoch(redis) == epoch
    assert not keeping.done()
    keeping.cancel()


async def test_stepping_over_an_epoch_that_a_worker_knows(any_redis: Redis) -> None:
    held = lease(any_redis)
    epoch = await held.acquire()
    await held.step_over(epoch, epoch + 10**9)
    assert await held.acquire() == epoch + 10**9 + 1


async def test_no_stepping_over_while_another_leads(any_redis: Redis) -> None:
    first, second = lease(any_redis, 0.2), lease(any_redis)
    epoch = await first.acquire()
    higher = await second.acquire()
    with pytest.raises(DeposedError):
        await first.step_over(epoch, higher)
