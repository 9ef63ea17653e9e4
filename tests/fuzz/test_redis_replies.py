"""A call of Redis that is cancelled must not leave its answer to the next one.

redis-py once did: the reply stayed in the pooled connection, and another user was given it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from servicekit import redis_client
from tests.integration.scheduler.harness import redis_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]
NUM_CALLS, NUM_CALLERS, CANCEL_SHARE = 10_000, 32, 0.5
# A call that waits long for its reply, or for a connection, is none that was given a wrong one.
PATIENT = "?socket_timeout=60&socket_connect_timeout=60&timeout=60"
# A little slower than a plain command, so that a cancellation finds calls at every stage.
_ECHO = "for i = 1, 300 do redis.call('PING') end return ARGV[1]"


async def test_each_reply_is_the_one_asked_for() -> None:
    """Ten thousand calls, scripts and pipelines, half of them cancelled at any moment."""
    chance = random.Random(30)
    ends: Counter[str] = Counter()
    async with redis_server() as server:
        client = redis_client.connect(server.url + PATIENT)
        echo = client.register_script(_ECHO)
        numbers = iter(range(NUM_CALLS))

        async def by_script(name: bytes) -> Any:
            return await echo(keys=[], args=[name])

        async def by_command(name: bytes) -> Any:
            return await client.echo(name)

        async def by_pipeline(name: bytes) -> Any:
            async with client.pipeline(transaction=True) as pipe:
                pipe.echo(name)
                pipe.echo(b"second")
                return (await pipe.execute())[0]

        async def call(how: Callable[[bytes], Awaitable[Any]], name: bytes) -> None:
            task = asyncio.ensure_future(how(name))
            if chance.random() < CANCEL_SHARE:
                for _ in range(chance.randrange(12)):
                    await asyncio.sleep(0)
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() / 500)
                task.cancel()
            end: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(end, asyncio.CancelledError):
                ends["cancelled"] += 1
                return
            assert end == name, f"{name!r} was answered with {end!r}"
            ends["answered"] += 1

        async def caller() -> None:
            for number in numbers:
                how = chance.choice((by_script, by_command, by_pipeline))
                await call(how, b"id-%d" % number)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(caller())
        await _is_well(client)
        await client.aclose()
    assert ends.total() == NUM_CALLS
    # Both happened often enough to mean something.
    assert min(ends["cancelled"], ends["answered"]) > NUM_CALLS / 10


async def _is_well(client: Redis) -> None:
    """No connection of the pool holds an answer to something else."""
    names = [b"after-%d" % i for i in range(4 * redis_client.MAX_CONNECTIONS)]
    assert await asyncio.gather(*(client.echo(name) for name in names)) == names
