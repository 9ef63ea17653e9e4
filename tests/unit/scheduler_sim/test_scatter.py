"""Scatter: drawn by seed from what was measured, and nothing without samples."""

import pytest

from scheduler_svc.sim.scatter import MAX_SAMPLES, NEIGHBOURS, Draws, Scatter

SCATTER = Scatter(steps_s=((1.0, 0.5), (1.0, 3.0)), round_trips_s=(0.002, 0.004))


def test_draws_are_samples_the_same_for_a_seed() -> None:
    one, other, third = (Draws(SCATTER, seed) for seed in ("a", "a", "b"))
    steps_s = [one.step_s(2.0) for _ in range(50)]
    trips_s = [one.half_trip_s(1.0) for _ in range(50)]
    assert {*steps_s} == {1.0, 6.0}
    assert {*trips_s} == {0.001, 0.002}
    # Neither row of draws moves the other one.
    assert [other.half_trip_s(1.0) for _ in range(50)] == trips_s
    assert [other.step_s(2.0) for _ in range(50)] == steps_s
    assert [third.step_s(2.0) for _ in range(50)] != steps_s


def test_a_step_scatters_as_steps_of_its_size_do() -> None:
    """Short ones take twice as long as expected, long ones as long."""
    short = tuple((0.01 + 1e-6 * number, 2 * (0.01 + 1e-6 * number)) for number in range(200))
    long = tuple((1.0 + number, 1.0 + number) for number in range(200))
    draws = Draws(Scatter(steps_s=long + short), "a")
    for expected_s, ratio in ((0.001, 2.0), (0.01, 2.0), (100.0, 1.0), (1e6, 1.0)):
        found = [draws.step_s(expected_s) / expected_s for _ in range(100)]
        assert found == pytest.approx([ratio] * 100)
    between = {round(draws.step_s(0.5) / 0.5, 6) for _ in range(100)}
    assert between == {1.0, 2.0}
    few = Draws(Scatter(steps_s=long[: NEIGHBOURS - 1]), "a")
    assert few.step_s(3.0) == pytest.approx(3.0)


def test_without_samples_nothing_varies() -> None:
    draws = Draws(Scatter(), "a")
    assert [draws.step_s(0.3) for _ in range(3)] == [0.3] * 3
    assert [draws.half_trip_s(0.004) for _ in range(3)] == [0.002] * 3


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="expected to take a time"):
        Scatter(steps_s=((0.0, 1.0),))
    with pytest.raises(ValueError, match="0 or more"):
        Scatter(steps_s=((1.0, -0.1),))
    with pytest.raises(ValueError, match="0 or more"):
        Scatter(round_trips_s=(-0.001,))
    with pytest.raises(ValueError, match="at most"):
        Scatter(round_trips_s=(1.0,) * (MAX_SAMPLES + 1))
