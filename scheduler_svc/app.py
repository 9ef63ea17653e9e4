"""Composition root of the scheduler: servers, Redis, lease, and one Term per epoch led."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from redis.asyncio import Redis

from scheduler_svc import admin_codec, settings
from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.lease import LeaderLease
from scheduler_svc.adapters.redis_access import FAILURES, DeposedError, RedisHealth, RedisSide
from scheduler_svc.adapters.worker_link import EpochTooLowError
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.grpc_service import SERVICE_NAME, SchedulerServicer
from scheduler_svc.metrics import Sample, SchedulerMetrics
from scheduler_svc.ports import Clock, Core
from scheduler_svc.recorder import TraceRecorder
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.term import Term
from servicekit import grpc_server, logs, ops, redis_client
from servicekit.catalogue import SCHEDULER
from servicekit.metrics import new_registry

T = TypeVar("T")

EXIT_STOPPED, EXIT_DEPOSED, EXIT_FAILED = 0, 1, 3
_log = logs.get_logger("scheduler")


class SchedulerApp:
    """One scheduler process: a standby until it holds the lease, then the leader."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        clock: Clock | None = None,
        make_core: Callable[[CoreConfig], Core] = SchedulerCore,
    ) -> None:
        self._config = config
        self._core_config = config.core_config()
        self._clock = clock or MonotonicClock()
        self._make_core = make_core
        self._lease: LeaderLease | None = None
        self._term: Term | None = None
        self.ports: dict[str, int] = {}
        registry = new_registry()
        self._metrics = SchedulerMetrics(registry, config.model_name, self._sample)
        self._ops = ops.OpsServer(registry, self.is_ready)
        self._server = grpc_server.Server(
            lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
                SchedulerServicer(self._snapshot, self._core), server
            ),
            [SERVICE_NAME],
        )

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop` or the end of the leadership; returns the exit code."""
        try:
            return await self._serve(stop)
        except Exception:
            _log.error("failed", exc_info=True)
            return EXIT_FAILED

    async def _serve(self, stop: asyncio.Event) -> int:
        host = self._config.host
        self._listening("ops", await self._ops.start(host, self._config.ops_port))
        try:
            self._listening(
                "scheduler", await self._server.start(host, self._config.scheduler_port)
            )
            await self._server.set_serving(True)
            return await self._lead(stop)
        finally:
            await self._server.stop(0.5)
            await self._ops.stop()

    def _listening(self, what: str, port: int) -> None:
        self.ports[what] = port
        _log.info("listening", what=what, port=port)

    async def _lead(self, stop: asyncio.Event) -> int:
        url = self._config.redis_url
        redis = RedisSide(
            commands=redis_client.connect(url),
            listener=redis_client.connect(url, blocking=True),
            health=RedisHealth(self._clock),
        )
        lease = LeaderLease(
            redis.commands,
            model=self._config.model_name,
            ttl_s=self._config.lease_ttl_s,
            health=redis.health,
        )
        self._lease = lease
        try:
            await _until(stop, _check_redis(redis.commands, redis.health))
            while not stop.is_set():
                epoch = await _until(stop, lease.acquire())
                if epoch is not None:
                    _log.info("leading", epoch=epoch)
                    await self._run_term(epoch, stop, redis, lease)
            return EXIT_STOPPED
        except DeposedError as error:
            _log.error("deposed", detail=str(error))
            return EXIT_DEPOSED
        finally:
            await lease.release()
            await redis.commands.aclose()
            await redis.listener.aclose()

    async def _run_term(
        self,
        epoch: int,
        stop: asyncio.Event,
        redis: RedisSide,
        lease: LeaderLease,
    ) -> None:
        """Returns at `stop`, or to lead again in a higher epoch. Raises DeposedError."""
        recorder = self._open_trace(epoch)
        self._term = Term(
            self._config,
            epoch=epoch,
            core=self._make_core(self._core_config),
            clock=self._clock,
            redis=redis,
            lease=lease,
            metrics=self._metrics,
            recorder=recorder,
        )
        try:
            await self._term.run(stop, lambda: _log.info("ready", epoch=epoch))
        except* DeposedError as deposed:
            raise DeposedError(str(_first(deposed))) from None
        except* EpochTooLowError as refused:
            error = _first(refused)
            assert isinstance(error, EpochTooLowError)
            _log.error("epoch_too_low", epoch=epoch, highest=error.highest_epoch)
            await lease.step_over(epoch, error.highest_epoch)
        finally:
            self._term = None
            if recorder is not None:
                recorder.close()

    def _open_trace(self, epoch: int) -> TraceRecorder | None:
        if not self._config.trace_dir:
            return None
        return TraceRecorder(
            Path(self._config.trace_dir).expanduser(),
            epoch=epoch,
            config=self._core_config,
            max_bytes=self._config.trace_max_mib * 2**20,
        )

    # What others may look at

    def is_leading(self) -> bool:
        """It leads and has read all that waits."""
        return self._term is not None and self._term.ready

    def is_ready(self) -> bool:
        """It leads, or would take over at once: a standby that Redis does not answer would not."""
        return self.is_leading() or (self._lease is not None and self._lease.standing_by)

    def _sample(self) -> Sample:
        term = self._term
        if term is None:
            return Sample(stats=None, view=None, num_finishes_pending=0, num_events_queued=0)
        view = term.core.view()
        return Sample(
            stats=term.core.stats,
            view=view,
            num_finishes_pending=term.outbox.num_pending,
            num_events_queued=len(term.queue),
            time_to_drain_s=term.backlog.throughput.time_to_drain_s(
                view.backlog_tokens, len(view.workers)
            ),
        )

    def _core(self) -> Core | None:
        return self._term.core if self._term else None

    def _snapshot(self) -> scheduler_pb2.SnapshotResponse:
        term = self._term
        return admin_codec.encode_snapshot(
            leader=term is not None,
            view=term.core.view() if term else None,
            stats=term.core.stats if term else None,
            addresses=term.links.addresses() if term else {},
        )


async def _check_redis(redis: Redis, health: RedisHealth) -> None:
    """Waits for Redis; RuntimeError if it may drop keys."""
    while True:
        try:
            await redis_client.require_noeviction(redis)
        except FAILURES as error:
            if "unknown command" in str(error).lower() or "NOPERM" in str(error):
                _log.warning("eviction_policy_unknown", detail=str(error)[:200])
                return
            health.failed(error)
            await asyncio.sleep(0.5)
        else:
            health.answered()
            return


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `stop` comes first."""
    loop = asyncio.get_running_loop()
    working, stopping = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait({working, stopping})


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """The process's body."""
    config = settings.load(argv, environ)
    logs.configure(SCHEDULER, config.log_level)
    app = SchedulerApp(config)
    # What is there now stays: to look through it for garbage again and again would hold the loop.
    gc.collect()
    gc.freeze()
    return await app.run(stop)
