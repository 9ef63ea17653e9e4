"""Redis as one epoch may use it: fenced scripts, and what "away" and "deposed" mean.

RedisAwayError: the command may or may not have been done; try again later. DeposedError: another
process has led since; this one must end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler_svc.ports import Clock
from servicekit import redis_keys
from servicekit.logs import get_logger

_log = get_logger("scheduler.redis")

# What redis-py raises when the server is gone, restarting, full or read-only.
FAILURES = (RedisError, OSError, TimeoutError)
LOG_PERIOD_NS = 5_000_000_000


class RedisAwayError(Exception):
    """Redis can't be used right now."""


class NoGroupError(RedisAwayError):
    """The stream or its group is missing."""


class DeposedError(Exception):
    """Another process has become leader."""


class RedisHealth:
    """Remembers whether Redis answers, and logs when that changes, at most every 5 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._away_since_ns: int | None = None
        self._logged = False
        self._logged_ns = -LOG_PERIOD_NS

    @property
    def away(self) -> bool:
        """The last command failed."""
        return self._away_since_ns is not None

    def failed(self, error: Exception) -> None:
        """A command failed."""
        now_ns = self._clock.now_ns()
        if self._away_since_ns is None:
            self._away_since_ns = now_ns
        if not self._logged and now_ns - self._logged_ns > LOG_PERIOD_NS:
            self._logged, self._logged_ns = True, now_ns
            _log.warning("redis_away", error=type(error).__name__, detail=str(error)[:200])

    def answered(self) -> None:
        """A command was answered."""
        if self._away_since_ns is not None:
            seconds = (self._clock.now_ns() - self._away_since_ns) / 1e9
            self._away_since_ns = None
            if self._logged:
                self._logged = False
                _log.info("redis_back", away_s=round(seconds, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSide:
    """The connections of one process: for commands, and for the wake channel."""

    commands: Redis
    listener: Redis
    health: RedisHealth


class FencedRedis:
    """Runs scripts that compare the epoch."""

    def __init__(self, redis: Redis, *, model: str, epoch: int, health: RedisHealth) -> None:
        self.redis = redis
        self.model = model
        self.epoch = epoch
        self.health = health
        self._epoch_key = redis_keys.epoch(model)

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes]) -> list[Any]:
        """The script's answer after its leading 1. Raises RedisAwayError or DeposedError."""
        try:
            answer = await self.redis.eval(
                script, 1 + len(keys), self._epoch_key, *keys, str(self.epoch), *args
            )
        except FAILURES as error:
            self.health.failed(error)
            if "NOGROUP" in str(error):
                raise NoGroupError(str(error)) from error
            raise RedisAwayError(str(error)) from error
        self.health.answered()
        answer = cast("list[Any]", answer)
        if answer[0] == 1:
            return answer[1:]
        stored = int(answer[1] or 0)
        if stored > self.epoch:
            raise DeposedError(f"epoch {stored} is stored, ours is {self.epoch}")
        # Redis lost its last writes; the lease's next renewal puts the epoch back.
        raise RedisAwayError(f"epoch {stored} is stored, ours is {self.epoch}")
