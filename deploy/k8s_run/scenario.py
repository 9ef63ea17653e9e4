"""What happens to the pods while clients stream, and what must be true then.

Every step waits until streams are under way, does one thing, waits until the manifests' own probes
call everything ready again, and lets more answers come. A client's first problem ends the run.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.k8s_run.errors import RunError
from deploy.k8s_run.load import Load
from deploy.k8s_run.pods import PlayedPod
from deploy.k8s_run.stage import Say, Stage

POLL_S = 0.05
UNDER_WAY_S = 300.0
MORE_S = 600.0
LEADER_S = 60.0
JOB_S = 600.0
IDLE_S = 60.0
WORKER_EXIT_S = 10.0  # a goal, printed beside what was seen: podman's own time is in it
IDLE = {
    "scheduler": ("vllm:num_requests_running", "vllm:num_requests_waiting", "quire:blocks_used"),
    "worker": ("quire:slots_used",),
    "gateway": ("quire:gateway_streams",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the report. The gap is the longest between two tokens of a stream."""

    what: str
    detail: str
    took_s: float
    num_answers: int
    longest_gap_s: float


class Scenario:
    """One run of the steps."""

    def __init__(self, stage: Stage, say: Say) -> None:
        self.steps: list[Step] = []
        self._stage, self._say = stage, say

    async def bring_up(self) -> None:
        """All of them at once, as kubectl apply does: nothing waits for what it needs."""
        begun = time.monotonic()
        started = []
        filler = await self._stage.play("model-cache")
        for component in ("scheduler", "redis", "gateway", "worker"):
            started += await self._stage.play_all(component)
        await self._stage.until_done(filler, JOB_S)
        self._say(f"{filler.name}: done")
        for pod in started:
            await self._stage.until_ready(pod)
            self._say(f"{pod.name}: ready {time.monotonic() - begun:.0f} s after the first pod")
        await self.leader()

    def gateway(self) -> tuple[PlayedPod, str]:
        """The first, and its address."""
        pod = self._stage.of("gateway")[0]
        return pod, f"http://{self._stage.address(pod)}:{pod.port('http')}"

    async def leader(self) -> PlayedPod:
        """The scheduler with an epoch. Raises RunError if none leads."""
        deadline = time.monotonic() + LEADER_S
        while time.monotonic() < deadline:
            for pod in self._stage.of("scheduler"):
                if await self._stage.metric(pod, "quire:epoch") > 0:
                    return pod
            await asyncio.sleep(POLL_S)
        raise RunError(f"no scheduler leads after {LEADER_S:.0f} s")

    async def disturb(self, load: Load) -> None:
        """The steps, in their order."""
        async with self._step(load, "a worker is killed, and its kubelet starts it again") as tell:
            victim, num_rows = await self._busiest()
            await self._stage.crash(victim)
            ready_s = await self._stage.until_ready(victim)
            await self._sessions(len(self._stage.of("worker")))
            tell(f"{victim.name} held {num_rows} requests, ready again after {ready_s:.0f} s")
        async with self._step(load, "a worker is added") as tell:
            added = await self._add("worker")
            await self._sessions(len(self._stage.of("worker")))
            rows = await self._until_used(added)
            tell(f"{added.name} was given {rows} requests")
        async with self._step(load, "a worker is removed") as tell:
            leaving, num_rows = await self._busiest()
            took_s, last_lines = await self._stage.drain(leaving)
            if not handed_over(last_lines):
                what = f"{leaving.name} left with requests {took_s:.0f} s after SIGTERM"
                raise RunError(f"{what}; its last lines:\n{last_lines}")
            await self._sessions(len(self._stage.of("worker")))
            tell(
                f"{leaving.name} held {num_rows} requests, handed them over and left "
                f"{took_s:.1f} s after SIGTERM (goal {WORKER_EXIT_S:.0f})"
            )
        async with self._step(load, "the leader is killed, with its pod") as tell:
            leader = await self.leader()
            epoch = await self._stage.metric(leader, "quire:epoch")
            killed = time.monotonic()
            await self._stage.lose(leader)
            gone_s = time.monotonic() - killed
            successor = await self.leader()
            led_s = time.monotonic() - killed
            if await self._stage.metric(successor, "quire:epoch") <= epoch:
                raise RunError(f"{successor.name} leads, with no epoch above {epoch:.0f}")
            await self._sessions(len(self._stage.of("worker")))
            tell(
                f"{successor.name} leads in place of {leader.name}, seen {led_s:.1f} s after the "
                f"kill, of which podman took {gone_s:.1f}"
            )
        async with self._step(load, "its successor as standby is made") as tell:
            tell(f"{(await self._add('scheduler')).name} stands by")

    async def settle(self) -> None:
        """Without clients everything becomes idle. Raises RunError with what is not."""
        deadline = time.monotonic() + IDLE_S
        while busy := await self._busy():
            if time.monotonic() > deadline:
                raise RunError(f"not idle {IDLE_S:.0f} s after the last answer: {busy}")
            await asyncio.sleep(POLL_S)

    async def _busy(self) -> dict[str, float]:
        found = {}
        for component, names in IDLE.items():
            for pod in self._stage.of(component):
                for name in names:
                    if value := await self._stage.metric(pod, name):
                        found[f"{pod.name} {name}"] = value
        return found

    async def _add(self, component: str) -> PlayedPod:
        pod = await self._stage.play(component)
        await self._stage.until_ready(pod)
        return pod

    async def _busiest(self) -> tuple[PlayedPod, int]:
        rows = [
            (int(await self._stage.metric(pod, "quire:slots_used")), pod.name, pod)
            for pod in self._stage.of("worker")
        ]
        num_rows, _, pod = max(rows)
        if not num_rows:
            raise RunError("no worker holds a request: the clients do not keep them busy")
        return pod, num_rows

    async def _until_used(self, pod: PlayedPod) -> int:
        deadline = time.monotonic() + UNDER_WAY_S
        while time.monotonic() < deadline:
            if rows := int(await self._stage.metric(pod, "quire:slots_used")):
                return rows
            await asyncio.sleep(POLL_S)
        raise RunError(f"{pod.name} was given no request in {UNDER_WAY_S:.0f} s")

    async def _sessions(self, count: int) -> None:
        """Waits until the leader has that many workers."""
        deadline = time.monotonic() + LEADER_S
        while True:
            found = await self._stage.metric(await self.leader(), "quire:workers")
            if found == count:
                return
            if time.monotonic() > deadline:
                raise RunError(f"the leader has {found:.0f} workers, not {count}")
            await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def _step(self, load: Load, what: str) -> AsyncIterator[Callable[[str], None]]:
        least = max(1, len(load.work) // 4)
        await self._wait(load, lambda: load.num_streaming(2) >= least, UNDER_WAY_S, "under way")
        self._say(f"{what} ...")
        begun, before, load.longest_gap_s = time.monotonic(), load.num_answers, 0.0
        details: list[str] = []
        yield details.append
        wanted = load.num_answers + len(load.work)
        await self._wait(load, lambda: load.num_answers >= wanted, MORE_S, "answered")
        step = Step(
            what=what,
            detail="; ".join(details),
            took_s=time.monotonic() - begun,
            num_answers=load.num_answers - before,
            longest_gap_s=load.longest_gap_s,
        )
        self.steps.append(step)
        self._say(f"  {step.detail}; {step.took_s:.0f} s, {step.num_answers} answers")

    async def _wait(
        self, load: Load, condition: Callable[[], bool], timeout_s: float, what: str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if load.problems:
                raise RunError(f"a request failed: {load.problems[0]}")
            if time.monotonic() > deadline:
                raise RunError(f"requests are not {what} after {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)


def handed_over(last_lines: str) -> bool:
    """Whether a worker says there that it left because nothing ran, not because its time was up."""
    for line in reversed(last_lines.splitlines()):
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if said["event"] == "drained":
                return bool(said["live_rows"] == 0)
    return False


async def under_load(load: Load, num_clients: int, disturb: Callable[[], Awaitable[None]]) -> None:
    """Runs `disturb` while the clients ask; they end between two requests."""
    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(load.client(number))
        await disturb()
        load.stop()
