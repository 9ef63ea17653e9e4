"""Stacks for tests: how idle looks, streams that can be compared, and the launcher's own stack.

`benchmarks.stack.Stack` starts the processes one by one; `LauncherStack` is what `make serve` runs.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.client import Answer, Client, Exchange
from benchmarks.stack import ROOT, START_S, Metrics, Process, Stack, StackError, fetch, wait_for
from benchmarks.workload import Job
from gpu_worker.token_hub import GONE_S
from servicekit import redis_keys
from tests.e2e import slowed_worker
from tests.e2e.models import write_stub_model
from tests.threads import IS_PARALLEL

# A worker keeps what a gateway that has ended left unacknowledged for GONE_S.
IDLE_S = GONE_S + 60.0
SLOWED = "slowed"
SCHEDULER_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "quire:blocks_used",
    "quire:slots_used",
    "quire:steps_in_flight",
    "quire:backlog_tokens",
    "quire:finishes_pending",
    "quire:events_queued",
)
WORKER_IDLE = ("quire:slots_used", "quire:outbox_batches")
GATEWAY_IDLE = ("quire:gateway_streams",)


def stub_stack_in(folder: Path, settings: Mapping[str, str], **counts: int) -> Stack:
    """Not yet started, with two torch-free workers that `slowed` slows."""
    return Stack(
        folder / "stack",
        model=str(write_stub_model(folder / "stub-model")),
        workers=2,
        worker_module=slowed_worker.__name__,
        settings={
            "STUB_STEP_MS": "10",
            slowed_worker.VARIABLE: str(folder / "stack" / SLOWED),
            **settings,
        },
        **counts,
    )


@contextlib.contextmanager
def slowed(stack: Stack, more_s: float = 0.1) -> Iterator[None]:
    """Each step takes so much longer: what runs has not ended when the block disturbs it."""
    path, written = stack.folder / SLOWED, stack.folder / f"{SLOWED}.new"
    written.write_text(str(more_s))
    written.rename(path)
    try:
        yield
    finally:
        path.unlink()


def redis_state(port: int, model: str) -> dict[str, int]:
    """Entries of the request stream, and how many of them are pending."""
    with redis.Redis(port=port) as client:
        stream = redis_keys.requests(model)
        pending = client.xpending(stream, redis_keys.GROUP)
        return {"stream": int(client.xlen(stream)), "pending": int(pending["pending"])}


def busy_gauges(stack: Stack) -> dict[str, float]:
    """Whatever is not at its idle value, by name; the tasks of a loop are another matter."""
    busy: dict[str, float] = {}
    groups: list[tuple[Process, tuple[str, ...]]]
    groups = [(scheduler, SCHEDULER_IDLE) for scheduler in stack.schedulers]
    groups += [(gateway, GATEWAY_IDLE) for gateway in stack.gateways]
    groups += [(worker, WORKER_IDLE) for worker in stack.workers]
    for process, names in groups:
        metrics = process.metrics()
        for name in names:
            if value := metrics.total(name):
                busy[f"{process.name} {name}"] = value
    for name, count in redis_state(stack.redis_port, stack.model_name).items():
        if count:
            busy[f"redis {name}"] = count
    return busy


def assert_idle(stack: Stack, timeout_s: float = IDLE_S) -> None:
    """Waits until every gauge is at its idle value and Redis holds nothing of any request."""
    busy: dict[str, float] = {}

    def idle() -> bool:
        nonlocal busy
        busy = busy_gauges(stack)
        return not busy

    wait_for(idle, lambda: f"idle; still busy: {busy}", timeout_s)


def num_tasks(stack: Stack) -> dict[str, float]:
    """Tasks on the event loop of each service."""
    services = [stack.scheduler, stack.gateway, *stack.workers]
    return {p.name: p.metrics().total("quire:event_loop_tasks") for p in services}


def assert_tasks(stack: Stack, before: Mapping[str, float], timeout_s: float = IDLE_S) -> None:
    """Waits until each event loop runs no more tasks than before."""
    now: dict[str, float] = {}

    def settled() -> bool:
        nonlocal now
        now = num_tasks(stack)
        return all(now[name] <= count for name, count in before.items())

    wait_for(settled, lambda: f"tasks before {before}, now {now}", timeout_s)


def mend(stack: Stack) -> None:
    """Starts whatever has ended and waits until the scheduler has a session with every worker."""
    if stack.redis.returncode is not None:
        stack.start_redis()
    services = (*stack.schedulers, *stack.workers, *stack.gateways)
    ended = [process for process in services if process.returncode is not None]
    for process in ended:
        process.start()
    one_leads = any(scheduler not in ended for scheduler in stack.schedulers)
    for process in ended:
        stands_by = one_leads and process in stack.schedulers
        process.wait_event("standing_by" if stands_by else "ready")
    stack.wait_ready()
    await_workers(stack, len(stack.workers))


def await_workers(stack: Stack, count: int) -> None:
    """Waits until the scheduler leads and has that many workers."""

    def seen() -> bool:
        return scheduler_total(stack, "quire:workers") == count

    wait_for(seen, lambda: f"{count} workers\n{stack.scheduler.tail()}", START_S)


def scheduler_total(stack: Stack, name: str) -> float:
    """Of the schedulers that run; a standby's metrics are zeros."""
    running = [s for s in stack.schedulers if s.returncode is None and "ops" in s.ports]
    return sum(scheduler.metrics().total(name) for scheduler in running)


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Polls on the loop; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # progress lives in another process
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Streams that run. `finish` gives their answers."""

    tasks: Sequence["asyncio.Task[Answer]"]
    watch: list[Exchange]

    async def reach(self, num_events: int, timeout_s: float = 120.0) -> None:
        """Waits until each has had so many events, or has ended."""

        def reached() -> bool:
            return len(self.watch) == len(self.tasks) and all(
                e.progress >= num_events or e.ended.done() for e in self.watch
            )

        await until(reached, timeout_s)

    @property
    def progress(self) -> list[int]:
        """Events of each stream so far."""
        return [exchange.progress for exchange in self.watch]

    async def finish(self) -> list[Answer]:
        """Waits for all."""
        return list(await asyncio.gather(*self.tasks))


def start_streams(client: Client, bodies: Sequence[Mapping[str, Any]]) -> Streams:
    """Sends all at once."""
    watch: list[Exchange] = []
    tasks = [asyncio.ensure_future(client.complete(body, watch=watch)) for body in bodies]
    return Streams(tasks=tasks, watch=watch)


def seed_of(index: int) -> int:
    """Of a request in a test: the torch-free worker takes its tokens from it even if greedy."""
    return 1_000 + index


def bodies(model: str, work: Sequence[Job], num_sampled: int = 0) -> list[dict[str, Any]]:
    """Requests that ask for token ids; the last ones are sampled, the others greedy."""
    first_sampled = len(work) - num_sampled
    return [
        job.body(
            model,
            return_token_ids=True,
            seed=seed_of(i),
            temperature=0.8 if i >= first_sampled else 0,
        )
        for i, job in enumerate(work)
    ]


def assert_exact(work: Sequence[Job], answers: Sequence[Answer]) -> None:
    """Each answer is whole: one terminal event, and exactly the tokens asked for, as ids too."""
    problems = {}
    for i, (job, answer) in enumerate(zip(work, answers, strict=True)):
        problem = answer.problem(job.num_output)
        if not problem and len(answer.token_ids) != job.num_output:
            problem = f"{len(answer.token_ids)} token ids of {job.num_output}"
        if problem:
            problems[i] = problem
    assert problems == {}, problems


def assert_equal_streams(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Same tokens, stream by stream; names the place of the first difference."""
    for i, (got, want) in enumerate(zip(answers, expected, strict=True)):
        pairs = enumerate(zip(got.token_ids, want.token_ids, strict=True))
        at = next((k for k, (a, b) in pairs if a != b), None)
        assert at is None, f"stream {i} differs from token {at} on"
        assert got.text == want.text


class LauncherStack:
    """`make serve` without make: the launcher, its children, and what it says about them."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "launcher.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        if cache := os.environ.get("QUIRE_CACHE_DIR"):
            inherited["QUIRE_CACHE_DIR"] = cache
        self._environ = {
            **inherited,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos' / 'gen'}",
            "PORT": "0",
            "GRPC_PORT": "0",
            **({"QUIRE_NUM_THREADS": "1"} if IS_PARALLEL else {}),
            **settings,
        }
        self._popen: subprocess.Popen[bytes] | None = None

    def text(self) -> str:
        """What the launcher has printed."""
        return self.output.read_text(errors="replace")

    @property
    def state(self) -> dict[str, Any]:
        """stack.json of the run."""
        found = re.search(r"logs in (\S+)", self.text())
        if found is None:
            return {}
        path = Path(found[1]) / "stack.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def client(self) -> Client:
        """For the gateway."""
        return Client(host="127.0.0.1", port=int(self.state["url"].rsplit(":", 1)[1]))

    @property
    def base_url(self) -> str:
        """Of the REST interface."""
        return str(self.state["url"])

    @property
    def model_name(self) -> str:
        """As served."""
        return str(self.state["model"])

    @property
    def grpc_address(self) -> str:
        """Of the gateway's gRPC interface."""
        return f"127.0.0.1:{self.state['grpc_port']}"

    def metrics(self, child: str) -> Metrics:
        """A scrape of a child's ops port."""
        port = self.state["children"][child]["ports"]["ops"]
        status, text = fetch(f"http://127.0.0.1:{port}/metrics")
        if status != 200:
            raise StackError(f"{child}: /metrics answered {status}")
        return Metrics(text)

    def start(self) -> None:
        """Returns when the launcher says that it is ready."""
        with self.output.open("ab") as sink:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "deploy.local.launcher"],
                cwd=ROOT, env=self._environ, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.wait_text(r"^ready after", START_S)

    def wait_text(self, pattern: str, timeout_s: float) -> None:
        """Waits until the launcher has printed a line that matches."""
        assert self._popen is not None

        def seen() -> bool:
            if re.search(pattern, self.text(), re.MULTILINE):
                return True
            if self._popen is not None and self._popen.poll() is not None:
                raise StackError(f"the launcher ended with {self._popen.returncode}\n{self.text()}")
            return False

        wait_for(seen, lambda: f"the launcher prints {pattern!r}\n{self.text()}", timeout_s)

    def pid(self, child: str) -> int:
        """Of a child now."""
        return int(self.state["children"][child]["pid"])

    def stop(self) -> None:
        """SIGTERM. Raises StackError unless the launcher and all children end well."""
        assert self._popen is not None
        pids = [self.pid(child) for child in self.state["children"]]
        self._popen.send_signal(signal.SIGTERM)
        code = self._popen.wait(60)
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if code != 0 or left:
            raise StackError(f"the launcher ended with {code}, left {left}\n{self.text()}")

    def destroy(self) -> None:
        """Ends the launcher at once; the kernel ends its children."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(30)
