"""Run folders: one per start under run/, with the children's logs; the last ones are kept."""

import datetime
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

KEPT = 20
PID_FILE = "launcher.pid"


def create(base: Path) -> Path:
    """A fresh folder for this launcher, after removing the oldest ones."""
    base.mkdir(parents=True, exist_ok=True)
    prune(base)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = base / f"{stamp}-{os.getpid()}"
    folder.mkdir()
    (folder / PID_FILE).write_text(f"{os.getpid()}\n")
    return folder


def prune(base: Path) -> None:
    """Keeps the newest KEPT - 1 folders and those of launchers that are running."""
    folders = sorted(path.parent for path in base.glob(f"*/{PID_FILE}"))
    for folder in folders[: -(KEPT - 1)]:
        if not _running(folder / PID_FILE):
            shutil.rmtree(folder, ignore_errors=True)


def _running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """stack.json: addresses, processes and ports, for scripts that look at a running stack."""
    new = folder / "stack.json.new"
    new.write_text(json.dumps(state, indent=1) + "\n")
    new.replace(folder / "stack.json")


def hold(data_dir: Path) -> IO[str] | None:
    """Takes a Redis data folder for this launcher; None if another one has it.

    The lock lasts as long as the returned file is open.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    handle = (data_dir / "launcher.lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
