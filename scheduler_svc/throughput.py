"""How fast the workers compute, as measured, and how long the work at hand takes them.

Pure: counts and times come in. Speeds are kept per worker, so that they stay right when workers
come and go. Time in which nothing was in flight does not count: a quiet hour is no slow model.
"""

import math

AVERAGE_S = 2.0
SHOWN_OVER_S = 45.0
HALF_LIFE_S = 900.0
HALF_LIFE_FULL_S = 30.0


class Throughput:
    """Two speeds of one worker, in tokens (of prompts and sampled) per second.

    One is the moving average over AVERAGE_S of work: how fast it goes now. The other is what a
    worker has shown it can do: the most that the average over SHOWN_OVER_S of work has been, so
    that prompts (ten times as fast as sampled tokens) count no more than their share. A few
    streams keep a worker far below that, and it would take more of them as fast: it is halved in
    HALF_LIFE_S of work. While requests wait, workers do what they can: then in HALF_LIFE_FULL_S.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._average = 0.0
        self._shown = 0.0
        self._seconds = 0.0
        self._num_tokens = 0
        self._num_workers = 0
        self._since_ns: int | None = None

    def observe(
        self, *, now_ns: int, num_tokens: int, num_workers: int, is_busy: bool, is_full: bool
    ) -> None:
        """A look at the core: tokens computed since its start, workers there, plans in flight, and
        whether requests wait for what the workers do."""
        since_ns = now_ns if self._since_ns is None else self._since_ns
        num_new, seconds = num_tokens - self._num_tokens, (now_ns - since_ns) / 1e9
        # Those that left since the last look have computed too.
        num_took_part = max(num_workers, self._num_workers, 1)
        if num_new > 0 and seconds > 0:
            self._worked(num_new / seconds / num_took_part, seconds, is_full=is_full)
        # While a long step runs the time counts, and its tokens come at the end.
        if num_new > 0 or not is_busy or self._since_ns is None:
            self._since_ns = now_ns
        self._num_tokens, self._num_workers = num_tokens, num_workers

    def _worked(self, per_s: float, seconds: float, *, is_full: bool) -> None:
        share = 1.0 if self._now == 0.0 else 1.0 - math.exp(-seconds / AVERAGE_S)
        self._now += share * (per_s - self._now)
        # Until there is enough to average over, the mean of all that there was.
        self._seconds += seconds
        share = max(seconds / self._seconds, 1.0 - math.exp(-seconds / SHOWN_OVER_S))
        self._average += share * (per_s - self._average)
        if self._seconds <= SHOWN_OVER_S:
            self._shown = self._average
            return
        half_life_s = HALF_LIFE_FULL_S if is_full else HALF_LIFE_S
        self._shown = max(self._average, self._shown * 2.0 ** (-seconds / half_life_s))

    @property
    def tokens_per_s(self) -> float:
        """Of all workers at their present speed; of one where there is none. 0: not measured."""
        return self._now * max(self._num_workers, 1)

    def time_to_drain_s(self, backlog_tokens: int, num_workers: int) -> float | None:
        """What these workers need for the backlog at the speed that they have shown.

        0 without work. None where it can't be told: without a worker, or before any work.
        """
        if backlog_tokens == 0:
            return 0.0
        if num_workers == 0 or self._shown == 0.0:
            return None
        return backlog_tokens / (self._shown * num_workers)
