"""Keys at the gRPC border: every method but health, those of reflection too."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from quire.oip import open_inference_pb2 as oip
from quire.oip import open_inference_pb2_grpc
from quire.v1 import inference_pb2, inference_pb2_grpc

from gateway.grpc_auth import OPEN_METHODS, KeyInterceptor, tenant
from gateway.grpc_service import SERVICE_NAME, InferenceService
from gateway.oip_service import SERVICE_NAME as OPEN_INFERENCE
from gateway.oip_service import OpenInferenceService
from servicekit.grpc_server import Server, channel
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_auth import RING
from tests.unit.gateway.test_keys import ALICE, BOB

KEY = (("authorization", f"Bearer {ALICE}"),)


@contextlib.asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[grpc.aio.Channel]:
    """The public services behind keys, and a channel to them."""

    def register(server: grpc.aio.Server) -> None:
        add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        add(InferenceService(bench.engine, tenant), server)
        add = open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
        add(OpenInferenceService(bench.engine), server)

    server = Server(register, [SERVICE_NAME, OPEN_INFERENCE], [KeyInterceptor(lambda: RING)])
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    async with channel(f"127.0.0.1:{port}") as found:
        yield found
    await server.stop(0)


async def code_of(found: grpc.aio.Channel, method: str, metadata: Any = ()) -> grpc.StatusCode:
    """How a call of any kind ends that sends one empty message.

    On the wire that is all that tells kinds apart. A client that may send more writes its message
    after the call began, and calls it an internal error of its own if the call has ended by then.
    """
    method_of: Any = found.unary_stream(method)
    call = method_of(b"", metadata=metadata, timeout=20)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()
        call.cancel()
    code = await call.code()
    assert isinstance(code, grpc.StatusCode)
    return code


async def services(found: grpc.aio.Channel) -> list[str]:
    """As reflection names them to a holder of a key."""
    new_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = new_stub(found)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([ask]), metadata=KEY)
    answer = await call.read()
    call.cancel()
    return [service.name for service in answer.list_services_response.service]


async def test_every_method_of_every_service_needs_a_key_but_health() -> None:
    """The walk: the server's own list of services, and all their methods."""
    pool = descriptor_pool.Default()
    num_closed = 0
    async with serving(make_bench()) as found:
        names = await services(found)
        assert {SERVICE_NAME, OPEN_INFERENCE, "grpc.health.v1.Health"} <= set(names)
        for name in names:
            for method in pool.FindServiceByName(name).methods:
                path = f"/{name}/{method.name}"
                wrong = (("authorization", f"Bearer {BOB}x"),)
                for metadata in ((), wrong, (*KEY, *KEY)):
                    refused = await code_of(found, path, metadata) is (
                        grpc.StatusCode.UNAUTHENTICATED
                    )
                    assert refused is (path not in OPEN_METHODS), path
                num_closed += path not in OPEN_METHODS
        assert num_closed >= 11


async def test_other_spellings_of_a_method_reach_nothing() -> None:
    """Neither a method nor the list of what is open."""
    paths = [
        "/quire.v1.InferenceService/ListModels/",
        "//quire.v1.InferenceService/ListModels",
        "/grpc.health.v1.Health/../quire.v1.InferenceService/ListModels",
        "/grpc.health.v1.Health/Check/quire.v1.InferenceService/ListModels",
        "/GRPC.HEALTH.V1.HEALTH/Check",
    ]
    closed = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    async with serving(make_bench()) as found:
        for path in paths:
            assert await code_of(found, path) in closed, path


async def test_the_tenant_travels_with_the_request() -> None:
    """Over both services; two tenants share no part of the prefix cache."""
    bench = make_bench()
    salts = []
    async with serving(bench) as found:
        quire: Any = inference_pb2_grpc.InferenceServiceStub(found)
        open_inference: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(found)
        for key in (ALICE, BOB):
            metadata = (("authorization", f"Bearer {key}"),)
            call = quire.Generate(inference_pb2.GenerateRequest(text="x"), metadata=metadata)
            await call.read()
            salts.append((await bench.queue.arrivals.get()).cache_salt)
            call.cancel()
            ask = oip.ModelInferRequest(model_name="tiny", raw_input_contents=[b"\1\0\0\0x"])
            ask.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            call = open_inference.ModelInfer(ask, metadata=metadata)
            salts.append((await bench.queue.arrivals.get()).cache_salt)
            call.cancel()
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert b"" not in salts


async def test_health_needs_no_key() -> None:
    """Whoever starts and stops processes has none."""
    async with serving(make_bench()) as found:
        stub: Any = health_pb2_grpc.HealthStub(found)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_refused_call_is_over_before_its_message_has_come() -> None:
    """Nobody holds a call open whom nobody knows."""
    async with serving(make_bench()) as found:
        call: Any = found.stream_stream(f"/{SERVICE_NAME}/Generate")(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
