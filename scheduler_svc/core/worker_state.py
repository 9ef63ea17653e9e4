"""One worker as the core sees it: slots, blocks, the rows last planned, the steps in flight.

Owns the difference between two plans: what changed since the last plan is collected here and given
out by `take_plan`. A freed slot may be used again in the same plan (releases come first on the
worker), with a higher generation.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler_svc.core import digest
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.ready import Admit, StepPlan, WorkerView
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_cost import StepCost
from scheduler_svc.core.types import BlockHash, BlockId, CostProfile, Slot, WorkerCapacity, WorkerId

_by_rank = attrgetter("rank")


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """A plan that has not returned, with its rows as columns of equal length."""

    step: int
    slots: list[Slot] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)


class WorkerState:
    """Mutable; owned by the scheduler."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        session: int,
        epoch: int,
        last_step: int,
        capacity: WorkerCapacity,
        cost: CostProfile,
        gateway_ids: frozenset[str],
    ) -> None:
        self.worker_id = worker_id
        self.session = session
        self.epoch = epoch
        self.capacity = capacity
        self.cost = StepCost(cost)
        self.gateway_ids = gateway_ids
        self.draining = False
        self.pool = BlockPool(capacity.num_blocks)
        self.running: dict[Slot, Request] = {}
        # The running requests, highest rank first.
        self.ranked: list[Request] = []
        # Known tokens of running requests that no plan covers yet, beyond one each.
        self.num_pending_prefill = 0
        # The longest request, prompt and output, that could run alone to its last token. That
        # token is never computed, so it needs no room.
        self.max_request_tokens = min(
            capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1
        )
        # Names of blocks that running requests are about to fill, and who fills them.
        self.coming: dict[BlockHash, Request] = {}
        self.in_flight: deque[StepInFlight] = deque()
        self.last_step = last_step
        self.last_result_step = last_step
        self.num_failed_in_a_row = 0
        self._free_slots = [Slot(i) for i in range(capacity.num_slots)]
        self._generations = [0] * capacity.num_slots
        self._rows: dict[Slot, int] = {}
        self._digest = 0
        self._reset = True
        self._releases: list[Slot] = []
        self._admits: list[Admit] = []
        self._growth: list[tuple[Slot, BlockId]] = []

    @property
    def num_free_slots(self) -> int:
        """Rows that an admission could take."""
        return len(self._free_slots)

    @property
    def must_tell(self) -> bool:
        """A plan is due even if it schedules nothing: slots are to be released, or all of them."""
        return self._reset or bool(self._releases)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens. The one size formula of the core."""
        return -(-num_tokens // self.capacity.block_size)

    def ever_fits(self, request: Request) -> bool:
        """Whether the request could run to its last token alone on this worker."""
        return request.max_total_tokens <= self.max_request_tokens

    def occupy(self, request: Request, blocks: list[BlockId]) -> int:
        """Gives the request the lowest free slot and its table; returns the slot's generation.

        What the request has computed must be set.
        """
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        request.slot = slot
        request.worker_id = self.worker_id
        request.blocks = blocks
        self.running[slot] = request
        insort(self.ranked, request, key=_by_rank)
        self.num_pending_prefill += max(0, request.num_wanted - 1)
        request.table_digest = 0
        self._count(request, 0)
        return self._generations[slot]

    def announce(self, admit: Admit) -> None:
        """Puts the admission into the next plan."""
        self._admits.append(admit)

    def grow(self, request: Request, block: BlockId) -> None:
        """Appends a block to the table of a running request."""
        request.blocks.append(block)
        self._growth.append((request.slot, block))
        self._count(request, len(request.blocks) - 1)

    def vacate(self, request: Request) -> None:
        """Frees slot and blocks at once; the next plan releases the slot on the worker."""
        slot = request.slot
        assert self.running.get(slot) is request, f"slot {slot} is not held by this request"
        del self.running[slot]
        del self.ranked[bisect_left(self.ranked, request.rank, key=_by_rank)]
        self.num_pending_prefill -= max(0, request.num_wanted - 1)
        self._digest = digest.add(self._digest, -request.table_digest)
        self.pool.release(request.blocks)
        heapq.heappush(self._free_slots, slot)
        self._rows.pop(slot, None)
        self._releases.append(slot)
        self._growth = [(s, b) for s, b in self._growth if s != slot]
        if self.coming:
            for name in request.block_hashes[request.num_published :]:
                if self.coming.get(name) is request:
                    del self.coming[name]

    def generation(self, slot: Slot) -> int:
        """Use count of a slot."""
        return self._generations[slot]

    def start_over(self) -> None:
        """The next plan carries `reset`; nothing may be running. Step numbers go on."""
        assert not self.running, "requests must leave before a reset"
        self._reset = True
        self._rows.clear()
        self._releases.clear()
        self._admits.clear()
        self._growth.clear()
        self._digest = 0
        self.in_flight.clear()

    def take_plan(self, scheduled: dict[Slot, int], num_chunks: int) -> StepPlan:
        """The next plan: `scheduled` rows and all that changed since the last one."""
        self.last_step += 1
        changed = [(s, n) for s, n in scheduled.items() if self._rows.get(s) != n]
        changed += [(s, 0) for s in self._rows if s not in scheduled]
        self.in_flight.append(self._plan_rows(scheduled))
        plan = StepPlan(
            worker_id=self.worker_id,
            epoch=self.epoch,
            step=self.last_step,
            based_on_step=self.last_result_step,
            reset=self._reset,
            releases=() if self._reset else tuple(self._releases),
            admits=tuple(self._admits),
            changed=tuple(changed),
            growth=tuple(self._growth),
            digest=self._digest,
            num_scheduled_tokens=sum(scheduled.values()),
            num_rows=len(scheduled),
            num_chunks=num_chunks,
        )
        self._rows = scheduled
        self._reset = False
        self._releases = []
        self._admits = []
        self._growth = []
        return plan

    def _plan_rows(self, scheduled: dict[Slot, int]) -> StepInFlight:
        """Moves the requests on by their rows."""
        slots = list(scheduled)
        requests = [self.running[slot] for slot in slots]
        samples = []
        for request, count in zip(requests, scheduled.values(), strict=True):
            left = request.num_tokens - request.num_computed_tokens
            request.num_computed_tokens += count
            request.num_in_flight += 1
            if left == count:
                request.num_tokens += 1
            if left > 1:
                self.num_pending_prefill -= count if left > count else count - 1
            samples.append(left == count)
        return StepInFlight(
            step=self.last_step,
            slots=slots,
            requests=requests,
            num_tokens=list(scheduled.values()),
            samples=samples,
        )

    def _count(self, request: Request, first_index: int) -> None:
        """Adds table entries from first_index on to the digest."""
        slot, blocks = request.slot, request.blocks[first_index:]
        amount = digest.table_sum(slot, self._generations[slot], first_index, blocks)
        request.table_digest = digest.add(request.table_digest, amount)
        self._digest = digest.add(self._digest, amount)

    def view(self) -> WorkerView:
        """For Snapshot and metrics."""
        return WorkerView(
            worker_id=self.worker_id,
            num_running=len(self.running),
            num_blocks_used=self.pool.num_used,
            num_blocks=self.pool.num_blocks,
            num_steps_in_flight=len(self.in_flight),
            last_step=self.last_step,
            draining=self.draining,
        )
