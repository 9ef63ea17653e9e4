"""The process's monotonic clock."""

import time


class MonotonicClock:
    """Implements ports.Clock."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary moment."""
        return time.monotonic_ns()
