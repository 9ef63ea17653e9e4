"""What the hop between scheduler and workers costs: python -m benchmarks.control_plane.

A real scheduler process, real gRPC and Redis; workers whose steps only wait. Each case has a stack
of its own, with every row decoding. `stub` workers are the shipped worker around a runner that
sleeps, one process each; `sleepers` share a process that computes nothing, so that many of them
leave a core to the scheduler. Everything runs on one machine: on two cores a worker's Python takes
its share too, and what else runs there shows in the figures.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.hop.plane import Load, Reading, measure

WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load, and the goal for one of its figures."""

    name: str
    load: Load
    figure: Callable[[Reading], float]
    goal: float
    at_least: bool = False


def _idle(reading: Reading) -> float:
    return reading.idle_share


CASES = (
    Case(
        name="worker idle, steps of 2 ms",
        load=Load(num_workers=1, num_rows=64, step_ms=2.0),
        figure=_idle,
        goal=0.03,
    ),
    Case(
        name="worker idle, steps of 6 ms",
        load=Load(num_workers=1, num_rows=64, step_ms=6.0),
        figure=_idle,
        goal=0.01,
    ),
    Case(
        name="worker idle, steps of 2 ms, 3 ms more each way",
        load=Load(num_workers=1, num_rows=64, step_ms=2.0, delay_s=0.003),
        figure=_idle,
        goal=0.03,
    ),
    Case(
        name="scheduler's core, 16 x 256 rows, steps of 20 ms",
        load=Load(num_workers=16, num_rows=256, step_ms=20.0, sleepers=True),
        figure=lambda reading: reading.core_share,
        goal=0.70,
    ),
)
SCALE = (1, 2, 4)
SCALE_GOAL = 3.8


async def run(seconds: float, only: str) -> list[dict[str, object]]:
    """All cases whose name holds `only`; prints each as it is there."""
    rows = []
    for case in CASES:
        if only in case.name:
            reading = await measure(case.load, warm_up_s=WARM_UP_S, seconds=seconds)
            rows.append(_row(case.name, case.figure(reading), case.goal, case.at_least, reading))
    if only in "scaling":
        rates = {}
        for count in SCALE:
            load = Load(num_workers=count, num_rows=256, step_ms=20.0, sleepers=True)
            reading = await measure(load, warm_up_s=WARM_UP_S, seconds=seconds)
            rates[count] = reading.tokens_per_s
            name, scale = f"scaling, {count} workers", rates[count] / rates[SCALE[0]]
            goal = SCALE_GOAL if count == SCALE[-1] else 0.95 * count
            rows.append(_row(name, scale, goal, True, reading))
    return rows


def _row(
    name: str, value: float, goal: float, at_least: bool, reading: Reading
) -> dict[str, object]:
    met = value >= goal if at_least else value <= goal
    sign = ">=" if at_least else "<="
    print(
        f"{name:<50} {value:>8.4f} {sign} {goal:<5g} {'met' if met else 'MISSED':<6}"
        f" {reading.idle_share:>8.4f} {reading.core_share:>6.3f} {reading.steps_per_s:>8.1f}"
        f" {reading.depth:>5.1f} {reading.round_trip_us:>8.0f}",
        flush=True,
    )
    return {"name": name, "value": value, "goal": goal, "met": met, **asdict(reading)}


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 if --strict and a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="window of each case")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--strict", action="store_true", help="fail if a goal is missed")
    options = parser.parse_args(argv)
    print(f"{os.cpu_count()} cores, load average before {os.getloadavg()[0]:.2f}")
    print(
        f"{'case':<50} {'value':>8}    {'goal':<12} {'idle':>8} {'core':>6} {'steps/s':>8}"
        f" {'k':>5} {'trip us':>8}"
    )
    rows = asyncio.run(run(options.seconds, options.only))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(options.strict and not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
