"""What a step costs in the scheduler: python -m benchmarks.scheduler.

From a worker's result as bytes to the next plan as bytes, at 16
to 1,024 running requests with 2,000 waiting. Contexts are spread, so that in each step a sixteenth
of the rows take a block and as many fill one, which is named and put into the prefix index. Times
are CPU time of the thread, so that neighbours on the machine count little; a calibration loop is
printed beside them, so that machines can be compared.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.v1 import common_pb2, worker_pb2

from scheduler_svc import codec
from scheduler_svc.adapters.loss_rules import WorkerHealth
from scheduler_svc.adapters.worker_life import WorkerLife
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import (
    BecameLeader,
    RequestArrived,
    WorkerJoined,
)
from scheduler_svc.core.ready import Ready, StepPlan
from scheduler_svc.core.types import CostProfile, RequestId, SamplingSpec, WorkerCapacity, WorkerId
from scheduler_svc.ports import StepReport

BLOCK_SIZE = 16
STEP_NS = 10_000_000
WORKER = WorkerId("w")


class SteadyLoad:
    """A core whose one worker decodes num_running requests; with churn some end and others come.

    So many results come `together` and are answered by one plan.
    """

    def __init__(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_steps: int,
        churn: float,
        together: int = 1,
    ) -> None:
        self.core = SchedulerCore(CoreConfig(max_inflight_steps=together))
        # Of a plan, by the steps that it stands for.
        self.plan_bytes: list[float] = []
        self._together = together
        self._now_ns = 0
        self._step = 0
        self._num_arrived = 0
        self._max_tokens = num_steps + 200
        self._churn = churn * num_running
        self._due = 0.0
        # A worker's rows, in the order in which it got them.
        self._scheduled: dict[int, int] = {}
        self._life = WorkerLife(
            worker_id=WORKER,
            epoch=1,
            incarnation=1,
            health=WorkerHealth(cost=CostProfile(), grace_ns=10**9, now_ns=0),
            gateway_ids=frozenset({"g"}),
        )
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
        self._send(self.core.take_ready())

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

    def _send(self, ready: Ready) -> None:
        for plan in ready.plans:
            raw = self._life.plan(plan, self._now_ns)
            assert raw is not None
            self._follow(plan)

    def _follow(self, plan: StepPlan) -> None:
        """Keeps the rows of the last plan, as a worker does."""
        for slot in plan.releases:
            self._scheduled.pop(slot, None)
        for slot, count in plan.changed:
            if count:
                self._scheduled[slot] = count
            else:
                del self._scheduled[slot]

    def _result(self, num_ended: int = 0) -> bytes:
        """What the worker sends for its next step: a token for each row, the last one for some."""
        self._step += 1
        slots = list(self._scheduled)
        ended = [slots[(self._step * 7 + 11 * i) % len(slots)] for i in range(num_ended)]
        return worker_pb2.SessionResponse(
            result=worker_pb2.StepResult(
                epoch=1,
                step=self._step,
                slots=self._scheduled,
                token_ids=[(slot * 7919 + self._step) % 49152 for slot in self._scheduled],
                finished_slots=ended,
                finish_reasons=[common_pb2.FINISH_REASON_STOP] * num_ended,
                times=worker_pb2.StepTimes(
                    idle_us=50, apply_us=200, forward_us=9000, total_us=9300
                ),
            )
        ).SerializeToString()

    def step_us(self) -> float:
        """Results and the next plan; CPU microseconds for each step."""
        self._now_ns += STEP_NS * self._together
        self._due += self._churn
        num_ended = int(self._due)
        self._due -= num_ended
        raw_results = [self._result() for _ in range(self._together - 1)]
        raw_results.append(self._result(num_ended))
        arrivals = [self._arrival() for _ in range(num_ended)]
        started = time.thread_time_ns()
        for raw_result in raw_results:
            report = codec.decode_worker_message(raw_result)
            assert isinstance(report, StepReport)
            event = self._life.event(report, self._now_ns)
            assert event is not None
            self.core.feed(event)
            self._life.returned(self._now_ns)
        for arrival in arrivals:
            self.core.feed(arrival)
        ready = self.core.take_ready()
        (plan,) = ready.plans
        raw_plan = self._life.plan(plan, self._now_ns)
        elapsed = time.thread_time_ns() - started
        assert raw_plan is not None
        assert plan.num_steps == self._together or self._churn
        self.plan_bytes.append(len(raw_plan) / plan.num_steps)
        self._follow(plan)
        return elapsed / 1000 / self._together


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
    *, num_running: int, num_waiting: int, num_steps: int, churn: float, together: int = 1
) -> dict[str, float]:
    """p50 and p99 of a step's CPU time, and bytes of its plan, or its share of one."""
    warm_up = 20
    load = SteadyLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=(num_steps + warm_up) * together,
        churn=churn,
        together=together,
    )
    for _ in range(warm_up):
        load.step_us()
    gc.collect()
    load.plan_bytes.clear()
    times = sorted(load.step_us() for _ in range(num_steps))
    sizes = sorted(load.plan_bytes)
    assert load.core.view().num_running == num_running
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "churn": churn,
        "together": together,
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "p50_plan_bytes": round(sizes[len(sizes) // 2], 1),
        "max_plan_bytes": round(sizes[-1], 1),
    }


def cases(num_waiting: int, num_steps: int) -> list[dict[str, float]]:
    """All rows of the table: then one without a queue, and plans that stand for several steps."""
    rows = [
        measure(num_running=n, num_waiting=num_waiting, num_steps=num_steps, churn=churn)
        for churn in (0.0, 0.02)
        for n in (16, 64, 256, 1024)
    ]
    rows.append(measure(num_running=256, num_waiting=0, num_steps=num_steps, churn=0.0))
    return rows + [
        measure(
            num_running=256, num_waiting=num_waiting, num_steps=num_steps, churn=0.0, together=n
        )
        for n in (2, 4)
    ]


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 if --max-p50-us is exceeded at 256 running."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps measured in each case")
    parser.add_argument("--waiting", type=int, default=2000, help="requests that wait")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--max-p50-us", type=float, help="fail above this at 256 running")
    options = parser.parse_args(argv)
    rows = cases(options.waiting, options.steps)
    calibration_us = calibrate_us()
    print(f"calibration: {calibration_us:.0f} us for 10,000 turns of a plain loop")
    print(
        f"{'running':>8} {'waiting':>8} {'churn':>6} {'at once':>8} {'p50 us':>9} {'p99 us':>9}"
        f" {'plan bytes':>14}"
    )
    for row in rows:
        print(
            f"{row['num_running']:>8.0f} {row['num_waiting']:>8.0f} {row['churn']:>6.2f} "
            f"{row['together']:>8.0f} {row['p50_us']:>9.1f} {row['p99_us']:>9.1f} "
            f"{row['p50_plan_bytes']:>6.0f} ({row['max_plan_bytes']:.0f})"
        )
    if options.json is not None:
        figures = {"calibration_us": calibration_us, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    at_256 = next(r["p50_us"] for r in rows if r["num_running"] == 256 and r["churn"] == 0)
    return int(options.max_p50_us is not None and at_256 > options.max_p50_us)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
