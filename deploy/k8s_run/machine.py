"""Whether this machine can run pods, and how podman is told about it."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.k8s_run.deadline import Deadline
from deploy.k8s_run.errors import NotPossibleError

Say = Callable[[str], None]

# What podman needs beside itself is only recommended by its package.
PACKAGES = (
    "podman", "buildah", "runc", "catatonit", "netavark", "aardvark-dns", "iptables",
    "golang-github-containers-common", "debootstrap", "openssl",
)  # fmt: skip
COMMANDS = ("podman", "iptables")
LEAST_VERSION = (4, 3)
APT_S, VERSION_S = 900.0, 60.0
SYSTEMD = Path("/run/systemd/system")
MAX_FILES = 4096


def prepare(install: bool, say: Say, deadline: Deadline) -> None:
    """Installs podman if that is wanted and it is missing. Raises NotPossibleError, LateError."""
    if os.geteuid() != 0:
        raise NotPossibleError("only root reaches the pods' network from outside: run it as root")
    if missing := _missing():
        if not install:
            raise NotPossibleError(
                f"{missing} is not there:  apt-get install --no-install-recommends "
                + " ".join(PACKAGES)
            )
        if shutil.which("apt-get") is None:
            raise NotPossibleError(f"{missing} is not there, and no apt-get to get it")
        say(f"{missing} is not there: installing it")
        _install(deadline)
        if missing := _missing():
            raise NotPossibleError(f"{missing} is not there after it was installed")
    found = version(_said(["podman", "version", "--format", "{{.Client.Version}}"], deadline))
    if found < LEAST_VERSION:
        raise NotPossibleError(
            f"podman is {'.'.join(map(str, found))}; "
            f"{'.'.join(map(str, LEAST_VERSION))} or newer is needed"
        )


def _missing() -> str:
    return " and ".join(name for name in COMMANDS if _which(name) is None)


def _install(deadline: Deadline) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES],
    ):
        limit_s = deadline.within(APT_S)
        try:
            done = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotPossibleError(f"{command[1]} of apt-get took over {limit_s:.0f} s") from None
        if done.returncode != 0:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
            raise NotPossibleError(f"podman can't be installed: {last}")


def _said(command: list[str], deadline: Deadline) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=deadline.within(VERSION_S), check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPossibleError(f"podman does not answer: {error}") from error
    if done.returncode != 0:
        raise NotPossibleError(f"podman does not answer: {done.stderr.strip()}")
    return done.stdout


def version(text: str) -> tuple[int, int]:
    """The first two numbers, also of 5.0.0-rc1. Raises NotPossibleError."""
    found = re.match(r"(\d+)\.(\d+)", text.strip())
    if found is None:
        raise NotPossibleError(f"podman says {text.strip()!r} of its version")
    return int(found[1]), int(found[2])


def _which(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def environ(base: Mapping[str, str], folder: Path) -> dict[str, str]:
    """For podman. Without systemd, and without a configuration of the user's, one is written."""
    found = dict(base)
    found["PATH"] = os.pathsep.join([found.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    if "CONTAINERS_CONF" in found or SYSTEMD.exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "containers.conf"
    files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    path.write_text(configuration(files, shutil.which("runc") is not None))
    found["CONTAINERS_CONF"] = str(path)
    return found


def configuration(num_files: int, has_runc: bool) -> str:
    """podman's, for a machine without systemd: it must ask it for nothing."""
    lines = [
        "[containers]",
        f'default_ulimits = ["nofile={num_files}:{num_files}", "nproc={MAX_FILES}:{MAX_FILES}"]',
        "[engine]",
        'events_logger = "file"',
        'cgroup_manager = "cgroupfs"',
    ]
    if has_runc:
        lines.append('runtime = "runc"')
    return "\n".join(lines) + "\n"
