"""When a worker is lost, on a clock that the test turns."""

import pytest

from scheduler_svc.adapters.loss_rules import Verdict, WorkerHealth
from scheduler_svc.core.types import CostProfile

MS = 1_000_000
S = 1_000 * MS


class Turned:
    """A WorkerHealth and its clock; time passes in steps of 50 ms, as in production."""

    def __init__(self, *, step_us: float = 0.0, token_us: float = 0.0, patience: int = 1) -> None:
        self.now_ns = 100 * S
        self.health = WorkerHealth(
            cost=CostProfile(step_us=step_us, token_us=token_us),
            grace_ns=S,
            now_ns=self.now_ns,
            patience=patience,
        )

    def wait(self, seconds: float, *, heartbeats: bool = False) -> Verdict | None:
        """Lets time pass; returns the first verdict."""
        end_ns = self.now_ns + round(seconds * S)
        while self.now_ns < end_ns:
            self.now_ns += 50 * MS
            if heartbeats:
                self.health.heard(self.now_ns)
            verdict = self.health.check(self.now_ns)
            if verdict is not None:
                return verdict
        return None

    def send(self, step: int, num_tokens: int = 1) -> None:
        self.health.sent(step, num_tokens, self.now_ns)

    def answer(self) -> None:
        self.health.heard(self.now_ns)
        self.health.returned(self.now_ns)


def test_a_broken_stream_has_the_grace() -> None:
    turned = Turned()
    turned.health.stream_broken(turned.now_ns)
    assert turned.wait(1.0) is None
    verdict = turned.wait(0.1)
    assert verdict is not None
    assert verdict.lost


def test_a_resync_within_the_grace_forgives() -> None:
    turned = Turned()
    turned.health.stream_broken(turned.now_ns)
    turned.wait(0.9)
    turned.health.stream_broken(turned.now_ns)  # a dial that failed does not extend it
    turned.wait(0.05)
    turned.health.stream_open(turned.now_ns)
    assert turned.wait(1.5) is None


def test_silence_with_a_plan_in_flight_is_a_loss_after_two_seconds() -> None:
    turned = Turned()
    turned.send(1)
    assert turned.wait(2.0) is None
    verdict = turned.wait(0.1)
    assert verdict == Verdict(reason="no sign of life", lost=True)


def test_silence_without_plans_costs_the_stream_only() -> None:
    turned = Turned()
    verdict = turned.wait(3)
    assert verdict == Verdict(reason="no sign of life", lost=False)


def test_a_long_expected_step_allows_a_long_silence() -> None:
    turned = Turned(step_us=100_000, token_us=1_000)
    turned.send(1, num_tokens=900)  # one second expected
    assert turned.wait(5.0) is None
    assert turned.wait(0.1) is not None


def test_heartbeats_give_a_step_ten_seconds() -> None:
    turned = Turned()
    turned.send(1)
    assert turned.wait(10.0, heartbeats=True) is None
    verdict = turned.wait(0.1, heartbeats=True)
    assert verdict == Verdict(reason="a step does not end", lost=True, stuck=True)


def test_heartbeats_give_a_slow_step_five_times_its_expected_time() -> None:
    turned = Turned(step_us=4_000_000)
    turned.send(1)
    assert turned.wait(20.0, heartbeats=True) is None
    assert turned.wait(0.1, heartbeats=True) is not None


def test_measured_steps_count_where_the_profile_says_too_little() -> None:
    turned = Turned(step_us=1)
    for step in range(30):
        turned.send(step)
        turned.wait(3.0, heartbeats=True)
        turned.answer()
    turned.send(30)
    assert turned.wait(14.0, heartbeats=True) is None


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    turned = Turned()
    turned.send(1)
    turned.send(2)
    turned.wait(9.0, heartbeats=True)
    turned.answer()
    assert turned.wait(9.0, heartbeats=True) is None


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    turned = Turned()
    turned.send(1)
    turned.wait(1.0)
    turned.now_ns += 60 * S
    assert turned.health.check(turned.now_ns) is None
    assert turned.wait(0.9) is None
    assert turned.wait(0.2) is not None


@pytest.mark.parametrize("idle_s", [0, 600])
def test_a_pause_of_this_process_is_no_time_of_a_step(idle_s: int) -> None:
    """Also of one that was sent to a worker which had had nothing to do for longer than that."""
    turned = Turned()
    turned.wait(idle_s, heartbeats=True)
    turned.send(1)
    turned.wait(1.0, heartbeats=True)
    turned.now_ns += 60 * S
    assert turned.wait(8.5, heartbeats=True) is None
    assert turned.wait(1.0, heartbeats=True) == Verdict(
        reason="a step does not end", lost=True, stuck=True
    )


def test_a_pause_is_no_time_of_a_step_that_began_with_a_result() -> None:
    turned = Turned()
    turned.send(1)
    turned.send(2)
    turned.wait(1.9, heartbeats=True)
    turned.answer()
    turned.now_ns += round(1.8 * S)
    assert turned.wait(9.5, heartbeats=True) is None


def test_a_pause_of_this_process_is_no_part_of_the_grace() -> None:
    turned = Turned()
    turned.health.stream_broken(turned.now_ns)
    turned.wait(0.5)
    turned.now_ns += 60 * S
    assert turned.wait(0.4) is None
    assert turned.wait(0.2) is not None


def test_patience_stretches_the_time_a_step_may_take_but_not_silence() -> None:
    patient = Turned(patience=4)
    patient.send(1)
    assert patient.wait(39.0, heartbeats=True) is None
    verdict = patient.wait(1.5, heartbeats=True)
    assert verdict is not None
    assert verdict.lost
    assert verdict.stuck
    silent = Turned(patience=4)
    silent.send(1)
    verdict = silent.wait(2.5)
    assert verdict is not None
    assert not verdict.stuck
