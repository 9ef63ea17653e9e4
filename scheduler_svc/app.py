"""Composition root of the scheduler: servers, Redis, and its part in leading."""

import asyncio
import gc
from collections.abc import Callable

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

from scheduler_svc import admin_codec, settings
from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.redis_access import RedisHealth, RedisSide
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.grpc_service import SERVICE_NAME, SchedulerServicer
from scheduler_svc.leadership import Leadership
from scheduler_svc.metrics import Sample, SchedulerMetrics
from scheduler_svc.ports import Clock, Core
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.term import Surroundings, Term
from servicekit import grpc_server, logs, ops, redis_client
from servicekit.catalogue import SCHEDULER
from servicekit.metrics import new_registry

EXIT_FAILED = 3
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
        self._clock = clock or MonotonicClock()
        self._make_core = make_core
        self._leadership: Leadership | None = None
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
        self._leadership = Leadership(
            self._config,
            around=Surroundings(clock=self._clock, redis=redis),
            make_core=self._make_core,
            metrics=self._metrics,
        )
        try:
            return await self._leadership.run(stop)
        finally:
            await redis.commands.aclose()
            await redis.listener.aclose()

    # What others may look at

    @property
    def _term(self) -> Term | None:
        return self._leadership.term if self._leadership else None

    def is_leading(self) -> bool:
        """It leads and has read all that waits."""
        return self._term is not None and self._term.ready

    def is_ready(self) -> bool:
        """It leads, or would take over at once: a standby that Redis does not answer would not."""
        return self.is_leading() or (self._leadership is not None and self._leadership.standing_by)

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


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """The process's body."""
    config = settings.load(argv, environ)
    logs.configure(SCHEDULER, config.log_level)
    app = SchedulerApp(config)
    # What is there now stays: to look through it for garbage again and again would hold the loop.
    gc.collect()
    gc.freeze()
    return await app.run(stop)
