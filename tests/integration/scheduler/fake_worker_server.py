"""A worker service in the test's own process: the wire around tests.builders.FakeWorker.

It mirrors plans strictly (digest, tables, KV) and can be told to misbehave: cut its stream, hold
results back, fall silent, refuse an epoch, come back as another incarnation.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio
from quire.v1 import common_pb2, queue_pb2, worker_pb2, worker_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from deploy.local.ports import FreePorts
from scheduler_svc.core import ready
from scheduler_svc.core.events import StepFailed
from scheduler_svc.core.types import BlockId, RequestId, SamplingSpec, Slot, WorkerId
from servicekit import redis_client
from tests.builders import Emission, FakeWorker, make_worker

RING = 64


class FakeWorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """One worker process as the scheduler sees it. Attributes are knobs and records."""

    def __init__(
        self,
        worker_id: str = "w1",
        *,
        gateways: Iterable[str] = ("g1",),
        step_s: float = 0.0,
        **capacity: int,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = secrets.randbits(63) + 1
        self.gateways = list(gateways)
        self.step_s = step_s
        self.capacity: dict[str, Any] = {"num_slots": 32, "num_blocks": 512} | capacity
        self.address = ""
        self.min_schema_revision = self.max_schema_revision = 1
        self.flow = asyncio.Event()
        self.flow.set()
        self.silent = False
        self.tells_busy = True
        self.refuses_below = 0
        # What it says to know then; 0: the truth.
        self.refuses_with = 0
        # It claims that the epoch after any leader's has been.
        self.lies = False
        self.fault_next: worker_pb2.Fault | None = None
        self.garble_next: Callable[[worker_pb2.StepResult], None] | None = None
        self.snapshot_slots: list[worker_pb2.SlotState] = []
        self.opens: list[worker_pb2.Open] = []
        self.plans: list[worker_pb2.StepPlan] = []
        self.emissions: list[Emission] = []
        self.num_sessions = 0
        self._results: deque[worker_pb2.StepResult] = deque(maxlen=RING)
        self._extra: deque[worker_pb2.SessionResponse] = deque()
        self._queue: asyncio.Queue[worker_pb2.StepPlan] = asyncio.Queue()
        self._busy = False
        self._epoch = 0
        self._last_plan_step = 0
        self._is_new_life = True
        self._rows: dict[Slot, int] = {}
        self._mirror: FakeWorker | None = None
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._session: list[asyncio.Task[None]] = []

    # Life

    async def start(self, port: int = 0) -> None:
        """Listens and computes."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        async with asyncio.timeout(20):
            while not self._listen(port):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await self._server.start()
        self._tasks.append(asyncio.get_running_loop().create_task(self._execute()))

    def _listen(self, port: int) -> bool:
        # None that the kernel gives to a client: it stays free between two lives.
        self.address = f"127.0.0.1:{port or FreePorts().take()}"
        assert self._server is not None
        try:
            return bool(self._server.add_insecure_port(self.address))
        except RuntimeError:
            return False

    async def stop(self) -> None:
        """Dies: the port closes, everything is forgotten."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        for end in ends:
            if isinstance(end, Exception):
                raise end  # the mirror found a plan that is wrong

    async def announce(self, redis: Redis, model: str) -> None:
        """Writes the registry record once and keeps renewing it until stop."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(1.0)
                with contextlib.suppress(RedisError):
                    await redis_client.announce(
                        redis, model, "worker", self.worker_id, self.record()
                    )

        await redis_client.announce(redis, model, "worker", self.worker_id, self.record())
        self._tasks.append(asyncio.get_running_loop().create_task(renew()))

    def record(self) -> bytes:
        """The registry's value."""
        return queue_pb2.WorkerRecord(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self.address,
            model_digest="d" * 64,
            max_model_len=1024,
        ).SerializeToString()

    def cut(self) -> None:
        """Ends the open stream; the worker lives on."""
        self._cut.set()

    def say(self, message: worker_pb2.SessionResponse) -> None:
        """Sends something on the open stream."""
        self._extra.append(message)
        self._wake.set()

    def subscribe(self, *gateways: str) -> None:
        """Other gateways read the tokens now."""
        self.gateways = list(gateways)
        subscriptions = worker_pb2.Subscriptions(gateway_ids=self.gateways)
        self.say(worker_pb2.SessionResponse(subscriptions=subscriptions))

    @property
    def last_step(self) -> int:
        """Step of the newest result."""
        return self._results[-1].step if self._results else 0

    # The wire

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> None:
        """See worker.proto."""
        opening = (await anext(request_iterator)).open
        self.opens.append(opening)
        if self.lies:
            self.refuses_below = self.refuses_with = opening.epoch + 1
        if opening.epoch < max(self.refuses_below, self._epoch):
            highest = self.refuses_with or max(self.refuses_below, self._epoch)
            refused = worker_pb2.Refused(highest_epoch=highest)
            await context.write(worker_pb2.SessionResponse(refused=refused))
            return
        for part in self._session:  # whose end may not have reached this side yet
            part.cancel()
        self.num_sessions += 1
        if opening.epoch > self._epoch:
            self._epoch = opening.epoch
            self._results.clear()
            self._last_plan_step = 0
        self._cut.clear()
        known = opening.incarnation == self.incarnation
        self._is_new_life |= not known
        sent = opening.last_result_step if known else self.last_step
        await context.write(worker_pb2.SessionResponse(hello=self._hello()))
        snapshot = worker_pb2.Snapshot(
            slots=self.snapshot_slots, gateway_ids=self.gateways, last=True
        )
        await context.write(worker_pb2.SessionResponse(snapshot=snapshot))
        loop = asyncio.get_running_loop()
        parts = [
            loop.create_task(self._read(request_iterator)),
            loop.create_task(self._write(context, sent)),
            loop.create_task(self._beat()),
            loop.create_task(self._wait_cut()),
        ]
        self._session = parts
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _hello(self) -> worker_pb2.Hello:
        joined = make_worker(self.worker_id, **self.capacity)
        return worker_pb2.Hello(
            min_schema_revision=self.min_schema_revision,
            max_schema_revision=self.max_schema_revision,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model_digest="d" * 64,
            cache_groups=[
                worker_pb2.CacheGroup(
                    kind=worker_pb2.CacheGroup.KIND_FULL,
                    block_size=joined.capacity.block_size,
                    num_device_blocks=joined.capacity.num_blocks,
                )
            ],
            num_slots=joined.capacity.num_slots,
            max_num_batched_tokens=joined.capacity.max_num_batched_tokens,
            max_model_len=joined.capacity.max_model_len,
            cost=worker_pb2.CostProfile(step_us=self.step_s * 1e6),
            last_applied_step=self._last_plan_step,
            first_result_step=self._results[0].step if self._results else self._last_plan_step + 1,
        )

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            plan = request.plan
            assert plan.reset or plan.step == self._last_plan_step + 1, "a plan is missing"
            self._last_plan_step = plan.step + plan.num_steps - 1
            self.plans.append(plan)
            self._queue.put_nowait(plan)
            for step in range(plan.step + 1, self._last_plan_step + 1):
                self._queue.put_nowait(
                    worker_pb2.StepPlan(
                        epoch=plan.epoch, step=step, num_steps=1, digest=plan.digest
                    )
                )

    async def _write(self, context: Any, sent: int) -> None:
        while True:
            self._wake.clear()
            for result in [r for r in self._results if r.step > sent]:
                await context.write(worker_pb2.SessionResponse(result=result))
                sent = result.step
            while self._extra:
                await context.write(self._extra.popleft())
            await self._wake.wait()

    async def _beat(self) -> None:
        while True:
            if not self.silent:
                busy = self._busy and self.tells_busy
                beat = worker_pb2.Heartbeat(last_step=self.last_step, busy=busy)
                self.say(worker_pb2.SessionResponse(heartbeat=beat))
            await asyncio.sleep(0.5)

    async def _wait_cut(self) -> None:
        await self._cut.wait()

    # Computing

    async def _execute(self) -> None:
        while True:
            plan = await self._queue.get()
            self._busy = True
            await self.flow.wait()
            if self.step_s:
                await asyncio.sleep(self.step_s)
            if plan.epoch == self._epoch:
                result = self._result(plan)
                if self.garble_next is not None:
                    garble, self.garble_next = self.garble_next, None
                    garble(result)
                self._results.append(result)
                self._wake.set()
            self._busy = False

    def _result(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = worker_pb2.StepResult(epoch=plan.epoch, step=plan.step, digest=plan.digest)
        if plan.reset:
            if self._is_new_life:
                self._mirror = FakeWorker(make_worker(self.worker_id, **self.capacity))
                self._is_new_life = False
            self._rows.clear()
        assert self._mirror is not None, "the first plan carries no reset"
        self._mirror.take(self._core_plan(plan))
        fault, self.fault_next = self.fault_next, None
        step = self._mirror.next_result(fail=fault is not None)
        if isinstance(step, StepFailed):
            code = worker_pb2.Fault.CODE_AWAITING_RESET
            waiting = worker_pb2.Fault(scope=worker_pb2.Fault.SCOPE_STEP, code=code)
            result.faults.append(fault or waiting)
            return result
        result.slots.extend(step.slots)
        result.token_ids.extend(step.token_ids)
        result.finished_slots.extend(slot for slot, _ in step.finished)
        result.finish_reasons.extend(
            common_pb2.FinishReason.ValueType(reason) for _, reason in step.finished
        )
        result.num_wasted_rows = step.num_wasted_rows
        self.emissions += self._mirror.outbox
        self._mirror.outbox.clear()
        return result

    def _core_plan(self, plan: worker_pb2.StepPlan) -> ready.StepPlan:
        for slot in plan.release_slots:
            self._rows.pop(Slot(slot), None)
        for slot, count in zip(plan.changed_slots, plan.changed_num_tokens, strict=True):
            self._rows[Slot(slot)] = count
            if not count:
                del self._rows[Slot(slot)]
        growth = zip(plan.grow_slots, plan.grow_block_ids, strict=True)
        changed = zip(plan.changed_slots, plan.changed_num_tokens, strict=True)
        return ready.StepPlan(
            worker_id=WorkerId(self.worker_id),
            epoch=plan.epoch,
            step=plan.step,
            based_on_step=plan.based_on_step,
            reset=plan.reset,
            releases=tuple(Slot(slot) for slot in plan.release_slots),
            admits=tuple(_core_admit(admit) for admit in plan.admits),
            changed=tuple((Slot(slot), count) for slot, count in changed),
            growth=tuple((Slot(slot), BlockId(block)) for slot, block in growth),
            digest=plan.digest,
            num_scheduled_tokens=sum(self._rows.values()),
            num_rows=len(self._rows),
            num_chunks=0,
        )


def _core_admit(admit: worker_pb2.Admit) -> ready.Admit:
    return ready.Admit(
        slot=Slot(admit.slot),
        generation=admit.generation,
        request_id=RequestId(admit.request_id),
        attempt=admit.attempt,
        reply_to=admit.reply_to,
        token_ids=tuple(admit.token_ids),
        prompt_len=admit.prompt_len,
        emit_from=admit.emit_from,
        num_computed_tokens=admit.num_computed_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=tuple(BlockId(block) for block in admit.block_ids),
        sampling=SamplingSpec(
            max_tokens=admit.sampling.max_tokens,
            temperature=admit.sampling.temperature,
            top_p=admit.sampling.top_p,
            top_k=admit.sampling.top_k,
            seed=admit.sampling.seed,
            stop_token_ids=tuple(admit.sampling.stop_token_ids),
            min_tokens=admit.sampling.min_tokens,
            num_logprobs=(
                admit.sampling.num_logprobs if admit.sampling.HasField("num_logprobs") else None
            ),
            prompt_logprobs=admit.sampling.prompt_logprobs,
        ),
        traceparent=admit.traceparent,
    )
