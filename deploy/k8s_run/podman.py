"""Owns what the run makes in podman: pods, volumes, a network. All of it is removed at the end.

Every name begins with the run's prefix, which no other run has; nothing else is ever touched.
Commands are bounded, and run in sessions of their own, so that Ctrl-C reaches the run alone.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s_check.objects import Manifest
from deploy.k8s_run.errors import RunError
from deploy.k8s_run.pods import MANAGED_BY, MANAGER, PlayedPod, SecretVolume

COMMAND_S = 120.0
PLAY_S = 900.0  # the containers that run before the others are waited for
FILL_S = 600.0
CLEAN_S, LOGS_S = 300.0, 120.0
NUM_LAST_LINES = 20
NUM_REMOVALS, REMOVAL_PAUSE_S = 5, 2.0


class PodmanError(RunError):
    """A command of podman failed; the message has its last lines."""


class Podman:
    """podman, for one run."""

    def __init__(self, prefix: str, environ: Mapping[str, str]) -> None:
        self.prefix = prefix
        self.network = f"{prefix}-net"
        self._environ = dict(environ)

    async def command(
        self, *arguments: str, stdin: bytes | None = None, timeout_s: float = COMMAND_S
    ) -> str:
        """What the command prints. Raises PodmanError."""
        code, output, errors = await self.attempt(*arguments, stdin=stdin, timeout_s=timeout_s)
        if code != 0:
            raise PodmanError(f"podman {' '.join(arguments[:4])}: {_last(errors or output)}")
        return output

    async def attempt(
        self, *arguments: str, stdin: bytes | None = None, timeout_s: float = COMMAND_S
    ) -> tuple[int, str, str]:
        """Status, output and errors; status 124 if it took longer."""
        process = await asyncio.create_subprocess_exec(
            "podman",
            *arguments,
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate(stdin)
        except TimeoutError:
            return 124, "", f"not done after {timeout_s:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")

    async def make_network(self) -> None:
        """One network with names, for this run's pods."""
        await self.command("network", "create", "--label", _LABEL, self.network)

    async def make_volume(self, name: str) -> None:
        """An empty one."""
        self._check(name)
        await self.command("volume", "create", "--label", _LABEL, name)

    async def fill_with_folder(self, name: str, folder: Path, inside: str) -> None:
        """Copies a folder's files, readable by everyone, to `inside`."""
        self._check(name)
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            await asyncio.to_thread(_tar_folder, Path(file.name), folder, inside)
            await self.command("volume", "import", name, file.name, timeout_s=FILL_S)

    async def fill_with_secret(self, volume: SecretVolume) -> None:
        """A file per key, owned as Kubernetes would."""
        self._check(volume.name)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "secret.tar"
            _tar_secret(path, volume)
            await self.command("volume", "import", volume.name, str(path))

    async def play(self, pod: PlayedPod, configs: Sequence[Manifest]) -> None:
        """Makes and starts it."""
        self._check(pod.name)
        documents = yaml.safe_dump_all([*configs, pod.manifest], sort_keys=False)
        network = self.network + "".join(
            f"{',' if i else ':'}alias={name}" for i, name in enumerate(pod.aliases)
        )
        try:
            await self.command(
                "kube", "play", "--quiet", "--network", network, "-",
                stdin=documents.encode(), timeout_s=PLAY_S,
            )  # fmt: skip
        except PodmanError as error:
            raise PodmanError(f"{pod.name}: {error}") from error

    async def address(self, pod: PlayedPod) -> str:
        """Of the pod on the network."""
        infra = await self.command("pod", "inspect", "--format", "{{.InfraContainerID}}", pod.name)
        networks = (await self.inspect(infra.strip()))["NetworkSettings"]["Networks"]
        address = str(networks.get(self.network, {}).get("IPAddress", ""))
        if not address:
            raise RunError(f"{pod.name} has no address on {self.network}")
        return address

    async def state(self, container: str) -> "ContainerState":
        """Of a container. Raises PodmanError where there is none."""
        return ContainerState(await self.inspect(container))

    async def inspect(self, container: str) -> dict[str, Any]:
        """podman's document of a container. Raises PodmanError where there is none."""
        found = json.loads(await self.command("inspect", "--type", "container", container))
        return dict(found[0])

    async def kill(self, container: str) -> None:
        """SIGKILL for its first process; after podman's own kill it would not be started again."""
        self._check(container)
        state = await self.state(container)
        if not state.running or state.pid <= 1:
            raise RunError(f"{container} does not run, and can't be killed")
        os.kill(state.pid, signal.SIGKILL)

    async def stop(self, pod: PlayedPod) -> None:
        """SIGTERM, and SIGKILL after the manifest's grace.

        Only to the containers of the manifest, as the kubelet does. `podman pod stop` ends the one
        that holds the network at the same time, and what drains would be cut off.
        """
        self._check(pod.name)
        names = [pod.container(position) for position in range(len(pod.work.containers))]
        await self.command(
            "stop", "--time", str(pod.grace_s), *names, timeout_s=pod.grace_s + COMMAND_S
        )

    async def remove(self, pod_name: str) -> None:
        """A pod, at once, whether it runs or not.

        Podman tidies up behind a container that has ended by itself, and what it holds just then
        can't be removed: tried NUM_REMOVALS times.
        """
        self._check(pod_name)
        removal = ("pod", "rm", "--force", "--ignore", "--time", "0", pod_name)
        for _ in range(NUM_REMOVALS - 1):
            code, _, _ = await self.attempt(*removal)
            if code == 0:
                return
            await asyncio.sleep(REMOVAL_PAUSE_S)
        await self.command(*removal)

    async def last_lines(self, container: str, count: int = NUM_LAST_LINES) -> str:
        """Of its log; what went wrong if there is none."""
        code, output, errors = await self.attempt("logs", "--tail", str(count), container)
        text = "\n".join(f"    {line}" for line in (output + errors).splitlines()[-count:])
        return text or f"    (no log, status {code})"

    def clean(self, limit_s: float = CLEAN_S) -> list[str]:
        """Removes all that carries the prefix; what may be left after it, with podman's words.

        Never raises for what podman does. What is not removed after `limit_s` counts as left.
        """
        deadline = time.monotonic() + limit_s
        left: list[str] = []
        # With their own, nameless volumes; those with names follow.
        for kind, removal in (
            ("pod", ("rm", "--force", "--time", "0")),
            ("volume", ("rm", "--force")),
            ("network", ("rm", "--force")),
        ):
            for name in self._names(left, kind, "ls", "--format", "{{.Name}}", deadline=deadline):
                code, output = self._removed((kind, *removal, name), deadline)
                if code != 0:
                    left.append(f"{name}: {_last(output)}")
        return left

    def _removed(self, removal: Sequence[str], deadline: float) -> tuple[int, str]:
        """As `remove` tries; not again after a command that hangs."""
        code, output = self._now(*removal, deadline=deadline)
        for _ in range(NUM_REMOVALS - 1):
            if code in (0, 124, 127) or time.monotonic() + REMOVAL_PAUSE_S > deadline:
                break
            time.sleep(REMOVAL_PAUSE_S)
            code, output = self._now(*removal, deadline=deadline)
        return code, output

    def save_logs(self, folder: Path, limit_s: float = LOGS_S) -> None:
        """The logs of all its containers, as files; those that come in time. Raises OSError."""
        deadline = time.monotonic() + limit_s
        missing: list[str] = []
        for name in self._names(
            missing, "ps", "--all", "--format", "{{.Names}}", deadline=deadline
        ):
            folder.mkdir(parents=True, exist_ok=True)
            self._save_log(name, folder / f"{name}.log", deadline)

    def _save_log(self, name: str, path: Path, deadline: float) -> None:
        with path.open("wb") as sink, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["podman", "logs", name], env=self._environ, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, check=False, start_new_session=True,
                timeout=max(0.0, min(COMMAND_S, deadline - time.monotonic())),
            )  # fmt: skip

    def _names(self, problems: list[str], *arguments: str, deadline: float) -> list[str]:
        """This run's; if they can't be listed, that is a problem."""
        code, output = self._now(*arguments, deadline=deadline)
        if code != 0:
            problems.append(f"podman {' '.join(arguments[:2])}: {_last(output)}")
            return []
        return [name for name in output.split() if name.startswith(f"{self.prefix}-")]

    def _now(self, *arguments: str, deadline: float) -> tuple[int, str]:
        """Status and what was printed; status 124 if it took too long, 127 if it can't be run."""
        limit_s = min(COMMAND_S, deadline - time.monotonic())
        if limit_s <= 0.0:
            return 124, "no time was left for it"
        try:
            done = subprocess.run(
                ["podman", *arguments], env=self._environ, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=limit_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"not done after {limit_s:.0f} s"
        except OSError as error:
            return 127, str(error)
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr

    def _check(self, name: str) -> None:
        assert name.startswith(f"{self.prefix}-"), f"{name} is not this run's"


_LABEL = f"{MANAGED_BY}={MANAGER}"


class ContainerState:
    """What podman says of a container."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        state = document["State"]
        self.running = bool(state["Running"])
        self.pid = int(state["Pid"])
        self.exit_code = int(state["ExitCode"])
        self.started_at = str(state["StartedAt"])
        self.finished_at = datetime.fromisoformat(str(state["FinishedAt"]))
        self.num_restarts = int(document.get("RestartCount", 0))


def _last(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-5:])


def _tar_folder(path: Path, folder: Path, inside: str) -> None:
    def readable(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.isdir() else 0o644
        return info

    with tarfile.open(path, "w", dereference=True) as archive:
        archive.add(folder, inside, filter=readable)


def _tar_secret(path: Path, volume: SecretVolume) -> None:
    folder = path.parent
    with tarfile.open(path, "w") as archive:
        for name, text in volume.files.items():
            source = folder / "value"
            source.write_text(text)
            source.chmod(0o600)
            info = archive.gettarinfo(source, name)
            info.mode, info.uid, info.gid = volume.mode, 0, volume.group
            info.uname = info.gname = ""
            with source.open("rb") as content:
                archive.addfile(info, content)
