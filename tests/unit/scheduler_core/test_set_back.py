"""A request that has lost its blocks: its deadline, its half-written plan, its swap in vain."""

from typing import Any

import pytest

from scheduler_svc.core.events import StepFailed
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.types import FaultScope, FinishReason, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import MS, Cluster

W = WorkerId("w")


def cluster(*, num_blocks: int = 6, **config: Any) -> Cluster:
    """A worker with eight host blocks; no cache, no margin."""
    options = {"max_inflight_steps": 1, "watermark": 0.0, "enable_prefix_caching": False}
    c = Cluster(make_core(**(options | config)))
    c.begin(W, num_blocks=num_blocks, num_host_blocks=8)
    return c


def state_of(c: Cluster, name: str) -> RequestState:
    found = c.core.explain(RequestId(name.encode()))
    assert found is not None
    return found.state


def assert_all_end_well(c: Cluster) -> None:
    c.run()
    for stream in c.gateway.streams.values():
        assert (stream.tokens, stream.end) == expected_output(stream.arrival)
    c.assert_idle()


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("swap", RequestState.SWAPPED),
        ("recompute", RequestState.WAITING),
        ("lost", RequestState.WAITING),
    ],
)
def test_a_deadline_holds_for_one_that_has_lost_its_blocks(how: str, state: RequestState) -> None:
    c = cluster(preemption_mode="recompute" if how == "lost" else how)
    deadline_ns = c.now_ns + 200 * MS
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8, deadline_ns=deadline_ns),
    )
    if how == "lost":
        c.steps(2)
        c.lose(W)
    else:
        c.run(until=lambda: c.core.stats.num_preemptions > 0)
    assert state_of(c, "second") is state
    assert not c.advance(deadline_ns - c.now_ns - 1).finishes
    (finish,) = c.advance(1).finishes
    assert (finish.request_id, finish.reason) == (b"second", FinishReason.DEADLINE)


def test_a_plan_grows_no_table_of_a_slot_that_it_releases() -> None:
    """Both need their third block at once, of which there is one; "served" gets it and loses all.

    It was there first, and its tenant has had most.
    """
    c = cluster(num_blocks=5, scheduling_policy="fair", preemption_mode="recompute")
    c.arrive_together(
        make_request("served", prompt=8, max_tokens=6, tenant="a"),
        make_request("other", prompt=8, max_tokens=6, tenant="b", tenant_weight=10.0),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    (plan,) = c.last.plans
    assert [preempted.request_id for preempted in plan.preemptions] == [b"served"]
    assert plan.releases == (0,)
    assert [slot for slot, _ in plan.growth] == [1]
    assert_all_end_well(c)


def test_a_swap_is_in_vain_if_steps_before_it_are_lost() -> None:
    """Its copy is done, but of the last tokens in it nothing was computed."""
    c = cluster(preemption_mode="swap", max_inflight_steps=4)
    ready = c.arrive_together(
        *(make_request(n, prompt=10, max_tokens=8) for n in ("first", "second"))
    )
    assert state_of(c, "second") is RequestState.SWAPPED
    (plan,) = (plan for plan in ready.plans if plan.operations)
    assert plan.step > ready.plans[0].step, "steps with the request have not returned"
    failed = StepFailed(
        now_ns=c.now_ns,
        worker_id=W,
        step=plan.step,
        scope=FaultScope.STEP,
        reason="planted",
        operations_done=tuple(operation.op_id for operation in plan.operations),
    )
    anew = [admit for plan in c.feed(failed).plans for admit in plan.admits]
    assert c.core.stats.num_swaps_void == 1
    assert [(admit.request_id, admit.num_computed_tokens) for admit in anew] == [
        (b"first", 0),
        (b"second", 0),
    ]
    assert_all_end_well(c)
