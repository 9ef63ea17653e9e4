"""The plumbing around a process: gRPC servers and channels, the ops port, refusal of -O."""

import asyncio
import socket
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter

from deploy.local.options import ROOT
from servicekit import grpc_server, listening, metrics
from servicekit.ops import OpsServer
from tests.integration.link import Link

METHOD = "/test.Echo/Echo"


class Echo(grpc.GenericRpcHandler):
    """Answers each message with itself; `held` is set while it holds one back for long."""

    def __init__(self) -> None:
        self.held = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """One method, raw bytes."""
        if details.method != METHOD:
            return None

        async def echo(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            if request == b"wait":
                self.held.set()
                await asyncio.sleep(30)
            return request

        return grpc.unary_unary_rpc_method_handler(echo)  # type: ignore[arg-type]


def make_server(echo: Echo | None = None) -> grpc_server.Server:
    """An echo server."""
    return grpc_server.Server(
        lambda server: server.add_generic_rpc_handlers((echo or Echo(),)), ["test.Echo"]
    )


async def test_messages_up_to_the_limit_pass_both_ways() -> None:
    """And larger ones fail by status, not by a broken connection."""
    server = make_server()
    port = await server.start("127.0.0.1", 0)
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(METHOD)
        large = bytes(grpc_server.MAX_MESSAGE_BYTES - 64)
        assert await call(large) == large
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(bytes(grpc_server.MAX_MESSAGE_BYTES + 1))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"again") == b"again"
    await server.stop(0)


async def test_a_peer_that_is_slow_to_answer_a_dial_is_waited_for() -> None:
    """Busy machines are; no call fails for it."""
    server = make_server()
    way = Link(await server.start("127.0.0.1", 0))

    async def carry_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        await way.carry(reader, writer)

    late = await asyncio.start_server(carry_late, "127.0.0.1", 0)
    port = late.sockets[0].getsockname()[1]
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(METHOD)
        assert await call(b"in time", timeout=20) == b"in time"
    late.close()
    way.cut()
    await server.stop(0)


async def test_health_follows_set_serving() -> None:
    """For the whole server and for each service."""
    server = make_server()
    port = await server.start("127.0.0.1", 0)
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for serving, status in ((True, 1), (False, 2)):
            await server.set_serving(serving)
            for name in ("", "test.Echo"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == status
    await server.stop(0)


async def test_stop_cuts_calls_that_outlast_the_grace() -> None:
    """A stop is bounded."""
    echo = Echo()
    server = make_server(echo)
    port = await server.start("127.0.0.1", 0)
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
        method: Any = channel.unary_unary(METHOD)
        call = method(b"wait")
        await echo.held.wait()
        await server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_busy_port_is_named() -> None:
    """Not shared with whoever listens there."""
    first, second = make_server(), make_server()
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        await second.start("127.0.0.1", port)
    await first.stop(0)
    await second.stop(0)


def _has_version_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_version_6(), reason="this machine has no address of version 6")
@pytest.mark.parametrize(("host", "dialled"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
async def test_servers_listen_on_version_6(host: str, dialled: list[str]) -> None:
    """On the wildcard for version 4 too: probes and neighbours may come by either."""
    ops = OpsServer(metrics.new_registry(), lambda: True)
    server = grpc_server.Server(lambda _: None, ())
    port, grpc_port = await ops.start(host, 0), await server.start(host, 0)
    for address in dialled:
        async with httpx.AsyncClient(trust_env=False) as client:
            found = await client.get(f"http://{address}:{port}/health")
            assert found.status_code == 200
        async with grpc.aio.insecure_channel(f"{address}:{grpc_port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
    await ops.stop()
    await server.stop(0)


def test_addresses_of_version_6_are_written_with_brackets() -> None:
    assert listening.joined("::1", 9300) == "[::1]:9300"
    assert listening.joined("[fd00::1]", 9300) == "[fd00::1]:9300"
    assert listening.joined("10.0.0.1", 9300) == "10.0.0.1:9300"


async def test_ops_port_tells_health_readiness_and_metrics() -> None:
    """Without a key."""
    registry = metrics.new_registry()
    Counter("seen", "Things seen.", registry=registry).inc()
    ready = [False]
    ops = OpsServer(registry, lambda: ready[0])
    port = await ops.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
        ready[0] = True
        assert (await client.get("/health/ready")).status_code == 200
        assert "seen_total 1.0" in (await client.get("/metrics")).text
        assert (await client.get("/other")).status_code == 404
    await ops.stop()


def test_buckets_rise() -> None:
    """As histograms need them."""
    for name in dir(metrics):
        if name.endswith(("BUCKETS", "BUCKETS_S")):
            bounds = getattr(metrics, name)
            assert list(bounds) == sorted(set(bounds)), name


MAIN = """
from servicekit import process
async def main(argv, environ, stop):
    print("started", flush=True)
    await stop.wait()
    return 7
process.run(main)
"""


def test_a_process_without_assertions_is_refused() -> None:
    """They guard shared state; -O would take them out."""
    refused = subprocess.run(
        [sys.executable, "-O", "-c", MAIN], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "-O" in refused.stderr
    assert refused.stdout == ""


def test_a_process_ends_with_main_s_status_after_a_signal() -> None:
    """SIGTERM sets the event; main decides what follows."""
    with subprocess.Popen(
        [sys.executable, "-c", MAIN], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.wait(30) == 7


def test_wrong_settings_end_a_process_with_status_2() -> None:
    """The launcher knows by it that a restart is of no use."""
    code = MAIN.replace("await stop.wait()", "raise settings.SettingsError('QUIRE_X: wrong')")
    code = "from servicekit import settings\n" + code
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == "QUIRE_X: wrong\n"
