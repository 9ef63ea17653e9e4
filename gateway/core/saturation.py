"""Whether the event loop has more to do than it can: no rest between one batch and the next.

A gateway that is behind reads one batch after the other, however many wait at the worker; what they
hold then had better go out together.
"""

from collections.abc import Callable

# The loop's thread wanted a core for so much of the time between two batches, so often in a row.
BUSY = 0.9
TIMES = 4


class Saturation:
    """Asked once for each batch. Both clocks in seconds; wanted_s is that of the loop's thread."""

    def __init__(self, wall_s: Callable[[], float], wanted_s: Callable[[], float]) -> None:
        self._wall_s, self._wanted_s = wall_s, wanted_s
        self._wall_then_s, self._wanted_then_s = wall_s(), wanted_s()
        self._num_busy = 0

    def seen(self) -> bool:
        """Whether the last TIMES stretches between two calls were busy ones."""
        wall_s, wanted_s = self._wall_s(), self._wanted_s()
        busy = wanted_s - self._wanted_then_s > BUSY * (wall_s - self._wall_then_s)
        self._wall_then_s, self._wanted_then_s = wall_s, wanted_s
        self._num_busy = self._num_busy + 1 if busy else 0
        return self._num_busy >= TIMES
