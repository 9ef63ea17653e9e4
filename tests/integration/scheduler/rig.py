"""One link to a worker under a real core, for tests of sessions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.refusals import Refusals
from scheduler_svc.adapters.worker_link import WorkerLink
from scheduler_svc.core import SchedulerCore
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import (
    BecameLeader,
    Event,
    RequestArrived,
)
from scheduler_svc.core.ready import Finish
from scheduler_svc.core.types import WorkerId
from scheduler_svc.ports import WorkerRecord
from tests.builders import make_request
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import eventually

EPOCH = 5
CLOCK = MonotonicClock()


class CountingObserver:
    """A LinkObserver that counts."""

    def __init__(self) -> None:
        self.plan_bytes: list[int] = []
        self.num_results = self.num_stale = self.num_mismatches = self.num_lost = 0

    def plan_sent(self, num_bytes: int) -> None:
        self.plan_bytes.append(num_bytes)

    def step_returned(self, seconds: float, idle_us: int) -> None:
        self.num_results += 1

    def stale_result(self) -> None:
        self.num_stale += 1

    def digest_mismatch(self) -> None:
        self.num_mismatches += 1

    def worker_lost(self) -> None:
        self.num_lost += 1


class Rig:
    """One link under a real core: each event is fed at once, each plan sent at once."""

    def __init__(
        self,
        worker: FakeWorkerServer,
        *,
        epoch: int = EPOCH,
        grace_s: float = 30.0,
        depth: int = 2,
    ) -> None:
        self.events: list[Event] = []
        self.finishes: list[Finish] = []
        self.observer = CountingObserver()
        self.digests: list[str] = []
        self.core = SchedulerCore(CoreConfig(max_inflight_steps=depth))
        self.core.feed(BecameLeader(now_ns=CLOCK.now_ns(), epoch=epoch))
        self.link = WorkerLink(
            self.record(worker),
            refusals=Refusals(epoch, CLOCK.now_ns()),
            grace_ns=round(grace_s * 1e9),
            clock=CLOCK,
            sink=self,
            observer=self.observer,
            check_digest=lambda _, digest: self.digests.append(digest),
        )

    @staticmethod
    def record(worker: FakeWorkerServer) -> WorkerRecord:
        return WorkerRecord(
            worker_id=WorkerId(worker.worker_id),
            incarnation=worker.incarnation,
            address=worker.address,
            model_digest="d" * 64,
        )

    async def put(self, event: Event) -> None:
        """EventSink."""
        self.events.append(event)
        asyncio.get_running_loop().call_soon(self.feed, event)

    def feed(self, event: Event) -> None:
        """What the driver does."""
        self.core.feed(event)
        ready = self.core.take_ready()
        for plan in ready.plans:
            self.link.send(plan)
        self.finishes += ready.finishes
        for given_up in ready.given_up:
            self.link.give_up(given_up.reason)

    def of(self, kind: type[Any]) -> list[Any]:
        """Events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    async def saw(self, kind: type[Any], count: int = 1, timeout_s: float = 20.0) -> None:
        """Waits for the count-th event of a kind."""
        await eventually(lambda: len(self.of(kind)) >= count, timeout_s)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        """The link's task and the loss rules' clock."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.link.run()), loop.create_task(self._check())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.link.check(CLOCK.now_ns())


def request(name: str = "a", **fields: Any) -> RequestArrived:
    """A request of the fake's gateway, with an id as long as the wire wants it."""
    return make_request(name.ljust(16, "."), gateway_id="g1", now_ns=CLOCK.now_ns(), **fields)
