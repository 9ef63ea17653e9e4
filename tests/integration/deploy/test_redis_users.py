"""The Redis of the manifests: its configuration, and users that may do what their role does only.

A whole stack with torch-free workers runs against a server with the manifests' own configuration
and users, through deaths that use every script; the server's log of refusals must stay empty.
"""

import asyncio
import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from structlog.testing import capture_logs

from benchmarks.stack import Process, Stack
from benchmarks.workload import Job
from deploy.local import valkey
from gateway.adapters.queue_redis import RedisQueue
from servicekit import redis_keys
from tests.e2e.models import VOCAB_SIZE, write_stub_model
from tests.e2e.stack import assert_exact, await_workers, bodies, start_streams, until

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deploy" / "k8s" / "base" / "redis"
ROLES = ("gateway", "scheduler", "worker")
SERVICES = {"gateway": "gateway", "scheduler_svc": "scheduler"}

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


def password(role: str) -> str:
    """Of a role; only its hash reaches the server."""
    return f"secret-of-{role}"


class UsersStack(Stack):
    """A stack whose services log in, each as its role."""

    def __init__(self, folder: Path, model: str) -> None:
        settings = {"QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "600", "STUB_STEP_MS": "10"}
        super().__init__(
            folder,
            model=model,
            workers=2,
            worker_module="tests.stub_worker",
            settings=settings,
        )
        users = (MANIFESTS / "users.acl").read_text()
        for role in ROLES:
            users = users.replace(f"@{role}@", hashlib.sha256(password(role).encode()).hexdigest())
        # The test's own eye on the server.
        (folder / "users.acl").write_text(users + "user eye on nopass ~* &* +@all\n")
        config = (MANIFESTS / "valkey.conf").read_text()
        assert "\ndir /data\n" in config
        (folder / "valkey.conf").write_text(config.replace("dir /data", f"dir {folder}/redis"))
        command = [str(valkey.binary()), str(folder / "valkey.conf")]
        command += ["--port", str(self.redis_port), "--bind", "127.0.0.1"]
        command += ["--aclfile", str(folder / "users.acl")]
        self.redis = Process("redis", command, {}, folder / "redis.log")

    def _service(self, module: str, name: str, **settings: str) -> Process:
        # A new dictionary each time: a process keeps the one that it is given.
        url = self.url(SERVICES.get(module, "worker"))
        self._environ = {**self._environ, "QUIRE_REDIS_URL": url}
        return super()._service(module, name, **settings)

    def url(self, role: str) -> str:
        """What stands in the Secret redis-urls."""
        return f"redis://{role}:{password(role)}@127.0.0.1:{self.redis_port}/0"

    def eye(self) -> redis.Redis:
        """A client that may do anything."""
        return redis.Redis(port=self.redis_port, username="eye", password="")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[UsersStack]:
    model = write_stub_model(tmp_path / "stub-model")
    users = UsersStack(tmp_path / "stack", str(model))
    with users:
        await_workers(users, 2)
        yield users


def work(count: int, num_output: int) -> list[Job]:
    """Jobs in the stub's vocabulary."""
    return [
        Job(
            prompt=tuple(3 + (7 * i + j) % (VOCAB_SIZE - 3) for j in range(24)),
            num_output=num_output,
        )
        for i in range(count)
    ]


async def test_each_role_may_do_all_that_it_does(stack: UsersStack) -> None:
    """Admission, steps, ends, cancels; a worker's and a leader's death; a drain."""
    jobs = work(12, 200)
    streams = start_streams(stack.client, bodies(stack.model_name, jobs))
    await streams.reach(5)
    stack.workers[0].kill()
    await asyncio.to_thread(await_workers, stack, 1)
    stack.scheduler.kill()
    stack.scheduler.start()
    leaving = start_streams(stack.client, bodies(stack.model_name, work(2, 3000)))
    await asyncio.to_thread(stack.scheduler.wait_event, "ready")
    await leaving.reach(1)
    for task in leaving.tasks:
        task.cancel()
    await asyncio.gather(*leaving.tasks, return_exceptions=True)
    assert_exact(jobs, await streams.finish())
    stack.workers[0].start()
    await asyncio.to_thread(stack.workers[0].wait_event, "ready")
    stack.workers[1].signal(signal.SIGTERM)
    assert await asyncio.to_thread(stack.workers[1].wait, 120) == 0
    again = start_streams(stack.client, bodies(stack.model_name, work(4, 20)))
    assert_exact(work(4, 20), await again.finish())
    with stack.eye() as eye:
        await until(lambda: eye.xlen(redis_keys.requests(stack.model_name)) == 0)
        assert [(e["username"], e["object"]) for e in eye.acl_log()] == []
        assert eye.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert eye.config_get("appendonly")["appendonly"] == "yes"
        # With it other machines are refused while the default user has no password.
        assert eye.config_get("protected-mode")["protected-mode"] == "no"


def test_no_role_may_do_more(stack: UsersStack) -> None:
    """Not what others' roles do, not what belongs to administrators, nothing without a name."""
    model = stack.model_name
    refused: dict[str, list[tuple[str, ...]]] = {
        "gateway": [
            ("SET", redis_keys.lease(model), "me"),
            ("SET", redis_keys.epoch(model), "9"),
            ("SET", redis_keys.record(model, "worker", "w"), "x"),
            ("XREADGROUP", "GROUP", "g", "c", "STREAMS", redis_keys.requests(model), ">"),
        ],
        "worker": [
            ("XLEN", redis_keys.requests(model)),
            ("XADD", redis_keys.requests(model), "*", "entry", "x"),
            ("GET", redis_keys.epoch(model)),
            ("SET", redis_keys.record(model, "gateway", "g"), "x"),
        ],
        "scheduler": [("SET", "somebody-elses", "x")],
    }
    everybody: list[tuple[str, ...]] = [
        ("FLUSHALL",),
        ("CONFIG", "SET", "save", ""),
        ("KEYS", "*"),
        ("ACL", "LIST"),
    ]
    for role, commands in refused.items():
        with redis.Redis.from_url(stack.url(role)) as client:
            assert client.ping()
            for command in (*commands, *everybody, ("SHUTDOWN",)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command)
    with redis.Redis(port=stack.redis_port) as nobody:
        assert nobody.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            nobody.execute_command("XLEN", redis_keys.requests(model))
    wrong = f"redis://gateway:wrong@127.0.0.1:{stack.redis_port}/0"
    with (
        redis.Redis.from_url(wrong) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.ping()


async def test_a_gateway_that_may_not_look_takes_entries_for_gone(stack: UsersStack) -> None:
    """Its user is of an earlier version: what may be lost is computed anew, and that is told."""
    stack.eye().execute_command("ACL", "SETUSER", "gateway", "-xrange")
    client = redis.asyncio.Redis.from_url(stack.url("gateway"))
    queue = RedisQueue(
        redis=client, blocking=client, model=stack.model_name, gateway_id="g", reply_to=b"g",
        max_requests=1, max_tokens=1,
    )  # fmt: skip
    with capture_logs() as lines:
        assert await queue.standing(["1-1", "1-2"]) == [False, False]
        assert await queue.standing(["1-1"]) == [False]
    assert [line["log_level"] for line in lines] == ["error"]
    await client.aclose()
