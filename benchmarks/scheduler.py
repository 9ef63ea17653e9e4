"""What a step costs in the scheduler core: python -m benchmarks.scheduler.

Planning a step and booking its result together, at 16 to 1,024 running requests with 2,000 waiting.
Contexts are spread, so that in each step a sixteenth of the rows take a block and as many fill one.
Times are CPU time of the thread, so that neighbours on the machine count little; a calibration loop
is printed beside them, so that machines can be compared.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import (
    BecameLeader,
    RequestArrived,
    RequestCancelled,
    StepCompleted,
    WorkerJoined,
)
from scheduler_svc.core.ready import Admit, Ready
from scheduler_svc.core.types import RequestId, SamplingSpec, WorkerCapacity, WorkerId

BLOCK_SIZE = 16
STEP_NS = 10_000_000
WORKER = WorkerId("w")


class SteadyLoad:
    """A core whose one worker decodes num_running requests; with churn some are replaced."""

    def __init__(self, *, num_running: int, num_waiting: int, num_steps: int, churn: float) -> None:
        self.core = SchedulerCore(CoreConfig(max_inflight_steps=1))
        self._now_ns = 0
        self._step = 0
        self._num_arrived = 0
        self._max_tokens = num_steps + 200
        self._churn = churn * num_running
        self._due = 0.0
        self._live: dict[int, RequestId] = {}
        self._scheduled: set[int] = set()
        self.core.feed(BecameLeader(now_ns=0, epoch=1))
        blocks_each = (2 * BLOCK_SIZE + self._max_tokens) // BLOCK_SIZE + 1
        self.core.feed(
            WorkerJoined(
                now_ns=0,
                worker_id=WORKER,
                capacity=WorkerCapacity(
                    num_slots=num_running,
                    num_blocks=num_running * blocks_each + 64,
                    block_size=BLOCK_SIZE,
                    max_num_batched_tokens=64 * num_running,
                    max_model_len=blocks_each * BLOCK_SIZE,
                ),
                gateway_ids=frozenset({"g"}),
            )
        )
        for _ in range(num_running + num_waiting):
            self.core.feed(self._arrival())
        self._follow(self.core.take_ready())

    def _arrival(self) -> RequestArrived:
        number = self._num_arrived
        self._num_arrived += 1
        length = BLOCK_SIZE + 1 + number % BLOCK_SIZE
        return RequestArrived(
            now_ns=self._now_ns,
            request_id=RequestId(b"%016d" % number),
            entry_id=str(number),
            gateway_id="g",
            prompt_token_ids=tuple(range(number, number + length)),
            sampling=SamplingSpec(max_tokens=self._max_tokens),
        )

    def _follow(self, ready: Ready) -> None:
        """Keeps the rows of the last plan, as a worker does."""
        (plan,) = ready.plans
        self._step = plan.step
        for slot in plan.releases:
            self._scheduled.discard(slot)
        admits: tuple[Admit, ...] = plan.admits
        self._live.update((admit.slot, admit.request_id) for admit in admits)
        for slot, count in plan.changed:
            if count:
                self._scheduled.add(slot)
            else:
                self._scheduled.discard(slot)

    def step_us(self) -> float:
        """One result and the next plan; CPU microseconds in the core."""
        self._now_ns += STEP_NS
        slots = tuple(sorted(self._scheduled))
        event = StepCompleted(
            now_ns=self._now_ns,
            worker_id=WORKER,
            step=self._step,
            slots=slots,  # type: ignore[arg-type]
            token_ids=tuple(slot % 997 for slot in slots),
        )
        others: list[RequestArrived | RequestCancelled] = []
        self._due += self._churn
        while self._due >= 1:
            self._due -= 1
            victim = self._live[slots[(self._step * 7 + len(others)) % len(slots)]]
            others.append(RequestCancelled(now_ns=self._now_ns, request_id=victim))
            others.append(self._arrival())
        started = time.thread_time_ns()
        self.core.feed(event)
        for other in others:
            self.core.feed(other)
        ready = self.core.take_ready()
        elapsed = time.thread_time_ns() - started
        self._follow(ready)
        return elapsed / 1000


def calibrate_us() -> float:
    """A fixed loop of plain Python; the best of several."""
    best = float("inf")
    for _ in range(20):
        started = time.thread_time_ns()
        total = 0
        for number in range(10_000):
            total += number & 7
        best = min(best, (time.thread_time_ns() - started) / 1000)
    return best


def measure(
    *, num_running: int, num_waiting: int, num_steps: int, churn: float
) -> dict[str, float]:
    """p50 and p99 of a step's CPU time in the core."""
    warm_up = 20
    load = SteadyLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=num_steps + warm_up,
        churn=churn,
    )
    for _ in range(warm_up):
        load.step_us()
    gc.collect()
    times = sorted(load.step_us() for _ in range(num_steps))
    assert load.core.view().num_running == num_running
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "churn": churn,
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
    }


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 if --max-p50-us is exceeded at 256 running."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps measured in each case")
    parser.add_argument("--waiting", type=int, default=2000, help="requests that wait")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--max-p50-us", type=float, help="fail above this at 256 running")
    options = parser.parse_args(argv)
    rows = [
        measure(
            num_running=num_running,
            num_waiting=options.waiting,
            num_steps=options.steps,
            churn=churn,
        )
        for churn in (0.0, 0.02)
        for num_running in (16, 64, 256, 1024)
    ]
    calibration_us = calibrate_us()
    print(f"calibration: {calibration_us:.0f} us for 10,000 turns of a plain loop")
    print(f"{'running':>8} {'churn':>6} {'p50 us':>9} {'p99 us':>9}")
    for row in rows:
        print(
            f"{row['num_running']:>8.0f} {row['churn']:>6.2f} "
            f"{row['p50_us']:>9.1f} {row['p99_us']:>9.1f}"
        )
    if options.json is not None:
        figures = {"calibration_us": calibration_us, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    at_256 = next(r["p50_us"] for r in rows if r["num_running"] == 256 and r["churn"] == 0)
    return int(options.max_p50_us is not None and at_256 > options.max_p50_us)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
