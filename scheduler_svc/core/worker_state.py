"""One worker as the core sees it: slots, blocks, the rows last planned, the steps in flight.

Owns the difference between two plans: what changed since the last plan is collected here and given
out by `take_plan`. A freed slot may be used again in the same plan (releases come first on the
worker), with a higher generation.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core import digest
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.ready import Admit, StepPlan, WorkerView
from scheduler_svc.core.request import Request
from scheduler_svc.core.types import BlockId, CostProfile, Slot, WorkerCapacity, WorkerId


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A request's part of a step in flight. `attempt` tells whether its tokens are still wanted."""

    request: Request
    attempt: int
    generation: int
    num_tokens: int
    samples: bool


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """A plan that has not returned, with its rows by slot."""

    step: int
    rows: dict[Slot, PlannedRow] = field(default_factory=dict)


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
        self.cost = cost
        self.gateway_ids = gateway_ids
        self.draining = False
        self.pool = BlockPool(capacity.num_blocks)
        self.running: dict[Slot, Request] = {}
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
    def num_pending_prefill(self) -> int:
        """Known tokens of running requests that no plan covers yet, beyond one each."""
        return sum(max(0, request.num_wanted - 1) for request in self.running.values())

    @property
    def must_tell(self) -> bool:
        """A plan is due even if it schedules nothing: slots are to be released, or all of them."""
        return self._reset or bool(self._releases)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens. The one size formula of the core."""
        return -(-num_tokens // self.capacity.block_size)

    def ever_fits(self, request: Request) -> bool:
        """Whether the request could run to its last token alone on this worker.

        The last output token is never computed, so it needs no room.
        """
        return (
            request.max_total_tokens <= self.capacity.max_model_len
            and self.blocks_for(request.max_total_tokens - 1) <= self.pool.num_blocks
        )

    def occupy(self, request: Request, blocks: list[BlockId]) -> int:
        """Gives the request the lowest free slot and its table; returns the slot's generation."""
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        request.slot = slot
        request.worker_id = self.worker_id
        request.blocks = blocks
        self.running[slot] = request
        self._count(request, 0, 1)
        return self._generations[slot]

    def announce(self, admit: Admit) -> None:
        """Puts the admission into the next plan."""
        self._admits.append(admit)

    def grow(self, request: Request, block: BlockId) -> None:
        """Appends a block to the table of a running request."""
        request.blocks.append(block)
        self._growth.append((request.slot, block))
        self._count(request, len(request.blocks) - 1, 1)

    def vacate(self, request: Request) -> None:
        """Frees slot and blocks at once; the next plan releases the slot on the worker."""
        slot = request.slot
        assert self.running.get(slot) is request, f"slot {slot} is not held by this request"
        del self.running[slot]
        self._count(request, 0, -1)
        self.pool.release(request.blocks)
        heapq.heappush(self._free_slots, slot)
        self._rows.pop(slot, None)
        self._releases.append(slot)
        self._growth = [(s, b) for s, b in self._growth if s != slot]

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
        flight = StepInFlight(step=self.last_step)
        for slot, num_tokens in scheduled.items():
            request = self.running[slot]
            flight.rows[slot] = PlannedRow(
                request,
                request.attempt,
                self._generations[slot],
                num_tokens,
                self._plan_tokens(request, num_tokens),
            )
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
        self.in_flight.append(flight)
        return plan

    @staticmethod
    def _plan_tokens(request: Request, num_tokens: int) -> bool:
        """Moves the request on by a planned row; True if the row will sample a token."""
        request.num_computed_tokens += num_tokens
        request.num_in_flight += 1
        samples = request.num_computed_tokens == request.num_tokens
        if samples:
            request.num_tokens += 1
        return samples

    def _count(self, request: Request, first_index: int, sign: int) -> None:
        amount = digest.table_sum(
            request.slot,
            self._generations[request.slot],
            first_index,
            request.blocks[first_index:],
        )
        self._digest = digest.add(self._digest, sign * amount)

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
