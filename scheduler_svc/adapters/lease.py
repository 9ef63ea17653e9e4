"""The leader lease and its epoch.

The lease says who may lead, the epoch fences: every queue script and every worker compares it, so
a leader that is late by any time does no harm. While Redis is away the lease can't be renewed; the
leader goes on with its workers and takes the lease back if nobody has led since.
"""

import asyncio
import secrets
from typing import Never

from redis.asyncio import Redis

from scheduler_svc.adapters import redis_scripts
from scheduler_svc.adapters.redis_access import FAILURES, DeposedError, RedisAwayError, RedisHealth
from servicekit import redis_keys
from servicekit.logs import get_logger

# A standby asks so often, whatever the lease's life: one that is given back is taken at once.
MAX_POLL_S = 0.5
_log = get_logger("scheduler.lease")


class LeaderLease:
    """One process's claim to lead one model."""

    def __init__(self, redis: Redis, *, model: str, ttl_s: float, health: RedisHealth) -> None:
        self.holder = secrets.token_hex(16)
        self._redis = redis
        self._lease = redis_keys.lease(model)
        self._epoch = redis_keys.epoch(model)
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._renew_s = ttl_s / 3
        self._health = health
        self._standing_by = False

    @property
    def standing_by(self) -> bool:
        """Redis has just said that another process leads, and is asked again and again: this one
        takes over as soon as the lease is free."""
        return self._standing_by

    async def acquire(self) -> int:
        """Waits until this process leads; returns its epoch."""
        told = False
        try:
            while True:
                try:
                    epoch = await self._eval(
                        redis_scripts.ACQUIRE, self._lease, self._epoch, self.holder, self._ttl_ms
                    )
                except RedisAwayError:
                    self._standing_by = False
                else:
                    if epoch is not None:
                        return int(epoch)
                    self._standing_by = True
                    if not told:
                        told = True
                        _log.info("standing_by")
                await asyncio.sleep(min(self._renew_s, MAX_POLL_S))
        finally:
            self._standing_by = False

    async def keep(self, epoch: int) -> Never:
        """Renews until DeposedError."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                kept = await self._eval(
                    redis_scripts.RENEW, self._lease, self._epoch, self.holder, self._ttl_ms, epoch
                )
            except RedisAwayError:
                continue
            if not kept:
                raise DeposedError("the lease is held by another process")

    async def step_over(self, epoch: int, highest: int) -> None:
        """Makes the next epoch exceed `highest`, which a worker knows. Raises DeposedError."""
        while True:
            try:
                done = await self._eval(
                    redis_scripts.STEP_OVER, self._lease, self._epoch, self.holder, epoch, highest
                )
            except RedisAwayError:
                await asyncio.sleep(self._renew_s)
                continue
            if not done:
                raise DeposedError(f"a worker knows epoch {highest}, another process leads")
            return

    async def release(self) -> None:
        """Lets a standby lead at once. Does nothing if Redis is away: the lease runs out."""
        try:
            await self._eval(redis_scripts.RELEASE, self._lease, self.holder, num_keys=1)
        except RedisAwayError:
            _log.warning("lease_not_released")

    async def _eval(self, script: str, *args: str | int, num_keys: int = 2) -> bytes | int | None:
        try:
            answer: bytes | int | None = await self._redis.eval(script, num_keys, *args)
        except FAILURES as error:
            self._health.failed(error)
            raise RedisAwayError(str(error)) from error
        self._health.answered()
        return answer
