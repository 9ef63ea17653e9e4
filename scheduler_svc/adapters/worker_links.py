"""All workers: who is in the registry, one link each, the loss rules' clock.

The registry only adds. A worker that is no longer in it keeps its link while it has a life.
"""

import asyncio
from collections.abc import Mapping

from scheduler_svc import codec
from scheduler_svc.adapters import refusals
from scheduler_svc.adapters.redis_access import FAILURES, FencedRedis
from scheduler_svc.adapters.worker_link import Dial, WorkerLink
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import WorkerId
from scheduler_svc.ports import Clock, EventSink, LinkObserver, WorkerRecord
from servicekit import grpc_server, redis_client
from servicekit.logs import get_logger

REGISTRY_PERIOD_S = 0.5
CHECK_PERIOD_S = 0.05
MAX_WORKERS = 4096
_log = get_logger("scheduler.workers")


class WorkerLinks:
    """Implements ports.PlanSink."""

    def __init__(
        self,
        access: FencedRedis,
        *,
        grace_s: float,
        clock: Clock,
        sink: EventSink,
        observer: LinkObserver,
        credit: refusals.Credit,
        dial: Dial = grpc_server.channel,
    ) -> None:
        self._redis = access.redis
        self._model = access.model
        self._epoch = access.epoch
        self._grace_ns = round(grace_s * 1e9)
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._sink = sink
        self._observer = observer
        self._health = access.health
        self._credit = credit
        self._dial = dial
        self._links: dict[WorkerId, WorkerLink] = {}
        self._digest = ""
        self._bad_records: set[str] = set()

    def send(self, plan: StepPlan) -> None:
        """Hands a plan to its worker's session."""
        link = self._links.get(plan.worker_id)
        if link is not None:
            link.send(plan)

    def give_up(self, worker_id: WorkerId, reason: str) -> None:
        """Closes the session; the worker is dialled again after a pause."""
        link = self._links.get(worker_id)
        if link is not None:
            link.give_up(reason)

    def addresses(self) -> Mapping[WorkerId, str]:
        """Where the workers are."""
        return {worker_id: link.address for worker_id, link in self._links.items()}

    def subscribed_gateways(self) -> frozenset[str]:
        """Gateways that read tokens of some worker."""
        return frozenset().union(*(link.gateway_ids for link in self._links.values()))

    async def run(self) -> None:
        """Serves all workers until cancelled. Raises EpochTooLowError in a group."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check())
            while True:
                await self._read_registry(group)
                await asyncio.sleep(REGISTRY_PERIOD_S)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            now_ns = self._clock.now_ns()
            for link in self._links.values():
                link.check(now_ns)
            claimed = [link.claimed_epoch for link in self._links.values()]
            refusals.check(claimed, self._credit, now_ns)

    async def _read_registry(self, group: asyncio.TaskGroup) -> None:
        try:
            found = await redis_client.members(self._redis, self._model, "worker")
        except FAILURES as error:
            self._health.failed(error)
            return
        self._health.answered()
        records = [r for r in (self._decode(k, v) for k, v in found.items()) if r is not None]
        for record in records:
            if record.worker_id in self._links:
                self._links[record.worker_id].announced(record)
            elif len(self._links) < MAX_WORKERS:
                self._add(record, group)
        for worker_id in sorted(self._links.keys() - {record.worker_id for record in records}):
            self._links[worker_id].announced(None)

    def _decode(self, member_id: str, raw: bytes) -> WorkerRecord | None:
        try:
            return codec.decode_worker_record(raw)
        except codec.MalformedError as error:
            if member_id not in self._bad_records and len(self._bad_records) < MAX_WORKERS:
                self._bad_records.add(member_id)
                _log.error("bad_worker_record", member=member_id, problem=str(error))
            return None

    def _add(self, record: WorkerRecord, group: asyncio.TaskGroup) -> None:
        link = WorkerLink(
            record,
            refusals=refusals.Refusals(self._epoch, self._began_ns),
            grace_ns=self._grace_ns,
            clock=self._clock,
            sink=self._sink,
            observer=self._observer,
            check_digest=self._check_digest,
            dial=self._dial,
        )
        self._links[record.worker_id] = link
        group.create_task(self._run(link))

    async def _run(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            del self._links[link.worker_id]

    def _check_digest(self, worker_id: WorkerId, digest: str) -> None:
        self._digest = self._digest or digest
        if digest != self._digest:
            _log.error(
                "model_digests_differ", worker=worker_id, digest=digest, first_seen=self._digest
            )
