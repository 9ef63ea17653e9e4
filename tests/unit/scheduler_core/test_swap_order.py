"""Who waits for whom where requests are out, on their way back, or on their way elsewhere."""

from typing import Any

import pytest

from scheduler_svc.core import plan_size
from scheduler_svc.core.events import WorkerSubscribed
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import Explanation
from scheduler_svc.core.types import OperationKind, PreemptionMode, RequestId, WorkerId
from tests.builders import GATEWAY, expected_output, make_core, make_request
from tests.cluster import Cluster


def cluster(**config: Any) -> Cluster:
    """Each preemption swaps unless told otherwise; one plan in flight."""
    options = {"preemption_mode": "swap", "watermark": 0.0, "enable_prefix_caching": False}
    return Cluster(make_core(**({"max_inflight_steps": 1} | options | config)))


def explain(c: Cluster, name: str) -> Explanation:
    found = c.core.explain(RequestId(name.encode()))
    assert found is not None
    return found


def state(c: Cluster, name: str) -> RequestState:
    return explain(c, name).state


def assert_all_end_well_but(c: Cluster, *gone: str) -> None:
    c.run()
    for request_id, stream in c.gateway.streams.items():
        if request_id.decode() not in gone:
            assert (stream.tokens, stream.end) == expected_output(stream.arrival)
    c.assert_idle()


def test_a_swap_waits_for_another_one_that_brings_their_prefix_back() -> None:
    """The first to leave left it to the other one, which took it along later."""
    c = cluster(enable_prefix_caching=True, hold_back_tokens=4)
    c.begin(num_blocks=10, num_host_blocks=12)
    c.arrive(make_request("long", prompt=5, max_tokens=34))
    for name in ("early", "late"):
        c.arrive(make_request(name, prompt=9, max_tokens=20, family=1))
    c.run(until=lambda: c.end("long") is not None)
    assert (state(c, "early"), state(c, "late")) == (
        RequestState.SWAPPING_IN,
        RequestState.SWAPPED,
    )
    assert_all_end_well_but(c)
    assert c.core.stats.num_swaps_void == 0


def test_who_comes_back_loses_its_blocks_before_one_of_a_better_rank() -> None:
    """It has no slot yet from which to take them, so the other waits for the copy, not longer."""
    c = cluster()
    c.begin(num_blocks=8, num_host_blocks=8)
    for name, prompt, max_tokens in (("first", 4, 26), ("third", 12, 8), ("second", 8, 8)):
        c.arrive(make_request(name, prompt=prompt, max_tokens=max_tokens))
    c.run(until=lambda: state(c, "second") is RequestState.SWAPPED)
    c.cancel("third")
    c.run(until=lambda: state(c, "second") is RequestState.SWAPPING_IN)
    num_rows = 1
    while num_rows:
        # The copy takes its time; "first" grows until nothing is free.
        (plan,) = c.step(num_done=0).plans
        assert not plan.preemptions
        num_rows = plan.num_rows
    assert state(c, "first") is RequestState.RUNNING
    c.step()
    assert state(c, "second") is RequestState.RUNNING, "the copy is done"
    (plan,) = c.step().plans
    assert [p.request_id for p in plan.preemptions] == [b"second"]
    assert_all_end_well_but(c, "third")
    assert explain(c, "first").num_preemptions == 0


def test_a_batch_of_another_worker_is_no_room_with_static() -> None:
    """Who went there would wait for its end, and so would who waits for it beside an open one."""
    c = cluster(scheduling_policy="static", static_batch_size=2)
    c.begin("other", num_blocks=30)
    c.arrive(make_request("alone", prompt=4, max_tokens=40))
    c.step("other")
    c.begin("w", num_blocks=6, num_host_blocks=8)
    c.arrive_together(*(make_request(n, prompt=10, max_tokens=8) for n in ("first", "second")))
    c.step("w")
    assert explain(c, "second").worker_id == "w"
    assert_all_end_well_but(c)
    assert c.core.stats.preemptions[PreemptionMode.MOVE] == 0
    assert c.core.stats.num_preemptions > 0


def test_a_worker_that_was_planned_before_takes_at_once_what_another_gives_up() -> None:
    """ "other" is idle: without the request's plan nothing would wake it before the next result."""
    c = cluster()
    c.begin("other", num_blocks=6, gateways=())
    c.begin("w", num_blocks=6)
    c.arrive_together(*(make_request(n, prompt=10, max_tokens=8) for n in ("first", "second")))
    other = WorkerId("other")
    c.feed(WorkerSubscribed(now_ns=c.now_ns, worker_id=other, gateway_ids=frozenset({GATEWAY})))
    while not (moved := [p for plan in c.step("w").plans for p in plan.preemptions]):
        pass
    assert [p.mode for p in moved] == [PreemptionMode.MOVE]
    assert [plan.worker_id for plan in c.last.plans] == ["w", "other"]
    assert state(c, "second") is RequestState.RUNNING
    assert_all_end_well_but(c)


def num_moving(c: Cluster) -> int:
    """Blocks in the swaps that the worker has begun and not ended."""
    moving = c.workers[WorkerId("w")].memory.in_flight.values()
    return sum(len(o.targets) for o in moving if o.kind is not OperationKind.COPY)


@pytest.mark.parametrize("limit", [8, 20])
def test_who_comes_back_waits_for_those_that_come_before_it(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_size, "MAX_BLOCKS_MOVING", limit)
    c = cluster()
    c.begin(num_blocks=14, num_host_blocks=30)
    for name, prompt, max_tokens in (("long", 4, 52), ("b", 6, 30), ("c", 6, 30)):
        c.arrive(make_request(name, prompt=prompt, max_tokens=max_tokens))
    c.run(until=lambda: c.end("long") is not None)
    assert c.core.stats.preemptions[PreemptionMode.SWAP] == 2
    first, then = RequestState.SWAPPING_IN, RequestState.SWAPPED
    assert [state(c, name) for name in "bc"] == [first, then if limit == 8 else first]
    assert num_moving(c) <= limit
    assert_all_end_well_but(c)


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_no_more_blocks_are_moving_than_a_worker_takes(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be swapped is computed anew."""
    monkeypatch.setattr(plan_size, "MAX_BLOCKS_MOVING", limit)
    c = cluster(max_inflight_steps=2)
    c.begin(num_blocks=12, num_host_blocks=30)
    for name in "abcd":
        c.arrive(make_request(name, prompt=8, max_tokens=16))
    while any(stream.end is None for stream in c.gateway.streams.values()):
        c.step(num_done=0)
        assert num_moving(c) <= limit
    assert c.core.stats.num_preemptions
    assert (c.core.stats.preemptions[PreemptionMode.SWAP] > 0) == (limit > 2)
    assert_all_end_well_but(c)


def test_step_numbers_of_lost_workers_are_not_kept_for_each() -> None:
    """One number for all: a session begins above every one that is over."""
    c = cluster()
    last_step = 0
    for number in range(4):
        c.begin(f"w{number}")
        (view,) = c.core.view().workers
        assert view.last_step > last_step
        last_step = view.last_step
        c.lose(f"w{number}")
    c.join("w0")
    assert [plan.step for plan in c.last.plans] == [last_step + 1]
