"""Names what a machine lacks before anything is downloaded, each with the command that mends it.

Runs on the system Python, before the environment exists: standard library only, and syntax that an
older Python can read far enough to say that it is too old.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import NamedTuple

MIN_PYTHON = (3, 11)
PYTHON_NAMES = ("python3.13", "python3.12", "python3.11")
GIB = 1024**3


class Missing(NamedTuple):
    """One thing that is missing and the command that mends it."""

    what: str
    mend: str

    def __str__(self) -> str:
        return f"  {self.what}\n      mend it with:  {self.mend}"


def python() -> Missing | None:
    """Python must be 3.11 or newer."""
    if sys.version_info[:2] >= MIN_PYTHON:
        return None
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Missing(
        f"Python {found} is too old; Quire needs 3.11 or newer",
        "sudo apt-get install python3.11 python3.11-venv",
    )


def newer_python() -> str | None:
    """Path of an installed Python that is new enough, for a machine whose python3 is older."""
    return next((path for name in PYTHON_NAMES if (path := shutil.which(name))), None)


def system() -> Missing | None:
    """Children end with their launcher through a Linux call."""
    if sys.platform.startswith("linux"):
        return None
    return Missing(
        f"{sys.platform}: the launcher needs Linux", "run Quire in a Linux machine or container"
    )


def make() -> Missing | None:
    """GNU make, for every further command."""
    if shutil.which("make"):
        return None
    return Missing("make is not installed", "sudo apt-get install make")


def venv() -> Missing | None:
    """The venv module with its pip; Debian ships them apart from Python."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return None
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Missing(
        "Python's venv module is not installed", f"sudo apt-get install python{version}-venv"
    )


def existing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def disk(path: Path, need_gib: float, purpose: str) -> Missing | None:
    """Room for what will be written under `path`."""
    folder = existing(path)
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib >= need_gib:
        return None
    variable = "QUIRE_CACHE_DIR" if "model" in purpose else ""
    mend = f"{variable}=/a/larger/disk make serve" if variable else f"df -h {folder}  (free some)"
    return Missing(
        f"{purpose} needs {need_gib:.1f} GiB under {folder}; {free_gib:.1f} GiB are free", mend
    )


def writable(path: Path, purpose: str) -> Missing | None:
    """The folder, or the nearest one above it, can be written to."""
    folder = existing(path)
    if os.access(folder, os.W_OK):
        return None
    return Missing(f"{purpose}: {folder} cannot be written to", f"sudo chown $USER {folder}")


def bindable(host: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Ports of connections that have just ended can be taken again; live listeners cannot.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port(host: str, number: int, variable: str) -> Missing | None:
    """The port is free; 0 stands for any."""
    if number == 0 or bindable(host, number):
        return None
    candidates = range(number + 1, min(number + 200, 65536))
    other = next((n for n in candidates if bindable(host, n)), 0)
    return Missing(f"port {number} is busy on {host}", f"make serve {variable}={other}")


def report(found: list[Missing | None]) -> int:
    """Prints what is missing; the number of things."""
    missing = [item for item in found if item is not None]
    if missing:
        print("Quire cannot start yet:", file=sys.stderr)
        for item in missing:
            print(item, file=sys.stderr)
    return len(missing)
