"""python -m benchmarks.hop.sleepers: several workers that only wait, in one process.

The sessions are those of the shipped worker; behind them a step takes its time on a clock that runs
on by itself, without computing: a step begins when the one before has ended and its plan is there,
and its result is sent when it has ended, by a timer. So many workers leave the other core to the
scheduler. Tokens go nowhere.
"""

import argparse
import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker import codec, grpc_service
from gpu_worker.messages import Snapshot, StepPlan, StepResult, StepTimes
from gpu_worker.ports import CacheGroupSpec, RunnerInfo
from gpu_worker.session import Sessions
from gpu_worker.token_hub import TokenHub
from servicekit import grpc_server, logs, process, redis_client

MAX_WAITING_STEPS = 8
RENEW_S = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step on its way to its end, which is fixed."""

    plan: StepPlan
    slots: Sequence[int]
    received_ns: int
    idle_ns: int
    duration_ns: int
    end_ns: int


class Sleeper:
    """A worker's plans and their ends. Implements gpu_worker.session.PlanQueue."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.incarnation = secrets.randbits(63) + 1
        self.last_step = 0
        self.sessions = Sessions(
            plans=self,
            incarnation=self.incarnation,
            log=logs.get_logger("sleeper"),
            on_dropped_cancel=lambda: None,
        )
        self._steps: deque[_Step] = deque()
        self._free_ns = 0
        # What is scheduled, and the tokens that rows have to compute before they sample.
        self._scheduled: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._decodes: list[int] = []

    @property
    def busy(self) -> bool:
        """A step has not ended."""
        return bool(self._steps)

    def submit(self, plan: StepPlan) -> bool:
        """Takes a plan; its steps end one after the other."""
        if len(self._steps) + max(1, plan.num_steps) > MAX_WAITING_STEPS:
            return False
        received_ns = time.perf_counter_ns()
        for single in plan.single_steps():
            self._apply(single)
            begin_ns = max(received_ns, self._free_ns)
            duration_ns = int(1000 * self.info.step_us) if self._scheduled else 0
            step = _Step(
                single,
                self._sampling(),
                received_ns,
                begin_ns - self._free_ns,
                duration_ns,
                begin_ns + duration_ns,
            )
            self._free_ns = step.end_ns
            self._steps.append(step)
            delay_s = (step.end_ns - received_ns) / 1e9
            asyncio.get_running_loop().call_later(delay_s, self._ended, step)
        return True

    def discard_plans(self) -> None:
        """Nothing of them will end."""
        self._steps.clear()

    def snapshot(self) -> Snapshot:
        """No rows: a new leader starts from nothing."""
        return Snapshot()

    def _apply(self, plan: StepPlan) -> None:
        if plan.reset:
            self._left.clear()
            self._scheduled.clear()
        for slot in plan.release_slots:
            self._left.pop(slot, None)
            self._scheduled.pop(slot, None)
        for admit in plan.admits:
            self._left[admit.slot] = len(admit.token_ids) - admit.num_computed_tokens
        for slot, count in zip(plan.changed_slots, plan.changed_num_tokens, strict=True):
            if count:
                self._scheduled[slot] = count
            else:
                self._scheduled.pop(slot, None)
        if plan.reset or plan.release_slots or plan.changed_slots:
            self._decodes = list(self._scheduled)

    def _sampling(self) -> Sequence[int]:
        """Slots whose rows sample in the step applied last."""
        if not self._left:
            return self._decodes
        sampling = []
        for slot, count in self._scheduled.items():
            left = self._left.pop(slot, count) - count
            if left > 0:
                self._left[slot] = left
            else:
                sampling.append(slot)
        return sampling

    def _ended(self, step: _Step) -> None:
        if not self._steps or self._steps[0] is not step:
            return
        self._steps.popleft()
        plan = step.plan
        self.last_step = plan.step
        times = StepTimes(
            idle_us=step.idle_ns // 1000,
            forward_us=step.duration_ns // 1000,
            total_us=(step.end_ns - step.received_ns) // 1000,
        )
        self.sessions.add_result(
            StepResult(
                epoch=plan.epoch,
                step=plan.step,
                digest=plan.digest,
                slots=step.slots,
                token_ids=[(slot * 7919 + plan.step) % 49152 for slot in step.slots],
                times=times,
            )
        )


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hop.sleepers")
    parser.add_argument("--count", type=int, default=1, help="workers")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step")
    parser.add_argument("--rows", type=int, default=256, help="slots of each")
    parser.add_argument("--gateway", required=True, help="the gateway that is said to read tokens")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args(argv)
    logs.configure("gpu_worker", "warning")
    info = RunnerInfo(
        model_digest="0" * 64,
        vocab_size=49152,
        max_model_len=8192,
        max_num_seqs=options.rows,
        max_num_batched_tokens=8192,
        cache_group=CacheGroupSpec(
            window=0, block_size=16, block_bytes=1024, num_blocks=options.rows * 300
        ),
        step_us=options.step_ms * 1000,
        token_us=0.0,
    )
    redis = redis_client.connect(options.redis_url)
    servers, records = [], {}
    for number in range(options.count):
        sleeper, worker_id = Sleeper(info), f"sleeper-{number}"
        sleeper.sessions.set_gateways([options.gateway])
        port, server = await _listen(sleeper, worker_id)
        servers.append(server)
        records[worker_id] = codec.worker_record(
            worker_id=worker_id,
            incarnation=sleeper.incarnation,
            address=f"127.0.0.1:{port}",
            info=info,
        )
    while not stop.is_set():
        for worker_id, record in records.items():
            await redis_client.announce(redis, options.model, "worker", worker_id, record)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEW_S):
                await stop.wait()
    for server in servers:
        await server.stop(0.0)
    await redis.aclose()
    return 0


async def _listen(sleeper: Sleeper, worker_id: str) -> tuple[int, grpc_server.Server]:
    identity = grpc_service.Identity(
        worker_id=worker_id, incarnation=sleeper.incarnation, info=sleeper.info
    )
    hub = TokenHub(
        max_batches=1,
        clock_s=time.monotonic,
        on_subscriptions=lambda _: None,
        log=logs.get_logger("tokens"),
    )
    server = grpc_server.Server(
        lambda s: grpc_service.register(s, sleeper.sessions, hub, identity, lambda _: None),
        grpc_service.SERVICE_NAMES,
    )
    return await server.start("127.0.0.1", 0), server


if __name__ == "__main__":
    process.run(main)
