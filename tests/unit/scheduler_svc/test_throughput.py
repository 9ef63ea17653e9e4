"""Speed of the workers, and the time that the backlog takes them."""

import pytest

from scheduler_svc.throughput import AVERAGE_S, HALF_LIFE_S, Throughput

PERIOD_S = 0.2


class Watch:
    """Looks at a core that computes as told."""

    def __init__(self, num_workers: int = 1) -> None:
        self.throughput = Throughput()
        self.num_workers = num_workers
        self._now_s, self._num_tokens = 100.0, 0
        self.look(busy=False)

    def look(self, *, busy: bool) -> None:
        self.throughput.observe(
            now_ns=round(self._now_s * 1e9),
            num_tokens=self._num_tokens,
            num_workers=self.num_workers,
            is_busy=busy,
        )

    def run(self, per_s: float, seconds: float) -> None:
        """Work at an even speed."""
        for _ in range(round(seconds / PERIOD_S)):
            self._now_s += PERIOD_S
            self._num_tokens += round(per_s * PERIOD_S)
            self.look(busy=True)

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
    assert watch.drain_s(8000) == pytest.approx(8, rel=1e-3), (
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


def test_a_few_streams_do_not_make_the_work_look_longer() -> None:
    """A worker that runs one request is far from what it can do."""
    watch = Watch()
    watch.run(1000, 20)
    watch.run(30, 10 * AVERAGE_S)
    assert watch.throughput.tokens_per_s == pytest.approx(30, rel=0.05)
    assert watch.drain_s(5000) == pytest.approx(5, rel=0.05)


def test_a_speed_of_long_ago_fades() -> None:
    watch = Watch()
    watch.run(1000, 20)
    watch.run(30, HALF_LIFE_S)
    assert watch.drain_s(5000) == pytest.approx(10, rel=0.05)
