"""Policies are pure functions."""

import pytest

from scheduler_svc.core import CoreConfig, policy
from scheduler_svc.core.request import Rank
from scheduler_svc.core.types import CostProfile
from tests.builders import make_core


def most(name: str, num_running: int, num_seats: int) -> int:
    return policy.max_admissions(
        name, num_seats=num_seats, num_running=num_running, static_batch_size=4
    )


@pytest.mark.parametrize("num_running", [0, 3, 400])
@pytest.mark.parametrize("name", ["fcfs", "fair"])
def test_fcfs_and_fair_fill_all_slots(name: str, num_running: int) -> None:
    assert most(name, num_running, num_seats=7) == 7


@pytest.mark.parametrize(
    ("num_running", "num_seats", "num_admitted"), [(0, 9, 4), (0, 3, 3), (1, 9, 0), (4, 9, 0)]
)
def test_static_fills_an_empty_worker_once(
    num_running: int, num_seats: int, num_admitted: int
) -> None:
    assert most("static", num_running, num_seats) == num_admitted


def cost(uncached: int, pending: int = 0, running: int = 0) -> int:
    return policy.placement_cost(num_uncached=uncached, num_pending=pending, num_running=running)


def test_a_hit_an_idle_worker_and_a_short_queue_are_cheaper() -> None:
    assert cost(10) < cost(200)
    assert cost(10, running=1) < cost(10, running=2)
    assert cost(10, pending=0) < cost(10, pending=64)
    assert cost(16, running=4) < cost(400, running=0)


def place(priority: int, arrived_ns: int, ageing_ns: int = 10) -> Rank:
    return policy.rank(priority=priority, arrived_ns=arrived_ns, sequence=7, ageing_ns=ageing_ns)


def test_a_rank_is_an_arrival_moved_by_its_class() -> None:
    assert place(0, 100) == place(1, 90) == place(-3, 130)
    assert place(1, 100) < place(0, 111)
    assert place(0, 109) < place(1, 100)
    assert place(-(2**31), 0) < place(2**31 - 1, 0)


def test_without_ageing_a_better_class_is_always_first() -> None:
    assert place(0, 10**18, ageing_ns=0) < place(1, 0, ageing_ns=0)


def test_who_has_had_a_context_more_waits_for_those_that_cannot_be_served() -> None:
    assert policy.may_lead(counter=139.0, least=100.0, max_lead=40)
    assert not policy.may_lead(counter=140.0, least=100.0, max_lead=40)
    assert policy.may_lead(counter=1e9, least=float("inf"), max_lead=40)


def too_late(deadline_ns: int | None, num_uncached: int = 10, min_tokens: int = 0) -> bool:
    return policy.is_too_late(
        now_ns=1000,
        deadline_ns=deadline_ns,
        num_uncached=num_uncached,
        min_tokens=min_tokens,
        budget_tokens=8,
        cost=CostProfile(step_us=5.0, token_us=1.0),
    )


@pytest.mark.parametrize(
    ("num_uncached", "min_tokens", "needed_us"), [(10, 0, 20), (8, 0, 13), (8, 1, 13), (8, 4, 28)]
)
def test_the_least_time_is_that_of_the_prompt_and_min_tokens(
    num_uncached: int, min_tokens: int, needed_us: int
) -> None:
    assert not too_late(1000 + needed_us * 1000, num_uncached, min_tokens)
    assert too_late(1000 + needed_us * 1000 - 1, num_uncached, min_tokens)


def test_without_a_deadline_nothing_is_too_late() -> None:
    assert not too_late(None, 10**9)


@pytest.mark.parametrize(("max_gap_us", "allowed"), [(100, 41), (20, 3), (1, 3)])
def test_prefill_gets_what_the_gap_leaves(max_gap_us: int, allowed: int) -> None:
    cost = CostProfile(step_us=10.0, token_us=2.0)
    assert allowed == policy.prefill_allowance(
        max_gap_ns=max_gap_us * 1000, num_decodes=4, floor_tokens=3, cost=cost
    )


def test_at_an_unknown_cost_prefill_is_not_limited() -> None:
    unlimited = policy.prefill_allowance(
        max_gap_ns=1, num_decodes=4, floor_tokens=3, cost=CostProfile()
    )
    assert unlimited is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduling_policy", "lottery"),
        ("max_inflight_steps", -1),
        ("max_inflight_steps", 9),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("static_batch_size", 0),
        ("max_skips", 0),
        ("max_step_failures", 0),
        ("max_attempts", 0),
        ("max_prefill_gap_ns", -1),
        ("priority_ageing_ns", -1),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        make_core(**{field: value})


def test_the_defaults_are_valid() -> None:
    CoreConfig().validate()
