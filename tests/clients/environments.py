"""An environment for each client, made on first use and kept until its pins change.

Lies below the cache folder, one folder a client, with a stamp that is written last: what was
interrupted is made anew. Standard library only, for the runner's own environment stays as it is.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.local import procs, setup
from tests.clients.catalogue import HERE, Client, Kind

STAMP = "quire-client.json"
INDEX = "TORCH_INDEX"
TICK_S = 10.0
INSTALL_S = 1800.0


class InstallError(Exception):
    """A client can't be installed here."""


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"[clients] {text}", flush=True)


def ensure(client: Client, cache: Path) -> Path:
    """The folder of the client's environment, made if it is not there. Raises InstallError."""
    folder = cache / client.name
    wanted = _stamp(client)
    try:
        found = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        found = None
    if found != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        say(f"{client.name}: installing {versions(client)}, about {client.size} on disk")
        _install(client, folder)
        (folder / STAMP).write_text(json.dumps(wanted) + "\n")
    return folder


def versions(client: Client) -> str:
    """Its own packages and their versions, as they are pinned."""
    if client.kind is Kind.NODE:
        pins = json.loads(client.pins.read_text())["dependencies"]
        return ", ".join(f"{name} {version}" for name, version in pins.items())
    return ", ".join(line.replace("==", " ") for line in _lines(client.pins))


def command(client: Client, folder: Path) -> list[str]:
    """What runs the client's script in its environment."""
    if client.kind is Kind.PYTHON:
        return [str(folder / "bin" / "python"), str(HERE / "scripts" / client.script)]
    # Node looks for packages beside the script, so it goes where they are.
    for script in (HERE / "scripts").glob("*.mjs"):
        shutil.copy(script, folder)
    return ["node", str(folder / client.script)]


def _lines(path: Path) -> list[str]:
    """The requirements in a file."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _stamp(client: Client) -> dict[str, str]:
    pins = hashlib.sha256(client.pins.read_bytes()).hexdigest()
    return {"pins": pins, "python": sys.version}


def _install(client: Client, folder: Path) -> None:
    if client.kind is Kind.NODE:
        if shutil.which("npm") is None:
            raise InstallError("npm is needed (Node 20 or newer)")
        shutil.copy(client.pins, folder)
        _run(client, ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"], folder)
        return
    _run(client, [sys.executable, "-m", "venv", str(folder)], folder)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # From its own index, where one is named; the others must find it installed.
    for torch in (line for line in _lines(client.pins) if line.startswith(f"{setup.TORCH}==")):
        _run(client, [*install, *setup.index_options(os.environ.get(INDEX, "")), torch], folder)
    _run(client, [*install, "-r", str(client.pins)], folder)


def _run(client: Client, argv: Sequence[str], folder: Path) -> None:
    """Raises InstallError. Says now and then that it is still at work."""
    started = time.monotonic()
    log = folder / "install.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            preexec_fn=procs.death_with_parent(),  # noqa: PLW1509 - no threads here
        )  # fmt: skip
    while True:
        try:
            status = process.wait(TICK_S)
            break
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - started
            say(f"{client.name}: still installing ... {passed:.0f} s")
            if passed > INSTALL_S:
                process.kill()
                process.wait()
                raise InstallError(f"not installed within {INSTALL_S:.0f} s") from None
    if status != 0:
        tail = "\n".join(procs.last_lines(log, 15))
        raise InstallError(f"{Path(argv[0]).name} failed with {status}:\n{tail}")
