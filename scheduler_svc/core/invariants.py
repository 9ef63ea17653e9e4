"""The core's promises, checked after every event in tests and sampled in long runs."""

import operator
from collections import Counter
from collections.abc import Sequence

from scheduler_svc.core import digest
from scheduler_svc.core.flight import DECODE, StepInFlight
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import RequestId, WorkerId
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

# Locals of the module: these are asked for every request after every event.
_WAITING, _RUNNING, _RETURNING = (
    RequestState.WAITING, RequestState.RUNNING, RequestState.RETURNING,
)  # fmt: skip
_SWAPPED, _SWAPPING_IN, _FINISHED = (
    RequestState.SWAPPED, RequestState.SWAPPING_IN, RequestState.FINISHED,
)  # fmt: skip
_LEFT = {_RETURNING, _SWAPPED, _FINISHED}


def check_all(core: SchedulerCore, worker_id: WorkerId | None = None) -> None:
    """Raises AssertionError naming the broken promise. Reads private state; changes nothing.

    With a worker's id the insides of the others are left out.
    """
    running: set[RequestId] = set()
    out: set[RequestId] = set()
    # Not by request_id: rows of one that has been superseded may still be in flight.
    flights: Counter[Request] = Counter()
    num_running = 0
    for worker in core._workers.values():
        if worker_id is None or worker.worker_id == worker_id:
            _check_worker(worker)
        num_running += len(worker.running)
        running.update([request.request_id for request in worker.running.values()])
        for swapped in worker.swap.swapped.values():
            request = swapped.request
            assert request.worker_id == worker.worker_id
            assert core._requests.get(request.request_id) is request
            assert swapped.is_out or request.state is RequestState.SWAPPING_IN
            out.add(request.request_id)
        for flight in worker.in_flight:
            _check_flight(worker, flight)
            for row in flight.gone:
                flights[flight.batch.requests[row]] += 1
    assert len(running) == num_running, "a request runs twice"
    waiting = core._waiting
    ranks = [request.rank for request in waiting]
    assert ranks == sorted(ranks)
    total = 0
    for request in core._requests.values():
        _check_request(request, running, out, waiting, flights)
        total += request.max_total_tokens
    assert core._num_total_tokens == total


def _check_request(
    request: Request,
    running: set[RequestId],
    out: set[RequestId],
    waiting: WaitingQueue,
    flights: Counter[Request],
) -> None:
    """It is where its state says, and nowhere else."""
    state, request_id = request.state, request.request_id
    assert (request_id in running) == (state is _RUNNING)
    assert (request in waiting) == (state is _WAITING)
    assert (request_id in out) == (state is _SWAPPED or state is _SWAPPING_IN)
    if state is _RUNNING:
        return
    assert state is not _FINISHED, "a finished request is still held"
    if state is _WAITING:
        assert request.num_in_flight == 0, "a request with unreturned steps could be admitted"
        assert not request.blocks, "a waiting request owns blocks"
    elif state is _RETURNING:
        assert request.num_in_flight > 0, "a request waits for steps that are not in flight"
        assert request.num_in_flight == flights[request]
    elif state is _SWAPPED:
        assert request.num_in_flight == flights[request]


def _check_flight(worker: WorkerState, flight: StepInFlight) -> None:
    """A row's request is in its slot, or has left it and is known to have."""
    slots, requests = flight.batch.slot_ids, list(flight.batch.requests)
    assert len(set(slots)) == len(slots), "two rows have one slot"
    present = list(map(worker.running.get, slots))
    for row in flight.gone:
        assert requests[row].state in _LEFT
        present[row] = requests[row]
    # Requests are equal if they are the same.
    assert present == requests, "a row is elsewhere"


def _check_worker(worker: WorkerState) -> None:
    size = worker.capacity.block_size
    swapped = worker.swap.swapped.values()
    worker.pool.check(
        [*(r.blocks for r in worker.running.values()), *(s.request.blocks for s in swapped)],
        [transfer.device_blocks for transfer in worker.swap.transfers.values()],
    )
    worker.swap.check()
    assert worker.in_flight or not worker.swap.transfers or worker.must_tell
    steps = [flight.step for flight in worker.in_flight]
    assert steps == list(range(worker.last_step - len(steps) + 1, worker.last_step + 1))
    in_rank = sorted(worker.running.values(), key=lambda request: request.rank)
    assert worker.ranked == in_rank
    assert worker._ranks == [request.rank for request in in_rank]
    _check_counts(worker, in_rank)
    _check_trial(worker, in_rank)
    samples = [r for r in in_rank if r.sample_group]
    assert sorted(r.rank for g in worker.samples.values() for r in g) == [r.rank for r in samples]
    assert all(r in worker.samples[r.sample_group] for r in samples)
    assert worker.order.tolist() == [request.slot for request in in_rank]
    for name, request in worker.coming.items():
        assert worker.running.get(request.slot) is request, "a block is coming from nobody"
        assert name in request.block_hashes[request.num_published :]
    _check_rows(worker, size)


def _check_counts(worker: WorkerState, in_rank: Sequence[Request]) -> None:
    """What is kept of all rows together."""
    rows = worker.rows
    slots = [request.slot for request in in_rank]
    known, limit = rows.num_tokens[slots].tolist(), rows.limit[slots].tolist()
    computed, at_admission = rows.num_computed[slots].tolist(), rows.known[slots].tolist()
    pending = sum(
        [
            tokens - done - 1
            for tokens, done, most in zip(known, computed, limit, strict=True)
            if done + 1 < tokens < most
        ]
    )
    assert worker.num_pending_prefill == pending
    assert worker.num_tokens_in_flight == sum([f.num_tokens for f in worker.in_flight])
    unsampled = sum(map(operator.eq, known, at_admission))
    assert worker._num_unsampled == unsampled
    assert rows.num_planned == int((rows.planned > 0).sum())
    num_left = list(map(operator.sub, limit, known))
    assert worker.num_open <= min(num_left, default=worker.num_open)


def _check_trial(worker: WorkerState, in_rank: Sequence[Request]) -> None:
    """A suspect runs beside no other one, and beside nothing of which no token has been seen.

    But for what comes back from host memory, and was on its way when the trial began.
    """
    tried = [r for r in in_rank if r.is_suspect and len(r.token_ids) == r.tokens_at_loss]
    if not tried:
        return
    assert tried == [worker.on_trial], "suspects are tried together"
    for request in in_rank:
        is_seen = len(request.token_ids) > request.num_known_at_admission
        assert request in tried or is_seen or request.num_swaps, "a suspect is not tried alone"


def _check_rows(worker: WorkerState, size: int) -> None:
    """What stands in the columns of each slot."""
    rows, total = worker.rows, 0
    slots = list(worker.running)
    columns = (rows.num_tokens, rows.num_computed, rows.num_confirmed, rows.limit, rows.room)
    numbers = zip(*(column[slots].tolist() for column in columns), strict=True)
    coming: dict[int, int] = {}
    for flight in worker.in_flight:
        special = flight.special
        for row, request in enumerate(flight.batch.requests):
            computes = (special.get(row) or DECODE)[0]
            coming[id(request)] = coming.get(id(request), 0) + computes
    for (slot, request), columns_of in zip(worker.running.items(), numbers, strict=True):
        num_tokens, num_computed, num_confirmed, limit, room = columns_of
        assert request.slot == slot
        assert request.worker_id == worker.worker_id
        assert limit == request.max_total_tokens
        assert room == len(request.blocks) * size
        shared = map(worker.pool.is_shared, request.blocks[num_confirmed // size :])
        assert not any(shared), "a shared block may be written"
        assert num_computed <= room, "computed past the table"
        num_coming = coming.get(id(request), 0)
        assert num_confirmed + num_coming == num_computed < num_tokens
        assert len(request.token_ids) <= num_tokens <= request.max_total_tokens
        # Room for what has been computed and at most the next block.
        needed = max(num_computed, len(request.token_ids))
        assert len(request.blocks) <= -(-needed // size) + 1, "a table is longer than planned"
        table = digest.table_sum(slot, int(rows.generation[slot]), 0, request.blocks)
        assert rows.digest[slot] == table
        total += table
    assert digest.add(total, -worker._digest) == 0, "the digest differs from the tables"
