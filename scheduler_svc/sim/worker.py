"""A simulated worker process.

Shipped: replica, executor (its turns, without its thread), sessions, token hub, both servicers and
the codec. Modelled: the device (device.py), the executor's thread (a step's outcome is known at its
begin and told at its end, so a snapshot taken meanwhile shows the table after it), and what
gpu_worker.app does beside: registration, heartbeats, the end after a broken device.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from quire.v1 import worker_pb2
from redis.exceptions import RedisError

from gpu_worker import codec, grpc_service
from gpu_worker.executor import Executor, StepOutcome, limits_of
from gpu_worker.messages import FaultCode, StepPlan
from gpu_worker.ports import RunnerInfo
from gpu_worker.replica import Replica
from gpu_worker.session import Sessions
from gpu_worker.token_hub import TokenHub
from scheduler_svc.sim.device import SimRunner, ViolationError
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.network import Method, Network
from scheduler_svc.sim.redis_clients import RedisClient
from servicekit import logs, redis_client

SESSION = "/quire.v1.WorkerService/Session"
TOKENS = "/quire.v1.TokensService/Tokens"
HEARTBEAT_S = 0.5
REGISTER_S = 1.0
SWEEP_S = 5.0
LAST_WORDS_S = 0.5
DRAIN_S, REST_S = 3.0, 0.2
OUTBOX_BATCHES = 256


class VirtualExecutor(Executor):
    """The shipped executor, whose thread is a timer."""

    def __init__(self, loop: VirtualLoop, runner: SimRunner, **options: Any) -> None:
        super().__init__(
            load=lambda: runner, clock_ns=lambda: round(runner.now_s() * 1e9), **options
        )
        self._virtual = loop
        self._runner = runner
        self._computing = False
        self._posted: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self.num_steps = 0
        self.highest_epoch = 0

    async def start(self) -> RunnerInfo:
        """The model is there at once."""
        self._loop = self._virtual
        self._replica = Replica(limits_of(self._runner.info))
        self._idle_since_ns = self._clock_ns()
        return self._runner.info

    @property
    def replica(self) -> Replica:
        """The table."""
        assert self._replica is not None
        return self._replica

    def submit(self, plan: StepPlan) -> bool:
        """Queues a plan and begins it if nothing runs."""
        if plan.epoch < self.highest_epoch:
            self._virtual.fail(
                ViolationError(
                    "no worker obeys an older epoch",
                    f"a plan of {plan.epoch} was taken after one of {self.highest_epoch}",
                )
            )
        self.highest_epoch = plan.epoch
        taken = super().submit(plan)
        self._virtual.call_soon(self._go_on)
        return taken

    def cancel(self, request_id: bytes) -> bool:
        """As the shipped one."""
        taken = super().cancel(request_id)
        self._virtual.call_soon(self._go_on)
        return taken

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        self._posted.append((callback, args))

    def _go_on(self) -> None:
        if self._computing or self.idle or self._stopping:
            return
        if not self._turn(self._runner, self.replica):
            self._stopping = True
        self.replica.check_invariants()
        if not self._posted:
            self._virtual.call_soon(self._go_on)
            return
        self._computing = self._busy = True
        self._virtual.call_later(self._runner.ahead_s, self._ended)

    def _ended(self) -> None:
        self._computing = self._busy = False
        self._runner.ahead_s = 0.0
        self.num_steps += 1
        posted, self._posted = self._posted, []
        for callback, args in posted:
            callback(*args)
        self._go_on()


class SimWorker:
    """One process's life. `on_leave` is called when it ends by itself."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        *,
        name: str,
        model: str,
        incarnation: int,
        runner: SimRunner,
        redis: RedisClient,
        on_leave: Callable[[], None],
    ) -> None:
        self.process = Process(loop, name)
        self.name = name
        self.runner = runner
        self._loop = loop
        self._network = network
        self._model = model
        self._redis = redis
        self._on_leave = on_leave
        self._leaving = False
        self.drained = False
        log = logs.get_logger("worker")
        self.executor = VirtualExecutor(
            loop, runner, on_outcome=self._step_ended, on_death=self._died, log=log
        )
        self.sessions = Sessions(
            plans=self.executor, incarnation=incarnation, log=log, on_dropped_cancel=lambda: None
        )
        self.hub = TokenHub(
            max_batches=OUTBOX_BATCHES,
            clock_s=loop.time,
            on_subscriptions=self.sessions.set_gateways,
            log=log,
        )
        self._identity = grpc_service.Identity(
            worker_id=name, incarnation=incarnation, info=runner.info
        )

    def start(self) -> None:
        """Listens at its name, registers, beats."""
        self.process.start(self._main())

    def drain(self) -> None:
        """Ends in order, as at SIGTERM: once its rows have ended or DRAIN_S has passed."""
        self.process.start(self._drain())

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return self.executor.replica.num_live_rows

    async def _main(self) -> None:
        await self.executor.start()
        session = grpc_service.WorkerService(self.sessions, self._identity)
        tokens = grpc_service.TokensService(self.hub, self._identity, self._cancel)
        methods = {
            SESSION: Method(session.Session, worker_pb2.SessionRequest.FromString),
            TOKENS: Method(tokens.Tokens, worker_pb2.TokensRequest.FromString),
        }
        self._network.listen(self.name, self.process, methods)
        self.process.start(self._register())
        self.process.start(self._tick())

    async def _drain(self) -> None:
        self._leaving = True
        self.sessions.drain()
        until_s = self._loop.time() + DRAIN_S
        while self._loop.time() < until_s:
            await asyncio.sleep(REST_S)
            if self.executor.idle and not self.num_live_rows:
                break
        await asyncio.sleep(LAST_WORDS_S)
        redis: Any = self._redis
        with contextlib.suppress(RedisError):
            await redis_client.withdraw(redis, self._model, "worker", self.name)
        self.drained = True
        self._on_leave()

    async def _register(self) -> None:
        record = codec.worker_record(
            worker_id=self.name,
            incarnation=self._identity.incarnation,
            address=self.name,
            info=self.runner.info,
        )
        redis: Any = self._redis
        while not self._leaving:
            with contextlib.suppress(RedisError):
                await redis_client.announce(redis, self._model, "worker", self.name, record)
            await asyncio.sleep(REGISTER_S)

    async def _tick(self) -> None:
        swept_s = self._loop.time()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.sessions.beat()
            if self._loop.time() - swept_s >= SWEEP_S:
                swept_s = self._loop.time()
                self.hub.sweep()

    def _step_ended(self, outcome: StepOutcome) -> None:
        self.sessions.add_result(outcome.result)
        self.hub.publish(outcome.batches)
        for fault in outcome.result.faults:
            if fault.code in (FaultCode.INVALID_PLAN, FaultCode.DIGEST_MISMATCH):
                self._loop.fail(ViolationError("plans are valid", fault.message))
        if outcome.worker_failed:
            self._loop.call_later(LAST_WORDS_S, self._on_leave)

    def _cancel(self, request_id: bytes) -> None:
        self.executor.cancel(request_id)
        self.sessions.add_cancel(request_id)

    def _died(self, reason: str) -> None:
        self._loop.fail(ViolationError("a worker's thread goes on", reason))
