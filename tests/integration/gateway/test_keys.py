"""A gateway with API keys, as a whole: both ports, two tenants, a file that changes."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from quire.oip import open_inference_pb2 as oip
from quire.oip import open_inference_pb2_grpc
from quire.v1 import inference_pb2, inference_pb2_grpc
from structlog.testing import capture_logs

import gateway
from servicekit import grpc_server
from tests.integration.gateway.conftest import MODEL, World, world_of
from tests.integration.gateway.fakes import STOP
from tests.integration.scheduler.harness import RedisServer
from tests.unit.gateway.model_folder import model_folder
from tests.unit.gateway.test_keys import ALICE, BOB, digest_of

pytestmark = pytest.mark.redis


def header(key: str) -> dict[str, str]:
    """As clients send it."""
    return {"authorization": f"Bearer {key}"}


async def salt_of(world: World, number: int, posting: Any) -> bytes:
    """Answers the request that was read as such a number; its cache partition."""
    task = asyncio.get_running_loop().create_task(posting)
    request = await world.request(number)
    await world.say(request, "k", finish=STOP)
    response = await task
    assert response.status_code == 200, response.text
    return bytes(request.cache_salt)


async def test_both_ports_ask_for_keys_and_follow_the_file(
    server: RedisServer, tmp_path: Path
) -> None:
    """Tenants do not share a cache; a key that is taken out is refused a moment later."""
    file = tmp_path / "keys"
    file.write_text(f"alice:{digest_of(ALICE)}\nbob:{digest_of(BOB)}:2\n")
    async with world_of(server, api_keys_file=str(file)) as world:
        await world.ready()
        post, body = world.client.post, {"prompt": "x"}
        assert (await post("/v1/completions", json=body)).status_code == 401
        assert (await world.client.get("/ready")).status_code == 200
        salts = [
            await salt_of(world, i, post("/v1/completions", json=body, headers=header(key)))
            for i, key in enumerate((ALICE, BOB, ALICE))
        ]
        assert salts[0] == salts[2] != salts[1]
        shares = [(r.tenant, r.tenant_weight) for r in world.scheduler.requests]
        assert shares == [("alice", 1.0), ("bob", 2.0), ("alice", 1.0)]
        async with grpc_server.channel(f"127.0.0.1:{world.gateway.ports['grpc']}") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            other: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            for call in (
                stub.ListModels(inference_pb2.ListModelsRequest()),
                other.ServerReady(oip.ServerReadyRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            shown = tuple(header(BOB).items())
            [model] = (
                await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=shown)
            ).models
            assert model.id == MODEL
            with capture_logs() as told:
                file.write_text("bob:not-a-hash\n")
                await world.until(lambda: "keys_not_reloaded" in [line["event"] for line in told])
            assert (await world.client.get("/v1/models", headers=header(BOB))).status_code == 200
            file.write_text(f"alice:{digest_of(ALICE)}\n")
            async with asyncio.timeout(20):
                while (await world.client.get("/v1/models", headers=header(BOB))).is_success:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=shown)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await world.client.get("/v1/models", headers=header(ALICE))).status_code == 200
        url = f"http://127.0.0.1:{world.gateway.ports['ops']}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as ops:
            assert (await ops.get("/health")).status_code == 200


@pytest.mark.parametrize("text", [None, "", "alice:sk-alice-secret\n"])
async def test_a_process_without_usable_keys_does_not_start(
    tmp_path: Path, text: str | None
) -> None:
    """Status 2 and one line that names the setting and the line, never what stands there."""
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    root = Path(gateway.__file__).parents[1]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{root}:{root / 'protos/gen'}",
        "QUIRE_HOST": "0.0.0.0",
        "QUIRE_MODEL": str(model_folder()),
        "QUIRE_API_KEYS_FILE": str(file),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=root, stderr=PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    last = said.decode().splitlines()[-1]
    assert last.startswith("QUIRE_API_KEYS_FILE: ")
    assert b"sk-alice-secret" not in said
