"""What has gone wrong in other servers, tried on a whole stack under watch.

Each test is a row of docs/security.md.
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from quire.v1 import inference_pb2

from benchmarks.stack import Process, wait_for
from servicekit import redis_keys
from tests.fuzz.asking import Asker, Response
from tests.fuzz.asks import PICKLES, ROUTES, Ask, Call, Post, images, urls
from tests.fuzz.sockets import listening, reached
from tests.fuzz.watched import BAIT
from tests.fuzz.world import CONTEXT, World, expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LOOPBACK = "127.0.0.1"
METHODS = (
    "/quire.v1.InferenceService/Generate",
    "/quire.v1.InferenceService/Cancel",
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)

WORKER_METHODS = ("/quire.v1.WorkerService/Session", "/quire.v1.TokensService/Tokens")
SNAPSHOT = "/quire.v1.SchedulerService/Snapshot"


class Trap:
    """A port that nobody should find."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    @property
    def num_caught(self) -> int:
        """Who has come since last asked."""
        count = 0
        while True:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def close(self) -> None:
        """Takes it away."""
        self._listener.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    """A port of this machine."""
    trap = Trap()
    yield trap
    trap.close()


def json_post(path: str, body: object, **headers: str) -> Post:
    """As clients send it."""
    data = json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    return Post(method="POST", path=path, body=data, headers=kind | headers)


def doings(world: World, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """What all services have written down of these kinds."""
    return [
        (service.name, line)
        for service in world.stack.services
        for line in world.stack.watched(service)
        if line["what"] in kinds
    ]


def test_one_request_id_of_two_tenants_mixes_nothing(fuzzed: World, asker: Asker) -> None:
    """It is echoed, and is no key to anything: not over REST, not over gRPC, not to a cancel."""
    count = CONTEXT - 8

    async def completion(tenant: str, seed: int) -> Response:
        prompt = [100 + seed, 7]
        body = {"prompt": prompt, "max_tokens": count, "seed": seed, "return_token_ids": True}
        post = json_post("/v1/completions", body | {"user": "same"}, **{"x-request-id": "same"})
        return await asker.post(post, tenant)

    async def generation(seed: int) -> list[int]:
        ask = Ask(
            kind="token_ids",
            prompt=[100 + seed, 7],
            fields={"max_tokens": count, "seed": seed},
            stream=False,
        )
        request = ask.grpc()
        request.client_request_id = "same"
        tokens: list[int] = []
        async for event in asker.stub.Generate(request, metadata=asker.metadata, timeout=60):
            tokens += event.delta.token_ids
        return tokens

    async def cancel() -> bool:
        await asyncio.sleep(0.01)
        request = inference_pb2.CancelRequest(request_id="same")
        answer = await asker.stub.Cancel(request, metadata=asker.metadata, timeout=60)
        return bool(answer.found)

    with fuzzed.round("one request id"):
        seeds = range(40)
        tenants = ["alice" if seed % 2 else "bob" for seed in seeds]
        answers = asker.together(
            [
                *(completion(tenant, seed) for tenant, seed in zip(tenants, seeds, strict=True)),
                *(generation(seed) for seed in seeds),
                *(cancel() for _ in range(5)),
            ]
        )
    expected = [expected_tokens([100 + seed, 7], seed, count) for seed in seeds]
    for answer, tokens in zip(answers[:40], expected, strict=True):
        assert answer.headers["x-request-id"] == "same"
        assert json.loads(answer.text)["choices"][0]["token_ids"] == tokens
    assert answers[40:80] == expected
    assert answers[80:] == [False] * 5


def test_no_address_is_ever_called(fuzzed: World, asker: Asker, trap: Trap) -> None:
    """Image parts and addresses anywhere: no connect, no look-up, no file, no new peer."""
    gateway = fuzzed.stack.gateway
    before = reached(gateway.pid)
    posts = [
        json_post(path, {**body, **extra})
        for url in urls(trap.port)
        for path, body in (
            ("/v1/chat/completions", {"messages": images(url)}),
            ("/tokenize", {"messages": images(url)}),
            ("/v1/completions", {"prompt": url, "max_tokens": 1}),
            ("/generate", {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}}),
            ("/v2/models/m/generate", {"text_input": url, "max_tokens": 1}),
        )
        for extra in ({}, {"chat_template": url, "user": url}, {"image_url": url, "url": url})
    ]
    with fuzzed.round("addresses"):
        answers = asker.together([asker.post(post) for post in posts])
    for post, answer in zip(posts, answers, strict=True):
        assert answer.status in ((400,) if b'image_url", ' in post.body else (200, 400)), post
    assert trap.num_caught == 0
    assert [line for line in doings(fuzzed, "lookup", "opened") if line[0] == "gateway"] == []
    assert (
        reached(gateway.pid)
        == before
        == {
            (LOOPBACK, fuzzed.stack.redis_port),
            (LOOPBACK, fuzzed.stack.workers[0].ports["worker"]),
        }
    )
    # What Python itself connects (the stub stack's Redis clients do without uvloop) goes there too.
    known = {str(port) for _, port in before}
    for name, line in doings(fuzzed, "connect"):
        assert any(port in line["args"] for port in known) or name != "gateway", line


def test_pickles_are_read_by_nobody(fuzzed: World, asker: Asker) -> None:
    """In every body, message, header, and place in Redis; by gateway, scheduler and worker."""
    stack = fuzzed.stack
    with fuzzed.round("pickles"):
        for data in PICKLES:
            posts = [
                Post(method="POST", path=path, body=data, headers={"content-type": kind})
                for path in ROUTES
                for kind in ("application/json", "application/octet-stream", "application/x-pickle")
            ]
            text = data.decode("latin-1")
            posts += [
                json_post(path, dict.fromkeys(fields, text)) for path, fields in ROUTES.items()
            ]
            answers = asker.together([asker.post(post) for post in posts])
            assert {answer.status for answer in answers} <= {200, 400, 415}
            asker.together([asker.call(Call(method=m, data=data)) for m in METHODS])
            inner = [(stack.workers[0].ports["worker"], m) for m in WORKER_METHODS]
            inner += [(stack.scheduler.ports["scheduler"], SNAPSHOT)]
            asker.together([asker.call_at(at, Call(method=m, data=data)) for at, m in inner])
            for service in stack.services:
                for what in service.ports:
                    knock(service, what, data)
            poison(fuzzed, data)
    assert doings(fuzzed, "unpickled", "unmarshalled", "started", "opened") == []


def knock(process: Process, what: str, data: bytes) -> None:
    """Bytes on a port, in no protocol."""
    with socket.create_connection((LOOPBACK, process.ports[what]), timeout=20) as connection:
        connection.sendall(data)


def poison(world: World, data: bytes) -> None:
    """Bytes in all the places of Redis that services read."""
    model = world.stack.model_name
    with redis.Redis(port=world.stack.redis_port) as client:
        client.xadd(redis_keys.requests(model), {"entry": data, "deadline_ms": 0})
        client.xadd(redis_keys.requests(model), {"entry": data, "deadline_ms": data})
        client.publish(redis_keys.wake(model), data)
        for gateway_id in client.zrange(redis_keys.registry(model, "gateway"), 0, -1):
            client.xadd(redis_keys.notices(model, gateway_id.decode()), {"notice": data})
        client.set(redis_keys.record(model, "worker", BAIT), data, px=3000)
        client.zadd(redis_keys.registry(model, "worker"), {BAIT: 2**52})
        client.set(redis_keys.record(model, "gateway", BAIT), data, px=3000)
        client.zadd(redis_keys.registry(model, "gateway"), {BAIT: 2**52})


def test_every_port_is_a_known_one(fuzzed: World) -> None:
    """Exactly these listen, and on loopback alone."""
    stack = fuzzed.stack
    expected = {
        "gateway": {"rest", "grpc", "ops"},
        "scheduler": {"scheduler", "ops"},
        "worker-0": {"worker", "ops"},
    }
    for service in stack.services:
        assert set(service.ports) == expected[service.name]
        ports = {(LOOPBACK, port) for port in service.ports.values()}
        assert listening(service.pid) == ports, service.name
    assert listening(stack.redis.pid) == {(LOOPBACK, stack.redis_port)}


def test_only_the_gateway_takes_requests_of_clients(fuzzed: World, asker: Asker) -> None:
    """Ports without a key have health and metrics, and nothing that changes anything."""
    allowed = {"/health": 200, "/health/ready": 200, "/metrics": 200}
    for service in fuzzed.stack.services:
        for path in (*allowed, "/", "/docs", "/openapi.json", "/v1/completions", "/update_weights"):
            for method in ("GET", "POST"):
                post = Post(method=method, path=path, body=b"", headers={})
                [answer] = asker.together([asker.post(post, port=service.ports["ops"])])
                expected = allowed.get(path, 404) if method == "GET" else (404, 405)
                assert answer.status in (expected if isinstance(expected, tuple) else (expected,))


def test_the_gateway_does_not_search_its_start_for_garbage(fuzzed: World) -> None:
    """A search through all that was loaded would hold the loop for longer than a step takes."""

    def frozen() -> bool:
        lines = fuzzed.stack.watched(fuzzed.stack.gateway)
        return any(line["what"] == "loop" and line["frozen"] > 10_000 for line in lines)

    wait_for(frozen, lambda: "the gateway freezes what it has loaded", 60)
