"""The invariants themselves: each promise, broken by hand in a core that keeps all others."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import BlockId, WorkerId
from scheduler_svc.core.worker_state import WorkerState
from tests.builders import make_core, make_request
from tests.cluster import Cluster

Break = Callable[[SchedulerCore, WorkerState], object]


def busy() -> SchedulerCore:
    """Three run, with plans in flight; one has gone under its steps, two wait."""
    c = Cluster(make_core(max_inflight_steps=2, enable_prefix_caching=True))
    c.begin(num_blocks=32, num_slots=3)
    c.arrive(make_request("old", prompt=9, max_tokens=2))
    c.run()
    c.arrive_together(*(make_request(n, prompt=9, max_tokens=20) for n in "abc"))
    c.steps(4)
    c.cancel("c")
    c.arrive_together(*(make_request(n, prompt=9, max_tokens=20) for n in "def"))
    return c.core


def first(core: SchedulerCore, state: RequestState) -> Request:
    return next(r for r in core._requests.values() if r.state is state)


def swap_states(core: SchedulerCore, _: WorkerState) -> None:
    first(core, RequestState.RUNNING).state = RequestState.SWAPPED


def wait_while_running(core: SchedulerCore, _: WorkerState) -> None:
    first(core, RequestState.RUNNING).state = RequestState.WAITING


def run_while_waiting(core: SchedulerCore, _: WorkerState) -> None:
    first(core, RequestState.WAITING).state = RequestState.RUNNING


def drop_from_the_queue(core: SchedulerCore, _: WorkerState) -> None:
    core._waiting.remove(first(core, RequestState.WAITING))


def keep_finished(core: SchedulerCore, _: WorkerState) -> None:
    core._waiting.remove(request := first(core, RequestState.WAITING))
    request.state = RequestState.FINISHED


def return_without_steps(core: SchedulerCore, _: WorkerState) -> None:
    core._waiting.remove(request := first(core, RequestState.WAITING))
    request.state = RequestState.RETURNING


def return_with_too_many_steps(core: SchedulerCore, _: WorkerState) -> None:
    core._waiting.remove(request := first(core, RequestState.WAITING))
    request.state, request.num_in_flight = RequestState.RETURNING, 1


def wait_with_steps(core: SchedulerCore, _: WorkerState) -> None:
    first(core, RequestState.WAITING).num_in_flight = 1


def wait_with_blocks(core: SchedulerCore, _: WorkerState) -> None:
    first(core, RequestState.WAITING).blocks.append(BlockId(3))


def unsort_the_queue(core: SchedulerCore, _: WorkerState) -> None:
    (lane,) = core._waiting._lanes.values()
    lane.reverse()


def miscount_tokens(core: SchedulerCore, _: WorkerState) -> None:
    core._num_total_tokens += 1


def move_a_row(_: SchedulerCore, worker: WorkerState) -> None:
    slots = list(worker.in_flight[0].batch.slot_ids)
    worker.in_flight[0].batch.slot_ids = (*slots[1:], slots[0])


def double_a_row(_: SchedulerCore, worker: WorkerState) -> None:
    batch = worker.in_flight[0].batch
    batch.slot_ids = (batch.slot_ids[0],) * len(batch.slot_ids)


def go_while_present(_: SchedulerCore, worker: WorkerState) -> None:
    flight = worker.in_flight[0]
    running = [row for row in range(len(flight.batch.slot_ids)) if row not in flight.gone]
    flight.gone.add(running[0])


def change(name: str, by: int = 1) -> Break:
    def breaks(_: SchedulerCore, worker: WorkerState) -> None:
        setattr(worker, name, getattr(worker, name) + by)

    return breaks


def change_column(name: str, by: int = 1) -> Break:
    def breaks(_: SchedulerCore, worker: WorkerState) -> None:
        getattr(worker.rows, name)[next(iter(worker.running))] += by

    return breaks


def share_the_tail(_: SchedulerCore, worker: WorkerState) -> None:
    mine, other = list(worker.running.values())[:2]
    worker.pool._counts[mine.blocks[-1]] += 1
    worker.pool._counts[other.blocks[-1]] -= 1
    worker.pool._blank.append(other.blocks[-1])
    other.blocks[-1] = mine.blocks[-1]


def double_in_table(_: SchedulerCore, worker: WorkerState) -> None:
    request = next(iter(worker.running.values()))
    request.blocks[-1] = request.blocks[0]


def lose_a_block(_: SchedulerCore, worker: WorkerState) -> None:
    worker.pool._blank.pop()


def free_what_is_owned(_: SchedulerCore, worker: WorkerState) -> None:
    worker.pool._counts[next(iter(worker.running.values())).blocks[0]] = 0


def forget_a_cached_block(_: SchedulerCore, worker: WorkerState) -> None:
    pool = worker.pool
    block = next(iter(pool._kept))
    del pool._index[pool._cached.pop(block)[0]]


def cache_a_blank_block(_: SchedulerCore, worker: WorkerState) -> None:
    pool = worker.pool
    block = next(iter(pool._kept))
    del pool._kept[block]
    pool._blank.append(block)


def index_another_block(_: SchedulerCore, worker: WorkerState) -> None:
    index = worker.pool._index
    one, other = list(index)[:2]
    index[one] = index[other]


BREAKS: dict[str, Break] = (
    {
        function.__name__: function
        for function in (
            swap_states,
            wait_while_running,
            run_while_waiting,
            drop_from_the_queue,
            keep_finished,
            return_without_steps,
            return_with_too_many_steps,
            wait_with_steps,
            wait_with_blocks,
            unsort_the_queue,
            miscount_tokens,
            move_a_row,
            double_a_row,
            go_while_present,
            share_the_tail,
            double_in_table,
            lose_a_block,
            free_what_is_owned,
            forget_a_cached_block,
            cache_a_blank_block,
            index_another_block,
        )
    }
    | {
        f"{name} {by:+}": change(name, by)
        for name in ("num_pending_prefill", "num_tokens_in_flight", "_num_unsampled", "last_step")
        for by in (1, -1)
    }
    | {
        f"column {name}": change_column(name)
        for name in ("num_computed", "num_confirmed", "limit", "room", "generation", "digest")
    }
)


def test_a_busy_core_keeps_them_all() -> None:
    core = busy()
    (worker,) = core._workers.values()
    check_all(core)
    # What is broken below is there to be broken.
    states = {request.state for request in core._requests.values()}
    assert {RequestState.RUNNING, RequestState.WAITING} <= states
    assert worker.in_flight
    assert worker.pool._kept
    assert len(core._waiting) >= 2
    assert any(flight.gone for flight in worker.in_flight)


@pytest.mark.parametrize("name", BREAKS)
def test_each_is_seen(name: str) -> None:
    core = busy()
    BREAKS[name](core, *core._workers.values())
    with pytest.raises(AssertionError):
        check_all(core)


def test_open_rows_are_never_counted_too_high() -> None:
    core = busy()
    (worker,) = core._workers.values()
    worker.num_open = 1_000
    with pytest.raises(AssertionError):
        check_all(core)


def test_the_insides_of_another_worker_are_left_out() -> None:
    core = busy()
    (worker,) = core._workers.values()
    worker.num_pending_prefill += 1
    check_all(core, WorkerId("another"))
    with pytest.raises(AssertionError):
        check_all(core, worker.worker_id)
