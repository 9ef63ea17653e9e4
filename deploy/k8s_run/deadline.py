"""The one bound of a whole run; every longer wait ends with it."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from deploy.k8s_run.errors import LateError


class Deadline:
    """So many seconds from now on."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._now = now
        self._ends_at = now() + limit_s

    def left_s(self) -> float:
        """Seconds; never negative."""
        return max(0.0, self._ends_at - self._now())

    def within(self, limit_s: float) -> float:
        """The bound of something that has one of its own. Raises LateError after the end."""
        self.check()
        return min(limit_s, self.left_s())

    def check(self) -> None:
        """Raises LateError after the end."""
        if self.left_s() <= 0.0:
            raise self._late()

    async def bound(self, work: Awaitable[None]) -> None:
        """Waits for it and cancels it at the end. Raises LateError then."""
        try:
            async with asyncio.timeout(self.left_s()) as limit:
                await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late() from None

    def _late(self) -> LateError:
        return LateError(f"took too long, over {self.limit_s:.0f} s")
