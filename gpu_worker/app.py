"""Composition of a worker process: builds everything, runs it, ends it in order.

Order of the start: ops port, model on its thread, gRPC, registration. Order of the end: Draining to
the scheduler, rows end or drain_s passes, outboxes are acknowledged, the registry key goes, gRPC
ends. While Redis is away the worker serves its sessions and keeps trying to register.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from structlog.typing import FilteringBoundLogger

from gpu_worker import address, codec, grpc_service, settings
from gpu_worker.executor import Executor, StepOutcome
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.ports import ModelRunner, RunnerInfo
from gpu_worker.session import Sessions
from gpu_worker.settings import WorkerSettings
from gpu_worker.token_hub import TokenHub
from servicekit import grpc_server, listening, logs, metrics, model_files, ops, redis_client

HEARTBEAT_S = 0.5
REGISTER_S = 1.0
SWEEP_S = 5.0
FLUSH_S = 2.0
_QUIET_S = 0.2
_POLL_S = 0.02
_STOP_GRACE_S = 0.2
_LAST_WORDS_S = 0.5
_WITHDRAW_S = 1.0

RunnerFactory = Callable[[WorkerSettings, FilteringBoundLogger], ModelRunner]


async def main(
    argv: Sequence[str],
    environ: Mapping[str, str],
    stop: asyncio.Event,
    load_runner: RunnerFactory,
) -> int:
    """Runs a worker until `stop`; the result is the process's exit code."""
    configured = settings.load(argv, environ)
    logs.configure("gpu_worker", configured.log_level)
    return await Worker(configured, load_runner).run(stop)


class Worker:
    """One worker, run once. The ports are known once it listens."""

    def __init__(
        self,
        configured: WorkerSettings,
        load_runner: RunnerFactory,
        make_hub: Callable[..., TokenHub] = TokenHub,
    ) -> None:
        self._settings = configured
        self._model = model_files.served_name(configured.served_model_name, configured.model)
        self._log = logs.get_logger("worker")
        self._incarnation = secrets.randbits(63) + 1
        self._failed = asyncio.Event()
        self._registered = False
        self._num_dropped = 0
        self.port = 0
        registry = metrics.new_registry()
        self._metrics = WorkerMetrics(registry, self._model)
        self._ops = ops.OpsServer(registry, lambda: self._registered)
        self._executor = Executor(
            load=lambda: load_runner(configured, logs.get_logger("runner")),
            on_outcome=self._step_ended,
            on_death=self._fail,
            log=logs.get_logger("executor"),
        )
        self._sessions = Sessions(
            plans=self._executor,
            incarnation=self._incarnation,
            log=logs.get_logger("session"),
            on_dropped_cancel=self._metrics.cancel_dropped,
        )
        self._hub = make_hub(
            max_batches=configured.outbox_batches,
            clock_s=time.monotonic,
            on_subscriptions=self._sessions.set_gateways,
            log=logs.get_logger("tokens"),
        )
        self._metrics.watch(
            slots_used=lambda: self._executor.num_live_rows,
            outbox_batches=lambda: self._hub.num_batches,
        )

    @property
    def incarnation(self) -> int:
        """Drawn for this run."""
        return self._incarnation

    async def run(self, stop: asyncio.Event) -> int:
        """Loads, serves, drains. 0 after a drain, 1 after a failure."""
        ops_port = await self._ops.start(self._settings.host, self._settings.ops_port)
        self._log.info("listening", what="ops", port=ops_port)
        try:
            info = await self._load(stop)
            return 0 if info is None else await self._serve(info, stop)
        except Exception as error:
            self._log.error("the worker can't serve", reason=str(error), exc_info=True)
            return 1
        finally:
            self._executor.stop()
            await self._ops.stop()

    async def _load(self, stop: asyncio.Event) -> RunnerInfo | None:
        """The model's numbers, or None if the process was told to stop first."""
        begin = time.monotonic()
        loading = asyncio.ensure_future(self._executor.start())
        await _first_of(loading, stop)
        if not loading.done():
            loading.cancel()
            return None
        info = loading.result()
        self._metrics.loaded(info)
        self._log.info(
            "model loaded",
            model=self._model,
            seconds=round(time.monotonic() - begin, 2),
            num_blocks=info.cache_group.num_blocks,
            block_size=info.cache_group.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )
        return info

    async def _serve(self, info: RunnerInfo, stop: asyncio.Event) -> int:
        worker_id, server = await self._listen(info)
        redis = redis_client.connect(self._settings.redis_url)
        record = codec.worker_record(
            worker_id=worker_id,
            incarnation=self._incarnation,
            address=await self._address(),
            info=info,
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._register(redis, worker_id, record)),
                    group.create_task(self._tick()),
                ]
                failing = group.create_task(self._failed.wait())
                await _first_of(failing, stop)
                if not self._failed.is_set():
                    await self._drain()
                if self._failed.is_set():
                    await asyncio.sleep(_LAST_WORDS_S)
                for task in (*tasks, failing):
                    task.cancel()
            await self._withdraw(redis, worker_id)
            self._end_streams()
        finally:
            await server.stop(_STOP_GRACE_S)
            await redis.aclose()
        self._log.info("worker ends", failed=self._failed.is_set())
        return 1 if self._failed.is_set() else 0

    async def _listen(self, info: RunnerInfo) -> tuple[str, grpc_server.Server]:
        configured = self._settings
        # The name may need the port, which is known only once the server listens.
        identity = grpc_service.Identity(incarnation=self._incarnation, info=info)
        server = grpc_server.Server(
            lambda s: grpc_service.register(s, self._sessions, self._hub, identity, self._cancel),
            grpc_service.SERVICE_NAMES,
        )
        self.port = await server.start(configured.host, configured.worker_port)
        identity.worker_id = configured.worker_id or f"{socket.gethostname()}:{self.port}"
        await server.set_serving(True)
        self._log.info("listening", what="worker", port=self.port)
        return identity.worker_id, server

    async def _address(self) -> str:
        """What others dial."""
        if self._settings.worker_address:
            return self._settings.worker_address
        host, name = self._settings.host, socket.gethostname()
        found = await address.own_addresses(name) if host in address.WILDCARDS else []
        return listening.joined(address.host_to_announce(host, name, found), self.port)

    async def _register(self, redis: Redis, worker_id: str, record: bytes) -> None:
        reachable: bool | None = None
        while True:
            try:
                await redis_client.announce(redis, self._model, "worker", worker_id, record)
                if reachable is False:
                    self._log.info("registered again", worker=worker_id)
                reachable = True
                if not self._registered:
                    self._registered = True
                    self._log.info("ready", worker=worker_id, incarnation=self._incarnation)
            except (RedisError, OSError, TimeoutError) as error:
                if reachable is not False:
                    self._log.warning("Redis does not answer, trying on", reason=repr(error))
                reachable = False
            await asyncio.sleep(REGISTER_S)

    async def _withdraw(self, redis: Redis, worker_id: str) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S):
                await redis_client.withdraw(redis, self._model, "worker", worker_id)

    async def _tick(self) -> None:
        swept = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._sessions.beat()
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                self._hub.sweep()

    async def _drain(self) -> None:
        """Rows end or drain_s passes; then gateways get FLUSH_S to acknowledge what they got."""
        self._log.info("draining", live_rows=self._executor.num_live_rows)
        self._sessions.drain()
        quiet_since = time.monotonic()

        def at_rest() -> bool:
            nonlocal quiet_since
            now = time.monotonic()
            if self._executor.num_live_rows or not self._executor.idle:
                quiet_since = now
            return self._failed.is_set() or now - quiet_since >= _QUIET_S

        await self._until(at_rest, self._settings.drain_s)
        await self._until(lambda: self._hub.num_unacknowledged == 0, FLUSH_S)
        self._log.info(
            "drained",
            live_rows=self._executor.num_live_rows,
            unacknowledged_batches=self._hub.num_unacknowledged,
        )

    def _end_streams(self) -> None:
        """Tells gateways by the streams' orderly end that they have all, if nothing runs here."""
        if self._executor.idle and not self._executor.num_live_rows and not self._failed.is_set():
            self._hub.close()

    @staticmethod
    async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for _ in range(int(timeout_s / _POLL_S) + 1):
            if condition() or time.monotonic() >= deadline:
                return
            await asyncio.sleep(_POLL_S)

    def _step_ended(self, outcome: StepOutcome) -> None:
        # Clients wait for the tokens; for the result a scheduler that has plans under way does not.
        self._hub.publish(outcome.batches)
        self._sessions.add_result(outcome.result)
        # When both have been sent: it takes as long as sending them.
        asyncio.get_running_loop().call_soon(self._metrics.step_ended, outcome)
        if self._hub.num_dropped_batches > self._num_dropped:
            self._metrics.batches_dropped(self._hub.num_dropped_batches - self._num_dropped)
            self._num_dropped = self._hub.num_dropped_batches
        if outcome.worker_failed:
            self._fail("the device can't be used any more")

    def _cancel(self, request_id: bytes) -> None:
        if not self._executor.cancel(request_id):
            self._metrics.cancel_dropped()
        self._sessions.add_cancel(request_id)

    def _fail(self, reason: str) -> None:
        self._log.error("the worker leaves", reason=reason)
        self._failed.set()


async def _first_of(future: "asyncio.Future[Any]", event: asyncio.Event) -> None:
    """Returns when either is there; leaves `future` as it is."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((future, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
