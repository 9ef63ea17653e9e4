"""The pods that stand: stands in for the controllers and the kubelet of a cluster.

Owns which pods there are. Makes a workload's pods, waits until their own probes call them ready,
ends and replaces them. Every wait is bounded by the manifest's budgets, and says which pod it
waited for, with its last lines.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from prometheus_client.parser import text_string_to_metric_families

from deploy.k8s_run import honoured, pods, probes
from deploy.k8s_run.errors import RunError
from deploy.k8s_run.podman import Podman, PodmanError
from deploy.k8s_run.pods import PlayedPod, Source

POLL_S = 0.25
LOOK_S = 5.0
SLACK_S = 30.0
SCRAPE_S = 10.0

Say = Callable[[str], None]


class Stage:
    """Enter it with a TaskGroup that asks the probes for as long as the run lasts."""

    def __init__(self, podman: Podman, source: Source, tasks: asyncio.TaskGroup, say: Say) -> None:
        self.podman, self.source = podman, source
        self.standing: dict[str, PlayedPod] = {}
        self.played: list[PlayedPod] = []
        self._tasks, self._say = tasks, say
        self._numbers: dict[str, int] = {}
        self._watches: dict[str, probes.Watch] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, str] = {}
        self._configs = pods.config_maps(source)
        self._ended: list[probes.Watch] = []
        self._num_crashes: dict[str, int] = {}

    async def play(self, component: str) -> PlayedPod:
        """One more pod of the workload; does not wait until it is ready."""
        work = self.source.workload(component)
        number = self._numbers.get(component, 0)
        self._numbers[component] = number + 1
        pod = pods.make(self.source, work, number)
        self.played.append(pod)
        self.standing[pod.name] = pod
        await self.podman.play(pod, self._configs)
        await self._check_rights(pod)
        # A Job's pod has no probes, and may be over and without an address by now.
        if any(kind in work.containers[0] for kind in pods.PROBES):
            self._addresses[pod.name] = await self.podman.address(pod)
            self._watch(pod)
        return pod

    async def _check_rights(self, pod: PlayedPod) -> None:
        """What the manifest says of limits and rights must be so."""
        problems = [
            f"{pod.name}, {name}: {problem}"
            for name in (str(container["name"]) for container in pod.work.all_containers)
            for problem in honoured.broken(
                pod.manifest, name, await self.podman.inspect(f"{pod.name}-{name}")
            )
        ]
        if problems:
            raise RunError("podman does not do as the manifest says: " + "; ".join(problems))

    async def play_all(self, component: str) -> list[PlayedPod]:
        """As many as the workload asks for."""
        count = self.source.num_pods(self.source.workload(component))
        return [await self.play(component) for _ in range(count)]

    def _watch(self, pod: PlayedPod) -> None:
        """Begins to ask its probes."""

        async def execute(command: tuple[str, ...], timeout_s: float) -> str:
            # podman itself takes its time to start a process in a container.
            code, output, errors = await self.podman.attempt(
                "exec", pod.container(), *command, timeout_s=timeout_s + SCRAPE_S
            )
            return "" if code == 0 else f"status {code} {(errors or output).strip()[-200:]}"

        watch = probes.Watch(pod.name, pod.work.containers[0], self._addresses[pod.name], execute)
        self._watches[pod.name] = watch
        self._asking[pod.name] = self._tasks.create_task(watch.run())

    async def until_ready(self, pod: PlayedPod) -> float:
        """Seconds waited. Raises RunError when the manifest's own budget is spent."""
        watch = self._watches[pod.name]
        begun = time.monotonic()
        bound_s = watch.budget_s + SLACK_S
        look_at = begun + LOOK_S
        while not watch.ready:
            now = time.monotonic()
            if watch.given_up or now - begun > bound_s:
                raise RunError(await self._words(pod, f"not ready after {now - begun:.0f} s"))
            if now >= look_at:
                look_at = now + LOOK_S
                state = await self.podman.state(pod.container())
                if state.num_restarts > self._allowed(pod) or not state.running:
                    what = f"restarted {state.num_restarts} times, status {state.exit_code}"
                    raise RunError(await self._words(pod, what))
            await asyncio.sleep(POLL_S)
        return time.monotonic() - begun

    async def until_done(self, pod: PlayedPod, timeout_s: float) -> None:
        """Waits until its container has ended well. Raises RunError."""
        deadline = time.monotonic() + timeout_s
        while (state := await self.podman.state(pod.container())).running:
            if time.monotonic() > deadline:
                raise RunError(await self._words(pod, f"not done after {timeout_s:.0f} s"))
            await asyncio.sleep(POLL_S)
        if state.exit_code != 0:
            raise RunError(await self._words(pod, f"ended with status {state.exit_code}"))
        await self._check_restarts(pod)
        self._forget(pod)
        await self.podman.remove(pod.name)

    async def crash(self, pod: PlayedPod) -> None:
        """SIGKILL for its container, which podman starts again by the pod's restart policy."""
        container = pod.container()
        before = await self.podman.state(container)
        await self._check_restarts(pod)
        self._num_crashes[pod.name] = self._allowed(pod) + 1
        await self.podman.kill(container)
        self._watches[pod.name].restarted()
        deadline = time.monotonic() + SLACK_S
        while True:
            state = await self.podman.state(container)
            if state.running and state.started_at != before.started_at:
                return
            if time.monotonic() > deadline:
                raise RunError(await self._words(pod, "killed, and not started again"))
            await asyncio.sleep(POLL_S)

    async def lose(self, pod: PlayedPod) -> None:
        """Ends the whole pod at once, as when its node is gone."""
        await self._check_restarts(pod)
        self._forget(pod)
        await self.podman.remove(pod.name)

    async def drain(self, pod: PlayedPod) -> tuple[float, str]:
        """SIGTERM with the manifest's grace. Seconds it took, and its last lines.

        Raises RunError unless it ended well.
        """
        await self._check_restarts(pod)
        self._forget(pod)
        begun = datetime.now(UTC)
        await self.podman.stop(pod)
        state = await self.podman.state(pod.container())
        # By its own end: to take the rest of the pod down, podman may need far longer.
        took_s = (state.finished_at - begun).total_seconds()
        if state.exit_code != 0:
            what = f"ended with status {state.exit_code} {took_s:.0f} s after SIGTERM"
            raise RunError(await self._words(pod, what))
        last_lines = await self.podman.last_lines(pod.container())
        await self.podman.remove(pod.name)
        return took_s, last_lines

    async def check_restarts(self) -> None:
        """Nothing that stands may have been started again, but by `crash`. Raises RunError."""
        for pod in list(self.standing.values()):
            await self._check_restarts(pod)

    def _allowed(self, pod: PlayedPod) -> int:
        return self._num_crashes.get(pod.name, 0)

    async def _check_restarts(self, pod: PlayedPod) -> None:
        for position in range(len(pod.work.containers)):
            name = pod.container(position)
            count = (await self.podman.state(name)).num_restarts
            allowed = self._allowed(pod) if position == 0 else 0
            if count != allowed:
                what = f"{name} was restarted {count} times, {allowed} of them by the run"
                raise RunError(await self._words(pod, what))

    def _forget(self, pod: PlayedPod) -> None:
        del self.standing[pod.name]
        if watch := self._watches.pop(pod.name, None):
            watch.leave()
            self._ended.append(watch)
            self._asking.pop(pod.name).cancel()

    def of(self, component: str) -> list[PlayedPod]:
        """Those that stand."""
        return [pod for pod in self.standing.values() if pod.component == component]

    def address(self, pod: PlayedPod) -> str:
        """On the network."""
        return self._addresses[pod.name]

    async def metric(self, pod: PlayedPod, name: str) -> float:
        """The sum of a metric's samples, from the pod's ops port. Raises RunError."""
        probe = probes.Probe(
            kind="scrape", path="/metrics", port=pod.port("ops"), timeout_s=SCRAPE_S
        )
        try:
            text = await asyncio.to_thread(probes.fetch, self.address(pod), probe)
        except OSError as error:
            raise RunError(await self._words(pod, f"/metrics: {error}")) from error
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        if not values:
            raise RunError(f"{pod.name}: no metric {name}")
        return float(sum(values))

    def problems(self) -> list[str]:
        """What the probes found that a cluster would have acted upon."""
        watches: Sequence[probes.Watch] = [*self._ended, *self._watches.values()]
        return [problem for watch in watches for problem in watch.problems]

    def num_asked(self) -> int:
        """Probes asked so far."""
        return sum(watch.num_asked for watch in (*self._ended, *self._watches.values()))

    def stop_watching(self) -> None:
        """No probe is asked from here on."""
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()

    async def _words(self, pod: PlayedPod, what: str) -> str:
        watch = self._watches.get(pod.name)
        asked = f"; {watch.last_failure}" if watch is not None else ""
        lines = [f"{pod.name}: {what}{asked}; its last lines:"]
        for container in pod.manifest["spec"].get("initContainers", ()):
            name = f"{pod.name}-{container['name']}"
            try:
                state = await self.podman.state(name)
            except PodmanError:
                continue
            if state.exit_code != 0:
                lines += [f"  {name}, status {state.exit_code}", await self.podman.last_lines(name)]
        return "\n".join([*lines, await self.podman.last_lines(pod.container())])
