"""The core's promises, checked after every event in tests and sampled in long runs."""

from collections import Counter

from scheduler_svc.core import digest
from scheduler_svc.core.flight import StepInFlight
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.worker_state import WorkerState


def check_all(core: SchedulerCore) -> None:
    """Raises AssertionError naming the broken promise. Reads private state; changes nothing."""
    running, out = {}, set()
    for worker in core._workers.values():
        _check_worker(worker)
        for request in worker.running.values():
            assert request.request_id not in running, "a request runs twice"
            running[request.request_id] = request
        for swapped in worker.swap.swapped.values():
            request = swapped.request
            assert request.worker_id == worker.worker_id
            assert core._requests.get(request.request_id) is request
            assert swapped.is_out or request.state is RequestState.SWAPPING_IN
            out.add(request.request_id)
    waiting = list(core._waiting)
    assert [r.rank for r in waiting] == sorted(r.rank for r in waiting)
    for request in core._requests.values():
        assert (request.state is RequestState.RUNNING) == (request.request_id in running)
        assert (request.state is RequestState.WAITING) == (request in core._waiting)
        assert request.state is not RequestState.FINISHED, "a finished request is still held"
        is_swapped = request.state in {RequestState.SWAPPED, RequestState.SWAPPING_IN}
        assert is_swapped == (request.request_id in out)
        if request.state is RequestState.RETURNING:
            assert request.num_in_flight > 0, "a request waits for steps that are not in flight"
        if request.state is RequestState.WAITING:
            assert request.num_in_flight == 0, "a request with unreturned steps could be admitted"
            assert not request.blocks, "a waiting request owns blocks"
    # Not by request_id: rows of one that has been superseded may still be in flight.
    flights: Counter[Request] = Counter()
    for worker in core._workers.values():
        for flight in worker.in_flight:
            _check_flight(worker, flight)
            for row in flight.gone:
                flights[flight.batch.requests[row]] += 1
    for request in core._requests.values():
        if request.state in {RequestState.RETURNING, RequestState.SWAPPED}:
            assert request.num_in_flight == flights[request]
    total = sum(request.max_total_tokens for request in core._requests.values())
    assert core._num_total_tokens == total


def _check_flight(worker: WorkerState, flight: StepInFlight) -> None:
    """A row's request is in its slot, or has left it and is known to have."""
    batch = flight.batch
    assert len(set(batch.slot_ids)) == len(batch.slot_ids), "two rows have one slot"
    for row, (slot, request) in enumerate(zip(batch.slot_ids, batch.requests, strict=True)):
        if row in flight.gone:
            assert request.state in {
                RequestState.RETURNING,
                RequestState.SWAPPED,
                RequestState.FINISHED,
            }
        else:
            assert worker.running.get(slot) is request, "a row is elsewhere"


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
    rows = worker.rows
    pending = sum(max(0, rows.num_wanted(request.slot) - 1) for request in in_rank)
    assert worker.num_pending_prefill == pending
    assert worker._num_unsampled == sum(rows.is_unsampled(request.slot) for request in in_rank)
    samples = [r for r in in_rank if r.sample_group]
    assert sorted(r.rank for g in worker.samples.values() for r in g) == [r.rank for r in samples]
    assert all(r in worker.samples[r.sample_group] for r in samples)
    assert worker.order.tolist() == [request.slot for request in in_rank]
    num_left = [int(rows.limit[r.slot] - rows.num_tokens[r.slot]) for r in in_rank]
    assert worker._num_open <= min(num_left, default=worker._num_open)
    for name, request in worker.coming.items():
        assert worker.running.get(request.slot) is request, "a block is coming from nobody"
        assert name in request.block_hashes[request.num_published :]
    total = 0
    for slot, request in worker.running.items():
        assert request.slot == slot
        assert request.worker_id == worker.worker_id
        num_tokens, num_computed = int(rows.num_tokens[slot]), int(rows.num_computed[slot])
        assert rows.limit[slot] == request.max_total_tokens
        assert rows.room[slot] == len(request.blocks) * size
        for block in request.blocks[int(rows.num_confirmed[slot]) // size :]:
            assert not worker.pool.is_shared(block), "a shared block may be written"
        assert num_computed <= rows.room[slot], "computed past the table"
        num_coming = sum(flight.num_tokens_of(request) for flight in worker.in_flight)
        assert rows.num_confirmed[slot] + num_coming == num_computed < num_tokens
        assert len(request.token_ids) <= num_tokens <= request.max_total_tokens
        # Room for what has been computed and at most the next block.
        needed = max(num_computed, len(request.token_ids))
        assert len(request.blocks) <= -(-needed // size) + 1, "a table is longer than planned"
        table = digest.table_sum(slot, int(rows.generation[slot]), 0, request.blocks)
        assert rows.digest[slot] == table
        total += table
    assert digest.add(total, -worker._digest) == 0, "the digest differs from the tables"
