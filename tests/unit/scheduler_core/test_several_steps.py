"""Plans that stand for several steps: one message for equal decode steps planned in one go."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.events import RequestCancelled, StepCompleted
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import FinishReason
from tests.builders import expected_output, make_core, make_request
from tests.cluster import MS, Cluster


def cluster(depth: int, **options: Any) -> Cluster:
    c = Cluster(make_core(max_inflight_steps=depth))
    c.begin(**options)
    return c


def sizes(plans: tuple[StepPlan, ...]) -> list[int]:
    return [plan.num_steps for plan in plans]


def answer(c: Cluster, count: int) -> tuple[StepPlan, ...]:
    """So many results that are all there before the next plan."""
    for _ in range(count):
        c.now_ns += MS
        c.core.feed(c.result())
    return c.round().plans


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_an_empty_pipeline_is_filled_by_one_plan_for_all_decodes(depth: int) -> None:
    c = cluster(depth)
    ready = c.arrive(make_request("a", prompt=4, max_tokens=30))
    assert sizes(ready.plans) == [1, depth - 1][:depth]
    assert c.core.view().workers[0].num_steps_in_flight == depth
    c.run()
    assert c.output("a") == expected_output(make_request("a", prompt=4, max_tokens=30))[0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_results_that_come_together_are_answered_by_one_plan(count: int) -> None:
    c = cluster(8)
    c.arrive(make_request("a", prompt=4, max_tokens=60))
    c.steps(9)
    assert sizes(answer(c, count)) == [count]
    c.run()
    assert len(c.output("a")) == 60


def test_blocks_of_all_steps_come_with_the_first() -> None:
    c = cluster(8, block_size=2)
    ready = c.arrive(make_request("a", prompt=2, max_tokens=40))
    _, decodes = ready.plans
    assert (decodes.num_steps, len(decodes.growth)) == (7, 4)
    assert len(c.workers[decodes.worker_id].plans) == 8
    c.run()
    assert c.end("a") is FinishReason.LENGTH


def test_a_prefill_in_chunks_is_not_repeated() -> None:
    """Rows of more than a token are planned step by step, even if they are equal."""
    c = cluster(4, max_num_batched_tokens=4)
    ready = c.arrive(make_request("a", prompt=12, max_tokens=9))
    assert sizes(ready.plans) == [1, 1, 1, 1]


def test_a_plan_ends_where_a_row_ends_by_length() -> None:
    c = cluster(8)
    ready = c.arrive_together(
        make_request("a", prompt=4, max_tokens=3), make_request("b", prompt=4, max_tokens=40)
    )
    assert sizes(ready.plans) == [1, 2, 5]
    c.run()
    assert (len(c.output("a")), len(c.output("b"))) == (3, 40)


def test_what_is_new_begins_a_plan_of_its_own() -> None:
    c = cluster(8)
    c.arrive(make_request("a", prompt=4, max_tokens=60))
    c.arrive(make_request("b", prompt=4, max_tokens=60))
    c.steps(9)
    for _ in range(3):
        c.core.feed(c.result())
    gone = RequestCancelled(now_ns=c.now_ns, request_id=make_request("b").request_id)
    plans = c.feed(gone).plans
    assert sizes(plans) == [3]
    assert plans[0].releases


@pytest.mark.parametrize("what", ["reset", "releases", "changed", "admits", "operations"])
def test_a_plan_that_brings_anything_but_blocks_is_not_joined(what: str) -> None:
    c = cluster(4)
    c.arrive(make_request("a", max_tokens=30))
    (plan,) = c.steps(6).plans
    assert plan.and_then(plan) is not None
    news: dict[str, Any] = {what: (1,)}
    assert plan.and_then(replace(plan, **news)) is None


def test_two_workers_never_share_a_plan() -> None:
    c = Cluster(make_core(max_inflight_steps=4))
    for name in ("w0", "w1"):
        c.begin(name)
    ready = c.arrive_together(*(make_request(f"r{i}", max_tokens=30) for i in range(2)))
    assert sorted((plan.worker_id, plan.num_steps) for plan in ready.plans) == [
        ("w0", 1), ("w0", 3), ("w1", 1), ("w1", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("failing", [1, 2, 4, 7])
def test_what_follows_a_failed_step_in_its_plan_is_void(failing: int) -> None:
    c = cluster(8)
    c.arrive(make_request("a", prompt=4, max_tokens=20))
    c.steps(failing)
    c.step(fail=True)
    c.run()
    assert c.output("a") == expected_output(make_request("a", prompt=4, max_tokens=20))[0]
    assert c.core.stats.num_failed_steps == 1


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_a_worker_lost_within_a_plan_of_several_steps_loses_no_token(num_steps: int) -> None:
    c = cluster(8)
    c.arrive(make_request("a", prompt=4, max_tokens=20))
    c.steps(num_steps)
    c.lose("w")
    c.begin()
    c.run()
    assert c.output("a") == expected_output(make_request("a", prompt=4, max_tokens=20))[0]


@pytest.mark.parametrize("stop_after", [2, 4, 6])
def test_a_row_that_stops_within_a_plan_is_skipped_by_the_rest(stop_after: int) -> None:
    c = cluster(8)
    c.arrive(make_request("a", prompt=4, max_tokens=20, stop_after=stop_after))
    c.run()
    assert (len(c.output("a")), c.end("a")) == (stop_after, FinishReason.STOP)
    assert c.core.stats.num_wasted_rows == 7
    c.assert_idle()


def test_results_are_counted_by_their_own_step() -> None:
    c = cluster(4)
    c.arrive(make_request("a", prompt=4, max_tokens=20))
    c.steps(2)
    event = c.result()
    assert isinstance(event, StepCompleted)
    c.core.feed(replace(event, step=event.step + 1))
    assert c.core.stats.num_stale_results == 1
    c.feed(event)
    assert c.core.view().workers[0].num_steps_in_flight == 4
