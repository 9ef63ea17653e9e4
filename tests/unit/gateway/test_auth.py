"""Keys at the REST border: by route, never by how a path is spelled."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.core import keys
from gateway.core.keys import KeyRing
from gateway.rest.auth import Guarded
from gateway.rest.routes import Rest
from gateway.rest.server import RestServer
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_keys import ALICE, BOB, digest_of

# The list of routes without a key. To add one is a decision; see the glossary of attacks.
OPEN = {"/health", "/ready", "/version", "/v2/health/live", "/v2/health/ready"}
KEY = {"authorization": f"Bearer {ALICE}"}
RING = keys.parse(f"alice:{digest_of(ALICE)}\nbob:{digest_of(BOB)}\n".encode())


def rest_of(bench: Bench, ring: KeyRing | None = RING) -> Rest:
    """With keys, unless told otherwise."""
    return Rest(bench.engine, bench.registry, 65_536, lambda: ring)


def client_of(bench: Bench, ring: KeyRing | None = RING) -> httpx.AsyncClient:
    """Over the ASGI application, no sockets."""
    transport = httpx.ASGITransport(app=rest_of(bench, ring).app())
    return httpx.AsyncClient(transport=transport, base_url="http://gateway.example")


def test_every_route_is_guarded_or_on_the_reviewed_list() -> None:
    """The walk over the table."""
    routes = rest_of(make_bench()).routes()
    assert {route.path for route in routes if not isinstance(route, Guarded)} == OPEN
    assert len(routes) > 15


async def test_no_guarded_route_does_anything_without_a_key() -> None:
    """Whatever the method; the refusal is the same for all and says nothing of the route."""
    bench = make_bench()
    said = set()
    async with client_of(bench) as client:
        for route in rest_of(bench).routes():
            path = route.path.replace("{name:path}", "tiny")
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
                for shown in ({}, {"authorization": f"Bearer {ALICE}x"}):
                    response = await client.request(method, path, headers=shown, content=b"{}")
                    if route.path in OPEN:
                        assert response.status_code in (200, 405), (method, path)
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    said.add(json.dumps(response.json()))
    assert len(said) == 3  # one in each protocol's shape
    assert bench.queue.admitted == []


async def test_a_key_opens_every_route() -> None:
    """What follows is the route's own business."""
    bench = make_bench()
    async with client_of(bench) as client:
        for route in rest_of(bench).routes():
            path = route.path.replace("{name:path}", "tiny")
            method = "POST" if "POST" in (route.methods or ()) else "GET"
            response = await client.request(method, path, headers=KEY, content=b"{}")
            assert response.status_code not in (401, 403, 404, 500), path


async def test_the_caller_s_tenant_travels_with_the_request() -> None:
    """It partitions the prefix cache; without keys there is no tenant."""
    bench = make_bench()
    salts = []
    for ring, key in ((RING, ALICE), (RING, BOB), (RING, ALICE), (None, "")):
        base = "http://127.0.0.1"
        async with client_of(bench, ring) as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            post = client.post(f"{base}/v1/completions", json={"prompt": "x"}, headers=headers)
            task = asyncio.get_running_loop().create_task(post)
            request = await bench.queue.arrivals.get()
            salts.append(request.cache_salt)
            bench.say(request.request_id, "k\3", finish=1)  # type: ignore[arg-type]
            assert (await task).status_code == 200
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] == b""


@contextlib.asynccontextmanager
async def listening(bench: Bench, ring: KeyRing | None = RING) -> AsyncIterator[int]:
    """The real server; its port."""
    server = RestServer(rest_of(bench, ring).app(), 1)
    listener = server.listen("127.0.0.1", 0)
    task = asyncio.get_running_loop().create_task(server.serve(listener))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.stop()
        await task


async def status_of(port: int, head: bytes) -> int:
    """Of an answer to bytes as they are; 0 if the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
            writer.close()
            return int(line.split()[1]) if line else 0
    return 0


HOSTS = (
    b"127.0.0.1", b"127.0.0.1/?", b"127.0.0.1/health?", b"127.0.0.1#", b"127.0.0.1/#", b"a@b",
    b"127.0.0.1/health#", b"/health", b"?", b"", b"localhost:80/health", b"x\\@y", b"[::1]/health",
)  # fmt: skip
TARGETS = (
    b"/v1/models", b"//v1/models", b"/v1//models", b"/v1/models/", b"/v1/models//", b"/v1%2fmodels",
    b"/v1/%6dodels", b"/%76%31/models", b"/V1/models", b"/v1/MODELS", b"/v1/models;",
    b"/v1;/models",
    b"/v1/models;/health", b"/v1/models.", b"/v1/models%20", b"/v1/models%00", b"/v1/models%0a",
    b"/health/../v1/models", b"/health/%2e%2e/v1/models", b"/health%2f..%2fv1%2fmodels",
    b"/./v1/models", b"/v1/models?/health", b"/v1/models#/health", b"/v1/models%23/health",
    b"/v1/models%3f/health", b"http://127.0.0.1/v1/models", b"http://127.0.0.1/health/v1/models",
    b"http://x@127.0.0.1/v1/models", b"http://127.0.0.1:1/v1/models?x", b"HTTP://a/v1/models",
    b"http://health/v1/models", b"http:///v1/models", b"//health/v1/models", b"\\v1\\models",
    b"/v1\\models", b"/metrics", b"//metrics", b"/metrics;", b"/openapi.json", b"/v2", b"/v2/",
    b"/v2/models/tiny", b"/v2/health/../models/tiny", b"/v2/health/live/../../models/tiny", b"*",
)  # fmt: skip


async def test_no_spelling_of_a_target_gets_past_the_keys() -> None:
    """Over a raw socket: each is refused or is no route; with the key the plain one is served."""
    async with listening(make_bench()) as port:
        for host in HOSTS:
            for target in TARGETS:
                head = b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n"
                found = await status_of(port, head + b"connection: close\r\n\r\n")
                assert found in (400, 401, 404), (host, target, found)
        for target in (b"/v1/models", b"http://any/v1/models", b"/v1/%6dodels"):
            key = b"authorization: Bearer " + ALICE.encode() + b"\r\n"
            head = b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n" + key + b"\r\n"
            assert await status_of(port, head) == 200, target


@pytest.mark.parametrize(
    "lines",
    [
        b"authorization : Bearer %b\r\n",
        b"x: y\r\n authorization: Bearer %b\r\n",
        b"authorization: Bearer %b\r\nauthorization: Bearer %b\r\n",
        b"authorization: Bearer x\r\nauthorization: Bearer %b\r\n",
        b"authorization: %b\r\n",
        b"x-api-key: %b\r\n",
        b"api-key: %b\r\n",
        b"cookie: authorization=Bearer %b\r\n",
        b"x-forwarded-authorization: Bearer %b\r\n",
    ],
)
async def test_a_key_counts_in_its_one_place_only(lines: bytes) -> None:
    """One header, one scheme: what two readers could read differently is refused."""
    shown = lines.replace(b"%b", ALICE.encode())
    async with listening(make_bench()) as port:
        head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + shown + b"\r\n"
        assert await status_of(port, head) in (400, 401)


async def test_with_keys_any_host_is_named() -> None:
    """A gateway that is reached from elsewhere has other names."""
    async with client_of(make_bench()) as client:
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200
    async with client_of(make_bench(), None) as client:
        assert (await client.get("/v1/models")).status_code == 403
        assert (await client.get("/health")).status_code == 403


async def test_a_changed_ring_counts_at_once() -> None:
    """The ring in force is asked for at each request."""
    bench, rings = make_bench(), [RING]
    app = Rest(bench.engine, bench.registry, 4096, lambda: rings[0]).app()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200
        rings[0] = keys.parse(f"bob:{digest_of(BOB)}".encode())
        assert (await client.get("/v1/models", headers=KEY)).status_code == 401
