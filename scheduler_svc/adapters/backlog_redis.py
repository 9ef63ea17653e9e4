"""Publishes how much work waits, for the gateways' bound and their Retry-After."""

import asyncio

from scheduler_svc.adapters import redis_scripts
from scheduler_svc.adapters.redis_access import FencedRedis, RedisAwayError
from scheduler_svc.ports import Clock, Core
from scheduler_svc.throughput import Throughput
from servicekit import redis_keys

PERIOD_S = 0.2
TTL_MS = 10_000
REFRESH_NS = 2_000_000_000


class BacklogPublisher:
    """Writes the backlog hash when it has changed, and often enough to keep it alive.

    It looks at the core each PERIOD_S, and so keeps the speed that metrics and the hash tell.
    """

    def __init__(self, access: FencedRedis, *, clock: Clock, core: Core) -> None:
        self._access = access
        self._clock = clock
        self._core = core
        self.throughput = Throughput()

    async def run(self) -> None:
        """Publishes until cancelled. Raises DeposedError."""
        written: list[str] = []
        written_ns = 0
        self._look(self._clock.now_ns())
        while True:
            await asyncio.sleep(PERIOD_S)
            now_ns = self._clock.now_ns()
            values = self._look(now_ns)
            if values == written and now_ns - written_ns < REFRESH_NS:
                continue
            try:
                await self._access.run(
                    redis_scripts.BACKLOG,
                    [redis_keys.backlog(self._access.model)],
                    [*values, str(TTL_MS)],
                )
            except RedisAwayError:
                continue
            written, written_ns = values, now_ns

    def _look(self, now_ns: int) -> list[str]:
        """Requests, tokens, tokens per second, as the hash has them."""
        stats, view = self._core.stats, self._core.view()
        self.throughput.observe(
            now_ns=now_ns,
            num_tokens=stats.num_prompt_tokens + stats.num_generation_tokens,
            num_workers=len(view.workers),
            is_busy=any(worker.num_steps_in_flight for worker in view.workers),
            is_full=view.num_waiting + view.num_swapped > 0,
        )
        return [
            str(view.num_waiting + view.num_running + view.num_swapped),
            str(view.backlog_tokens),
            f"{self.throughput.tokens_per_s:.1f}",
        ]
