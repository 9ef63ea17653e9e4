"""What of the other workers counts while one is given requests for its next step.

A request that waits for the next step of another worker is promised to it: what it will cost there
stands before those behind it. Else all that wait would go to the one worker that has least to do,
each only in a step of that one, while the others stand idle.

With many workers such a request is looked at in the plan of each of them before its turn comes, and
mostly the answer is that of the last look. That is certain if nothing of it is cached here, if what
stands before it there is less than here, and if there is room for all of it there: what may be
cached there can only make it cheaper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from scheduler_svc.core import planner, policy
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.types import WorkerId
from scheduler_svc.core.worker_state import WorkerState


@dataclass(slots=True, kw_only=True)
class _Other:
    """Another worker that takes requests: what stands before a new one, and blocks for it."""

    worker: WorkerState
    standing: int
    num_spare: int


class Elsewhere:
    """For one worker's admissions into one step, in which nothing changes of the others."""

    def __init__(
        self,
        worker: WorkerState,
        workers: Mapping[WorkerId, WorkerState],
        config: CoreConfig,
        sharing: PrefixSharing,
    ) -> None:
        self._worker = worker
        self._workers = workers
        self._config = config
        self._sharing = sharing
        self._others: dict[WorkerId, _Other | None] = {}
        self._standing = planner.load(worker)
        # By worker, what those looked at before will cost there.
        self.promised: dict[WorkerId, int] = {}
        # What stands before a new one as last seen, the place among workers, what stands there
        # without what has been promised, and the worker.
        self._by_standing: list[tuple[int, int, int, WorkerState]] | None = None

    def admitted(self) -> None:
        """The worker has one request more."""
        self._standing = planner.load(self._worker)

    def promise(self, request: Request) -> None:
        """The request waits for a step of the worker that is cheapest."""
        assert request.cheapest_at is not None
        name, num_uncached = request.cheapest_at, request.num_uncached_there
        cost = policy.placement_cost(num_uncached, num_pending=0, num_running=1)
        self.promised[name] = self.promised.get(name, 0) + cost

    def emptiest(self) -> WorkerState | None:
        """Of the others with room, the first that has least to do.

        So that not each of many that wait is matched with all workers, in the plan of each.
        """
        if self._by_standing is None:
            self._by_standing = [
                ((standing := planner.load(other)), place, standing, other)
                for place, other in enumerate(self._workers.values())
                if other is not self._worker
                and not other.draining
                and planner.has_room(other, self._config)
            ]
            heapify(self._by_standing)
        heap = self._by_standing
        while heap:
            seen, place, standing, other = heap[0]
            now = standing + self.promised.get(other.worker_id, 0)
            if now == seen:
                return other
            heapreplace(heap, (now, place, standing, other))
        return None

    def keeps(self, request: Request) -> bool:
        """Whether the request certainly goes to where it would have gone at the last look.

        If not, that has to be found out. It is no sample of a group, nor held back here.
        """
        name = request.cheapest_at
        if name is None:
            return False
        if name not in self._others:
            self._others[name] = self._other(name)
        other = self._others[name]
        if other is None or other.standing + self.promised.get(name, 0) >= self._standing:
            return False
        there = other.worker
        return (
            self._sharing.is_cold(request, self._worker)
            and there.blocks_for(len(request.token_ids)) <= other.num_spare
            and request.max_total_tokens <= there.max_request_tokens
            and request.gateway_id in there.gateway_ids
        )

    def _other(self, name: WorkerId) -> _Other | None:
        """None if it is not certain that it takes what comes next."""
        other = self._workers.get(name)
        if (
            other is None
            or other is self._worker
            or other.draining
            or other.swap.swapped
            or other.on_trial is not None
            or not planner.has_room(other, self._config)
        ):
            return None
        num_spare = other.pool.num_free - other.watermark
        return _Other(worker=other, standing=planner.load(other), num_spare=num_spare)
