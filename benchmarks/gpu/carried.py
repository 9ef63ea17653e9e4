"""Packages carried as wheels: unpacked into a folder of their own, within a time limit."""

import platform
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

NEEDED = ("torch", "triton", "transformers", "numpy")


def install(wheels: Path, site: Path, limit_s: float) -> dict[str, Any] | None:
    """Fills `site` from the folder `wheels` without a network; how it ended, None without wheels.

    What did not end well is not to be used: half a package is worse than none.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-compile", f"--target={site}"]
    entry: dict[str, Any] = {"files": [file.name for file in files]}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *map(str, files)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        entry["ended"] = "out of time"
    else:
        entry["ended"] = "ok" if done.returncode == 0 else f"failed ({done.returncode})"
        if done.returncode:
            entry["output"] = done.stdout.splitlines()[-40:]
    entry["seconds"] = round(time.monotonic() - began, 1)
    return entry


def versions(site: str) -> dict[str, str]:
    """Of what the stages need, as they find it: the machine's own, then what was carried."""
    path = [*sys.path, *([site] if site else [])]
    found = {"python": platform.python_version()}
    for name in NEEDED:
        first = next(iter(distributions(name=name, path=path)), None)
        found[name] = "missing" if first is None else first.version
    return found
