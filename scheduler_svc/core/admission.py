"""From waiting to running: who is admitted, where, and what the worker is told.

Rules:

- requests are looked at in the order of the queue; one that does not fit may be passed by later
  ones max_skips times, then nobody passes it on a worker that could run it;
- with `fair` a request also passes others only while its tenant does not lead them by a context;
- one that can't keep its deadline comes after all others;
- one that comes after a swapped request of a worker, still out, is not admitted there;
- a suspect is tried alone, see suspects;
- one that shares enough with a running prefill is held back until that has filled the cache, for
  max_holds plans at most; a sample of a prompt that another sample fills likewise, see fork;
- a request goes to the cheapest worker that has room and whose tokens its gateway reads;
- the attempt rises when a request moves to another worker session, so that what the old session
  may still deliver is told apart from the repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core import fork, plan_size, planner, policy, suspects
from scheduler_svc.core.account import Overtakes, Wait
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.elsewhere import Elsewhere
from scheduler_svc.core.fork import Fork
from scheduler_svc.core.lifecycle import Move
from scheduler_svc.core.planner import Placement, StepBudget
from scheduler_svc.core.ready import Admit, CoreStats
from scheduler_svc.core.request import Request
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.tenants import Tenant, Tenants
from scheduler_svc.core.types import MAX_ATTEMPT, BlockHash, BlockId, WorkerId
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

# Requests that a worker could run, looked at in one step of it and not admitted.
_MAX_SCAN = 64
_NOTHING: Mapping[WorkerId, int] = {}


@dataclass(slots=True, kw_only=True)
class _Fill:
    """One worker's admissions into one step."""

    worker: WorkerState
    budget: StepBudget
    now_ns: int
    # Requests that may be admitted at most.
    most: int
    # Looked at and not admitted, by tenant.
    left: dict[Tenant, int] = field(default_factory=dict)
    num_left: int = 0
    admitted: list[Request] = field(default_factory=list)
    # Looked at and did not fit anywhere.
    passed: list[Request] = field(default_factory=list)
    most_skips: int = 0
    # Can't keep their deadline.
    late: list[Request] = field(default_factory=list)
    # The lowest counter of those that were looked at and not admitted.
    least: float = float("inf")
    # A suspect is tried on the worker, or waits for that.
    is_closed: bool = False
    # Where there are several workers and requests.
    elsewhere: Elsewhere | None = None

    def num_promised(self, worker: WorkerState) -> int:
        """What requests looked at before will cost on another worker."""
        return 0 if self.elsewhere is None else self.elsewhere.promised.get(worker.worker_id, 0)


class Admission:
    """Moves requests from the queue into steps. The scheduler owns queue, workers and requests."""

    def __init__(
        self,
        *,
        config: CoreConfig,
        stats: CoreStats,
        sharing: PrefixSharing,
        waiting: WaitingQueue,
        tenants: Tenants,
        workers: Mapping[WorkerId, WorkerState],
    ) -> None:
        self._config = config
        self._stats = stats
        self._sharing = sharing
        self._waiting = waiting
        self._tenants = tenants
        self._is_fair = config.scheduling_policy == "fair"
        self._is_static = config.scheduling_policy == "static"
        self._workers = workers
        self._overtakes = Overtakes()

    def eligible(self, request: Request, *, draining: bool = True) -> list[WorkerState]:
        """Workers that could run the request and whose tokens its gateway reads.

        With those that are draining, or without.
        """
        num_tokens, gateway_id = request.max_total_tokens, request.gateway_id
        return [
            worker
            for worker in self._workers.values()
            if num_tokens <= worker.max_request_tokens
            and gateway_id in worker.gateway_ids
            and (draining or not worker.draining)
        ]

    def is_barred(self, worker: WorkerState, request: Request) -> bool:
        """Whether a swapped request of the worker, still out, comes before this one."""
        if not worker.swap.swapped:
            return False
        name = self._config.scheduling_policy
        mine = policy.turn(name, request)
        return any(
            swapped.is_out and policy.turn(name, swapped.request) < mine
            for swapped in worker.swap.swapped.values()
        )

    def fill(self, worker: WorkerState, budget: StepBudget, now_ns: int) -> None:
        """Admits from the queue what belongs on this worker now."""
        most = 0 if worker.draining else self.most(worker)
        if most == 0 or not self._is_open(worker, budget):
            return
        several = len(self._workers) > 1 and len(self._waiting) > 1
        fill = _Fill(worker=worker, budget=budget, now_ns=now_ns, most=most)
        if several:
            fill.elsewhere = Elsewhere(worker, self._workers, self._config, self._sharing)
        for request in self._waiting.in_turn(fill.left):
            if not self._goes_on(fill, request):
                break
            self._consider(fill, request)
        for request in fill.late:
            if not self._goes_on(fill, request):
                break
            self._consider(fill, request, last_chance=True)
        self._waiting.remove(*fill.admitted)

    def _goes_on(self, fill: _Fill, request: Request) -> bool:
        """Whether the request may be looked at, after what has been admitted and passed so far."""
        worker = fill.worker
        return (
            fill.num_left < _MAX_SCAN
            and not fill.is_closed
            and fill.most_skips < self._config.max_skips
            and len(fill.admitted) < fill.most
            and (not fill.admitted or self._is_open(worker, fill.budget))
            and not (worker.swap.swapped and self.is_barred(worker, request))
            and (
                not self._is_fair
                or policy.may_lead(
                    counter=request.tenant.counter,
                    least=fill.least,
                    max_lead=worker.capacity.max_model_len,
                )
            )
        )

    def _consider(self, fill: _Fill, request: Request, *, last_chance: bool = False) -> None:
        """Admits the request if it belongs on this worker now."""
        worker = fill.worker
        if (
            request.max_total_tokens > worker.max_request_tokens
            or request.gateway_id not in worker.gateway_ids
        ):
            return
        if request.is_suspect and request.still_suspect():
            if not suspects.may_try(worker):
                fill.is_closed = True
                request.waits.turn_to(Wait.SUSPECT, fill.now_ns, self.overtaken_ns(request))
                return
            workers = [worker]
        elif len(self._workers) == 1:
            workers = [worker]
        elif self._goes_elsewhere(fill, request):
            workers = []
            if fill.elsewhere is not None:
                fill.elsewhere.promise(request)
        else:
            workers = self._open_to(request, worker)
        placement, reason = self._find_placement(fill, request, workers)
        if reason is Wait.BLOCKS:
            fill.passed.append(request)
            fill.most_skips = max(fill.most_skips, request.num_skips)
        elif placement is not None and placement.worker is worker:
            if (
                request.deadline_ns is not None
                and not last_chance
                and self._is_too_late(request, request.deadline_ns, placement, fill.now_ns)
            ):
                fill.late.append(request)
            elif (
                worker.coming
                and placement.source is None
                and (coming := self._sharing.coming(request, worker, len(placement.shared)))
                and self._is_held_back(request, worker, coming)
            ):
                reason = Wait.HELD_BACK
            else:
                self._take(fill, request, placement)
                return
        fill.num_left += 1
        fill.left[request.tenant] = fill.left.get(request.tenant, 0) + 1
        fill.least = min(fill.least, request.tenant.counter)
        if request.waits.reason is not reason:
            request.waits.turn_to(reason, fill.now_ns, self.overtaken_ns(request))

    def _goes_elsewhere(self, fill: _Fill, request: Request) -> bool:
        """Whether the request certainly goes to another worker, `cheapest_at`.

        Seen by a few numbers instead of a match with each worker, in the plan of each.
        """
        elsewhere = fill.elsewhere
        if request.sample_group or request.held_for in fill.worker.coming:
            return False
        if elsewhere is not None:
            # Not with `static`, where a worker may take none for more than one reason.
            if not self._is_static and elsewhere.keeps(request):
                return True
            other = elsewhere.emptiest()
            if (
                other is not None
                and planner.is_better(other, fill.worker, request, fill.num_promised(other))
                and self._is_open_to(other, request)
            ):
                request.cheapest_at = other.worker_id
                request.num_uncached_there = len(request.token_ids)
                return True
        return self._is_dearer_here(fill, request)

    def _is_dearer_here(self, fill: _Fill, request: Request) -> bool:
        """Whether the request still goes to where it would have gone at the last look.

        An answer of no room can't stand: it would have come after that look, and have forgotten it.
        """
        worker, name = fill.worker, request.cheapest_at
        other = None if name is None else self._workers.get(name)
        if other is None or other is worker or not self._is_open_to(other, request):
            return False
        if not planner.has_room(other, self._config):
            return False
        there = planner.cost_at(request, other, self._sharing, fill.num_promised(other))
        return there < planner.cost_at(request, worker, self._sharing)

    def _is_open_to(self, worker: WorkerState, request: Request) -> bool:
        """Whether the worker could take the request in its own next step."""
        return (
            request.max_total_tokens <= worker.max_request_tokens
            and request.gateway_id in worker.gateway_ids
            and not worker.draining
            and (not self._is_static or self.most(worker) > 0)
            and not (worker.swap.swapped and self.is_barred(worker, request))
            # Here, so that the answer of no room falls when the trial has ended.
            and not (worker.on_trial is not None and suspects.is_trying(worker))
        )

    def _open_to(self, request: Request, planning: WorkerState) -> list[WorkerState]:
        """Workers that could take the request: that whose step is planned, and others."""
        return [w for w in self._workers.values() if w is planning or self._is_open_to(w, request)]

    def _find_placement(
        self, fill: _Fill, request: Request, workers: list[WorkerState]
    ) -> tuple[Placement | None, Wait]:
        """Where the request would go, and what it waits for otherwise.

        A match costs as much as the prompt is long, so an answer stands until something has changed
        that it depends on: blocks have been freed, or blocks of prompts have been filled. Without
        workers it goes to another one.
        """
        if not workers:
            return None, Wait.TURN
        config = self._config
        if request.sample_group:
            found = fork.find(request, workers, config)
            if found is not None and found.is_ready and found.worker is fill.worker:
                return found.placement(request), Wait.TURN
            if found is not None and self._waits_to_fork(request, found):
                return None, Wait.HELD_BACK
        if request.held_for in fill.worker.coming and request.num_holds < config.max_holds:
            request.num_holds += 1
            return None, Wait.HELD_BACK
        if request.had_no_room_at is not None and request.had_no_room_at == _changes(workers):
            return None, Wait.BLOCKS
        elsewhere = fill.elsewhere
        promised = _NOTHING if elsewhere is None else elsewhere.promised
        placement = planner.find_placement(
            request, workers, config, self._sharing, fill.worker, promised
        )
        request.cheapest_at = None
        if placement is None:
            request.had_no_room_at = _changes(workers)
            return None, Wait.BLOCKS
        request.had_no_room_at = None
        if placement.worker is not fill.worker:
            request.cheapest_at = placement.worker.worker_id
            request.num_uncached_there = len(request.token_ids) - placement.num_cached
            if elsewhere is not None:
                elsewhere.promise(request)
        return placement, Wait.TURN

    def _waits_to_fork(self, request: Request, found: Fork) -> bool:
        """Whether the request waits for the fork: for its source, or for the turn of its worker.

        The source gives more than the cache does now only if it has blocks to fill, or if there is
        no cache.
        """
        config = self._config
        is_filling = not found.is_ready and (
            found.num_blocks_to_fill or not config.enable_prefix_caching
        )
        waits = policy.waits_to_fork(
            config.scheduling_policy,
            num_blocks=found.num_whole_blocks if found.is_ready or is_filling else 0,
            num_holds=request.num_holds,
            max_holds=config.max_holds if config.hold_back_tokens else 0,
        )
        if waits:
            self._stats.num_held_back += request.num_holds == 0
            request.num_holds += 1
        return waits

    def _take(self, fill: _Fill, request: Request, placement: Placement) -> None:
        """Admits the request into the step."""
        if self._is_fair:
            self._tenants.raise_floor(min(fill.least, request.tenant.counter))
            if self._waiting.num_lanes > 1:
                self._overtakes.note(request.sequence, fill.now_ns)
        worker, num_cached = placement.worker, placement.num_cached
        if placement.shared:
            worker.pool.share(placement.shared)
        fresh = worker.pool.allocate(placement.num_new)
        assert fresh is not None, "placement counted blocks that are not there"
        request.num_published = num_cached // worker.capacity.block_size
        if placement.source is not None:
            self._sharing.inherit(request, placement.source, worker)
            self._stats.num_forks += 1
        request.stranded_since_ns = None
        num_uncached = len(request.token_ids) - num_cached
        if self._is_fair and not request.is_charged:
            request.is_charged = True
            request.tenant.charge(num_uncached)
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = fill.now_ns
            request.num_cached_tokens = min(num_cached, request.prompt_len)
            if placement.stop is not None:
                self._stats.prefix_queries += request.prompt_len
                self._stats.prefix_hits += request.num_cached_tokens
                self._stats.prefix_stops[placement.stop] += 1
            request.prefix_stop = placement.stop
        blocks = placement.shared + fresh
        self.seat(request, worker, blocks=blocks, num_computed=num_cached, now_ns=fill.now_ns)
        fill.budget.take(request.slot, num_uncached)
        if fill.elsewhere is not None:
            fill.elsewhere.admitted()
        fill.is_closed = request.is_suspect
        fill.admitted.append(request)
        for skipped in fill.passed:
            skipped.num_skips += 1
        fill.most_skips += bool(fill.passed)

    def overtaken_ns(self, request: Request) -> int | None:
        """When, with `fair`, a later one was first admitted."""
        return self._overtakes.since_ns(request.sequence) if self._is_fair else None

    def _is_too_late(
        self, request: Request, deadline_ns: int, placement: Placement, now_ns: int
    ) -> bool:
        worker = placement.worker
        return policy.is_too_late(
            now_ns=now_ns,
            deadline_ns=deadline_ns,
            num_uncached=len(request.token_ids) - placement.num_cached,
            min_tokens=request.sampling.min_tokens - request.num_output_tokens,
            budget_tokens=worker.capacity.max_num_batched_tokens,
            cost=worker.cost.profile,
        )

    def _is_held_back(
        self, request: Request, worker: WorkerState, coming: Sequence[BlockHash]
    ) -> bool:
        """Whether the request waits for these blocks, which a running one is about to fill."""
        config = self._config
        held = policy.holds_back(
            config.scheduling_policy,
            num_coming=len(coming) * worker.capacity.block_size,
            num_holds=request.num_holds,
            min_tokens=config.hold_back_tokens,
            max_holds=config.max_holds,
            cost=worker.cost.profile,
        )
        if held:
            self._stats.num_held_back += request.num_holds == 0
            request.num_holds += 1
            request.held_for = coming[-1]
        return held

    def most(self, worker: WorkerState) -> int:
        """How many requests the worker may be given at most, whatever their size."""
        num_seats = planner.num_free_seats(worker, self._config)
        if num_seats == 0:
            return 0
        return policy.max_admissions(
            self._config.scheduling_policy,
            num_seats=num_seats,
            num_running=len(worker.running) + len(worker.swap.swapped),
            static_batch_size=self._config.static_batch_size,
        )

    def _is_open(self, worker: WorkerState, budget: StepBudget) -> bool:
        """Whether there are tokens and blocks for one more request in this step.

        A static batch is admitted whole, or as much of it as a plan can carry; what the step's
        budget does not hold starts later.
        """
        has_tokens = budget.num_tokens > 0 or self._is_static
        return (
            has_tokens
            and worker.num_admit_bytes < plan_size.ADMIT_BYTES
            and worker.pool.num_free > worker.watermark
        )

    def seat(
        self,
        request: Request,
        worker: WorkerState,
        *,
        blocks: list[BlockId],
        num_computed: int,
        now_ns: int,
    ) -> None:
        """Brings a request into a slot with a table whose blocks hold so many of its tokens."""
        request.waits.turn_to(None, now_ns, self.overtaken_ns(request) if self._is_fair else None)
        if request.is_suspect:
            worker.on_trial = request
        generation = worker.occupy(request, blocks, num_computed)
        num_full = num_computed // worker.capacity.block_size
        if num_full > request.num_published:
            self._sharing.publish(worker, (request,), (num_full,))
        self._sharing.announce(request, worker)
        emit_from = _begin_emission(request, worker)
        request.move(Move.ADMIT)
        worker.announce(
            Admit(
                slot=request.slot,
                generation=generation,
                request_id=request.request_id,
                attempt=request.attempt,
                reply_to=request.reply_to,
                token_ids=tuple(request.token_ids),
                prompt_len=request.prompt_len,
                emit_from=emit_from,
                num_computed_tokens=num_computed,
                num_cached_tokens=request.num_cached_tokens,
                block_ids=tuple(request.blocks),
                sampling=request.sampling,
                traceparent=request.traceparent,
                sample_index=request.sample_index,
            )
        )


def _changes(workers: Sequence[WorkerState]) -> tuple[tuple[int, int], ...]:
    """What has to change for a request that has no room on these workers to have some."""
    return tuple([(w.session, w.pool.num_released + w.num_prompt_blocks) for w in workers])


def _begin_emission(request: Request, worker: WorkerState) -> int:
    """Output position the worker emits from; raises the attempt on a move between sessions."""
    if request.emitted_by is not None:
        request.emit_from = request.emission_start(worker.session)
        if request.emitted_by != worker.session:
            # At the bound two workers share one until the core ends the request: see is_spent.
            request.attempt = min(request.attempt + 1, MAX_ATTEMPT)
            request.num_moves += 1
    request.emitted_by = worker.session
    request.num_known_at_admission = len(request.token_ids)
    return request.emit_from
