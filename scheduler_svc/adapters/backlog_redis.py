"""Publishes how much work waits, for the gateways' bound and their Retry-After."""

import asyncio

from scheduler_svc.adapters import redis_scripts
from scheduler_svc.adapters.redis_access import FencedRedis, RedisAwayError
from scheduler_svc.ports import Clock, Core
from servicekit import redis_keys

PERIOD_S = 0.2
TTL_MS = 10_000
REFRESH_NS = 2_000_000_000
_NEW_SHARE = 0.1


class BacklogPublisher:
    """Writes the backlog hash when it has changed, and often enough to keep it alive.

    tokens_per_s averages over the periods in which tokens were computed, so that an idle time does
    not look like a slow model.
    """

    def __init__(self, access: FencedRedis, *, clock: Clock, core: Core) -> None:
        self._access = access
        self._clock = clock
        self._core = core
        self._tokens_per_s = 0.0

    async def run(self) -> None:
        """Publishes until cancelled. Raises DeposedError."""
        written: list[str] = []
        written_ns = 0
        num_tokens, at_ns = self._num_computed(), self._clock.now_ns()
        while True:
            await asyncio.sleep(PERIOD_S)
            now_ns, total = self._clock.now_ns(), self._num_computed()
            if total > num_tokens:
                self._average((total - num_tokens) / ((now_ns - at_ns) / 1e9))
            num_tokens, at_ns = total, now_ns
            view = self._core.view()
            values = [
                str(view.num_waiting + view.num_running + view.num_swapped),
                str(view.backlog_tokens),
                f"{self._tokens_per_s:.1f}",
            ]
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

    def _num_computed(self) -> int:
        stats = self._core.stats
        return stats.num_prompt_tokens + stats.num_generation_tokens

    def _average(self, rate: float) -> None:
        if self._tokens_per_s == 0.0:
            self._tokens_per_s = rate
        else:
            self._tokens_per_s += _NEW_SHARE * (rate - self._tokens_per_s)
