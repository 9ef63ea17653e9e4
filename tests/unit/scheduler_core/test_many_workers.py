"""What many workers cost that have nothing to do: counted calls, so no clock and no flakiness."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from scheduler_svc.core import planner
from scheduler_svc.core.sharing import PrefixSharing
from tests.builders import GATEWAY, make_core, make_request
from tests.cluster import Cluster

NUM_WORKERS = 16
BUSY, OTHER = "w10", "w13"
PREFIX = 160


def idle_cluster(**config: Any) -> Cluster:
    """Workers that have answered their first plan; each has a gateway of its own besides."""
    c = Cluster(make_core(hash_key=b"k", **({"max_inflight_steps": 1} | config)))
    for number in range(NUM_WORKERS):
        name = f"w{number}"
        size = {"num_slots": 4, "num_blocks": 256, "max_num_batched_tokens": 256}
        c.begin(name, gateways=(GATEWAY, name), **size)
    return c


def with_a_busy_worker() -> Cluster:
    """One that holds the prefix of family 1, with a step in flight."""
    c = idle_cluster()
    c.arrive(make_request("first", gateway_id=BUSY, prompt=PREFIX, family=1, max_tokens=400))
    c.steps(2, BUSY)
    assert c.workers[c.last.plans[0].worker_id].worker_id == BUSY
    return c


def calls_of(function: Any, do: Callable[[], object]) -> int:
    """How often it is called meanwhile."""
    num_calls = 0

    def tally(frame: FrameType, what: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += what == "call" and frame.f_code is function.__code__

    sys.setprofile(tally)
    try:
        do()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("policy", ["fcfs", "fair", "static"])
def test_idle_workers_are_not_planned_for_while_nothing_waits(policy: str) -> None:
    c = idle_cluster(scheduling_policy=policy)
    c.arrive(make_request("runs", max_tokens=200))
    (busy,) = [worker for worker in c.workers.values() if worker.plans]
    num_plans = num_calls = 0
    for _ in range(20):
        num_calls += calls_of(planner.plan_step, lambda: c.step(busy.worker_id))
        num_plans += len(c.last.plans)
    assert num_plans == 20
    assert num_calls <= 2 * num_plans


def test_an_idle_worker_is_planned_for_as_soon_as_it_has_to_be_told_something() -> None:
    c = idle_cluster()
    c.arrive(make_request("goes", max_tokens=200))
    (busy,) = [worker for worker in c.workers.values() if worker.plans]
    c.cancel("goes")
    c.step(busy.worker_id)
    (plan,) = c.last.plans
    assert plan.worker_id == busy.worker_id
    assert plan.releases
    c.join("later")
    assert [plan.reset for plan in c.last.plans] == [True]


def test_one_that_belongs_on_a_busy_worker_is_matched_with_all_others_once() -> None:
    """Not in the plan of each idle worker; and it gets to where its prefix is."""
    c = with_a_busy_worker()
    comes = make_request("comes", prompt=PREFIX, family=1, max_tokens=4)
    assert calls_of(PrefixSharing.match, lambda: c.arrive(comes)) <= 3 * NUM_WORKERS
    assert not c.last.plans
    c.step(BUSY)
    ((admit,),) = [plan.admits for plan in c.last.plans]
    assert admit.request_id == comes.request_id
    assert admit.num_cached_tokens > PREFIX // 2


def test_what_was_seen_holds_until_something_changes() -> None:
    """The busy worker is lost: the request goes to another one in the same round."""
    c = with_a_busy_worker()
    comes = make_request("comes", prompt=PREFIX, family=1, max_tokens=4)
    c.arrive(comes)
    assert not c.last.plans
    c.lose(BUSY)
    admitted = {admit.request_id for plan in c.last.plans for admit in plan.admits}
    assert comes.request_id in admitted


def test_of_equals_the_one_that_is_planned_has_it() -> None:
    """What is cached on the one saves as much as the request beside it costs on the other."""
    c = with_a_busy_worker()
    c.arrive(make_request("had", gateway_id=OTHER, prompt=PREFIX - 16, family=1, max_tokens=1))
    c.steps(2, OTHER)
    c.arrive(make_request("comes", prompt=PREFIX + 1, family=1, max_tokens=4))
    ((plan, admit),) = [(plan, admit) for plan in c.last.plans for admit in plan.admits]
    assert plan.worker_id == OTHER
    assert admit.num_computed_tokens == PREFIX - 16


def test_while_its_worker_is_busy_it_is_not_matched_with_all_others_again() -> None:
    """Results come and go elsewhere: each plan compares its worker with the remembered one."""
    c = with_a_busy_worker()
    c.arrive(make_request("other", gateway_id=OTHER, prompt=9, max_tokens=400))
    c.arrive(make_request("comes", prompt=PREFIX, family=1, max_tokens=4))
    for _ in range(4):
        num_calls = calls_of(PrefixSharing.match, lambda: c.step(OTHER))
        assert [plan.worker_id for plan in c.last.plans] == [OTHER]
        assert 0 < num_calls <= 2 * NUM_WORKERS


def test_a_worker_whose_plans_are_full_is_not_waited_for() -> None:
    """Its prompt is in a plan, so nothing of it is left to plan, and yet it is in the way."""
    c = Cluster(make_core(max_inflight_steps=1))
    for name in ("a", "b"):
        c.begin(name, gateways=(GATEWAY, name), max_num_batched_tokens=256, num_blocks=256)
    c.arrive(make_request("long", gateway_id="a", prompt=256, max_tokens=4))
    assert [plan.worker_id for plan in c.last.plans] == ["a"]
    shorts = [make_request(f"short-{n}", prompt=64, family=n, max_tokens=4) for n in range(3)]
    c.arrive_together(*shorts)
    assert [(plan.worker_id, len(plan.admits)) for plan in c.last.plans] == [("b", 3)]


def two_busy_workers(*, num_at_a: int = 2) -> Cluster:
    """With steps in flight; `a` has more to do than `b`, with two by less than a prompt."""
    c = Cluster(make_core(hash_key=b"k", max_inflight_steps=1))
    for name, num_running in (("a", num_at_a), ("b", 1)):
        size = {"num_slots": 40, "num_blocks": 1000, "max_num_batched_tokens": 256}
        c.begin(name, gateways=(GATEWAY, name), **size)
        for number in range(num_running):
            c.arrive(make_request(f"{name}{number}", gateway_id=name, prompt=9, max_tokens=400))
            c.step(name)
    return c


def test_many_that_wait_for_another_worker_are_not_compared_in_each_plan() -> None:
    """What is less to do there is less for each of them, while nothing of it is cached here."""
    c = two_busy_workers(num_at_a=12)
    waiting = [make_request(f"w{n}", prompt=24, family=n, max_tokens=4) for n in range(4)]
    c.arrive_together(*waiting)
    c.step("a")  # where each would go is found out
    for _ in range(3):
        assert calls_of(planner.cost_at, lambda: c.step("a")) == 0
        assert [(plan.worker_id, plan.admits) for plan in c.last.plans] == [("a", ())]
    c.step("b")
    assert [(plan.worker_id, len(plan.admits)) for plan in c.last.plans] == [("b", 4)]


def test_those_that_wait_do_not_all_wait_for_one_worker() -> None:
    """Each counts those before it where they will go, so all workers are given work at once."""
    c = two_busy_workers()
    waiting = [make_request(f"w{n}", prompt=PREFIX, family=n, max_tokens=4) for n in range(4)]
    c.arrive_together(*waiting)
    c.step("a")
    assert [(plan.worker_id, len(plan.admits)) for plan in c.last.plans] == [("a", 2)]
    c.step("b")
    assert [(plan.worker_id, len(plan.admits)) for plan in c.last.plans] == [("b", 2)]


@pytest.mark.parametrize("policy", ["fcfs", "fair", "static"])
def test_a_burst_is_spread_within_a_step_of_each_worker(policy: str) -> None:
    """However many there are: nobody waits for a worker while another has room for it."""
    c = idle_cluster(scheduling_policy=policy)
    for number in range(NUM_WORKERS):
        c.arrive(make_request(f"r{number}", prompt=9 + number, family=number, max_tokens=400))
    c.arrive_together(
        *(make_request(f"b{n}", prompt=64, family=20 + n, max_tokens=400) for n in range(32))
    )
    for number in range(NUM_WORKERS):
        c.step(f"w{number}")
    assert c.core.view().num_waiting == 0 or policy == "static"
    running = [len(worker.running) for worker in c.core._workers.values()]
    assert max(running) - min(running) <= 1


def test_one_that_waits_for_another_worker_goes_where_its_prompt_has_come_to_be_cached() -> None:
    c = two_busy_workers()
    comes = make_request("comes", prompt=PREFIX, family=1, max_tokens=4)
    c.arrive_together(comes, make_request("beside", prompt=PREFIX, family=2, max_tokens=4))
    c.step("a")
    c.arrive(make_request("same", gateway_id="a", prompt=PREFIX + 1, family=1, max_tokens=400))
    c.step("a")
    ((admit,),) = [plan.admits for plan in c.last.plans]
    assert admit.request_id != comes.request_id
    c.step("a")
    ((admit,),) = [plan.admits for plan in c.last.plans]
    assert admit.request_id == comes.request_id
    assert admit.num_computed_tokens >= PREFIX - 16
