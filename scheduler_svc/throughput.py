"""How fast the workers compute, as measured, and how long the work at hand takes them.

Pure: counts and times come in. Speeds are kept per worker, so that they stay right when workers
come and go. Time in which nothing was in flight does not count: a quiet hour is no slow model.
"""

import math

AVERAGE_S = 2.0
HALF_LIFE_S = 900.0


class Throughput:
    """Two speeds of one worker, in tokens (of prompts and sampled) per second.

    One is the moving average over AVERAGE_S of work: how fast it goes now. The other is the most
    that this average has been, halved every HALF_LIFE_S of work: what a worker has shown it can
    do. A few streams keep a worker far below that, and it would take more of them as fast.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._shown = 0.0
        self._num_tokens = 0
        self._num_workers = 0
        self._since_ns: int | None = None

    def observe(self, *, now_ns: int, num_tokens: int, num_workers: int, is_busy: bool) -> None:
        """A look at the core: tokens computed since its start, workers there, plans in flight."""
        since_ns = now_ns if self._since_ns is None else self._since_ns
        num_new, seconds = num_tokens - self._num_tokens, (now_ns - since_ns) / 1e9
        # Those that left since the last look have computed too.
        num_took_part = max(num_workers, self._num_workers, 1)
        if num_new > 0 and seconds > 0:
            self._average(num_new / seconds / num_took_part, seconds)
        # While a long step runs the time counts, and its tokens come at the end.
        if num_new > 0 or not is_busy or self._since_ns is None:
            self._since_ns = now_ns
        self._num_tokens, self._num_workers = num_tokens, num_workers

    def _average(self, per_s: float, seconds: float) -> None:
        share = 1.0 if self._now == 0.0 else 1.0 - math.exp(-seconds / AVERAGE_S)
        self._now += share * (per_s - self._now)
        self._shown = max(self._now, self._shown * 2.0 ** (-seconds / HALF_LIFE_S))

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
