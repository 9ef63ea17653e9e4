"""Runs the stages of the GPU script, each a process with a time limit of its own.

The report is written anew after every line that a stage prints, so that what was measured is there
whatever happens later. A stage that fails or takes too long does not keep the next from running;
one for which no time is left is in the report as skipped, and counts as one that did not end well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import carried

TOTAL_S = 345.0  # of the wheels and all stages together
WHEELS_S = 30.0  # of putting carried wheels in place
GRACE_S = 20.0  # between the time a stage may look for more to do, and its end
LEAST_S = 5.0  # a stage with less than this left is not begun
MAX_NOISE = 40  # last lines kept of what a stage says beside its results


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A module to run, and the seconds it gets."""

    module: str
    limit_s: float

    @property
    def name(self) -> str:
        """As in the report."""
        return self.module.rpartition(".")[2]


STAGES = (
    Stage(module="benchmarks.gpu.bandwidth", limit_s=35),
    Stage(module="benchmarks.gpu.correctness", limit_s=100),
    Stage(module="benchmarks.gpu.worker", limit_s=105),
    Stage(module="benchmarks.gpu.sweeps", limit_s=75),
)


def environment(dry: bool) -> dict[str, str]:
    """The stages', with the interpreter chosen before Triton is imported."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if dry:
        environ["TRITON_INTERPRET"] = "1"
    path = [os.getcwd(), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    environ.setdefault("HF_HUB_OFFLINE", "1")
    return environ


class Report:
    """The JSON file. Owns the stages' entries."""

    def __init__(self, path: Path, dry: bool, site: str, wheels: dict[str, Any] | None) -> None:
        self.dry, self.site = dry, site
        self._path = path
        self._head = {"dry_run": dry, "packages": carried.versions(site), "wheels": wheels}
        self.stages: list[dict[str, Any]] = []

    def write(self) -> None:
        """All that is known, in one go; on one line, which takes a tenth of the time."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self._head, "stages": self.stages}) + "\n")
        temporary.replace(self._path)

    def open(self, stage: Stage, ended: str, **more: Any) -> dict[str, Any]:
        """A new entry, written at once."""
        entry: dict[str, Any] = {"stage": stage.name, "ended": ended, **more, "results": []}
        self.stages.append(entry)
        self.write()
        return entry


def result_of(line: str) -> dict[str, Any] | None:
    """What a stage found; None for anything else that it says."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def run_stage(stage: Stage, limit_s: float, report: Report) -> dict[str, Any]:
    """Its lines, how it ended and how long it took."""
    command = [sys.executable, "-m", "benchmarks.gpu.launch", report.site, stage.module]
    command.append(f"--seconds={max(1.0, limit_s - GRACE_S)}")
    if report.dry:
        command.append("--dry-run")
    entry = report.open(stage, "running")
    began = time.monotonic()
    noise: list[str] = []
    with subprocess.Popen(
        command,
        env=environment(report.dry),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                result = result_of(line)
                if result is None:
                    noise = [*noise[1 - MAX_NOISE :], line.rstrip()]
                else:
                    entry["results"].append(result)
                    report.write()
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # this process is being ended: the stage goes with it
                os.killpg(process.pid, signal.SIGKILL)
    taken = time.monotonic() - began
    entry["seconds"] = round(taken, 1)
    entry["ended"] = _ended(code, out_of_time=taken >= limit_s, any_result=bool(entry["results"]))
    if entry["ended"] != "ok":
        entry["output"] = noise
    report.write()
    return entry


def _ended(code: int, *, out_of_time: bool, any_result: bool) -> str:
    if code == -signal.SIGKILL and out_of_time:
        return "out of time"
    if code:
        return f"failed ({code})"
    return "ok" if any_result else "nothing done"


def show(entry: dict[str, Any]) -> None:
    """Says how a stage ended and what it found; of cases only those that failed."""
    what = entry.get("reason") or f"in {entry['seconds']} s"
    sys.stdout.write(f"{entry['stage']}: {entry['ended']}, {what}\n")
    for line in (*entry["results"], *entry.get("output", ())):
        if isinstance(line, str) or "case" not in line or not line["passed"]:
            sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


def run_stages(only: list[str] | None, deadline: float, report: Report) -> int:
    """The number of stages that did not end well."""
    bad = 0
    for stage in STAGES:
        if only is not None and stage.name not in only:
            continue
        left = deadline - time.monotonic()
        if left < LEAST_S:
            reason = f"{max(0.0, left):.1f} s left, a stage needs {LEAST_S:.0f}"
            entry = report.open(stage, "skipped", reason=reason)
        else:
            entry = run_stage(stage, min(stage.limit_s, left), report)
        bad += entry["ended"] != "ok"
        show(entry)
    return bad


def main(argv: list[str]) -> int:
    """The number of stages that did not end well, carried wheels counted as one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.stages", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file")
    parser.add_argument("--dry-run", action="store_true", help="interpreter and tiny shapes")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", action="append", choices=names, help="a stage; may be repeated")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wheels = None
        if options.wheels is not None:
            wheels = carried.install(options.wheels, Path(folder), WHEELS_S)
        usable = wheels is not None and wheels["ended"] == "ok"
        report = Report(options.out, options.dry_run, folder if usable else "", wheels)
        report.write()
        if wheels is not None:
            sys.stdout.write(f"wheels: {wheels}\n")
        bad = run_stages(options.only, deadline, report)
    return bad + (wheels is not None and not usable)


if __name__ == "__main__":
    # `timeout` ends this process by SIGTERM: an exit like any other, so that its stage ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
