"""A container that ended and was started again without the run's doing is a failure."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deploy.k8s_run import pods
from deploy.k8s_run.errors import RunError
from deploy.k8s_run.podman import Podman
from deploy.k8s_run.stage import Stage
from tests.unit.deploy.manifests import overlay
from tests.unit.deploy.test_k8s_run_pods import inspected, source_of


class PodmanInMemory:
    """Containers that run until they are killed, and then run again."""

    def __init__(self) -> None:
        self.num_restarts: Counter[str] = Counter()
        self.removed: list[str] = []
        self.stopped: list[str] = []

    async def play(self, pod: pods.PlayedPod, configs: object) -> None:
        """Nothing has to be made."""

    async def address(self, pod: pods.PlayedPod) -> str:
        return "127.0.0.1"

    async def inspect(self, container: str) -> dict[str, Any]:
        first = container.endswith("wait-for-model")
        return inspected(Memory=64 << 20, CpuQuota=50_000) if first else inspected()

    async def state(self, container: str) -> SimpleNamespace:
        return SimpleNamespace(
            num_restarts=self.num_restarts[container],
            running=True,
            exit_code=0,
            started_at=str(self.num_restarts[container]),
            finished_at=datetime.now(UTC),
        )

    async def kill(self, container: str) -> None:
        self.num_restarts[container] += 1

    async def stop(self, pod: pods.PlayedPod) -> None:
        self.stopped.append(pod.name)

    async def remove(self, pod_name: str) -> None:
        self.removed.append(pod_name)

    async def last_lines(self, container: str) -> str:
        return "    Traceback"


class Scene:
    """One gateway on a stage."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.podman = PodmanInMemory()
        source = source_of(overlay("dev-cpu"))
        self.stage = Stage(cast("Podman", self.podman), source, tasks, lambda _: None)

    async def play(self) -> pods.PlayedPod:
        """A gateway that nobody asks."""
        pod = await self.stage.play("gateway")
        for task in self.stage._asking.values():
            task.cancel()
        return pod

    def restart(self, pod: pods.PlayedPod) -> None:
        """Its container crashes, and is started again."""
        self.podman.num_restarts[pod.container()] += 1


async def test_without_a_crash_pods_are_ended_and_removed() -> None:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        lost, drained, crashed = [await scene.play() for _ in range(3)]
        await scene.stage.crash(crashed)
        await scene.stage.check_restarts()
        await scene.stage.lose(lost)
        _, last_lines = await scene.stage.drain(drained)
        await scene.stage.crash(crashed)
        await scene.stage.lose(crashed)
    assert scene.podman.removed == [lost.name, drained.name, crashed.name]
    assert last_lines == "    Traceback"


@pytest.mark.parametrize("how", ["lose", "drain", "crash", "check_restarts", "until_ready"])
async def test_a_crash_that_nobody_wanted_is_told(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pod is ended, when its count is gone, and at the end for those that stand."""
    monkeypatch.setattr("deploy.k8s_run.stage.LOOK_S", 0.0)
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        pod = await scene.play()
        scene.restart(pod)
        arguments = () if how == "check_restarts" else (pod,)
        with pytest.raises(RunError, match=r"restarted 1 times.*\n    Traceback"):
            await getattr(scene.stage, how)(*arguments)
    assert scene.podman.removed == scene.podman.stopped == []


async def test_a_worker_that_crashes_once_more_than_it_was_killed_is_told() -> None:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        pod = await scene.play()
        await scene.stage.crash(pod)
        scene.restart(pod)
        with pytest.raises(RunError, match="was restarted 2 times, 1 of them by the run"):
            await scene.stage.check_restarts()
