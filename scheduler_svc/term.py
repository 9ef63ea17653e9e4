"""One term as leader: everything that lives and dies with one epoch.

Builds the core, its driver and the adapters for an epoch, and runs them until the process is told
to stop or the term is over. A part that raises ends all the others.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.adapters.backlog_redis import BacklogPublisher
from scheduler_svc.adapters.cancels import CancelsOnce
from scheduler_svc.adapters.gateway_watch import GatewayWatch
from scheduler_svc.adapters.inbox_redis import RequestInbox
from scheduler_svc.adapters.lease import LeaderLease
from scheduler_svc.adapters.outbox_redis import CompletionOutbox
from scheduler_svc.adapters.redis_access import FencedRedis, RedisSide
from scheduler_svc.adapters.refusals import Credit
from scheduler_svc.adapters.worker_link import Dial
from scheduler_svc.adapters.worker_links import WorkerLinks
from scheduler_svc.driver import Driver, EventQueue
from scheduler_svc.ports import Clock, Core, RoundRecorder, TermObserver
from scheduler_svc.settings import SchedulerSettings
from servicekit import grpc_server
from servicekit.logs import get_logger

MAX_WAITING = 4096
LOOK_PERIOD_NS = 100_000_000
_log = get_logger("scheduler.term")


class _Room:
    """Whether the core may be given more requests: fewer than MAX_WAITING wait.

    The core is asked every LOOK_PERIOD_NS; in between, what has been read since counts as waiting.
    """

    def __init__(self, core: Core, clock: Clock, outbox: CompletionOutbox) -> None:
        self._core = core
        self._clock = clock
        self._outbox = outbox
        self._looked_ns = 0
        self._base = 0

    def has_room(self) -> bool:
        """Called before each read."""
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns >= LOOK_PERIOD_NS:
            self._looked_ns = now_ns
            self._base = self._core.view().num_waiting - self._outbox.num_held
        return self._base + self._outbox.num_held < MAX_WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is around a process: its clock, its Redis, and how it dials and believes workers."""

    clock: Clock
    redis: RedisSide
    dial: Dial = grpc_server.channel
    credit: Credit = field(default_factory=Credit)


class Term:
    """A leadership from its epoch to its end."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        epoch: int,
        core: Core,
        around: Surroundings,
        lease: LeaderLease,
        metrics: TermObserver,
        recorder: RoundRecorder | None = None,
    ) -> None:
        clock, redis = around.clock, around.redis
        model = settings.model_name
        self.core = core
        self.epoch = epoch
        self._settings = settings
        self._lease = lease
        self._redis = redis
        self.queue = EventQueue()
        sink = CancelsOnce(self.queue)
        access = FencedRedis(redis.commands, model=model, epoch=epoch, health=redis.health)
        self.outbox = CompletionOutbox(access)
        self.links = WorkerLinks(
            access,
            grace_s=settings.worker_grace_s,
            clock=clock,
            sink=sink,
            observer=metrics,
            credit=around.credit,
            dial=around.dial,
        )
        self._gateways = GatewayWatch(
            redis.commands,
            model=model,
            clock=clock,
            sink=self.queue,
            subscribed=self.links.subscribed_gateways,
            health=redis.health,
        )
        self._inbox = RequestInbox(
            access,
            clock=clock,
            sink=sink,
            outbox=self.outbox,
            has_room=_Room(core, clock, self.outbox).has_room,
            saw_gateway=self._gateways.saw_request,
        )
        self.backlog = BacklogPublisher(access, clock=clock, core=core)
        self._driver = Driver(
            core,
            clock=clock,
            plans=self.links,
            completions=self.outbox,
            observer=metrics,
            queue=self.queue,
            recorder=recorder,
        )

    @property
    def ready(self) -> bool:
        """The group exists and the pending list has been read."""
        return self._inbox.recovered.is_set()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Leads until `stop`, then writes what has ended. Raises, in a group, what ends the term:
        DeposedError, EpochTooLowError, or a bug."""
        async with asyncio.TaskGroup() as group:
            reading = [
                group.create_task(self._inbox.run()),
                group.create_task(self._inbox.listen(self._redis.listener)),
            ]
            tasks = [
                group.create_task(self._driver.run(self.epoch)),
                group.create_task(self._lease.keep(self.epoch)),
                group.create_task(self.outbox.run()),
                group.create_task(self.links.run()),
                group.create_task(self._gateways.run()),
                group.create_task(self.backlog.run()),
                group.create_task(self._announce(on_ready)),
            ]
            await stop.wait()
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
            _log.info("draining", finishes=self.outbox.num_pending)
            await self.outbox.flush(min(self._settings.drain_s, 3.0))
            for task in tasks:
                task.cancel()

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._inbox.recovered.wait()
        on_ready()
