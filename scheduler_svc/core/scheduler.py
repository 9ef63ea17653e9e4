"""The scheduler core: events in, Ready out. Pure: no clock, no chance, no IO.

Owns every request from arrival to its one end, and the state of every worker. Rules:

- a request is in exactly one of waiting, running (on one worker) or returning;
- tokens are appended in the order of results, never guessed;
- a request's blocks enter the prefix index on the result that filled them;
- a request with unreturned steps is not admitted again before they return or the worker is lost;
- the attempt rises when a request moves to another worker session, so that what the old session
  may still deliver is told apart from the repeat.
"""

from heapq import heappop, heappush
from typing import assert_never

from scheduler_svc.core import planner, policy, prefix
from scheduler_svc.core.blocks import CachedBlock
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import (
    BecameLeader,
    Event,
    GatewayLost,
    RequestArrived,
    RequestCancelled,
    StepCompleted,
    StepFailed,
    Tick,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSubscribed,
)
from scheduler_svc.core.lifecycle import Move, RequestState
from scheduler_svc.core.planner import Placement, StepBudget
from scheduler_svc.core.ready import Admit, CoreStats, CoreView, Finish, Ready, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.types import (
    BlockHash,
    BlockId,
    FaultScope,
    FinishReason,
    RequestId,
    Slot,
    WorkerId,
)
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import PlannedRow, WorkerState

_STRANDED_CHECK_NS = 100_000_000
_MAX_SCAN = 64
_MAX_LOSSES_WITHOUT_TOKEN = 3


class SchedulerCore:
    """feed(event) any number of times, then take_ready(). Both raise only on a bug of ours."""

    def __init__(self, config: CoreConfig) -> None:
        config.validate()
        self.config = config
        self.stats = CoreStats()
        self._epoch = 0
        self._now_ns = 0
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue()
        self._workers: dict[WorkerId, WorkerState] = {}
        self._num_sessions = 0
        self._num_arrivals = 0
        self._last_steps: dict[WorkerId, int] = {}
        self._snapshot_attempts: dict[RequestId, int] = {}
        self._deadlines: list[tuple[int, int, RequestId]] = []
        self._stranded_check_at_ns = 0
        self._finishes: list[Finish] = []
        self._discards: list[str] = []
        self._given_up: list[WorkerId] = []

    # Events

    def feed(self, event: Event) -> None:
        """Applies one event. Time never goes back: an earlier now_ns counts as the last one."""
        self._now_ns = max(self._now_ns, event.now_ns)
        match event:
            case StepCompleted():
                self._step_completed(event)
            case RequestArrived():
                self._arrived(event)
            case RequestCancelled():
                self._cancelled(event.request_id)
            case StepFailed():
                self._step_failed(event)
            case WorkerJoined():
                self._joined(event)
            case WorkerLost():
                self._lost(event.worker_id)
            case WorkerDraining():
                if event.worker_id in self._workers:
                    self._workers[event.worker_id].draining = True
            case WorkerSubscribed():
                if event.worker_id in self._workers:
                    self._workers[event.worker_id].gateway_ids = event.gateway_ids
            case GatewayLost():
                for request in [
                    r for r in self._requests.values() if r.gateway_id == event.gateway_id
                ]:
                    self._finish(request, FinishReason.CANCELLED)
            case BecameLeader():
                assert not self._workers, "an epoch begins without workers"
                self._epoch = event.epoch
            case Tick():
                pass
            case _ as never:
                assert_never(never)
        self._expire()

    def take_ready(self) -> Ready:
        """Plans every worker that has room for a plan, and hands out all that is to be done."""
        self._hand_over_from_draining()
        plans: list[StepPlan] = []
        for worker in self._workers.values():
            while len(worker.in_flight) < self.config.max_inflight_steps:
                plan = planner.plan_step(worker, self.config, self._preempt, self._admit_waiting)
                if plan is None:
                    break
                self.stats.num_steps += 1
                self.stats.num_chunked_prefills += plan.num_chunks
                plans.append(plan)
        self._find_stranded()
        ready = Ready(
            plans=tuple(plans),
            finishes=tuple(self._finishes),
            discards=tuple(self._discards),
            given_up=tuple(self._given_up),
            wake_at_ns=self._wake_at_ns(),
        )
        self._finishes, self._discards, self._given_up = [], [], []
        return ready

    def view(self) -> CoreView:
        """Counts for Snapshot and metrics."""
        num_running = sum(len(worker.running) for worker in self._workers.values())
        return CoreView(
            epoch=self._epoch,
            num_waiting=len(self._requests) - num_running,
            num_running=num_running,
            backlog_tokens=sum(
                max(0, r.max_total_tokens - r.num_computed_tokens) for r in self._requests.values()
            ),
            workers=tuple(worker.view() for worker in self._workers.values()),
        )

    # Arrival and end of requests

    def _arrived(self, event: RequestArrived) -> None:
        known = self._requests.get(event.request_id)
        if known is not None and event.attempt <= known.entry_attempt:
            self.stats.num_stale_arrivals += 1
            if event.entry_id != known.entry_id:
                self._discards.append(event.entry_id)
            return
        sequence, arrived_ns = self._num_arrivals, self._now_ns
        self._num_arrivals += 1
        if known is not None:
            # The gateway has deleted the old entry; the request keeps its place in the order.
            self.stats.num_superseded += 1
            sequence, arrived_ns = known.sequence, known.arrived_ns
            self._drop(known)
        held = max(self._snapshot_attempts.pop(event.request_id, 0), known.attempt if known else 0)
        request = self._new_request(event, sequence, arrived_ns, held)
        self._requests[request.request_id] = request
        self._waiting.add(request)
        if request.deadline_ns is not None:
            heappush(self._deadlines, (request.deadline_ns, sequence, request.request_id))
        if request.num_output_tokens >= request.sampling.max_tokens:
            self._finish(request, FinishReason.LENGTH, notify=True)
        else:
            self._reject_if_never_fits(request)

    def _new_request(
        self, event: RequestArrived, sequence: int, arrived_ns: int, held: int
    ) -> Request:
        """`held` is the highest attempt that may still deliver tokens, 0 if none."""
        prompt_len = len(event.prompt_token_ids)
        request = Request(
            request_id=event.request_id,
            entry_id=event.entry_id,
            entry_attempt=event.attempt,
            attempt=max(event.attempt, held + 1),
            gateway_id=event.gateway_id,
            reply_to=event.reply_to,
            token_ids=[*event.prompt_token_ids, *event.output_token_ids],
            prompt_len=prompt_len,
            sampling=event.sampling,
            priority=event.priority,
            deadline_ns=event.deadline_ns,
            cache_salt=event.cache_salt,
            traceparent=event.traceparent,
            sequence=sequence,
            arrived_ns=arrived_ns,
            emit_from=len(event.output_token_ids),
            max_total_tokens=prompt_len + event.sampling.max_tokens,
        )
        request.num_tokens = len(request.token_ids)
        return request

    def _reject_if_never_fits(self, request: Request) -> None:
        workers = list(self._workers.values())
        if not workers or any(worker.ever_fits(request) for worker in workers):
            return
        largest = max(workers, key=lambda worker: worker.pool.num_blocks)
        self._finish(
            request,
            FinishReason.REJECTED,
            notify=True,
            message=(
                f"prompt ({request.prompt_len}) + max_tokens ({request.sampling.max_tokens}) need "
                f"{largest.blocks_for(request.max_total_tokens - 1)} KV blocks of "
                f"{largest.capacity.block_size} tokens; the largest worker has "
                f"{largest.pool.num_blocks} and a context of {largest.capacity.max_model_len}"
            ),
        )

    def _cancelled(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.CANCELLED)

    def _finish(
        self, request: Request, reason: FinishReason, *, notify: bool = False, message: str = ""
    ) -> None:
        self._drop(request)
        self._finishes.append(
            Finish(
                request_id=request.request_id,
                entry_id=request.entry_id,
                attempt=request.attempt,
                gateway_id=request.gateway_id,
                reason=reason,
                notify=notify,
                message=message,
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                arrived_ns=request.arrived_ns,
                first_scheduled_ns=request.first_scheduled_ns,
                first_token_ns=request.first_token_ns,
                finished_ns=self._now_ns,
            )
        )

    def _drop(self, request: Request) -> None:
        """Takes a request out of everything. Its rows in flight find it FINISHED."""
        if request.state is RequestState.RUNNING:
            assert request.worker_id is not None
            self._workers[request.worker_id].vacate(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        request.move(Move.FINISH)
        request.blocks = []
        del self._requests[request.request_id]

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now_ns:
            deadline_ns, _, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_ns == deadline_ns:
                self._finish(
                    request,
                    FinishReason.DEADLINE,
                    notify=True,
                    message="the request's deadline has passed",
                )

    # Workers

    def _joined(self, event: WorkerJoined) -> None:
        self._lost(event.worker_id)
        self._num_sessions += 1
        for request_id, attempt in event.snapshot_attempts.items():
            self._raise_attempt_above(request_id, attempt)
        self._workers[event.worker_id] = WorkerState(
            worker_id=event.worker_id,
            session=self._num_sessions,
            epoch=self._epoch,
            last_step=self._last_steps.get(event.worker_id, 0),
            capacity=event.capacity,
            cost=event.cost,
            gateway_ids=event.gateway_ids,
        )
        for request in list(self._waiting):
            if request.num_output_tokens == 0:
                self._reject_if_never_fits(request)

    def _raise_attempt_above(self, request_id: RequestId, attempt: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self._snapshot_attempts[request_id] = attempt
        elif request.state is RequestState.WAITING and request.attempt <= attempt:
            request.attempt = attempt + 1
            request.emit_from = 0

    def _lost(self, worker_id: WorkerId) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._last_steps[worker_id] = worker.last_step
        self._void_in_flight(worker)
        for request in list(worker.running.values()):
            request.forget_work()
            request.move(Move.YIELD)
            self._waiting.add(request)
            self.stats.num_recovered += 1
            self._count_loss(request)

    def _void_in_flight(self, worker: WorkerState) -> None:
        """No result of the steps in flight will come."""
        for flight in worker.in_flight:
            for row in flight.rows.values():
                self._row_returned(row)
        worker.in_flight.clear()

    def _row_returned(self, row: PlannedRow) -> None:
        row.request.num_in_flight -= 1
        if row.request.state is RequestState.RETURNING and row.request.num_in_flight == 0:
            row.request.forget_work()
            row.request.move(Move.RETURN)
            self._waiting.add(row.request)

    def _count_loss(self, request: Request) -> None:
        """Bounds how often one request may lose its worker: it may be what kills them."""
        progressed = len(request.token_ids) != request.tokens_at_loss
        request.num_losses = 1 if progressed else request.num_losses + 1
        request.tokens_at_loss = len(request.token_ids)
        if (
            request.num_losses >= _MAX_LOSSES_WITHOUT_TOKEN
            or request.attempt >= self.config.max_attempts
        ):
            self._finish(
                request,
                FinishReason.ERROR,
                notify=True,
                message=f"the request lost its worker {request.num_losses} times without a token",
            )

    def _hand_over_from_draining(self) -> None:
        """Moves requests off draining workers where another one can take them."""
        for worker in self._workers.values():
            if not worker.draining:
                continue
            for request in list(worker.running.values()):
                if any(not w.draining for w in self._eligible(request)):
                    self._yield(worker, request)

    # Results

    def _step_completed(self, event: StepCompleted) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.in_flight or worker.in_flight[0].step != event.step:
            self.stats.num_stale_results += 1
            return
        flight = worker.in_flight.popleft()
        worker.last_result_step = event.step
        worker.num_failed_in_a_row = 0
        self.stats.num_wasted_rows += event.num_wasted_rows
        tokens = dict(zip(event.slots, event.token_ids, strict=True))
        finished = dict(event.finished)
        for slot, row in flight.rows.items():
            self._apply_row(worker, slot, row, tokens.get(slot), finished.get(slot))

    def _apply_row(
        self,
        worker: WorkerState,
        slot: Slot,
        row: PlannedRow,
        token_id: int | None,
        reason: FinishReason | None,
    ) -> None:
        request = row.request
        if request.state is RequestState.FINISHED:
            request.num_in_flight -= 1
            self.stats.num_stale_tokens += token_id is not None
            return
        live = worker.running.get(slot) is request and worker.generation(slot) == row.generation
        if live:
            request.num_confirmed_tokens += row.num_tokens
            self.stats.num_prompt_tokens += min(
                row.num_tokens,
                max(0, request.prompt_len - request.num_confirmed_tokens + row.num_tokens),
            )
        if row.samples and token_id is not None:
            request.token_ids.append(token_id)
            self.stats.num_generation_tokens += 1
            if request.first_token_ns is None:
                request.first_token_ns = self._now_ns
        if live:
            self._publish(worker, request)
        self._row_returned(row)
        if reason is not None:
            self._finish(request, reason)
        elif row.samples and token_id is None:
            self._finish(
                request,
                FinishReason.ERROR,
                notify=True,
                message="the worker did not compute the request",
            )

    def _publish(self, worker: WorkerState, request: Request) -> None:
        """Puts the blocks that are full and confirmed into the prefix index."""
        if not self.config.enable_prefix_caching:
            return
        size = worker.capacity.block_size
        num_full = request.num_confirmed_tokens // size
        if num_full <= request.num_published:
            return
        start = self._name_blocks(request, size)
        for index in range(request.num_published, num_full):
            worker.pool.publish(
                request.blocks[index],
                CachedBlock(
                    name=request.block_hashes[index],
                    parent=request.block_hashes[index - 1] if index else start,
                    tokens=prefix.block_tokens(
                        request.token_ids[index * size : (index + 1) * size]
                    ),
                ),
            )
        request.num_published = num_full

    def _name_blocks(self, request: Request, block_size: int) -> BlockHash:
        """Names all full blocks of known tokens; returns the parent of the first."""
        if request.hashed_block_size != block_size:
            request.block_hashes.clear()
            request.hashed_block_size = block_size
        start = prefix.chain_start(self.config.hash_key, request.cache_salt)
        prefix.extend_chain(request.block_hashes, start, request.token_ids, block_size)
        return start

    def _step_failed(self, event: StepFailed) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.in_flight or event.step < worker.in_flight[0].step:
            self.stats.num_stale_results += 1
            return
        self.stats.num_failed_steps += 1
        worker.num_failed_in_a_row += 1
        given_up = worker.num_failed_in_a_row >= self.config.max_step_failures
        if event.scope is FaultScope.WORKER or given_up:
            self._given_up.append(event.worker_id)
            self._lost(event.worker_id)
            return
        self._void_in_flight(worker)
        for request in list(worker.running.values()):
            self._yield(worker, request)
        worker.start_over()

    # Planning

    def _preempt(self, worker: WorkerState, request: Request) -> None:
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._yield(worker, request)

    def _yield(self, worker: WorkerState, request: Request) -> None:
        """Takes a running request off its worker; it waits at the place of its rank."""
        worker.vacate(request)
        request.forget_work()
        if request.num_in_flight > 0:
            request.move(Move.YIELD_IN_FLIGHT)
        else:
            request.move(Move.YIELD)
            self._waiting.add(request)

    def _eligible(self, request: Request) -> list[WorkerState]:
        """Workers that could run the request and whose tokens its gateway reads."""
        return [
            worker
            for worker in self._workers.values()
            if request.gateway_id in worker.gateway_ids and worker.ever_fits(request)
        ]

    def _admit_waiting(self, worker: WorkerState, budget: StepBudget) -> None:
        """Admits from the head of the queue what belongs on this worker now."""
        if worker.draining or not planner.has_slot(worker, self.config):
            return
        passed: list[Request] = []
        chosen: list[tuple[Request, Placement]] = []
        num_admitted = 0
        for num_seen, request in enumerate(self._waiting):
            if num_seen == _MAX_SCAN or budget.num_tokens == 0:
                break
            if not planner.has_slot(worker, self.config) or not policy.may_admit(
                self.config.scheduling_policy,
                num_running=len(worker.running),
                num_admitted=num_admitted,
                static_batch_size=self.config.static_batch_size,
            ):
                break
            workers = [w for w in self._eligible(request) if not w.draining]
            placement = planner.find_placement(request, workers, self.config, self._match)
            if placement is None:
                if workers and request.num_skips >= self.config.max_skips:
                    break
                passed.extend([request] if workers else [])
            elif placement.worker is worker:
                self._admit(request, placement)
                budget.take(request)
                num_admitted += 1
                chosen.append((request, placement))
                for skipped in passed:
                    skipped.num_skips += 1
        for request, _ in chosen:
            self._waiting.remove(request)

    def _match(self, request: Request, worker: WorkerState) -> list[BlockId]:
        """Cached blocks of the request's prefix; at least one token is left to compute."""
        if not self.config.enable_prefix_caching:
            return []
        size = worker.capacity.block_size
        start = self._name_blocks(request, size)
        num_usable = (len(request.token_ids) - 1) // size
        tokens = [
            prefix.block_tokens(request.token_ids[i * size : (i + 1) * size])
            for i in range(num_usable)
        ]
        return worker.pool.match(request.block_hashes[:num_usable], start, tokens)

    def _admit(self, request: Request, placement: Placement) -> None:
        worker = placement.worker
        worker.pool.share(placement.cached)
        fresh = worker.pool.allocate(placement.num_new)
        assert fresh is not None, "placement counted blocks that are not there"
        generation = worker.occupy(request, placement.cached + fresh)
        num_cached = len(placement.cached) * worker.capacity.block_size
        request.num_tokens = len(request.token_ids)
        request.num_computed_tokens = request.num_confirmed_tokens = num_cached
        request.num_published = len(placement.cached)
        request.stranded_since_ns = None
        emit_from = self._emission_start(request, worker)
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = self._now_ns
            request.num_cached_tokens = min(num_cached, request.prompt_len)
            self.stats.prefix_queries += request.prompt_len
            self.stats.prefix_hits += request.num_cached_tokens
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
                num_computed_tokens=num_cached,
                num_cached_tokens=request.num_cached_tokens,
                block_ids=tuple(request.blocks),
                sampling=request.sampling,
                traceparent=request.traceparent,
            )
        )

    @staticmethod
    def _emission_start(request: Request, worker: WorkerState) -> int:
        """Output position the worker emits from; raises the attempt on a move between sessions.

        The session that emitted before still delivers through its outbox if it is this one. Any
        other may have died with tokens unsent: everything is repeated under a higher attempt.
        """
        if request.emitted_by is None:
            start = request.emit_from
        elif request.emitted_by == worker.session:
            start = request.num_output_tokens
        else:
            request.attempt += 1
            start = 0
        request.emitted_by = worker.session
        return start

    # Time

    def _find_stranded(self) -> None:
        """Ends requests without a token that no worker could take for worker_wait_ns."""
        if self._now_ns < self._stranded_check_at_ns or not len(self._waiting):
            return
        self._stranded_check_at_ns = self._now_ns + _STRANDED_CHECK_NS
        for request in list(self._waiting):
            if self._eligible(request):
                request.stranded_since_ns = None
            elif request.stranded_since_ns is None:
                request.stranded_since_ns = self._now_ns
            elif (
                request.num_output_tokens == 0
                and self._now_ns - request.stranded_since_ns >= self.config.worker_wait_ns
            ):
                self._finish(
                    request,
                    FinishReason.UNAVAILABLE,
                    notify=True,
                    message="no worker could take the request in time",
                )

    def _wake_at_ns(self) -> int | None:
        wakes = [self._deadlines[0][0]] if self._deadlines else []
        if len(self._waiting):
            wakes.append(max(self._stranded_check_at_ns, self._now_ns + 1))
        return min(wakes, default=None)
