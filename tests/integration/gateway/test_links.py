"""One link is cut, or one process dies, at one moment of a request's life."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from servicekit import redis_client, redis_keys
from tests.integration.gateway.conftest import MODEL, World, world_of
from tests.integration.gateway.fakes import STOP
from tests.integration.gateway.test_failures import half_way, process_of, tokens_of
from tests.integration.link import Link, link_to
from tests.integration.scheduler.harness import PATIENT, RedisServer
from tests.unit.gateway.model_folder import model_folder

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def cut_off(server: RedisServer) -> AsyncIterator[tuple[World, Link]]:
    """A gateway with a link of its own to Redis: workers and scheduler have another."""
    async with link_to(server.port) as link:
        url = f"redis://127.0.0.1:{link.port}/0"
        async with world_of(server, redis_url=url + PATIENT) as world:
            await world.ready()
            yield world, link
            link.mend()
            await world.until(lambda: world.gateway.queue.available)
            assert world.gateway.engine.num_live == 0


async def cut(world: World, link: Link) -> None:
    """And wait until the gateway has seen it."""
    link.cut()
    await world.until(lambda: not world.gateway.queue.available)


async def test_a_claimed_request_does_not_need_its_gateways_redis(server: RedisServer) -> None:
    """The scheduler has it, its tokens come from the worker: all of them, and the end."""
    async with cut_off(server) as (world, link):
        body = {"prompt": "x", "max_tokens": 50, "return_token_ids": True}
        posting = world.client.post("/v1/completions", json=body)
        task = asyncio.get_running_loop().create_task(posting)
        request = await world.request()
        await cut(world, link)
        refused = await world.client.post("/v1/completions", json=body)
        assert refused.status_code == 503, "a new one needs it"
        await world.say(request, "abc", finish=STOP)
        assert await tokens_of(task) == "abc"
        assert len(world.scheduler.requests) == 1


async def test_an_end_does_not_need_its_gateways_redis(server: RedisServer) -> None:
    async with cut_off(server) as (world, link), half_way(world) as (request, task):
        await cut(world, link)
        await world.say(request, at=2, finish=STOP)
        assert await tokens_of(task) == "ab"


async def test_a_client_that_leaves_as_the_end_comes(world: World) -> None:
    """Its last token has been said, the end has not: nothing is left behind, others are served."""
    async with half_way(world) as (left, task):
        task.cancel()
        await world.say(left, at=2, finish=STOP)
        await world.until(lambda: world.gateway.engine.num_live == 0)
        await world.scheduler.finish(left.request_id)
    async with half_way(world) as (request, task):
        await world.say(request, at=2, finish=STOP)
        assert await tokens_of(task) == "ab"
        await world.scheduler.finish(request.request_id)
    # Whichever came first; rows of a request that the gateway has forgotten are refused once more.
    assert set(world.worker.cancels) <= {left.request_id}
    assert world.scheduler.cancels == [], "the worker is told, not the queue"
    assert await world.redis.xlen(redis_keys.requests(MODEL)) == 0


async def test_a_gateway_that_dies_before_it_has_accepted_queues_nothing(
    server: RedisServer,
) -> None:
    """The client's connection breaks while its body is still on the way."""
    redis = redis_client.connect(server.url)
    async with process_of(
        redis_url=server.url + PATIENT,
        model=str(model_folder()),
        served_model_name=MODEL,
        port="0",
        grpc_port="0",
    ) as found:
        await found.line("ready")
        port = int((await found.line("listening", what="rest"))["port"])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += "content-type: application/json\r\ncontent-length: 40\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": ')
        await writer.drain()
        await asyncio.sleep(0.1)
        found.process.kill()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
    assert await redis.xlen(redis_keys.requests(MODEL)) == 0
    await redis.aclose()
