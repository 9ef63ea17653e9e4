"""A whole Quire under watch, two tenants, and what must hold around whatever is thrown at it.

Real are Valkey, scheduler, gateway and worker processes and every socket between them; only the
worker's runner makes its tokens up (tests.stub_worker), so that each stream's tokens are known
beforehand. The model has a small context: whatever is asked for ends soon.
"""

import contextlib
import hashlib
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stack import Process, Stack
from tests.e2e.models import VOCAB_SIZE, write_stub_model
from tests.e2e.stack import assert_idle, assert_tasks, await_workers, num_tasks
from tests.stub_worker.fake_runner import FakeOptions, token_from_history

CONTEXT = 32
# Between two streams of the canary.
PAUSE_S = 0.05
KEYS = {"alice": "a" * 40, "bob": "b" * 40}
OPTIONS = FakeOptions(vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
# What an answer must not hold unless its request did: exceptions, paths, modules, addresses.
LEAKS = re.compile(
    r"Traceback|0x[0-9a-fA-F]{3,}|/work/|/tmp/|/usr/|/home/|/root|site-packages|\.py\b|\.so\b"
    r"|\b[A-Z][A-Za-z]+(?:Error|Exception)\b|<class |<object|object at "
    r"|\b(?:gateway|servicekit|scheduler_svc|gpu_worker|starlette|uvicorn|pydantic|tokenizers"
    r"|httptools|asyncio|redis|grpc\._|google\.protobuf|jinja2|json\.decoder)\b"
    r"|127\.0\.0\.1|localhost|redis:"
)


def bearer(tenant: str) -> dict[str, str]:
    """The header of a tenant's key."""
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def leak_in(answer: str, asked: str) -> str:
    """Something of ours in an answer that the client did not write; empty if there is nothing."""
    return next((m[0] for m in LEAKS.finditer(answer) if m[0] not in asked), "")


def expected_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    """What the stub worker makes of a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(token_from_history(tokens, OPTIONS, seed % 2**64))
    return tokens[len(prompt) :]


class WatchedStack(Stack):
    """Every service writes down what it does; see tests.fuzz.watched."""

    def _service(self, module: str, name: str, **settings: str) -> Process:
        if module == "gateway":
            # A machine that stands still for seconds is no Redis that is away: no 503 for that.
            patient = "?socket_timeout=20&socket_connect_timeout=20&timeout=20"
            settings["QUIRE_REDIS_URL"] = self._environ["QUIRE_REDIS_URL"] + patient
        log = str(self.folder / f"{name}.watch")
        environ = {**self._environ, **settings, "WATCH_LOG": log}
        argv = [sys.executable, "-m", "tests.fuzz.watched", module]
        return Process(name, argv, environ, self.folder / f"{name}.log")

    def watched(self, process: Process) -> list[dict[str, Any]]:
        """What a service has written down so far."""
        text = (self.folder / f"{process.name}.watch").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def services(self) -> list[Process]:
        """All but Redis."""
        return [self.gateway, self.scheduler, *self.workers]


@dataclass
class Canary:
    """Bob's streams, one after the other, each compared with the tokens it must have."""

    base_url: str
    num_streams: int = 0
    problems: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until stopped; at least one stream."""
        with httpx.Client(base_url=self.base_url, headers=bearer("bob"), timeout=60) as client:
            while True:
                try:
                    self._stream(client, seed=self.num_streams)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.problems.append(f"{type(error).__name__}: {error}")
                self.num_streams += 1
                if self._stop.wait(PAUSE_S) or len(self.problems) > 10:
                    return

    def _stream(self, client: httpx.Client, seed: int) -> None:
        prompt = [3 + (seed * 7 + i) % 1000 for i in range(4)]
        count = CONTEXT - len(prompt)
        body = {
            "prompt": prompt,
            "max_tokens": count,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        at_s: list[float] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or ()
                        at_s.append(time.monotonic())
        if tokens != expected_tokens(prompt, seed, count):
            self.problems.append(f"stream {seed}: {response.status_code}, tokens {tokens}")
        self.gaps_s += [b - a for a, b in itertools.pairwise(at_s)]

    def stop(self) -> None:
        """After the stream that runs."""
        self._stop.set()


@dataclass
class World:
    """One stack for a module's tests."""

    stack: WatchedStack

    @contextlib.contextmanager
    def round(self, name: str) -> Iterator[None]:
        """Things are thrown at the gateway while a canary streams; then all is as before."""
        assert_idle(self.stack)
        tasks, begin_s = num_tasks(self.stack), time.monotonic()
        pids = [process.pid for process in self.stack.processes]
        canary = Canary(self.stack.base_url)
        thread = threading.Thread(target=canary.run, name="canary")
        thread.start()
        try:
            yield
        finally:
            canary.stop()
            thread.join(120)
        assert [p.pid for p in self.stack.processes] == pids
        ended = {p.name: p.returncode for p in self.stack.processes if p.returncode is not None}
        assert ended == {}, self.stack.gateway.tail()
        assert canary.problems == []
        assert_idle(self.stack)
        assert_tasks(self.stack, tasks)
        self._report(name, canary, begin_s)

    def _report(self, name: str, canary: Canary, begin_s: float) -> None:
        time.sleep(1.1)  # the meter's last line
        lines = [
            line
            for line in self.stack.watched(self.stack.gateway)
            if line["what"] == "loop" and line["at"] > begin_s
        ]
        stall_ms = max((line["stall_ms"] for line in lines), default=0.0)
        over = {f"over_{ms}_ms": sum(line[f"over_{ms}_ms"] for line in lines) for ms in (20, 50)}
        gaps = sorted(canary.gaps_s) or [0.0]
        print(
            f"\n{name}: {time.monotonic() - begin_s:.1f} s; canary: {canary.num_streams} streams, "
            f"gaps p50 {1000 * gaps[len(gaps) // 2]:.1f} ms, "
            f"p99 {1000 * gaps[len(gaps) * 99 // 100]:.1f} ms; the gateway's loop: "
            f"longest stall {stall_ms:.0f} ms, {over}, "
            f"latest tick {max((line['late_ms'] for line in lines), default=0):.0f} ms"
        )
        # Generous: the machine may be busy with other things. The figure to look at is printed.
        assert stall_ms < 1000, lines


def write_keys(path: Path) -> Path:
    """A file of the tenants' keys."""
    lines = [f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Two tenants, one worker. Leaving it, all processes end by themselves."""
    stack = WatchedStack(
        folder / "stack",
        model=str(write_stub_model(folder / "stub-model", max_model_len=CONTEXT)),
        worker_module="tests.stub_worker",
        settings={
            "QUIRE_API_KEYS_FILE": str(write_keys(folder / "keys")),
            "QUIRE_SERVED_MODEL_NAME": "m",
            "QUIRE_DRAIN_S": "1",
            "STUB_STEP_MS": "1",
        },
    )
    with stack:
        await_workers(stack, 1)
        yield World(stack)
