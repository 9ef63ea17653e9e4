"""One step of one worker: who gets how many tokens, and which blocks.

Order: running requests with one token to go, then chunks of running prefills, then admissions.
Decodes come first so that a long prompt can't hold them up; prefill takes what the token budget
leaves, and no more than the decodes of the step may wait for. Nothing is admitted in a step in
which running requests lacked blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core import policy, suspects
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Column, column
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.types import BlockId, PrefixStop, WorkerId
from scheduler_svc.core.value import value
from scheduler_svc.core.worker_state import WorkerState

NO_ROOM = float("inf")


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """What is left of one step, and its rows that are no decodes."""

    num_tokens: int
    chunk_tokens: int
    chunks: dict[int, int] = field(default_factory=dict)
    num_chunks: int = 0

    def take(self, slot: int, wanted: int) -> None:
        """Schedules as much of a row's tokens as budget and chunk limit allow, maybe nothing."""
        count = min(wanted, self.num_tokens, self.chunk_tokens)
        if count > 0:
            self.chunks[slot] = count
            self.num_tokens -= count
            self.num_chunks += count < wanted


@value(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a waiting request would go: blocks to share and the number of new ones.

    num_cached tokens need not be computed. The shared blocks are those of the prefix cache, and
    `stop` says why there are no more, or those of `source`, see fork.
    """

    worker: WorkerState
    shared: list[BlockId]
    num_cached: int
    num_new: int
    stop: PrefixStop | None = None
    source: Request | None = None


def plan_step(
    worker: WorkerState,
    config: CoreConfig,
    now_ns: int,
    preempt: Callable[[WorkerState, Request], None],
    fill: Callable[[WorkerState, StepBudget, bool], None],
) -> StepPlan | None:
    """The next plan of `worker`, or None if there is nothing to do.

    `preempt` takes a running request off the worker; `fill` may add rows to the budget, and is told
    whether running requests lacked blocks.
    """
    budget = StepBudget(
        num_tokens=_token_budget(worker, config),
        chunk_tokens=config.prefill_chunk_tokens or worker.capacity.max_num_batched_tokens,
    )
    decodes, prefills, is_short = _schedule_decodes(worker, config, budget, preempt)
    if config.max_prefill_gap_ns and len(decodes):
        allowance = policy.prefill_allowance(
            max_gap_ns=config.max_prefill_gap_ns,
            num_decodes=len(decodes),
            floor_tokens=worker.capacity.block_size,
            cost=worker.cost.profile,
        )
        if allowance is not None:
            budget.num_tokens = min(budget.num_tokens, allowance)
    for request in prefills:
        if worker.running.get(request.slot) is request:
            budget.take(request.slot, worker.rows.num_wanted(request.slot))
    fill(worker, budget, is_short)
    if not len(decodes) and not budget.chunks and not worker.must_tell:
        return None
    return worker.take_plan(now_ns, decodes, budget.chunks, budget.num_chunks)


def _token_budget(worker: WorkerState, config: CoreConfig) -> int:
    own = worker.capacity.max_num_batched_tokens
    return min(own, config.max_num_batched_tokens or own)


def _schedule_decodes(
    worker: WorkerState,
    config: CoreConfig,
    budget: StepBudget,
    preempt: Callable[[WorkerState, Request], None],
) -> tuple[Column, list[Request], bool]:
    """One token for each request that wants just one, by rank, as far as the budget goes.

    Returns their slots, the requests that want more, and whether blocks were missing. Runs in each
    step: no calls for each row.
    """
    decodes, prefills = worker.to_plan()
    is_short = False
    if len(decodes) > budget.num_tokens:
        decodes = decodes[: budget.num_tokens]
    lacking = worker.without_room(decodes)
    if len(lacking):
        blocks = worker.pool.allocate(len(lacking))
        if blocks is not None:
            worker.grow(lacking, blocks)
        else:
            decodes, is_short = _make_room(worker, config, decodes, lacking, preempt), True
    budget.num_tokens -= len(decodes)
    return decodes, prefills, is_short


def _make_room(
    worker: WorkerState,
    config: CoreConfig,
    decodes: Column,
    lacking: Column,
    preempt: Callable[[WorkerState, Request], None],
) -> Column:
    """Blocks for the slots that lack one, one after the other, taken from the policy's victims.

    Blocks that wait for a copy to the host are on their way: for each of them one row is left out
    of this step and loses nothing. So is a row whose victim would be a request that comes back: as
    soon as its copy is done it has a slot, and then it can lose its blocks like any other. Returns
    the decodes that are left. Each loop ends: a turn takes one request off the worker.
    """
    left_out: set[int] = set()
    coming_back = [swapped.request for swapped in worker.swap.coming_back()]
    for slot in lacking.tolist():
        while slot in worker.running:
            found = worker.pool.allocate(1)
            if found is not None:
                worker.grow(column([slot]), found)
                break
            left_out &= worker.running.keys()
            if worker.pool.num_waiting > len(left_out):
                left_out.add(slot)
                break
            victim = policy.choose_victim(
                config.scheduling_policy,
                [*worker.ranked, *coming_back],
                max_preemptions=config.max_preemptions,
            )
            if victim in coming_back:
                left_out.add(slot)
                break
            preempt(worker, victim)
    return column([s for s in decodes.tolist() if s in worker.running and s not in left_out])


def find_placement(
    request: Request,
    workers: Sequence[WorkerState],
    config: CoreConfig,
    sharing: PrefixSharing,
    planning: WorkerState,
    promised: Mapping[WorkerId, int],
) -> Placement | None:
    """The cheapest worker that has room for the whole request now; None if none has.

    `promised` is what requests before this one will cost on workers whose next step they wait for.
    Among equals the one whose step is planned, which is one of them: it can have the request at
    once. Room is a free slot, and blocks for all known tokens above the watermark. Workers that
    are dearer whatever they have cached are matched only if that is the answer, for its `stop`;
    those that have nothing cached, of many mostly all, not at all.
    """
    num_tokens, dearer = len(request.token_ids), list[WorkerState]()
    found = sharing.match(request, planning)
    shared, stop = found.blocks, found.stop
    num_cached = most_cached = len(shared) * planning.capacity.block_size
    num_new = planning.blocks_for(num_tokens) - len(shared)
    best, best_cost = None, NO_ROOM
    # That there is a seat on the one whose step is planned has been seen before.
    num_kept = planning.pool.num_free_among(shared) if shared else 0
    if planning.pool.num_free - num_new - num_kept >= planning.watermark:
        best, best_cost = planning, 0
        if len(workers) > 1:
            best_cost = load(planning, num_tokens - num_cached)
    for worker in workers:
        if worker is planning:
            continue
        standing = load(worker) + promised.get(worker.worker_id, 0)
        if standing + 1 >= best_cost:
            dearer.append(worker)
            continue
        is_cold = sharing.is_cold(request, worker)
        if is_cold and standing + num_tokens >= best_cost:
            continue
        if not has_room(worker, config):
            continue
        cached = [] if is_cold else sharing.match(request, worker).blocks
        num_there = len(cached) * worker.capacity.block_size
        most_cached = max(most_cached, num_there)
        cost = standing + num_tokens - num_there
        if cost < best_cost and _spare(worker, num_tokens, cached) >= worker.watermark:
            best, best_cost, shared, num_cached = worker, cost, cached, num_there
            num_new = worker.blocks_for(num_tokens) - len(cached)
    if best is None:
        return None
    if best is planning:
        for worker in dearer:
            if not sharing.is_cold(request, worker) and has_room(worker, config):
                num_blocks = len(sharing.match(request, worker).blocks)
                most_cached = max(most_cached, num_blocks * worker.capacity.block_size)
    return Placement(
        worker=best,
        shared=shared,
        num_cached=num_cached,
        num_new=num_new,
        stop=PrefixStop.ELSEWHERE if most_cached > num_cached else stop,
    )


def cost_at(
    request: Request, worker: WorkerState, sharing: PrefixSharing, num_promised: int = 0
) -> float:
    """What find_placement compares; NO_ROOM if there are too few blocks."""
    is_cold = sharing.is_cold(request, worker)
    cached = [] if is_cold else sharing.match(request, worker).blocks
    num_tokens = len(request.token_ids)
    if _spare(worker, num_tokens, cached) < worker.watermark:
        return NO_ROOM
    return num_promised + load(worker, num_tokens - len(cached) * worker.capacity.block_size)


def _spare(worker: WorkerState, num_tokens: int, cached: Sequence[BlockId]) -> int:
    """Blocks that stay free when so many tokens come, of which these blocks hold the first."""
    pool = worker.pool
    num_new = worker.blocks_for(num_tokens) - len(cached)
    return pool.num_free - num_new - (pool.num_free_among(cached) if cached else 0)


def is_better(
    worker: WorkerState, than: WorkerState, request: Request, num_promised: int = 0
) -> bool:
    """Whether the request would go to `worker` rather, whatever the caches of both have of it."""
    num_tokens = len(request.token_ids)
    spare = worker.pool.num_free - worker.blocks_for(num_tokens)
    there = num_promised + load(worker, num_tokens)
    return spare >= worker.watermark and there < load(than, num_uncached=1)


def load(worker: WorkerState, num_uncached: int = 0) -> int:
    """What placement compares, for a request of which so many tokens are not cached there."""
    num_pending = worker.num_pending_prefill + worker.num_tokens_in_flight
    return policy.placement_cost(num_uncached, num_pending, len(worker.running))


def has_room(worker: WorkerState, config: CoreConfig) -> bool:
    """Whether one more request, of one new block at least, may run on the worker."""
    return worker.pool.num_free > worker.watermark and num_free_seats(worker, config) > 0


def has_seat(worker: WorkerState, config: CoreConfig) -> bool:
    """Whether there is a slot for one more request."""
    return num_free_seats(worker, config) > 0


def num_free_seats(worker: WorkerState, config: CoreConfig) -> int:
    """Slots for more requests; none while a suspect is tried."""
    if worker.on_trial is not None and suspects.is_trying(worker):
        return 0
    limit = worker.capacity.num_slots
    if config.max_num_seqs:
        limit = min(limit, config.max_num_seqs)
    return max(0, limit - len(worker.running) - worker.swap.num_coming_back)


def fits(worker: WorkerState, config: CoreConfig, num_tokens: int) -> bool:
    """Whether a request of so many tokens has room on the worker now, if nothing is cached."""
    spare = worker.pool.num_free - worker.blocks_for(num_tokens)
    return has_seat(worker, config) and spare >= worker.watermark
