"""A simulated scheduler process: the shipped leadership around a core that is checked.

Modelled: only what is around it, the process that ends and is started anew by its world.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.adapters.redis_access import RedisHealth, RedisSide
from scheduler_svc.core import CoreConfig, Ready, SchedulerCore
from scheduler_svc.core.events import Event, RequestArrived, RequestCancelled, Tick
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.ready import CoreStats, CoreView, Explanation
from scheduler_svc.core.types import RequestId, WorkerId
from scheduler_svc.leadership import Leadership
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.sim.device import ViolationError
from scheduler_svc.sim.journal import Journal
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.network import Network
from scheduler_svc.sim.redis_clients import RedisClient
from scheduler_svc.sim.suspects import Suspects
from scheduler_svc.term import Surroundings

# A worker that does not exist: the insides of none are looked at.
NOBODY = WorkerId("")
# In so many checks there is one that looks at all workers, whatever the event.
WHOLE_EVERY = 16


class CheckedCore:
    """ports.Core: the shipped core, checked after each event and each Ready, and written down.

    Queues, states and counts of all requests each time; of the workers the insides of those that an
    event or a Ready is about. What it breaks elsewhere is found with that worker's own next event
    or plan, at the latest WHOLE_EVERY checks later. No worker lies, so no result may be refused.
    """

    def __init__(
        self,
        config: CoreConfig,
        loop: VirtualLoop,
        journal: Journal,
        name: str,
        suspects: Suspects,
    ) -> None:
        self._core = SchedulerCore(config)
        self._loop = loop
        self._journal = journal
        self._name = name
        self._suspects = suspects
        self._num_checks = 0

    @property
    def stats(self) -> CoreStats:
        """Of the core."""
        return self._core.stats

    def feed(self, event: Event) -> None:
        """Feeds and checks."""
        self._journal.event(self._name, event)
        self._suspects.event(event)
        worker_id = self._worker_of(event)
        self._core.feed(event)
        self._check([worker_id])

    def take_ready(self) -> Ready:
        """Takes and checks."""
        ready = self._core.take_ready()
        self._journal.ready(self._name, ready)
        if ready.plans or ready.finishes or ready.given_up:
            planned = list(dict.fromkeys(plan.worker_id for plan in ready.plans))
            self._check([None] if ready.given_up else planned or [NOBODY])
            self._check_suspects(ready)
        return ready

    def view(self) -> CoreView:
        """Of the core."""
        return self._core.view()

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Of the core."""
        return self._core.explain(request_id)

    def _check_suspects(self, ready: Ready) -> None:
        try:
            self._suspects.ready(ready)
        except ViolationError as broken:
            self._loop.fail(broken)
            raise

    def _worker_of(self, event: Event) -> WorkerId | None:
        """The one that an event names, or that has the request that it names; None for all."""
        if isinstance(event, RequestArrived | RequestCancelled):
            request = self._core._requests.get(event.request_id)
            return NOBODY if request is None else request.worker_id or NOBODY
        if isinstance(event, Tick):
            return NOBODY
        return getattr(event, "worker_id", None)

    def _check(self, worker_ids: Sequence[WorkerId | None]) -> None:
        self._num_checks += 1
        whole = self._num_checks % WHOLE_EVERY == 0
        try:
            for worker_id in (None,) if whole else worker_ids:
                check_all(self._core, worker_id)
            assert not self.stats.num_bad_results, "a result was refused"
        except AssertionError as error:
            broken = ViolationError("the core's invariants hold", f"{error}")
            self._loop.fail(broken)
            raise broken from error


class Observer:
    """ports.TermObserver: counts what the world asks about."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.num_stale_results = 0

    def round_done(self, ready: Ready, core_s: float) -> None:
        """Nothing to count."""

    def plan_sent(self, num_bytes: int) -> None:
        """Nothing to count."""

    def step_returned(self, seconds: float, idle_us: int) -> None:
        """Nothing to count."""

    def stale_result(self) -> None:
        """Dropped by the link."""
        self.num_stale_results += 1

    def digest_mismatch(self) -> None:
        """Nothing here changes bytes on their way."""
        self._loop.fail(ViolationError("plans are valid", "a digest differs"))

    def worker_lost(self) -> None:
        """Nothing to count."""


class SimScheduler:
    """One process's life. `on_exit` gets its exit code; `suspects` what is taken for poison."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        *,
        name: str,
        settings: SchedulerSettings,
        redis: RedisClient,
        journal: Journal,
        on_exit: Callable[[int], None],
        suspects: set[bytes],
    ) -> None:
        self.process = Process(loop, name)
        self.name = name
        self.observer = Observer(loop)
        self._loop = loop
        self._network = network
        self._settings = settings
        self._redis = redis
        self._journal = journal
        self._on_exit = on_exit
        self._suspects = suspects
        self._stop = asyncio.Event()
        self._leadership: Leadership | None = None

    def start(self) -> None:
        """Stands by, and leads when it can."""
        self.process.start(self._main())

    def stop(self) -> None:
        """Ends in order, as at SIGTERM."""
        self.process.run(self._stop.set)

    @property
    def epoch(self) -> int:
        """Of the term it believes to lead; 0 for a standby."""
        term = self._leadership.term if self._leadership else None
        return term.epoch if term else 0

    @property
    def view(self) -> CoreView | None:
        """Of the core of its term."""
        term = self._leadership.term if self._leadership else None
        return term.core.view() if term else None

    def _core(self, config: CoreConfig) -> CheckedCore:
        suspects = Suspects(self._suspects)
        return CheckedCore(config, self._loop, self._journal, self.name, suspects)

    async def _main(self) -> None:
        redis: Any = self._redis
        self._leadership = Leadership(
            self._settings,
            around=Surroundings(
                clock=self._loop,
                redis=RedisSide(commands=redis, listener=redis, health=RedisHealth(self._loop)),
                dial=self._network.dial(self.name),
            ),
            make_core=self._core,
            metrics=self.observer,
        )
        try:
            code = await self._leadership.run(self._stop)
        except Exception as error:
            self._loop.fail(error)
            return
        self._on_exit(code)
