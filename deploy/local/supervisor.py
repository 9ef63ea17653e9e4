"""Runs one stack from start to end; the only place that orders an end.

Starts Redis, then everything else at once. A dead worker is restarted with a back-off; any other
death ends the stack. SIGINT, SIGTERM or SIGHUP drain it in the order of Role; a second one ends it
at once. Should the launcher itself be killed, the kernel ends the children.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.local.children import STATUS_BAD_SETTINGS, Child, Role, Spec

POLL_S = 0.1
READY_POLL_S = 0.3
PROGRESS_S = 3.0
READY_LIMIT_S = 3600.0
REDIS_LIMIT_S = 120.0
# What each stage of a drain has at least before it is killed, the gateway's after drain_s. A stage
# may also use what the ones before it left over: the whole is bounded by their sum.
STAGE_S = {Role.GATEWAY: 2.5, Role.WORKER: 5.0, Role.SCHEDULER: 3.0, Role.REDIS: 2.0}

OK, FAILED, INTERRUPTED = 0, 1, 130


def say(text: str) -> None:
    """Prints at once. A reader that has gone away does not end the stack."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Supervisor:
    """One stack. Must run on the main thread: children die with the thread that started them."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        run_dir: Path,
        cwd: Path,
        drain_s: float,
        redis_answers: Callable[[], bool],
        is_ready: Callable[[], bool],
        on_ready: Callable[[], None],
        on_change: Callable[[Sequence[Child]], None],
    ) -> None:
        self._children = [Child(spec=spec, run_dir=run_dir, cwd=cwd) for spec in specs]
        self._drain_s = drain_s
        self._redis_answers = redis_answers
        self._is_ready = is_ready
        self._on_ready = on_ready
        self._on_change = on_change
        self._signals = 0
        self._started_at = time.monotonic()
        self._ready = False
        self._next_look = 0.0
        self._next_word = self._started_at + 1.0

    def run(self) -> int:
        """Starts the stack and keeps it until it ends; the launcher's exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            status = self._start() or self._keep()
            if self._signals > 1:
                return INTERRUPTED
            return self._drain() or status
        finally:
            for child in self._children:
                child.kill()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _start(self) -> int:
        """Starts all children, Redis first; 0 when they run."""
        for child in sorted(self._children, key=lambda c: -c.spec.role):
            child.start()
            say(child.describe())
            if child.spec.role is Role.REDIS and not self._await_redis(child):
                return OK if self._signals else FAILED
        self._on_change(self._children)
        return OK

    def _await_redis(self, child: Child) -> bool:
        limit = time.monotonic() + REDIS_LIMIT_S
        while child.alive and time.monotonic() < limit and not self._signals:
            if self._redis_answers():
                return True
            time.sleep(0.02)
        if not self._signals:
            say(child.death_notice() if not child.alive else "Redis does not answer")
        return False

    def _keep(self) -> int:
        """Watches until a signal (0) or a death that ends the stack (1)."""
        while not self._signals:
            now = time.monotonic()
            for child in self._children:
                if not self._look_after(child, now):
                    return FAILED
            if not self._ready and not self._watch_readiness(now):
                return FAILED
            time.sleep(POLL_S)
        return OK

    def _look_after(self, child: Child, now: float) -> bool:
        """Echoes, restarts; False when the stack must end."""
        for line in child.news():
            say(f"[{child.spec.name}] {line}")
        if child.alive:
            return True
        if child.restart_at is not None:
            if now >= child.restart_at:
                child.start()
                say(f"restarted: {child.describe()}")
                self._on_change(self._children)
            return True
        say(child.death_notice())
        child.kill()
        assert child.process is not None
        if child.spec.role is not Role.WORKER:
            say(f"ending: nothing can be served without {child.spec.name}")
            return False
        if child.process.returncode == STATUS_BAD_SETTINGS:
            say("ending: a restart cannot mend a wrong setting")
            return False
        delay = child.plan_restart(now)
        if delay is None:
            say(f"ending: {child.spec.name} died {len(child.deaths)} times within a minute")
            return False
        say(f"{child.spec.name} restarts in {delay:g} s")
        return True

    def _watch_readiness(self, now: float) -> bool:
        """Looks for readiness and says what is awaited; False when the limit is over."""
        if now >= self._next_look:
            self._next_look = now + READY_POLL_S
            if self._is_ready():
                self._ready = True
                say(f"ready after {now - self._started_at:.1f} s")
                self._on_ready()
                return True
        if now >= self._next_word:
            self._next_word = now + PROGRESS_S
            say(f"{self._awaited()} ... {now - self._started_at:.0f} s")
        if now - self._started_at > READY_LIMIT_S:
            say(f"ending: not ready within {READY_LIMIT_S:.0f} s")
            return False
        return True

    def _awaited(self) -> str:
        loading = [
            c.spec.name for c in self._children if c.spec.role is Role.WORKER and not c.ready
        ]
        if loading:
            return "loading model (" + ", ".join(loading) + ")"
        return "waiting for the gateway to see a worker that can serve"

    def _drain(self) -> int:
        """Ends the stack stage by stage; 0, or INTERRUPTED after a second signal."""
        say(f"draining: running requests get {self._drain_s:g} s; a second signal ends at once")
        end = time.monotonic() + self._drain_s + sum(STAGE_S.values())
        for role in sorted(Role):
            until = end - sum(least for later, least in STAGE_S.items() if later > role)
            stage = [c for c in self._children if c.spec.role is role]
            began = time.monotonic()
            for child in stage:
                child.terminate()
            while any(child.alive for child in stage) and time.monotonic() < until:
                for child in stage:
                    for line in child.news():
                        say(f"[{child.spec.name}] {line}")
                if self._signals > 1:
                    say("ending at once")
                    return INTERRUPTED
                time.sleep(POLL_S / 2)
            for child in stage:
                if child.alive:
                    waited = time.monotonic() - began
                    say(f"{child.spec.name} did not end within {waited:.1f} s; killed")
                child.kill()
        say("stopped")
        return OK
