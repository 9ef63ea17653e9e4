"""Golden traces: scripts of commands with what the core answered below each.

A line that starts in the first column is a command; the indented lines below it are the recorded
Ready. `pytest tests/traces --rewrite` records anew; say in the commit why the answers differ.

    core KEY=VALUE...              the core's configuration; first command of a script
    join WORKER KEY=VALUE...       numbers as of make_worker
    arrive NAME KEY=VALUE... [& NAME KEY=VALUE...]   requests that are there together; prompt, max,
                                   stop_after, outputs, attempt, family, priority, deadline_ms,
                                   group and index of samples
    complete [WORKER] [TIMES]      the worker answers its oldest plan
    run                            workers answer in turn until nothing is planned
    fail [WORKER]                  the step is not computed
    cancel NAME | supersede NAME | lose-worker WORKER | drain WORKER | advance MS
    subscribe WORKER [GATEWAY...] | lose-gateway GATEWAY
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core import Ready
from scheduler_svc.core.events import GatewayLost, RequestArrived, WorkerDraining, WorkerSubscribed
from scheduler_svc.core.trace import event_line, ready_lines
from scheduler_svc.core.types import WorkerId
from tests.builders import make_core, make_request
from tests.cluster import MS, Cluster

FOLDER = Path(__file__).parent
TRACES = sorted(FOLDER.glob("*.trace"))
NAMES = {"max": "max_tokens", "group": "sample_group", "index": "sample_index"}


class Script:
    """Plays commands on a cluster."""

    def __init__(self, options: list[str]) -> None:
        self.cluster = Cluster(make_core(**keywords(options)))
        self.commands: dict[str, Callable[..., Ready]] = {
            "join": self.join,
            "arrive": self.arrive,
            "complete": lambda name="w": self.cluster.step(name),
            "fail": lambda name="w": self.cluster.step(name, fail=True),
            "cancel": self.cluster.cancel,
            "supersede": self.cluster.supersede,
            "lose-worker": self.cluster.lose,
            "advance": lambda ms: self.cluster.advance(int(ms) * MS),
            "drain": lambda name: self.cluster.feed(
                WorkerDraining(now_ns=self.cluster.now_ns, worker_id=WorkerId(name))
            ),
            "subscribe": lambda name, *gateways: self.cluster.feed(
                WorkerSubscribed(
                    now_ns=self.cluster.now_ns,
                    worker_id=WorkerId(name),
                    gateway_ids=frozenset(gateways),
                )
            ),
            "lose-gateway": lambda name: self.cluster.feed(
                GatewayLost(now_ns=self.cluster.now_ns, gateway_id=name)
            ),
        }

    def join(self, name: str, *options: str) -> Ready:
        self.cluster.join(name, **keywords(list(options)))
        return self.cluster.last

    def arrive(self, *words: str) -> Ready:
        parts = [part.split() for part in " ".join(words).split("&")]
        return self.cluster.arrive_together(*(self.request(*part) for part in parts))

    def request(self, name: str, *options: str) -> RequestArrived:
        fields = {"family": 0, **keywords(list(options))}
        if "deadline_ms" in fields:
            fields["deadline_ns"] = self.cluster.now_ns + int(fields.pop("deadline_ms")) * MS
        if "sample_group" in fields:
            fields["sample_group"] = str(fields["sample_group"]).encode()
        return make_request(name, **fields)

    def play(self, line: str) -> Iterator[str]:
        """The answers to a command."""
        command, *words = line.split()
        if command == "run":
            while busy := [w for w in self.cluster.workers.values() if w.plans]:
                for worker in busy:
                    yield from ready_lines(self.cluster.step(worker.worker_id))
            return
        times = int(words.pop()) if command == "complete" and words and words[-1].isdigit() else 1
        for _ in range(times):
            yield from ready_lines(self.commands[command](*words))


def keywords(options: list[str]) -> dict[str, Any]:
    """KEY=VALUE words."""
    pairs = (option.split("=") for option in options)
    return {NAMES.get(key, key): number(value) for key, value in pairs}


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def record(text: str) -> str:
    """The script with the core's answers of today."""
    lines: list[str] = []
    script: Script | None = None
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith("core"):
            script = Script(line.split()[1:])
        elif line and not line.startswith("#"):
            assert script is not None, "a script begins with `core`"
            lines += [f"    {answer}" for answer in script.play(line)]
    assert script is not None
    script.cluster.assert_idle()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_core_answers_as_recorded(path: Path, rewrite: bool) -> None:
    text = path.read_text()
    now = record(text)
    if rewrite:
        path.write_text(now)
    else:
        assert now == text


def test_there_is_a_trace_for_each_behaviour() -> None:
    assert {path.stem for path in TRACES} >= {
        "adapted-depth",
        "budget-edge",
        "cancel-in-flight",
        "chunked-prefill",
        "copy-on-write",
        "draining",
        "host-pool-full",
        "fork",
        "never-fits",
        "preempt-cost",
        "preempt-resume",
        "preempt-swap",
        "prefix-hit",
        "several-steps",
        "static",
        "step-failed",
        "superseded",
        "suspect",
        "swap-void",
        "swapped-ended",
        "worker-lost",
    }


def test_events_and_values_have_one_text() -> None:
    event = WorkerSubscribed(now_ns=5, worker_id=WorkerId("w"), gateway_ids=frozenset("hgfedcba"))
    assert (
        event_line(event) == "WorkerSubscribed(now_ns=5 worker_id=w gateway_ids={a,b,c,d,e,f,g,h})"
    )
    arrival = make_request("a", prompt=range(20), reply_to=b"\x00\xff", deadline_ns=0)
    assert event_line(arrival) == (
        "RequestArrived(now_ns=0 request_id=a entry_id=a-1 gateway_id=gateway reply_to=0x00ff "
        "prompt_token_ids=(0,1,2,3,..20 #c8a08ec3) sampling=SamplingSpec(max_tokens=3) "
        "deadline_ns=0)"
    )


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_traces_are_the_same_in_every_process(hash_seed: str) -> None:
    path = FOLDER / "worker-lost.trace"
    code = f"from tests.traces.test_traces import *; print(record(open({str(path)!r}).read()))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.rstrip() == path.read_text().rstrip()
