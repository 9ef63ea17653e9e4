"""python -m scheduler_svc.replay FILE...: feeds recorded events to a new core and compares.

Every Ready must be the recorded one, byte for byte. Prints the first difference of a file and exits
with 1; a file that is no trace gives 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc import trace_file
from scheduler_svc.core import SchedulerCore
from scheduler_svc.trace_file import Trace, TraceError


def replay(trace: Trace) -> tuple[int, str | None]:
    """Rounds that were equal, and the first difference, None if there is none."""
    core = SchedulerCore(trace.config)
    for number, recorded in enumerate(trace.rounds):
        for event in recorded.events:
            core.feed(event)
        if recorded.ready is None:
            break
        now = tuple(trace_file.answer_lines(core.take_ready()))
        if now != recorded.ready:
            return number, _difference(recorded.line, recorded.ready, now)
    return sum(recorded.ready is not None for recorded in trace.rounds), None


def _difference(line: int, recorded: Sequence[str], now: Sequence[str]) -> str:
    for place in range(max(len(recorded), len(now))):
        then = recorded[place] if place < len(recorded) else "(nothing)"
        today = now[place] if place < len(now) else "(nothing)"
        if then != today:
            return (
                f"round of line {line}, answer {place + 1}:\n  recorded {then}\n  now      {today}"
            )
    raise AssertionError("they differ")


def main(argv: Sequence[str]) -> int:
    """Replays all files; the worst result counts."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc.replay", description="Compare trace files with a new core."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    worst = 0
    for path in parser.parse_args(argv).files:
        try:
            with path.open(encoding="utf-8", newline="\n") as lines:
                trace = trace_file.read(lines)
        except (OSError, UnicodeDecodeError, TraceError) as error:
            sys.stdout.write(f"{path}: {error}\n")
            worst = 2
            continue
        num_equal, difference = replay(trace)
        if difference is None:
            ends = f"; {trace.stopped}" if trace.stopped else ""
            sys.stdout.write(f"{path}: {num_equal} rounds are equal{ends}\n")
        else:
            sys.stdout.write(f"{path}: {num_equal} rounds are equal, then differs: {difference}\n")
            worst = max(worst, 1)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
