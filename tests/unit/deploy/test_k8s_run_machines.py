"""`make k8s-run` on machines that can't run pods, can't build images, or are too slow."""

import asyncio
import contextlib
import itertools
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docker import __main__ as docker
from deploy.k8s_run import __main__ as k8s_run
from deploy.k8s_run import images, machine, trial
from deploy.k8s_run.deadline import Deadline
from deploy.k8s_run.errors import LateError, NotPossibleError, RunError
from deploy.k8s_run.podman import Podman
from deploy.local import valkey

# A podman that plays the trial's pod. Each test may break one of its answers.
HEAD = """#!/bin/sh
echo "$@" >> "$LOG"
"""
PODMAN = """case "$1 $2" in
"version --format") echo 4.9.3 ;;
"kube play") cat > "$LOG.played" ;;
"inspect --type") cat "$LOG.container" ;;
esac
"""
CONTAINER = """[{"State": {"Running": false, "Pid": 0, "ExitCode": %d, "StartedAt": "",
"FinishedAt": "2020-01-01T00:00:00+00:00"}, "RestartCount": 0, "EffectiveCaps": null,
"Config": {"User": "65534"}, "HostConfig": {"ReadonlyRootfs": true, "Memory": %d,
"SecurityOpt": ["no-new-privileges"], "CpuPeriod": 100000, "CpuQuota": 50000}}]"""
GOOD = CONTAINER % (0, 64 << 20)


class Machine:
    """A PATH with a podman of the test's."""

    def __init__(self, folder: Path) -> None:
        self.path = f"{folder}:/usr/bin:/bin"
        self.log = folder / "log"
        self._podman = folder / "podman"
        self.environ = {"PATH": self.path, "LOG": str(self.log)}
        self._lines: list[str] = []
        self._write()
        self.inspected(GOOD)

    def breaks(self, what: str) -> None:
        """From now on the command that begins with these words fails."""
        self.answers(what, "echo broken >&2; exit 125")

    def answers(self, what: str, how: str) -> None:
        """From now on the command that begins with these words does this."""
        self._lines.insert(0, f'case "$*" in "{what}"*) {how}; exit ;; esac\n')
        self._write()

    def _write(self) -> None:
        self._podman.write_text(HEAD + "".join(self._lines) + PODMAN)
        self._podman.chmod(0o755)

    def inspected(self, document: str) -> None:
        """What podman says of the trial's container."""
        self.log.with_name("log.container").write_text(document)

    def played(self) -> dict[str, Any]:
        """The pod that was played."""
        found: dict[str, Any] = yaml.safe_load(self.log.with_name("log.played").read_text())
        return found

    def asked(self) -> list[str]:
        """podman's command lines."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine on which the trial goes well, and a run that leaves this process as it was."""
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setenv("LOG", str(made.log))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(machine, "COMMANDS", ("podman",))
    monkeypatch.setattr(k8s_run, "RUNS", tmp_path / "run")
    monkeypatch.setattr("deploy.k8s_run.podman.REMOVAL_PAUSE_S", 0.0)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield made
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of the images: who asked for them. The pods end at once."""
    asked: list[str] = []

    def bases(self: images.Images, how: str) -> images.Bases:
        asked.append(how)
        return images.Bases(python=images.PYTHON, redis=images.REDIS)

    async def play(self: k8s_run.Run, bases: images.Bases) -> None:
        asked.append("play")

    monkeypatch.setattr(images.Images, "bases", bases)
    monkeypatch.setattr(images.Images, "try_a_build", lambda *_: None)
    monkeypatch.setattr(images.Images, "build", lambda *_: None)
    monkeypatch.setattr(images.Images, "build_stub", lambda *_: None)
    monkeypatch.setattr(images.Images, "sizes", lambda *_: [])
    monkeypatch.setattr(k8s_run.Run, "play", play)
    return asked


def result(place: Machine, optional: bool) -> int:
    """Of a run with stub workers."""
    return k8s_run.main(["--stub", *(["--optional"] if optional else [])], place.environ)


def test_where_the_trial_goes_well_the_run_goes_on(place: Machine, built: list[str]) -> None:
    assert result(place, optional=True) == 0
    assert built == ["auto", "play"]


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("what", ["network create", "kube play", "wait", "pod rm"])
def test_no_image_is_built_where_no_pod_can_run(
    place: Machine,
    built: list[str],
    capsys: pytest.CaptureFixture[str],
    what: str,
    optional: bool,
) -> None:
    place.breaks(what)
    assert result(place, optional) == (0 if optional else 1)
    assert "not run: podman can't run a pod here" in capsys.readouterr().out
    assert built == []


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        RunError("gateway failed, status 1"),
        FileNotFoundError("no embedded Valkey"),
        subprocess.TimeoutExpired("podman", 1.0),
    ],
)
def test_where_no_image_can_be_built_nothing_is_said_about_quire(
    place: Machine,
    built: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    optional: bool,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(images.Images, "try_a_build", fail)
    assert result(place, optional) == (0 if optional else 1)
    assert f"not run: no image can be built here: {error}" in capsys.readouterr().out
    assert built == ["auto"]


@pytest.mark.parametrize("what", ["build", "build_stub"])
def test_where_a_small_image_can_be_built_one_of_quire_has_to_be(
    place: Machine,
    built: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    """A broken Dockerfile or lock file is no fault of the machine."""

    def fail(*_: object) -> None:
        raise RunError("gateway failed, status 1")

    monkeypatch.setattr(images.Images, what, fail)
    assert result(place, optional=True) == 1
    assert "s: gateway failed, status 1" in capsys.readouterr().out
    assert built == ["auto"]


def test_a_missing_valkey_is_an_image_that_cannot_be_built(
    place: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise FileNotFoundError("no embedded Valkey for riscv64")

    monkeypatch.setattr(valkey, "binary", missing)
    environ = {**place.environ, "PYTHON_IMAGE": "localhost/python"}
    assert k8s_run.main(["--stub", "--optional", "--bases", "build"], environ) == 0
    assert "no embedded Valkey for riscv64" in capsys.readouterr().out


async def test_the_trial_asks_for_what_the_pods_ask_for(place: Machine) -> None:
    podman = Podman("run-1", place.environ)
    await trial.run(podman)
    (container,) = place.played()["spec"]["containers"]
    assert container["resources"]["limits"].keys() == {"memory", "cpu"}
    assert container["command"][1:] == ["ahostsv4", "run-1-trial"]
    assert "kube play --quiet --network run-1-net:alias=run-1-trial -" in place.asked()
    assert place.asked()[-1] == "pod rm --force --ignore --time 0 run-1-trial"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (CONTAINER % (2, 64 << 20), "its own name is not found, status 2"),
        (CONTAINER % (0, 0), "0 bytes of memory, not 64Mi"),
    ],
)
async def test_a_trial_without_names_or_limits_has_failed(
    place: Machine, document: str, problem: str
) -> None:
    place.inspected(document)
    with pytest.raises(RunError, match=problem):
        await trial.run(Podman("run-1", place.environ))


@pytest.mark.parametrize(
    ("text", "found"), [("4.3.1\n", (4, 3)), ("5.0.0-rc1", (5, 0)), ("10.2", (10, 2))]
)
def test_versions_are_read(text: str, found: tuple[int, int]) -> None:
    assert machine.version(text) == found
    with pytest.raises(NotPossibleError, match="of its version"):
        machine.version("new")


def test_an_old_podman_is_refused(place: Machine) -> None:
    place.answers("version --format", "echo 3.4.4")
    with pytest.raises(NotPossibleError, match=r"podman is 3\.4; 4\.3 or newer"):
        machine.prepare(install=False, say=print, deadline=Deadline(60.0))
    place.breaks("version --format")
    with pytest.raises(NotPossibleError, match="does not answer: broken"):
        machine.prepare(install=False, say=print, deadline=Deadline(60.0))


def test_a_deadline_bounds_what_has_a_bound_of_its_own() -> None:
    seconds = itertools.count(0.0, 4.0)
    deadline = Deadline(10.0, lambda: next(seconds))
    assert deadline.within(2.0) == 2.0
    with pytest.raises(LateError, match="over 10 s"):
        deadline.within(2.0)


async def test_a_deadline_ends_what_waits() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(LateError):
        await Deadline(0.01).bound(forever())
    assert ended == [True]


async def test_a_timeout_of_anything_else_is_its_own() -> None:
    async def times_out() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="of a socket"):
        await Deadline(60.0).bound(times_out())


@pytest.mark.parametrize("optional", [False, True])
def test_a_run_that_takes_too_long_is_not_run(
    place: Machine,
    built: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optional: bool,
) -> None:
    """The pods never come to an end, and what was made is removed none the less."""

    def build(self: k8s_run.Run) -> images.Bases:
        monkeypatch.setattr(self._deadline, "_ends_at", time.monotonic() + 0.05)
        return images.Bases(python=images.PYTHON, redis=images.REDIS)

    async def play(self: k8s_run.Run, bases: images.Bases) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(k8s_run.Run, "build", build)
    monkeypatch.setattr(k8s_run.Run, "play", play)
    limit_s = k8s_run.OPTIONAL_LIMIT_S if optional else k8s_run.LIMIT_S
    assert result(place, optional) == (0 if optional else 1)
    assert f"not run: took too long, over {limit_s:.0f} s" in capsys.readouterr().out
    assert "network ls --format {{.Name}}" in place.asked()


def test_a_build_ends_with_the_deadline(place: Machine, tmp_path: Path) -> None:
    builder = images.Images(place.environ, tmp_path, print, Deadline(0.3))
    with pytest.raises(LateError):
        builder._run("sleep", ["sleep", "60"], 60.0)


def test_no_image_of_a_release_is_replaced(
    place: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a run builds may stand on a stand-in."""
    built: list[list[str]] = []
    monkeypatch.setattr(images.Images, "_run", lambda self, name, line, limit_s: built.append(line))
    builder = images.Images(place.environ, tmp_path, print, Deadline(60.0))
    builder.build(docker.SERVICES, images.OWN_PYTHON)
    tags = [line[line.index("--tag") + 1] for line in built]
    assert tags == [f"localhost/quire/{service}:k8s-run" for service in docker.SERVICES]
    assert [line.count("--tag") for line in built] == [1, 1, 1]
    words = {word for line in built for word in line}
    assert not words & {docker.tag(service, "cpu") for service in docker.SERVICES}


@pytest.mark.parametrize("error", ["late", "away"])
def test_pods_are_removed_even_if_their_logs_cannot_be_had(
    place: Machine, built: list[str], monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """podman hangs, or something unforeseen happens."""

    async def play(self: k8s_run.Run, bases: images.Bases) -> None:
        place.answers("ps --all", f"echo {self.prefix}-redis-0")
        raise RunError("a request failed")

    def logs(self: Podman, name: str, path: Path, deadline: float) -> None:
        raise subprocess.TimeoutExpired(name, 1.0) if error == "late" else PermissionError(name)

    monkeypatch.setattr(k8s_run.Run, "play", play)
    monkeypatch.setattr(Podman, "_save_log", logs)
    with contextlib.suppress(subprocess.TimeoutExpired):
        result(place, optional=True)
    assert "network ls --format {{.Name}}" in place.asked()


def give_up_soon(monkeypatch: pytest.MonkeyPatch, name: str, limit_s: float) -> None:
    """A command about that pod; the others have their whole time, which a slow machine needs."""
    run = subprocess.run

    def hurried(command: list[str], **options: Any) -> Any:
        if command[-1] == name:
            options["timeout"] = limit_s
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", hurried)


def test_a_podman_that_hangs_is_told_and_the_rest_is_removed(
    place: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that can't even list what there is."""
    give_up_soon(monkeypatch, "run-1-redis-0", 0.5)
    podman = Podman("run-1", place.environ)
    place.answers("pod ls", "echo run-1-redis-0 run-1-worker-0")
    place.answers("pod rm", 'case "$*" in *redis-0) exec sleep 60 ;; esac')
    place.answers("volume ls", "echo no storage >&2; exit 125")
    assert podman.clean() == [
        "run-1-redis-0: not done after 120 s",
        "podman volume ls: no storage",
    ]
    assert "pod rm --force --time 0 run-1-worker-0" in place.asked()
    assert "network ls --format {{.Name}}" in place.asked()


def test_what_is_not_removed_in_time_is_left(place: Machine) -> None:
    left = Podman("run-1", place.environ).clean(limit_s=0.0)
    assert left == [
        f"podman {kind} ls: no time was left for it" for kind in ("pod", "volume", "network")
    ]


def test_logs_are_saved_but_those_that_hang(
    place: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch, "run-1-a", 3.0)
    place.answers("ps --all", "echo run-1-a run-1-b other")
    place.answers("logs run-1-a", "echo first; exec sleep 60")
    place.answers("logs run-1-b", "echo second")
    Podman("run-1", place.environ).save_logs(tmp_path / "logs")
    found = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert found == {"run-1-a.log": "first\n", "run-1-b.log": "second\n"}
