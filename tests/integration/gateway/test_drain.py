"""A gateway that leaves: its readiness, where its clients go, and what it lets end."""

import asyncio
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import inference_pb2, inference_pb2_grpc

from servicekit import grpc_server
from tests.integration.gateway.conftest import world_of
from tests.integration.gateway.fakes import LENGTH
from tests.integration.scheduler.harness import RedisServer

pytestmark = pytest.mark.redis

BODY = {"prompt": "x", "max_tokens": 2, "return_token_ids": True}
IDLE = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
# Far longer than leaving `world_of` may take.
DRAIN_S = "60"


async def test_it_is_ready_for_requests_while_no_worker_runs(server: RedisServer) -> None:
    """For the ops port, by which a cluster sends clients; /ready tells that none can be served."""
    async with world_of(server, announcing=False) as world:
        ops = f"http://127.0.0.1:{world.gateway.ports['ops']}/health/ready"
        assert (await world.client.get(ops)).status_code == 200
        assert (await world.client.get("/ready")).status_code == 503
        world.gateway.engine.draining = True
        assert (await world.client.get(ops)).status_code == 503


async def test_http_clients_go_elsewhere_and_what_runs_ends(server: RedisServer) -> None:
    """Idle connections close; answers that run are the last of theirs, and so are refusals."""
    async with world_of(server, drain_s=DRAIN_S) as world:
        await world.ready()
        port = world.gateway.ports["rest"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(IDLE)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head.lower()
        posting = world.client.post("/v1/completions", json=BODY)
        running = asyncio.get_running_loop().create_task(posting)
        request = await world.request()
        await world.say(request, "a")

        world.stop.set()
        async with asyncio.timeout(20):
            assert b"\r\n" not in await reader.read()  # the body's rest, then the end
        writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as late:
            for _ in range(2):
                refused = await late.post("/v1/completions", json=BODY)
                assert refused.status_code == 503
                assert refused.headers["connection"] == "close"
                assert refused.headers["retry-after"]
            ops = f"http://127.0.0.1:{world.gateway.ports['ops']}/health/ready"
            assert (await late.get(ops)).status_code == 503
        assert not running.done()
        await world.say(request, "b", at=1, finish=LENGTH)
        response = await running
        assert response.json()["choices"][0]["token_ids"] == [*b"ab"]
        assert response.headers["connection"] == "close"


async def test_grpc_clients_go_elsewhere_and_what_runs_ends(server: RedisServer) -> None:
    """The port takes no new call; a watch that never ends does not keep the process."""
    async with world_of(server, drain_s=DRAIN_S) as world:
        await world.ready()
        address = f"127.0.0.1:{world.gateway.ports['grpc']}"
        async with grpc_server.channel(address) as channel, grpc_server.channel(address) as other:
            here: Any = health_pb2_grpc.HealthStub(channel)
            anew: Any = health_pb2_grpc.HealthStub(other)
            watch = here.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=2))
            request = await world.request()
            await world.say(request, "a")

            world.stop.set()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anew.Check(health_pb2.HealthCheckRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await world.say(request, "b", at=1, finish=LENGTH)
            said = [message async for message in call]
            assert [*b"ab"] == [token for message in said for token in message.delta.token_ids]
            assert said[-1].HasField("finished")
            async with asyncio.timeout(20):
                with pytest.raises(grpc.aio.AioRpcError):
                    await watch.read()
