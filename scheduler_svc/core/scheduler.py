"""The scheduler core: events in, Ready out. Pure: no clock, no chance, no IO.

Owns every request from arrival to its one end, and the state of every worker. Rules:

- a request is in exactly one of waiting, running (on one worker) or returning;
- a request with unreturned steps is not admitted again before they return or the worker is lost;
- what is admitted, where and when: see admission; what a result changes: see results.
"""

from itertools import chain
from typing import assert_never

from scheduler_svc.core import breaches, explain, planner, stranded, suspects
from scheduler_svc.core.account import Account, Wait
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.arrivals import new_request
from scheduler_svc.core.attempts import AttemptMemory
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.depth import TIMER_NS
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
from scheduler_svc.core.explain import EndedRequests
from scheduler_svc.core.lifecycle import Move, RequestState
from scheduler_svc.core.planner import StepBudget
from scheduler_svc.core.preemption import Preemptions
from scheduler_svc.core.ready import (
    CoreStats,
    CoreView,
    Explanation,
    Finish,
    GivenUp,
    Glance,
    Ready,
    StepPlan,
    joined,
)
from scheduler_svc.core.request import Request
from scheduler_svc.core.results import ResultBook
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.types import MAX_ATTEMPT, FaultScope, FinishReason, RequestId, WorkerId
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState


class SchedulerCore:
    """feed(event) any number of times, then take_ready(). Both raise only on a bug of ours."""

    def __init__(self, config: CoreConfig) -> None:
        config.validate()
        self.config = config
        self.stats = CoreStats()
        self._epoch = self._now_ns = 0
        self._requests: dict[RequestId, Request] = {}
        is_fair = config.scheduling_policy == "fair"
        self._tenants = Tenants()
        self._waiting = WaitingQueue(self._tenants if is_fair else None)
        self._workers: dict[WorkerId, WorkerState] = {}
        self._num_sessions = self._num_arrivals = 0
        # Prompt and max_tokens of all requests that are held.
        self._num_total_tokens = 0
        # The highest step of all sessions that are over: later ones begin above it.
        self._last_step = 0
        self._attempts, self._deadlines = AttemptMemory(), Deadlines()
        self._finishes: list[Finish] = []
        self._ended = EndedRequests()
        self._discards: list[str] = []
        self._given_up: list[GivenUp] = []
        # Found since the last round to have no attempt left.
        self._spent: list[Request] = []
        # Whether a request has been taken off its worker in this round of planning.
        self._has_yielded = False
        self._sharing = PrefixSharing(
            enabled=config.enable_prefix_caching,
            hash_key=config.hash_key,
            hash_bytes=config.hash_bytes,
        )
        self._admission = Admission(
            config=config,
            stats=self.stats,
            sharing=self._sharing,
            waiting=self._waiting,
            tenants=self._tenants,
            workers=self._workers,
        )
        self._stranded = stranded.Stranded(config.worker_wait_ns, self._waiting, self._workers)
        self._preemptions = Preemptions(
            config=config,
            stats=self.stats,
            sharing=self._sharing,
            waiting=self._waiting,
            admission=self._admission,
            start_anew=self._yield,
        )
        self._results = ResultBook(
            stats=self.stats,
            sharing=self._sharing,
            charges=is_fair,
            finish=self._finish,
            row_returned=self._row_returned,
        )

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
                gone = [r for r in self._requests.values() if r.gateway_id == event.gateway_id]
                for request in gone:
                    self._finish(request, FinishReason.CANCELLED)
            case BecameLeader():
                assert not self._workers, "an epoch begins without workers"
                self._epoch = event.epoch
            case Tick():
                pass
            case _ as never:
                assert_never(never)
        if self._now_ns >= self._deadlines.none_before_ns:
            self._end_late()

    def take_ready(self) -> Ready:
        """Plans every worker that has room for a plan, and hands out all that is to be done."""
        self._hand_over_from_draining()
        if self._spent:
            self._end_spent()
        steps: list[StepPlan] = []
        soon_ns = self._now_ns + TIMER_NS
        for _ in range(2):
            self._has_yielded = False
            for worker in self._workers.values():
                depth, in_flight = worker.depth, worker.in_flight
                if (held_ns := depth.held_until_ns) is not None and in_flight and held_ns > soon_ns:
                    continue  # mostly, and as may_plan would say again
                while len(in_flight) < depth.k and depth.may_plan(self._now_ns, in_flight):
                    if not (worker.running or len(self._waiting) or worker.holds_or_tells):
                        break  # as plan_step would find, at more than that costs
                    plan = planner.plan_step(
                        worker, self.config, self._now_ns, self._preempt, self._fill
                    )
                    if plan is None:
                        break
                    steps.append(plan)
            # A worker that was looked at before may take what another one has just given up.
            if not self._has_yielded:
                break
        self.stats.planned(steps)
        self._end_stranded()
        ready = Ready(
            plans=joined(steps),
            finishes=tuple(self._finishes),
            discards=tuple(self._discards),
            given_up=tuple(self._given_up),
            wake_at_ns=self._wake_at_ns(),
        )
        self._finishes, self._discards, self._given_up = [], [], []
        return ready

    def view(self) -> CoreView:
        """Counts for Snapshot and metrics."""
        return explain.core_view(
            self._epoch, len(self._requests), self._num_total_tokens, self._workers.values()
        )

    def glance(self, worker_id: WorkerId) -> Glance:
        """As `view`, of one worker."""
        return explain.glance(len(self._requests), self._workers.values(), self._workers[worker_id])

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Where a request stands and where its time went; None if it is not known any more."""
        request = self._requests.get(request_id)
        if request is None:
            return self._ended.explain(request_id)
        waits = request.state is RequestState.WAITING
        return explain.held(
            request,
            place=self._waiting.place(request) if waits else None,
            worker=None if request.worker_id is None else self._workers[request.worker_id],
            now_ns=self._now_ns,
            account=self._account(request),
        )

    def _account(self, request: Request) -> Account:
        waits = request.waits.reason is not None
        overtaken_ns = self._admission.overtaken_ns(request) if waits else None
        return request.account(self._now_ns, overtaken_ns)

    # Arrival and end of requests

    def _arrived(self, event: RequestArrived) -> None:
        known = self._requests.get(event.request_id)
        if known is not None and event.attempt <= known.entry_attempt:
            self.stats.num_stale_arrivals += 1
            if event.entry_id != known.entry_id:
                self._discards.append(event.entry_id)
            return
        tenant = self._tenants.arrived(event.tenant, event.tenant_weight)
        held = self._attempts.take(event.request_id)
        self._num_arrivals += 1
        request = new_request(
            event,
            tenant=tenant,
            held=held,
            now_ns=self._now_ns,
            sequence=self._num_arrivals,
            ageing_ns=self.config.priority_ageing_ns,
        )
        if known is not None:
            # The gateway has deleted the old entry, unless that was added by a script whose answer
            # was lost: then it knows of another one only. The request keeps its place in the order.
            if event.entry_id != known.entry_id:
                self._discards.append(known.entry_id)
            self.stats.num_superseded += 1
            request.take_over(known)
            self._drop(known)
        self._requests[request.request_id] = request
        self._num_total_tokens += request.max_total_tokens
        self._wait(request)
        self._deadlines.add(request)
        if request.prompt_len == 0:
            message = "the prompt has no tokens"
            self._finish(request, FinishReason.REJECTED, notify=True, message=message)
        elif len(event.output_token_ids) >= event.sampling.max_tokens:
            self._finish(request, FinishReason.LENGTH, notify=True)
        else:
            self._reject_if_never_fits(request)

    def _reject_if_never_fits(self, request: Request) -> None:
        message = explain.why_never(request, self._workers.values())
        if message is not None:
            self._finish(request, FinishReason.REJECTED, notify=True, message=message)

    def _cancelled(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.CANCELLED)

    def _finish(
        self, request: Request, reason: FinishReason, *, notify: bool = False, message: str = ""
    ) -> None:
        self._drop(request)
        if request.attempt > request.entry_attempt:
            # Its gateway may know of lower ones only and ask again if the end gets lost.
            self._attempts.note(request.request_id, request.attempt)
        account = self._account(request)
        end = explain.end(request, reason, notify, message, self._now_ns, account)
        self._finishes.append(end)
        self._ended.note(end)

    def _drop(self, request: Request) -> None:
        """Takes a request out of everything. Its rows in flight find it FINISHED."""
        if request.state is RequestState.RUNNING:
            assert request.worker_id is not None
            self._workers[request.worker_id].vacate(request)
        elif request.worker_id is not None:
            self._workers[request.worker_id].swap.forget(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        request.move(Move.FINISH)
        request.blocks = []
        del self._requests[request.request_id]
        self._num_total_tokens -= request.max_total_tokens
        self._tenants.ended(request.tenant)

    def _end_if(self, why: str | None, request: Request) -> None:
        if why is not None:
            self._finish(request, FinishReason.ERROR, notify=True, message=why)

    def _end_late(self) -> None:
        message = "the request's deadline has passed"
        while (late := self._deadlines.pop_due(self._now_ns)) is not None:
            self._finish(late, FinishReason.DEADLINE, notify=True, message=message)

    # Workers

    def _joined(self, event: WorkerJoined) -> None:
        self._lost(event.worker_id)
        self._num_sessions += 1
        for request_id, attempt in sorted(event.snapshot_attempts.items()):
            self._raise_attempt_above(request_id, attempt)
        self._workers[event.worker_id] = WorkerState(
            worker_id=event.worker_id,
            session=self._num_sessions,
            epoch=self._epoch,
            last_step=self._last_step,
            capacity=event.capacity,
            cost=event.cost,
            gateway_ids=event.gateway_ids,
            config=self.config,
        )
        for request in list(self._waiting):
            if request.num_output_tokens == 0:
                self._reject_if_never_fits(request)

    def _raise_attempt_above(self, request_id: RequestId, attempt: int) -> None:
        """Its gateway may have seen `attempt` and drops lower ones.

        A request that runs under the same attempt elsewhere may stay: it repeats all that the other
        worker can have sent.
        """
        request = self._requests.get(request_id)
        if request is None:
            self._attempts.note(request_id, attempt)
            return
        if request.attempt > attempt or (
            request.attempt == attempt and request.state is not RequestState.WAITING
        ):
            return
        if request.worker_id is not None:
            self._yield(self._workers[request.worker_id], request, False)
        request.attempt = attempt + 1
        request.emit_from = 0
        request.emitted_by = None
        if request.is_spent:
            self._spent.append(request)

    def _lost(self, worker_id: WorkerId) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._last_step = max(self._last_step, worker.last_step)
        for swapped in list(worker.swap.swapped.values()):
            self._yield(worker, swapped.request, False)
            self.stats.num_recovered += 1
        self._void_in_flight(worker)
        for request in list(worker.running.values()):
            request.set_back(self._now_ns, preempted=False)
            request.forget_work()
            request.move(Move.YIELD)
            self._wait(request)
            self.stats.num_recovered += 1
            why = suspects.count_loss(request, self.config.max_attempts, self._now_ns)
            self._end_if(why, request)

    def _void_in_flight(self, worker: WorkerState) -> None:
        """No result of the steps in flight will come."""
        for flight in worker.in_flight:
            for row in sorted(flight.gone):
                self._row_returned(flight.batch.requests[row], False)
        worker.in_flight.clear()
        worker.num_tokens_in_flight = 0

    def _row_returned(self, request: Request, is_whole: bool) -> None:
        """One step less is in flight with a request that has left its slot."""
        if request.state is RequestState.SWAPPED:
            assert request.worker_id is not None
            worker = self._workers[request.worker_id]
            self._preemptions.row_returned(worker, request, is_whole=is_whole)
        elif request.state is RequestState.RETURNING:
            request.num_in_flight -= 1
            if request.num_in_flight == 0:
                request.move(Move.RETURN)
                self._wait(request)

    def _hand_over_from_draining(self) -> None:
        """Moves requests off draining workers where another one can take them."""
        for worker in self._workers.values():
            if not worker.draining:
                continue
            swapped = [swapped.request for swapped in worker.swap.swapped.values()]
            for request in [*worker.running.values(), *swapped]:
                if any(not w.draining for w in self._admission.eligible(request)):
                    self._yield(worker, request, False)

    # Results

    def _step_completed(self, event: StepCompleted) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.in_flight or worker.in_flight[0].step != event.step:
            self.stats.num_stale_results += 1
            return
        breach = breaches.of_result(worker, worker.in_flight[0], event)
        if breach is not None:
            self._refuse_result(worker, breach)
            return
        flight = worker.in_flight.popleft()
        worker.num_tokens_in_flight -= flight.num_tokens
        worker.last_result_step = event.step
        worker.num_failed_in_a_row = 0
        worker.depth.returned(flight, event, worker.in_flight)
        if event.operations_done:
            self._preemptions.operations_done(worker, event.operations_done)
        self._results.book(worker, flight, event, self._now_ns)

    def _step_failed(self, event: StepFailed) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.in_flight or event.step < worker.in_flight[0].step:
            self.stats.num_stale_results += 1
            return
        breach = breaches.of_operations(worker, event)
        if breach is not None:
            self._refuse_result(worker, breach)
            return
        self.stats.num_failed_steps += 1
        worker.num_failed_in_a_row += 1
        if event.scope is FaultScope.WORKER:
            self._give_up(worker, "it can't go on, it says")
            return
        if worker.num_failed_in_a_row >= self.config.max_step_failures:
            self._give_up(worker, f"{worker.num_failed_in_a_row} steps in a row failed")
            return
        self._preemptions.operations_done(worker, event.operations_done)
        self._preemptions.forget_unfinished(worker)
        failed = [flight.batch for flight in worker.in_flight if flight.step == event.step]
        self._void_in_flight(worker)
        for request in list(worker.running.values()):
            self._yield(worker, request, False)
        worker.start_over()
        for request in chain.from_iterable(batch.requests for batch in failed):
            if request.state is not RequestState.FINISHED:
                limit = self.config.max_step_failures
                why = suspects.count_failed_step(request, limit, self._now_ns)
                self._end_if(why, request)

    def _refuse_result(self, worker: WorkerState, breach: str) -> None:
        """It can't be true, so nothing of it is booked: what the worker holds is not known."""
        self.stats.num_bad_results += 1
        self._give_up(worker, breach)

    def _give_up(self, worker: WorkerState, reason: str) -> None:
        self._given_up.append(GivenUp(worker_id=worker.worker_id, reason=reason))
        self._lost(worker.worker_id)

    # Planning

    def _fill(self, worker: WorkerState, budget: StepBudget, is_short: bool) -> None:
        if worker.swap.swapped:
            self._preemptions.bring_back(worker, budget, self._now_ns, is_short=is_short)
        if not is_short and len(self._waiting):
            self._admission.fill(worker, budget, self._now_ns)

    def _preempt(self, worker: WorkerState, request: Request) -> None:
        self._preemptions.preempt(worker, request, self._now_ns)

    def _yield(self, worker: WorkerState, request: Request, preempted: bool) -> None:
        """Takes a request off its worker; it begins anew, at the place of its rank."""
        self._has_yielded = True
        worker.take_off(request)
        request.set_back(self._now_ns, preempted=preempted)
        request.forget_work()
        if request.num_in_flight > 0:
            request.move(Move.YIELD_IN_FLIGHT)
            request.waits.turn_to(Wait.RETURNING, self._now_ns)
        else:
            request.move(Move.YIELD)
            self._wait(request)

    def _wait(self, request: Request) -> None:
        self._waiting.add(request)
        is_suspect = request.is_suspect and request.still_suspect()
        request.waits.turn_to(Wait.SUSPECT if is_suspect else Wait.TURN, self._now_ns)
        if request.attempt >= MAX_ATTEMPT and request.is_spent:
            self._spent.append(request)

    def _end_stranded(self) -> None:
        for request in self._stranded.find(self._now_ns):
            self._finish(request, FinishReason.UNAVAILABLE, notify=True, message=stranded.MESSAGE)

    def _end_spent(self) -> None:
        for request in self._spent:
            if request.state is not RequestState.FINISHED:
                self._finish(request, FinishReason.ERROR, notify=True, message="no attempt is left")
        self._spent.clear()

    def _wake_at_ns(self) -> int | None:
        wakes = [self._deadlines.next_ns(), self._stranded.wake_at_ns(self._now_ns)]
        wakes += [ns for w in self._workers.values() if (ns := w.depth.held_until_ns) is not None]
        return min(filter(None, wakes), default=None)
