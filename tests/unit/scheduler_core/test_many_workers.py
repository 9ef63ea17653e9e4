"""What many workers cost that have nothing to do: counted calls, so no clock and no flakiness."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from scheduler_svc.core import planner
from tests.builders import GATEWAY, make_core, make_request
from tests.cluster import Cluster

NUM_WORKERS = 16


def idle_cluster(**config: Any) -> Cluster:
    """Workers that have answered their first plan; each has a gateway of its own besides."""
    c = Cluster(make_core(hash_key=b"k", **({"max_inflight_steps": 1} | config)))
    for number in range(NUM_WORKERS):
        name = f"w{number}"
        size = {"num_slots": 4, "num_blocks": 256, "max_num_batched_tokens": 256}
        c.begin(name, gateways=(GATEWAY, name), **size)
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
