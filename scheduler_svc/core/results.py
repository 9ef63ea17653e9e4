"""What steps gave: tokens are appended, ends found, full blocks shared, tenants charged.

Tokens are appended in the order of results, never guessed; a request's blocks enter the prefix
index on the result that filled them.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

from scheduler_svc.core.events import StepCompleted
from scheduler_svc.core.flight import DECODE, StepInFlight
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import CoreStats
from scheduler_svc.core.request import Request
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.types import FinishReason
from scheduler_svc.core.worker_state import WorkerState

_NO_END = "the worker did not end the request at its last token"


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
        row_returned: Callable[[Request, bool], None],
    ) -> None:
        self._stats = stats
        self._sharing = sharing
        self._charges = charges
        self._finish = finish
        self._row_returned = row_returned

    def book(
        self, worker: WorkerState, flight: StepInFlight, event: StepCompleted, now_ns: int
    ) -> None:
        """Books what a step gave: rows that have sampled as columns, all others singly."""
        batch = flight.batch
        self._stats.num_wasted_rows += event.num_wasted_rows
        if not event.num_wasted_rows:
            worker.cost.observe(flight.num_tokens, event.step_us)
        elif not flight.special:
            # Of chunks, nobody says how many tokens the skipped ones had.
            worker.cost.observe(flight.num_tokens - event.num_wasted_rows, event.step_us)
        given = _Given(tokens=event.token_ids, finished=dict(event.finished))
        rest = set(flight.gone)
        if event.slots != batch.slot_ids:
            by_slot: dict[int, int] = dict(zip(event.slots, event.token_ids, strict=True))
            given.tokens = list(map(by_slot.get, batch.slot_ids))
            if len(by_slot) != len(batch.slot_ids) or None in given.tokens:
                rest.update(row for row, token in enumerate(given.tokens) if token is None)
        if given.finished:
            rest.update(row for row, slot in enumerate(batch.slot_ids) if slot in given.finished)
        first: list[int] = []
        for row, (_, samples) in flight.special.items():
            if not samples:
                rest.add(row)
            elif row not in rest:
                first.append(row)
        self._book_samples(worker, flight, given.tokens, rest, first)
        # Blocks are shared in the order of rows, so that it does not matter how each is booked.
        for row in sorted(rest):
            if first and first[0] < row:
                self._book_first(worker, flight, [r for r in first if r < row], now_ns)
                first = [r for r in first if r > row]
            self._book_row(worker, flight, given, row, now_ns)
        if first:
            self._book_first(worker, flight, first, now_ns)

    def _book_samples(
        self,
        worker: WorkerState,
        flight: StepInFlight,
        tokens: Sequence[int | None],
        rest: set[int],
        first: Sequence[int],
    ) -> None:
        """All rows but `rest`: each has computed its tokens and sampled the next. No calls by row.

        For those of `first` it is the first one since their admission: see _book_first for more.
        """
        batch = flight.batch
        lists, by_slot = batch.token_ids, batch.num_tokens
        by_tenant = batch.num_by_tenant if self._charges and not rest and not first else None
        if rest:
            rows, keeps = list(rest), [True] * len(lists)
            for row in rows:
                keeps[row] = False
            by_slot = by_slot.copy()
            by_slot[batch.slots[rows]] = 0
            lists, tokens = list(compress(lists, keeps)), list(compress(tokens, keeps))
        # A loop without a turn of the interpreter: append(array, token) for each row.
        sampled: Sequence[int] = tokens  # type: ignore[assignment]  # but for `rest` all have one
        deque(map(array.append, lists, sampled), maxlen=0)
        self._stats.num_generation_tokens += len(lists)
        if self._charges and by_tenant is None:
            others = {*rest, *first}
            by_tenant = Counter(
                request.tenant for row, request in enumerate(batch.requests) if row not in others
            )
        for tenant, num_tokens in (by_tenant or {}).items():
            tenant.charge(num_tokens)
        confirmed, size = worker.rows.num_confirmed, worker.capacity.block_size
        confirmed += by_slot
        is_full = confirmed % size == 0
        if rest:
            is_full &= by_slot > 0
        for row in first:
            is_full[batch.slot_ids[row]] = False
        full = batch.slots[is_full[batch.slots]]
        if len(full):
            requests = list(map(worker.running.__getitem__, full.tolist()))
            self._sharing.publish(worker, requests, (confirmed[full] // size).tolist())
        if worker.num_open > 0:
            return
        # None of these rows has been named as ended, yet some may have had their last token.
        is_over = confirmed + 1 >= worker.rows.limit
        if rest:
            is_over &= by_slot > 0
        for row in first:
            is_over[batch.slot_ids[row]] = False
        for slot in batch.slots[is_over[batch.slots]].tolist():
            self._finish(worker.running[slot], FinishReason.ERROR, notify=True, message=_NO_END)

    def _book_first(
        self, worker: WorkerState, flight: StepInFlight, rows: Sequence[int], now_ns: int
    ) -> None:
        """What is left to book of rows that have sampled for the first time."""
        batch, confirmed, size = flight.batch, worker.rows.num_confirmed, worker.capacity.block_size
        requests: list[Request] = []
        num_full: list[int] = []
        for row in rows:
            request = batch.requests[row]
            if self._charges:
                request.tenant.charge(1)
            after = confirmed.item(batch.slot_ids[row])
            before = after - flight.special[row][0]
            requests.append(request)
            num_full.append(after // size)
            if before < request.prompt_len:
                self._stats.num_prompt_tokens += min(after, request.prompt_len) - before
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            if request.set_back_since_ns is not None:
                request.end_set_back(now_ns)
        self._sharing.publish(worker, requests, num_full)
        if worker.num_open > 0:
            return
        for request in requests:
            if request.num_output_tokens >= request.sampling.max_tokens:
                self._finish(request, FinishReason.ERROR, notify=True, message=_NO_END)

    def _book_row(
        self, worker: WorkerState, flight: StepInFlight, given: "_Given", row: int, now_ns: int
    ) -> None:
        """A row that has not sampled, has ended, or whose request has left its slot."""
        request, slot = flight.batch.requests[row], flight.batch.slot_ids[row]
        token_id, reason = given.tokens[row], given.finished.get(slot)
        num_tokens, samples = flight.special.get(row, DECODE)
        if request.state is RequestState.FINISHED:
            self._stats.num_stale_tokens += token_id is not None
            return
        is_running = row not in flight.gone
        if token_id is not None:
            request.token_ids.append(token_id)
            self._stats.num_generation_tokens += 1
            if self._charges:
                request.tenant.charge(1)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            if is_running and request.set_back_since_ns is not None:
                # Not by a token that was on its way when the request lost its blocks.
                request.end_set_back(now_ns)
        # A row that the worker has left out is named as ended, here or in an earlier result.
        is_whole = token_id is not None if samples else reason is None
        if not is_running:
            self._row_returned(request, is_whole)
        elif is_whole:
            before = worker.rows.num_confirmed.item(slot)
            confirmed = before + num_tokens
            worker.rows.num_confirmed[slot] = confirmed
            if before < request.prompt_len:
                self._stats.num_prompt_tokens += min(num_tokens, request.prompt_len - before)
            num_full = confirmed // worker.capacity.block_size
            if num_full > request.num_published:
                self._sharing.publish(worker, (request,), (num_full,))
        if reason is not None:
            self._finish(request, reason)
        elif samples and token_id is None:
            self._finish(
                request,
                FinishReason.ERROR,
                notify=True,
                message="the worker did not compute the request",
            )
        elif request.num_output_tokens >= request.sampling.max_tokens:
            self._finish(request, FinishReason.ERROR, notify=True, message=_NO_END)


@dataclass(slots=True, kw_only=True)
class _Given:
    """A result by row: tokens, and the ends by slot."""

    tokens: Sequence[int | None]
    finished: Mapping[int, FinishReason]
