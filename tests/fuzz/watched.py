"""python -m tests.fuzz.watched SERVICE [ARGUMENTS]: a service whose doings are written down.

Owns one file of JSON lines, WATCH_LOG. Each line has `what` and the monotonic time `at`:

- `unpickled`, `unmarshalled`: something was read that can run code; imports are not meant.
- `connect`, `lookup`: an address that Python code wanted to reach, or a name it wanted to resolve.
- `started`: another program.
- `opened`: a file whose path holds the word BAIT.
- `loop`: what the event loop did since the line before; see Meter.

uvloop and gRPC reach the network without telling an audit hook: tests look from outside as well.
"""

import asyncio
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from servicekit import process

BAIT = "quire-bait"
TICK_S, REPORT_S = 0.01, 1.0
STALLS_MS = (20, 50, 100, 200)
_EVENTS = {
    "pickle.find_class": "unpickled",
    "marshal.load": "unmarshalled",
    "marshal.loads": "unmarshalled",
    "socket.connect": "connect",
    "socket.getaddrinfo": "lookup",
    "socket.gethostbyname": "lookup",
    "subprocess.Popen": "started",
    "os.system": "started",
    "os.exec": "started",
    "os.posix_spawn": "started",
    "open": "opened",
}


class Log:
    """Whole lines, written at once: the process may end without notice."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **fields: object) -> None:
        """One line."""
        line = json.dumps({"what": what, "at": time.monotonic(), **fields}, default=repr)
        os.write(self._file, line.encode() + b"\n")


class Meter:
    """How long the event loop stood still.

    A tick that comes late was held up by the loop's own work or by a machine that had no time for
    it. `stall_ms` counts only the former: of the lateness no more than what this thread computed.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            stalls: list[float] = []
            late = 0.0
            end_s = loop.time() + REPORT_S
            while loop.time() < end_s:
                due_s, busy_s = loop.time() + TICK_S, time.thread_time()
                await asyncio.sleep(TICK_S)
                late_s = max(0.0, loop.time() - due_s)
                late = max(late, late_s)
                stalls.append(1000 * min(late_s, time.thread_time() - busy_s))
            frozen = gc.get_freeze_count()
            counts = {f"over_{ms}_ms": sum(s > ms for s in stalls) for ms in STALLS_MS}
            longest = {"stall_ms": max(stalls), "late_ms": 1000 * late}
            self._log.write("loop", ticks=len(stalls), frozen=frozen, **longest, **counts)


def watch(log: Log) -> None:
    """From here on everything is written down, for as long as the process lives."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        what = _EVENTS.get(event)
        if what is None or (what == "opened" and BAIT not in str(args[0])):
            return
        if what == "unmarshalled" and sys._getframe(1).f_code.co_filename.startswith("<frozen"):
            return
        log.write(what, event=event, args=repr(args)[:300])

    sys.addaudithook(hook)
    # The hook is told of classes that are looked up; this tells of all that is unpickled.
    pickles = importlib.import_module("pickle")

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(pickles, name)

        def read(*args: Any, **options: Any) -> Any:
            log.write("unpickled", event=name, args="")
            return original(*args, **options)

        return read

    for name in ("load", "loads"):
        setattr(pickles, name, recorded(name))


def run(service: str) -> None:
    """Becomes the service."""
    log = Log(os.environ.pop("WATCH_LOG"))
    watch(log)
    module = importlib.import_module(f"{service}.__main__")
    main: Callable[..., Awaitable[int]] = getattr(module, "main", None) or module._main

    async def watched(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
        meter = asyncio.get_running_loop().create_task(Meter(log).run())
        try:
            return await main(argv, environ, stop)
        finally:
            meter.cancel()

    process.run(watched)


if __name__ == "__main__":
    del sys.argv[0]
    run(sys.argv[0])
