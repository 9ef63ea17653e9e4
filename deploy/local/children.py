"""One child of the launcher: its process, its log, what it last said, how often it died."""

import enum
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local import procs
from deploy.local.logtail import SHOWN_LINES, LogTail, parse

DEATHS, DEATHS_WINDOW_S = 5, 60.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
STATUS_BAD_SETTINGS = 2


class Role(enum.IntEnum):
    """What a child is. A stack ends in this order and starts in the opposite one."""

    GATEWAY = 0
    WORKER = 1
    SCHEDULER = 2
    REDIS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a child; a restart gets a new one, with new ports."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A child to be: `prepare` is called for each start."""

    name: str
    role: Role
    prepare: Callable[[], Launch]


@dataclass(slots=True, kw_only=True)
class Child:
    """The owner of one process. Mutable; used by the supervisor alone."""

    spec: Spec
    run_dir: Path
    cwd: Path
    process: "subprocess.Popen[bytes] | None" = None
    launch: Launch | None = None
    ready: bool = False
    buried: bool = True
    started_at: float = 0.0
    restart_at: float | None = None
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS))
    tail: LogTail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = LogTail(self.run_dir / f"{self.spec.name}.log")

    @property
    def alive(self) -> bool:
        """Whether a process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts the process; its log is appended to."""
        assert not self.alive, f"{self.spec.name} is running already"
        self.launch = self.spec.prepare()
        self.process = procs.start(self.launch.argv, self.launch.environ, self.tail.path, self.cwd)
        self.ready = self.buried = False
        self.started_at = time.monotonic()
        self.restart_at = None

    def describe(self) -> str:
        """One line: name, process, ports, log."""
        assert self.process is not None
        assert self.launch is not None
        ports = ", ".join(f"{name} {port}" for name, port in self.launch.ports.items())
        return f"{self.spec.name:<14} pid {self.process.pid:<8} {ports}"

    def news(self) -> list[str]:
        """Reads the log; the lines that are worth showing, at most SHOWN_LINES of them."""
        loud = []
        for entry in self.tail.entries():
            self.ready = self.ready or entry.event == "ready"
            if entry.loud:
                loud.append(str(entry))
        if len(loud) > SHOWN_LINES:
            more = len(loud) - SHOWN_LINES
            loud[SHOWN_LINES:] = [f"... {more} more in {self.tail.path}"]
        return loud

    def death_notice(self) -> str:
        """How it ended and its last log lines."""
        assert self.process is not None
        code = self.process.returncode
        try:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        except ValueError:
            how = f"signal {-code}"
        lines = procs.last_lines(self.tail.path, 12)
        plain = [str(parse(line.encode()) or line[:300]) for line in lines] or ["(no output)"]
        shown = "\n".join(f"    | {line}" for line in plain)
        return f"{self.spec.name} has died ({how}); its last lines, from {self.tail.path}:\n{shown}"

    def plan_restart(self, now: float) -> float | None:
        """Counts a death; seconds until the restart, or None when it died too often."""
        self.deaths.append(now)
        recent = sum(now - at <= DEATHS_WINDOW_S for at in self.deaths)
        if recent >= DEATHS:
            return None
        delay = BACKOFF_S[min(recent, len(BACKOFF_S)) - 1]
        self.restart_at = now + delay
        return delay

    def terminate(self) -> None:
        """Asks the process, and only it, to end."""
        if self.alive:
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process and what it started, at once.

        Once per process: a number of a process long gone may belong to another one.
        """
        if self.process is not None and not self.buried:
            procs.kill_group(self.process)
            self.process.wait()
            self.buried = True
