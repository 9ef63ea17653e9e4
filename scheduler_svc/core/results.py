"""What steps gave: tokens are appended, ends found, full blocks shared, tenants charged.

Tokens are appended in the order of results, never guessed; a request's blocks enter the prefix
index on the result that filled them.
"""

from collections.abc import Callable
from typing import Protocol

from scheduler_svc.core.events import StepCompleted
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import CoreStats
from scheduler_svc.core.request import Request
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.types import FinishReason
from scheduler_svc.core.worker_state import StepInFlight, WorkerState


class Finishes(Protocol):
    """Ends a request."""

    def __call__(
        self, request: Request, reason: FinishReason, *, notify: bool = False, message: str = ""
    ) -> None:
        """See SchedulerCore."""


class ResultBook:
    """Books results on requests. The scheduler owns requests and workers."""

    def __init__(
        self,
        *,
        stats: CoreStats,
        sharing: PrefixSharing,
        charges: bool,
        finish: Finishes,
        row_returned: Callable[[Request], None],
    ) -> None:
        self._stats = stats
        self._sharing = sharing
        self._charges = charges
        self._finish = finish
        self._row_returned = row_returned

    def book(
        self, worker: WorkerState, flight: StepInFlight, event: StepCompleted, now_ns: int
    ) -> None:
        """Books what each row of a step gave. No calls on the way of a decode inside its block."""
        tokens = dict(zip(event.slots, event.token_ids, strict=True))
        finished = dict(event.finished)
        stats, block_size, charges = self._stats, worker.capacity.block_size, self._charges
        stats.num_wasted_rows += event.num_wasted_rows
        stats.num_generation_tokens += len(tokens)
        worker.cost.observe(sum(flight.num_tokens), event.step_us)
        chunks_are_whole = _chunks_are_whole(flight, event)
        for slot, request, num_tokens, samples in zip(
            flight.slots, flight.requests, flight.num_tokens, flight.samples, strict=True
        ):
            token_id = tokens.get(slot)
            request.num_in_flight -= 1
            if request.state is RequestState.FINISHED:
                stats.num_stale_tokens += token_id is not None
                stats.num_generation_tokens -= token_id is not None
                continue
            if token_id is not None:
                request.token_ids.append(token_id)
                if charges:
                    request.tenant.charge(1)
                if request.first_token_ns is None:
                    request.first_token_ns = now_ns
                # A token that was on its way when it lost its blocks does not end a set-back.
                if request.set_back_since_ns is not None and request.state is RequestState.RUNNING:
                    request.end_set_back(now_ns)
            reason = finished.get(slot)
            is_whole = token_id is not None if samples else reason is None and chunks_are_whole
            if request.state is RequestState.RUNNING and is_whole:
                confirmed = request.num_confirmed_tokens
                request.num_confirmed_tokens = confirmed + num_tokens
                if confirmed < request.prompt_len:
                    stats.num_prompt_tokens += min(num_tokens, request.prompt_len - confirmed)
                if (confirmed + num_tokens) // block_size > request.num_published:
                    self._sharing.publish(request, worker)
            elif request.state is RequestState.RETURNING:
                self._row_returned(request)
            if reason is not None:
                self._finish(request, reason)
            elif samples and token_id is None:
                self._finish(
                    request,
                    FinishReason.ERROR,
                    notify=True,
                    message="the worker did not compute the request",
                )


def _chunks_are_whole(flight: StepInFlight, event: StepCompleted) -> bool:
    """Whether every row that was not to sample has been computed.

    A row that was ended on the worker is skipped before the core may know of its end. One that was
    to sample shows it by giving no token. If there were more, any chunk may have been skipped, and
    its blocks must not be shared.
    """
    if event.num_wasted_rows == 0:
        return True
    sampled, finished = set(event.slots), {slot for slot, _ in event.finished}
    num_silent = sum(
        samples and slot not in sampled and slot not in finished
        for slot, samples in zip(flight.slots, flight.samples, strict=True)
    )
    return event.num_wasted_rows <= num_silent
