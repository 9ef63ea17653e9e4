"""How long `make serve` takes from a second start to ready, and what its worker then holds.

`python -m benchmarks.start` starts Quire by the command of `make serve`, on free ports, once
without looking and then --starts times; it takes the times of what the services log. After the last
start it sends the load of benchmarks.serving from 32 clients and looks at the worker's memory: of
what is resident, KV blocks and packed weights lie on pages for which large ones were asked, what
the model's modules keep is told by the worker, and the rest is what a worker costs besides. oneDNN
packs weights in memory of its own; a worker that takes oneDNN's is counted too high by them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from benchmarks import measure, report, target
from benchmarks.goals import Goal, Verdict
from benchmarks.stack import ROOT, StackError, cpu_seconds
from benchmarks.workload import Shape, jobs
from deploy.local import procs
from deploy.local.ports import FreePorts

SERVE = ("python3", "-m", "deploy.local.setup", "--then", "deploy.local.launcher")
LAUNCH = (sys.executable, "-m", "deploy.local.launcher")
READY_S, END_S = 300.0, 60.0
LAST_LINES, LAST_BYTES = 20, 1 << 16
CLIENTS, REQUESTS = 32, 48
SHAPE = Shape(output=(32, 64))
MIB = 2**20
STAGES = (  # (what is there then, whose log, event)
    ("launcher looks for the model", "", "model "),
    ("scheduler leads", "scheduler_svc", "ready"),
    ("gateway: tokenizer loaded", "gateway", "model_loaded"),
    ("gateway takes requests", "gateway", "ready"),
    ("worker: its process runs", "worker-0", "listening"),
    ("worker: torch and transformers imported", "worker-0", "loading weights"),
    ("worker: weights read, layers probed", "worker-0", "model loaded"),
    ("worker: weights packed", "worker-0", "the lean forward computes it"),
    (
        "worker: held against eager attention",
        "worker-0",
        "paged attention agrees with eager attention",
    ),
    ("worker: warmed up, a step's cost measured", "worker-0", "warmed up"),
    ("worker registered", "worker-0", "ready"),
    ("gateway reads the worker's tokens", "gateway", "stream_up"),
    ("launcher says ready", "", "ready after"),
)
SECOND_START = Goal(meaning="second start to ready", value=12.0, unit="s", at_least=False)
OVER = Goal(meaning="worker's memory over weights and KV", value=1.2, unit="GiB", at_least=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Seconds from the start, and from the stage before it in the same process."""

    name: str
    at_s: float
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. CPU seconds at the end of it, by process."""

    ready_s: float
    stages: tuple[Stage, ...]
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resident memory of a worker in bytes: all of it, and what is meant to be there.

    `large` are packed weights and the KV blocks that were used, `modules` the weights that the
    model's modules keep.
    """

    resident: int
    large: int
    packed: int
    modules: int

    @property
    def over(self) -> int:
        """What is neither weights nor KV."""
        return self.resident - self.large - self.modules


class Serving:
    """A launcher that has said that it is ready."""

    def __init__(self, lines: Mapping[str, float], began: datetime, port: int) -> None:
        self.lines, self.began, self.port = lines, began, port
        logs = next(line for line in lines if line.startswith("logs in "))
        self.folder = Path(logs.removeprefix("logs in "))
        self.children: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())[
            "children"
        ]

    def events(self, child: str) -> Iterator[dict[str, Any]]:
        """What it has logged."""
        for line in (self.folder / f"{child}.log").read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def start(self) -> Start:
        """Its stages."""
        last: dict[str, float] = {}
        stages = []
        for name, child, event in STAGES:
            at_s = self._at_s(child, event)
            if at_s is not None:
                took_s = at_s - last.get(child, 0.0)
                stages.append(Stage(name=name, at_s=at_s, took_s=took_s))
                last[child] = at_s
        cpu_s = {name: cpu_seconds(child["pid"]) for name, child in self.children.items()}
        return Start(ready_s=stages[-1].at_s, stages=tuple(stages), cpu_s=cpu_s)

    def held(self) -> Held:
        """By its first worker."""
        warm = next(of for of in self.events("worker-0") if of.get("event") == "warmed up")
        smaps = Path(f"/proc/{self.children['worker-0']['pid']}/smaps").read_text()
        resident, large = resident_bytes(smaps)
        return Held(
            resident=resident,
            large=large,
            packed=int(warm["packed_mib"] * MIB),
            modules=int(warm["weights_mib"] * MIB),
        )

    def _at_s(self, child: str, event: str) -> float | None:
        if not child:
            return next((at for line, at in self.lines.items() if line.startswith(event)), None)
        for found in self.events(child):
            if found.get("event") == event:
                logged = datetime.fromisoformat(found["timestamp"])
                return (logged - self.began).total_seconds()
        return None


def resident_bytes(smaps: str) -> tuple[int, int]:
    """All resident bytes of /proc/PID/smaps, and those of areas that asked for large pages."""
    total = large = area = 0
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            area = int(rest.split()[0]) * 1024
            total += area
        elif name == "VmFlags" and "hg" in rest.split():
            large += area
    return total, large


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[Serving]:
    """Quire on free ports, until the end of the context.

    Raises StackError, with the last that was written to stderr, if it isn't ready within READY_S or
    does not end within END_S; then it is killed.
    """
    free = FreePorts()
    port = free.take()
    environ = {**os.environ, "PORT": str(port), "GRPC_PORT": str(free.take())}
    with tempfile.TemporaryFile() as errors:
        began, began_s = datetime.now(tz=UTC), time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=procs.death_with_parent(),  # noqa: PLW1509  # no threads
        )
        has_ended = True
        try:
            try:
                lines = _until_ready(process, began_s)
                yield Serving(lines, began, port)
            finally:
                has_ended = _end(process)
        except StackError as error:
            raise StackError(f"{error}{_last_lines(errors)}") from error
        if not has_ended:
            raise StackError(f"it did not end within {END_S:g} s{_last_lines(errors)}")


def _until_ready(process: "subprocess.Popen[bytes]", began_s: float) -> dict[str, float]:
    """What it says, each line with its seconds from the start."""
    lines: dict[str, float] = {}
    for line in _lines(process, began_s + READY_S):
        lines.setdefault(line.strip(), time.monotonic() - began_s)
        if line.startswith("ready after"):
            return lines
    raise StackError("not ready:\n" + "\n".join(list(lines)[-10:]))


def _lines(process: "subprocess.Popen[bytes]", until_s: float) -> Iterator[str]:
    """What it says until its end, or until a moment of the clock however silent it is."""
    assert process.stdout is not None
    pipe, begun = process.stdout.fileno(), b""
    while (left_s := until_s - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
        said = os.read(pipe, 1 << 16)
        if not said:
            return
        *whole, begun = (begun + said).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> bool:
    """Asks it to end, and kills it if it doesn't: then False."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    return True


def _last_lines(errors: IO[bytes]) -> str:
    """The end of what it wrote to stderr, on lines of their own; nothing if there is nothing."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_BYTES))
    lines = errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return "".join(f"\n{line}" for line in lines)


def load(port: int) -> None:
    """Sends the load. Raises StackError if an answer isn't whole."""
    client, model = target.running(f"http://127.0.0.1:{port}")
    work = jobs("start", REQUESTS, SHAPE)
    answers = asyncio.run(measure.closed_loop(client, [job.body(model) for job in work], CLIENTS))
    problems = [of.problem(job.num_output) for job, of in zip(work, answers, strict=True)]
    if any(problems):
        raise StackError(next(filter(None, problems)))


def verdicts(starts: Sequence[Start], held: Held | None) -> list[Verdict]:
    """Neither has a floor that is measured: the goals stay as they are."""
    ready_s = statistics.median(of.ready_s for of in starts)
    over = None if held is None else held.over / 2**30
    return [
        Verdict(goal=SECOND_START, factor=1.0, found=ready_s),
        Verdict(goal=OVER, factor=1.0, found=over),
    ]


def tables(starts: Sequence[Start], held: Held | None) -> str:
    """Stages and CPU of the median start, memory, goals."""
    shown = sorted(starts, key=lambda of: of.ready_s)[len(starts) // 2]
    stages = [(of.name, f"{of.at_s:.2f}", f"{of.took_s:.2f}") for of in shown.stages]
    parts = [
        report.markdown(("stage", "at s", "since the one before, s"), stages),
        report.markdown(
            ("process", "CPU s until ready"), [(n, f"{s:.1f}") for n, s in shown.cpu_s.items()]
        ),
    ]
    if held is not None:
        rows = [
            ("resident after the load", held.resident),
            ("packed weights", held.packed),
            ("KV blocks that were used", held.large - held.packed),
            ("weights that the modules keep", held.modules),
            ("over weights and KV", held.over),
        ]
        parts.append(report.markdown(("memory", "MiB"), [(n, f"{b / MIB:,.0f}") for n, b in rows]))
    parts.append(report.goal_table(verdicts(starts, held)))
    return "\n\n".join(parts)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    add = parser.add_argument
    add("--starts", type=int, default=3, help="measured starts; the median counts")
    add("--no-load", action="store_true", help="leave the memory under load out")
    add("--launcher", action="store_true", help="begin with the launcher, not with the set-up")
    add("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Prints the tables."""
    options = parse(argv)
    command = LAUNCH if options.launcher else SERVE
    starts: list[Start] = []
    held = None
    try:
        for number in range(options.starts + 1):
            with serving(command) as running:
                if number:  # the first one brings everything into the page cache
                    starts.append(running.start())
                if number == options.starts and not options.no_load:
                    load(running.port)
                    held = running.held()
    except (StackError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(tables(starts, held) + "\n")
    if options.json is not None:
        document = {
            "machine": report.machine(),
            "starts": [asdict(of) for of in starts],
            "held": None if held is None else asdict(held),
            "goals": [of.as_dict() for of in verdicts(starts, held)],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
