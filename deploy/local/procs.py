"""Starting processes that cannot outlive the launcher.

A child leads a session of its own, so that a terminal's Ctrl-C does not reach it, and asks the
kernel for SIGKILL when its parent dies, however that happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child between fork and exec must not load libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def death_with_parent() -> Callable[[], None]:
    """What a child must call between fork and exec, to be killed when this process dies."""
    parent = os.getpid()

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return ask


def start(
    argv: Sequence[str], environ: Mapping[str, str], log: Path, cwd: Path
) -> subprocess.Popen[bytes]:
    """Starts `argv` with both outputs appended to `log`. Call from a process without threads.

    The kernel's signal follows the thread that forked, so that thread must live as long as the
    launcher: its main thread.
    """
    with log.open("ab") as sink:
        return subprocess.Popen(
            list(argv),
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=death_with_parent(),  # noqa: PLW1509 - see the docstring
        )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it has started, at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def last_lines(log: Path, count: int, limit_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, read from its end."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
