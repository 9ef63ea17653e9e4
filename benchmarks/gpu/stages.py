"""Runs the stages of the GPU script, each a process with a time limit of its own.

The report is written anew after every line that a stage prints, so that what was measured is there
whatever happens later. A stage that fails or takes too long does not keep the next from running.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TOTAL_S = 345.0
PACKAGES = ("torch", "triton", "transformers", "numpy")
GRACE_S = 20.0  # between the time a stage may look for more to do, and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A module of this package, and the seconds it gets."""

    name: str
    limit_s: float


STAGES = (
    Stage(name="bandwidth", limit_s=40),
    Stage(name="correctness", limit_s=110),
    Stage(name="worker", limit_s=110),
    Stage(name="sweeps", limit_s=80),
)


def packages() -> dict[str, str]:
    """Versions of what the stages need."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def environment(dry: bool) -> dict[str, str]:
    """The stages', with the interpreter chosen before Triton is imported."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if dry:
        environ["TRITON_INTERPRET"] = "1"
    path = [os.getcwd(), environ.get("PYTHONPATH", ""), environ.get("QUIRE_GPU_SITE", "")]
    environ["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    environ.setdefault("HF_HUB_OFFLINE", "1")
    return environ


def run_stage(stage: Stage, limit_s: float, dry: bool, report: "Report") -> dict[str, Any]:
    """Its lines, how it ended and how long it took."""
    seconds = max(1.0, limit_s - GRACE_S)
    command = [sys.executable, "-m", f"benchmarks.gpu.{stage.name}", f"--seconds={seconds}"]
    if dry:
        command.append("--dry-run")
    entry: dict[str, Any] = {"stage": stage.name, "ended": "running", "results": []}
    report.stages.append(entry)
    began = time.monotonic()
    with subprocess.Popen(
        command,
        env=environment(dry),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit_s, os.killpg, (process.pid, 9))
        timer.start()
        noise: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                entry["results"].append(json.loads(line))
                report.write()
            else:
                noise = [*noise[-40:], line.rstrip()]
        code = process.wait()
        timer.cancel()
    entry["seconds"] = round(time.monotonic() - began, 1)
    entry["ended"] = "ok" if code == 0 else "out of time" if code == -9 else f"failed ({code})"
    if code:
        entry["output"] = noise
    report.write()
    return entry


class Report:
    """The JSON file."""

    def __init__(self, path: Path, dry: bool) -> None:
        self._path = path
        self._head = {"dry_run": dry, "packages": packages()}
        self.stages: list[dict[str, Any]] = []

    def write(self) -> None:
        """All that is known, in one go."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self._head, "stages": self.stages}, indent=1) + "\n")
        temporary.replace(self._path)


def main(argv: list[str]) -> int:
    """The number of stages that did not end well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.stages", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file")
    parser.add_argument("--dry-run", action="store_true", help="interpreter and tiny shapes")
    parser.add_argument("--only", choices=[stage.name for stage in STAGES], help="one stage")
    options = parser.parse_args(argv)
    report = Report(options.out, options.dry_run)
    report.write()
    deadline = time.monotonic() + TOTAL_S
    bad = 0
    for stage in STAGES:
        left = deadline - time.monotonic()
        if options.only not in (None, stage.name) or left < 5:
            continue
        entry = run_stage(stage, min(stage.limit_s, left), options.dry_run, report)
        bad += entry["ended"] != "ok"
        sys.stdout.write(f"{stage.name}: {entry['ended']} in {entry['seconds']} s\n")
        for line in (*entry["results"], *entry.get("output", ())):
            sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
