"""One worker as the core sees it: slots, blocks, the rows last planned, the steps in flight.

Owns the difference between two plans: what changed since the last plan is collected here and given
out by `take_plan`. A freed slot may be used again in the same plan (releases come first on the
worker), with a higher generation.
"""

import heapq
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from scheduler_svc.core import digest, plan_size
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.depth import Depth
from scheduler_svc.core.flight import DECODE, Batch, Special, StepInFlight
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import Admit, Operation, Preemption, StepPlan, WorkerView
from scheduler_svc.core.request import Rank, Request
from scheduler_svc.core.rows import Column, Rows, column
from scheduler_svc.core.step_cost import StepCost
from scheduler_svc.core.swap import SwapSpace
from scheduler_svc.core.types import (
    BlockHash,
    BlockId,
    CostProfile,
    OperationKind,
    PreemptionMode,
    Slot,
    WorkerCapacity,
    WorkerId,
)

_NOBODY = column(())


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
        config: CoreConfig,
    ) -> None:
        self.worker_id = worker_id
        self.session, self.epoch = session, epoch
        self.capacity, self.cost = capacity, StepCost(cost)
        self.depth = Depth(config.max_inflight_steps)
        self.gateway_ids = gateway_ids
        self.draining = False
        self.on_trial: Request | None = None  # the suspect admitted last; it may have gone
        self.pool = BlockPool(capacity.num_blocks)
        # Blocks that an admission must leave free. An idle worker needs none, so that a request
        # which can run alone always gets to run.
        self.watermark, self._busy_watermark = 0, int(config.watermark * capacity.num_blocks)
        self.swap = SwapSpace(capacity.num_host_blocks, self.pool)
        # How the last preemption here went, of those that had the choice.
        self.last_preemption: PreemptionMode | None = None
        # Those of the next plan, for its trace.
        self.preemptions: list[Preemption] = []
        self.running: dict[int, Request] = {}
        # Those of them that have other samples, by group, in the order of their admission.
        self.samples: dict[bytes, list[Request]] = {}
        # The running requests, highest rank first; their ranks and their slots.
        self.ranked: list[Request] = []
        self._ranks: list[Rank] = []
        self._ranked_slots = array("q")
        # Known tokens of running requests that no plan covers yet, beyond one each.
        self.num_pending_prefill = 0
        # The longest request, prompt and output, that could run alone to its last token. That
        # token is never computed, so it needs no room.
        self.max_request_tokens = min(
            capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1
        )
        # Names of blocks that running requests are about to fill, and who fills them.
        self.coming: dict[BlockHash, Request] = {}
        # Blocks of known tokens that have been filled so far: what others may share, more or less.
        self.num_prompt_blocks = 0
        self.in_flight, self.num_tokens_in_flight = deque[StepInFlight](), 0
        self.last_step = self.last_result_step = last_step
        self.num_failed_in_a_row = 0
        self._free_slots = [Slot(i) for i in range(capacity.num_slots)]
        self.rows = Rows(capacity.num_slots)
        self._order: Column | None = None
        # Of no running request fewer samples are left to plan; 0 if that is not known.
        self.num_open = 0
        # Running requests for which no plan since their admission samples a token.
        self._num_unsampled = 0
        # The rows of the plan before, and its decodes if it had nothing else.
        self._batch = Batch(_NOBODY, self.rows.planned.copy(), self.rows)
        self._last_decodes: Column | None = None
        # Reduced mod 2^64 as a plan is taken.
        self._digest = 0
        self._reset = True
        self._releases: list[Slot] = []
        self._admits: list[Admit] = []
        # What those take of the next plan; see plan_size.
        self.num_admit_bytes = 0
        self._growth: list[tuple[Slot, BlockId]] = []
        self._operations: list[Operation] = []
        # Above those of an earlier session in this epoch: a plan has fewer than 2^20 operations.
        self._last_op_id = last_step << 20

    @property
    def num_free_slots(self) -> int:
        """Rows that an admission could take."""
        return len(self._free_slots)

    @property
    def num_seats(self) -> int:
        """Requests that hold a slot or will take one as soon as their blocks are there."""
        return len(self.running) + self.swap.num_coming_back

    @property
    def must_tell(self) -> bool:
        """A plan is due even if it schedules nothing: for releases, a reset or operations.

        Also when operations are not done and no result is to come that could say they are.
        """
        asks = bool(self.swap.transfers) and not self.in_flight
        return self._reset or bool(self._releases) or bool(self._operations) or asks

    @property
    def holds_or_tells(self) -> bool:
        """A plan may be due though nothing runs here and nothing waits."""
        return bool(self.swap.swapped) or self.must_tell

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens. The one size formula of the core."""
        return -(-num_tokens // self.capacity.block_size)

    def occupy(self, request: Request, blocks: list[BlockId], num_cached: int) -> int:
        """Gives the request the lowest free slot and its table; returns the slot's generation.

        The blocks are its own or shared by it. A shared one that it would write into is replaced in
        `blocks`.
        """
        slot, rows, size = heapq.heappop(self._free_slots), self.rows, self.capacity.block_size
        num_tokens, limit = len(request.token_ids), request.max_total_tokens
        first = num_cached // size
        # Without cached tokens all blocks are new.
        if num_cached and first < len(blocks) and self.pool.is_shared(blocks[first]):
            self._copy_on_write(blocks, first)
        generation = rows.begin(
            slot,
            num_tokens=num_tokens,
            num_cached=num_cached,
            limit=limit,
            room=len(blocks) * size,
        )
        rows.requests[slot], rows.token_ids[slot] = request, request.token_ids
        request.slot = slot
        request.worker_id = self.worker_id
        request.blocks = blocks
        self.running[slot] = request
        self.watermark = self._busy_watermark
        if request.sample_group:
            self.samples.setdefault(request.sample_group, []).append(request)
        ranks, rank = self._ranks, request.rank
        # Mostly the last one, without a search.
        place = len(ranks) if not ranks or ranks[-1] < rank else bisect_left(ranks, rank)
        ranks.insert(place, rank)
        self.ranked.insert(place, request)
        self._ranked_slots.insert(place, slot)
        self._order = None
        # It is not at its limit, and at least its last token is not computed.
        self.num_open = min(self.num_open, limit - num_tokens)
        self.num_pending_prefill += num_tokens - num_cached - 1
        self._num_unsampled += 1
        rows.key[slot] = key = digest.row_key(slot, generation)
        rows.digest[slot] = amount = digest.row_sum(key, 0, blocks)
        self._digest += amount
        return generation

    def _copy_on_write(self, blocks: list[BlockId], index: int) -> None:
        """Makes the block into which a table's owner writes first its own: a copy of it.

        The one place where a shared block could come to be written: each table passes here as it
        enters a slot, and after that it grows by fresh blocks only, while num_computed rises. What
        others come to share of it later are blocks below what steps that have returned computed,
        full ones by the prefix cache; by a fork also the one that is partly full, but the fork's
        own table passes here at once, in the same plan, and leaves that block to its first owner.
        """
        shared, fresh = blocks[index], self.pool.allocate(1)
        assert fresh is not None, "no block was left for a copy"
        self.operate(OperationKind.COPY, [shared], fresh)
        self.pool.release([shared])
        blocks[index] = fresh[0]

    def announce(self, admit: Admit) -> None:
        """Puts the admission into the next plan."""
        self._admits.append(admit)
        self.num_admit_bytes += plan_size.of_admit(admit)

    def operate(self, kind: OperationKind, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Puts copies of blocks into the next plan, after those that stand there; returns the id.

        The worker does them in this order, before it computes the plan's rows.
        """
        self._last_op_id += 1
        self._operations.append(
            Operation(
                op_id=self._last_op_id, kind=kind, sources=tuple(sources), targets=tuple(targets)
            )
        )
        return self._last_op_id

    def grow(self, slots: Column, blocks: list[BlockId]) -> None:
        """Appends a block to the table of each of these slots."""
        rows, size, running = self.rows, self.capacity.block_size, self.running
        room, keys = rows.room[slots], rows.key[slots]
        if len(blocks) <= digest.FEW:
            indexes = [num_tokens // size for num_tokens in room.tolist()]
            mixed = digest.mix_few(keys.tolist(), indexes, blocks)
            amounts = np.array(mixed, np.uint64)
        else:
            columns = (room // size).astype(np.uint64), np.array(blocks, np.uint64)
            amounts = digest.mix_columns(keys, *columns)
            mixed = amounts.tolist()
        rows.room[slots] = room + size
        rows.digest[slots] += amounts
        self._digest += sum(mixed)
        grown: list[Slot] = slots.tolist()  # type: ignore[assignment]  # a NewType
        for slot, block in zip(grown, blocks, strict=True):
            running[slot].blocks.append(block)
            self._growth.append((slot, block))

    def vacate(self, request: Request) -> None:
        """Frees slot and blocks at once; the next plan releases the slot on the worker.

        The request's num_in_flight says in how many unreturned steps it has a row.
        """
        slot, rows = request.slot, self.rows
        assert self.running.get(slot) is request, f"slot {slot} is not held by this request"
        del self.running[slot]
        if not self.running:
            self.watermark = 0
        if request.sample_group:
            self.samples[request.sample_group].remove(request)
            if not self.samples[request.sample_group]:
                del self.samples[request.sample_group]
        place = bisect_left(self._ranks, request.rank)
        del self._ranks[place], self.ranked[place], self._ranked_slots[place]
        self._order = None
        # Mostly of none.
        if self.num_pending_prefill:
            self.num_pending_prefill -= max(0, rows.num_wanted(slot) - 1)
        if self._num_unsampled:
            self._num_unsampled -= rows.is_unsampled(slot)
        self._digest -= rows.digest.item(slot)
        self.pool.release(request.blocks)
        heapq.heappush(self._free_slots, slot)
        rows.num_planned -= rows.planned.item(slot) > 0
        rows.planned[slot] = 0
        self._releases.append(slot)
        if self._growth:
            self._growth = [(s, b) for s, b in self._growth if s != slot]
        if self.coming:
            for name in request.block_hashes[request.num_published :]:
                if self.coming.get(name) is request:
                    del self.coming[name]
        request.num_in_flight = 0
        for flight in self.in_flight:
            request.num_in_flight += flight.leave(slot, request)

    def take_off(self, request: Request) -> None:
        """Frees all that a request holds here, in a slot or in host memory."""
        if request.state is RequestState.RUNNING:
            self.vacate(request)
        else:
            self.swap.forget(request)

    def start_over(self) -> None:
        """The next plan carries `reset`; nothing may be running. Step numbers go on."""
        assert not self.running, "requests must leave before a reset"
        self._reset = True
        self.rows.planned[:] = 0
        self.rows.num_planned = 0
        self._batch = Batch(_NOBODY, self.rows.planned.copy(), self.rows)
        self._releases.clear()
        self._admits.clear()
        self.num_admit_bytes = 0
        self._growth.clear()
        self._operations.clear()
        self._digest = 0
        self.in_flight.clear()
        self.num_tokens_in_flight = 0

    # Planning

    @property
    def order(self) -> Column:
        """Slots by the rank of their requests."""
        if self._order is None:
            self._order = np.array(self._ranked_slots, np.int64)
        return self._order

    def to_plan(self) -> tuple[Column, list[Request]]:
        """By rank: slots with one token left to plan, and requests with more."""
        rows, order = self.rows, self.order
        if not self.running or (self.num_open > 0 and self.num_pending_prefill == 0):
            return order, []
        num_tokens = rows.num_tokens[order]
        num_left = rows.limit[order] - num_tokens
        self.num_open = int(np.minimum.reduce(num_left))
        if self.num_open > 0 and self.num_pending_prefill == 0:
            return order, []
        is_open = num_left > 0
        is_decode = num_tokens - rows.num_computed[order] == 1
        is_decode &= is_open
        is_open &= ~is_decode
        return order[is_decode], [self.running[slot] for slot in order[is_open].tolist()]

    def without_room(self, slots: Column) -> Column:
        """Those whose next token needs another block."""
        return slots[self.rows.room[slots] <= self.rows.num_computed[slots]]

    def take_plan(
        self, now_ns: int, decodes: Column, chunks: dict[int, int], num_chunks: int
    ) -> StepPlan:
        """The next plan: one token for each of `decodes`, and so many for each of `chunks`.

        What changed since the last plan goes with it.
        """
        self.last_step += 1
        self.num_open = max(0, self.num_open - 1)
        self._digest = digest.add(self._digest, 0)
        changed = self._changed(decodes, chunks)
        special = self._advance(decodes, chunks)
        num_rows = len(decodes) + len(chunks)
        num_tokens = len(decodes) + sum(chunks.values())
        flight = StepInFlight(
            step=self.last_step,
            num_tokens=num_tokens,
            batch=self._batch,
            special=special,
            planned_ns=now_ns,
            expected_us=self.cost.expected_us(num_tokens) if num_tokens else 0.0,
        )
        self.depth.planned(flight, self.in_flight)
        self.in_flight.append(flight)
        self.num_tokens_in_flight += num_tokens
        plan = StepPlan(
            worker_id=self.worker_id,
            epoch=self.epoch,
            step=self.last_step,
            based_on_step=self.last_result_step,
            reset=self._reset,
            releases=() if self._reset else tuple(self._releases),
            admits=tuple(self._admits),
            changed=changed,
            growth=tuple(self._growth),
            digest=self._digest,
            num_scheduled_tokens=num_tokens,
            num_rows=num_rows,
            num_chunks=num_chunks,
            operations=tuple(self._operations),
            max_steps_in_flight=self.depth.k if self.depth.adapts else 0,
            round_trip_us=round(self.depth.round_trip_us) if self.depth.adapts else 0,
            preemptions=tuple(self.preemptions),
        )
        self._reset = False
        self._releases = []
        self._admits = []
        self.num_admit_bytes = 0
        self._growth = []
        self._operations = []
        self.preemptions = []
        return plan

    def _changed(self, decodes: Column, chunks: dict[int, int]) -> tuple[tuple[Slot, int], ...]:
        """Rows that differ from the plan before, whose batch is replaced."""
        if decodes is self._last_decodes and not chunks:
            return ()
        rows, planned, slots = self.rows, self.rows.planned, decodes
        changed: list[tuple[Slot, int]] = []
        num_kept = len(decodes)
        # Those admitted in the plan before, mostly: too few for columns of their own.
        for slot in decodes[planned[decodes] != 1].tolist():
            num_kept -= planned.item(slot) == 0
            changed.append((slot, 1))
            planned[slot] = 1
        if chunks:
            slots = np.concatenate((decodes, column(chunks)))
            for slot, num_tokens in chunks.items():
                num_before = planned.item(slot)
                num_kept += num_before > 0
                if num_before != num_tokens:
                    changed.append((Slot(slot), num_tokens))
                    planned[slot] = num_tokens
        if num_kept < rows.num_planned:
            is_left = planned > 0
            is_left[slots] = False
            planned[is_left] = 0
            # In the order of the plan before.
            left = self._batch.slots[is_left[self._batch.slots]]
            changed += [(slot, 0) for slot in left.tolist()]
        rows.num_planned = len(slots)
        # A copy: rows of slots that are vacated are no longer planned, but still in flight.
        self._batch = Batch(slots, planned.copy(), rows)
        self._last_decodes = None if chunks else decodes
        return tuple(changed)

    def _advance(self, decodes: Column, chunks: dict[int, int]) -> dict[int, Special]:
        """Moves the columns on by a plan's rows; returns the rows that are more than a decode."""
        rows, by_slot = self.rows, self._batch.num_tokens
        special: dict[int, Special] = {}
        # Chunks are of rows that have not sampled.
        if self._num_unsampled > len(chunks):
            first = (rows.num_tokens[decodes] == rows.known[decodes]).nonzero()[0].tolist()
            special.update(dict.fromkeys(first, DECODE))
            self._num_unsampled -= len(first)
        rows.num_computed += by_slot
        rows.num_tokens += by_slot
        # A chunk samples one token, if it leaves none to compute.
        for row, (slot, count) in enumerate(chunks.items(), start=len(decodes)):
            num_tokens = rows.num_tokens.item(slot) - count
            samples = num_tokens == rows.num_computed.item(slot)
            rows.num_tokens[slot] = num_tokens + samples
            special[row] = count, samples
            self.num_pending_prefill -= count - samples
            self._num_unsampled -= samples
        return special

    def is_coming(self, names: Iterable[BlockHash]) -> bool:
        """Whether blocks of all these names come back with requests that are on their way."""
        size, coming = self.capacity.block_size, set[BlockHash]()
        for swapped in self.swap.coming_back():
            coming.update(swapped.request.block_hashes[: swapped.num_computed // size])
        return coming.issuperset(names)

    def num_computed(self, request: Request) -> int:
        """Tokens of a request of this worker whose KV planned steps will have written."""
        if request.state is RequestState.RUNNING:
            return int(self.rows.num_computed[request.slot])
        return self.swap.of(request).num_computed

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
            max_steps_in_flight=self.depth.k,
            round_trip_us=round(self.depth.round_trip_us),
            num_swapped=len(self.swap.swapped),
            num_host_blocks_used=self.swap.host.num_used,
            num_host_blocks=self.swap.host.num_blocks,
        )
