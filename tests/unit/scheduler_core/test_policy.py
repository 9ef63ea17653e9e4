"""Policies are pure functions."""

import pytest

from scheduler_svc.core import CoreConfig, policy
from tests.builders import make_core


def admits(name: str, num_running: int, num_admitted: int) -> bool:
    return policy.may_admit(
        name, num_running=num_running, num_admitted=num_admitted, static_batch_size=4
    )


@pytest.mark.parametrize("num_running", [0, 3, 400])
def test_fcfs_always_admits(num_running: int) -> None:
    assert admits("fcfs", num_running, 0)


@pytest.mark.parametrize(
    ("num_running", "num_admitted", "may"),
    [(0, 0, True), (3, 3, True), (4, 4, False), (1, 0, False), (4, 3, False)],
)
def test_static_fills_an_empty_worker_once(num_running: int, num_admitted: int, may: bool) -> None:
    assert admits("static", num_running, num_admitted) is may


def cost(uncached: int, pending: int = 0, running: int = 0) -> int:
    return policy.placement_cost(
        num_uncached=uncached, num_pending_prefill=pending, num_running=running
    )


def test_a_hit_an_idle_worker_and_a_short_queue_are_cheaper() -> None:
    assert cost(10) < cost(200)
    assert cost(10, running=1) < cost(10, running=2)
    assert cost(10, pending=0) < cost(10, pending=64)
    assert cost(16, running=4) < cost(400, running=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduling_policy", "lottery"),
        ("max_inflight_steps", 0),
        ("max_inflight_steps", 9),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("static_batch_size", 0),
        ("max_skips", 0),
        ("max_step_failures", 0),
        ("max_attempts", 0),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        make_core(**{field: value})


def test_the_defaults_are_valid() -> None:
    CoreConfig().validate()
