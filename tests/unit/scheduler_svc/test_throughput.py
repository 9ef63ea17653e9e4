"""Speed of the workers, and the time that the backlog takes them."""

import pytest

from scheduler_svc.throughput import (
    HALF_LIFE_FULL_S,
    HALF_LIFE_S,
    SHOWN_OVER_S,
    Throughput,
)

PERIOD_S = 0.2


class Watch:
    """Looks at a core that computes as told."""

    def __init__(self, num_workers: int = 1) -> None:
        self.throughput = Throughput()
        self.num_workers = num_workers
        self._now_s, self._num_tokens = 100.0, 0
        self.look(busy=False)

    def look(self, *, busy: bool, full: bool = False) -> None:
        self.throughput.observe(
            now_ns=round(self._now_s * 1e9),
            num_tokens=self._num_tokens,
            num_workers=self.num_workers,
            is_busy=busy,
            is_full=full,
        )

    def run(self, per_s: float, seconds: float, *, full: bool = False) -> None:
        """Work at an even speed; full: more requests than the workers take."""
        for _ in range(round(seconds / PERIOD_S)):
            self._now_s += PERIOD_S
            self._num_tokens += round(per_s * PERIOD_S)
            self.look(busy=True, full=full)

    def step(self, num_tokens: int, seconds: float) -> None:
        """One long step: nothing comes until its end."""
        for _ in range(round(seconds / PERIOD_S) - 1):
            self._now_s += PERIOD_S
            self.look(busy=True)
        self._now_s += PERIOD_S
        self._num_tokens += num_tokens
        self.look(busy=True)

    def rest(self, seconds: float) -> None:
        """Nothing to do."""
        for _ in range(round(seconds / PERIOD_S)):
            self._now_s += PERIOD_S
            self.look(busy=False)

    def drain_s(self, backlog_tokens: int) -> float | None:
        return self.throughput.time_to_drain_s(backlog_tokens, self.num_workers)


def test_it_is_the_backlog_over_the_speed() -> None:
    watch = Watch()
    watch.run(1000, 20)
    assert watch.throughput.tokens_per_s == pytest.approx(1000)
    assert watch.drain_s(5000) == pytest.approx(5)


def test_without_work_it_is_zero_whoever_is_there() -> None:
    assert Watch().drain_s(0) == 0
    assert Watch(num_workers=0).drain_s(0) == 0


def test_before_any_work_nothing_can_be_told() -> None:
    assert Watch().throughput.tokens_per_s == 0
    assert Watch().drain_s(100) is None


def test_without_workers_nothing_can_be_told() -> None:
    """No number is right: a first worker is brought by the tokens that wait, not by this."""
    watch = Watch()
    watch.run(1000, 20)
    watch.num_workers = 0
    watch.rest(1)
    assert watch.drain_s(5000) is None
    assert watch.throughput.tokens_per_s == pytest.approx(1000), "what one more would do"
    watch.num_workers = 1
    assert watch.drain_s(5000) == pytest.approx(5), "as soon as it is back"


def test_it_follows_the_number_of_workers_at_once() -> None:
    watch = Watch(num_workers=4)
    watch.run(4000, 20)
    assert watch.drain_s(8000) == pytest.approx(2)
    watch.num_workers = 1
    watch.run(1000, 20)
    assert watch.drain_s(8000) == pytest.approx(8, rel=0.01), (
        "no speed of those that have left is kept"
    )
    assert watch.throughput.tokens_per_s == pytest.approx(1000, rel=1e-3)


def test_an_idle_time_is_no_slow_model() -> None:
    watch = Watch()
    watch.run(1000, 20)
    watch.rest(3600)
    watch.run(1000, 1)
    assert watch.throughput.tokens_per_s == pytest.approx(1000)


def test_a_long_step_is_no_fast_model() -> None:
    """Its time counts from its beginning, not from the last look."""
    watch = Watch()
    for _ in range(10):
        watch.step(256, 2.0)
    assert watch.throughput.tokens_per_s == pytest.approx(128)


def test_prompts_at_the_start_are_no_promise() -> None:
    """They go ten times as fast as what is sampled then."""
    watch = Watch()
    watch.run(30_000, 2)
    watch.run(3_200, 58)
    assert watch.drain_s(2_000_000) == pytest.approx(2_000_000 / 3_200, rel=0.3)


def test_prompts_between_count_their_share() -> None:
    watch = Watch()
    watch.run(3_200, 2 * SHOWN_OVER_S)
    watch.run(30_000, 2)
    watch.run(3_200, 10)
    assert watch.drain_s(32_000) == pytest.approx(10, rel=0.3)


def test_a_few_streams_do_not_make_the_work_look_longer() -> None:
    """A worker that runs one request is far from what it can do."""
    watch = Watch()
    watch.run(1000, 2 * SHOWN_OVER_S)
    watch.run(30, 2 * SHOWN_OVER_S)
    assert watch.throughput.tokens_per_s == pytest.approx(30, rel=0.05)
    assert watch.drain_s(5000) == pytest.approx(5, rel=0.1)


def test_workers_that_slow_down_show_it_once_requests_wait() -> None:
    """Then no lack of work explains the speed."""
    watch = Watch()
    watch.run(3000, 2 * SHOWN_OVER_S, full=True)
    watch.run(300, 5 * HALF_LIFE_FULL_S + SHOWN_OVER_S, full=True)
    assert watch.drain_s(3000) == pytest.approx(10, rel=0.15)


def test_a_speed_of_long_ago_fades() -> None:
    watch = Watch()
    watch.run(1000, 2 * SHOWN_OVER_S)
    watch.run(30, HALF_LIFE_S)
    assert watch.drain_s(5000) == pytest.approx(10, rel=0.05)
