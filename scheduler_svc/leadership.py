"""A process's part in leading: it waits for the lease, leads term after term, and gives it back."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis

from scheduler_svc.adapters.lease import LeaderLease
from scheduler_svc.adapters.redis_access import FAILURES, DeposedError, RedisHealth
from scheduler_svc.adapters.refusals import EpochTooLowError
from scheduler_svc.core import CoreConfig
from scheduler_svc.ports import Core, TermObserver
from scheduler_svc.recorder import TraceRecorder
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.term import Surroundings, Term
from servicekit import logs, redis_client

T = TypeVar("T")

EXIT_STOPPED, EXIT_DEPOSED = 0, 1
_log = logs.get_logger("scheduler")


class Leadership:
    """Standby until the process holds the lease, then leader. `term` is the one now, if any."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        around: Surroundings,
        make_core: Callable[[CoreConfig], Core],
        metrics: TermObserver,
    ) -> None:
        redis = around.redis
        self.term: Term | None = None
        self._config = config
        self._core_config = config.core_config()
        self._around = around
        self._make_core = make_core
        self._metrics = metrics
        self._lease = LeaderLease(
            redis.commands,
            model=config.model_name,
            ttl_s=config.lease_ttl_s,
            health=redis.health,
        )

    @property
    def standing_by(self) -> bool:
        """It would lead at once if the lease were free."""
        return self._lease.standing_by

    async def run(self, stop: asyncio.Event) -> int:
        """Leads until `stop` or until another process has led; returns the exit code."""
        redis = self._around.redis
        try:
            await _until(stop, _check_redis(redis.commands, redis.health))
            while not stop.is_set():
                epoch = await _until(stop, self._lease.acquire())
                if epoch is not None:
                    _log.info("leading", epoch=epoch)
                    await self._run_term(epoch, stop)
            return EXIT_STOPPED
        except DeposedError as error:
            _log.error("deposed", detail=str(error))
            return EXIT_DEPOSED
        finally:
            await self._lease.release()

    async def _run_term(self, epoch: int, stop: asyncio.Event) -> None:
        """Returns at `stop`, or to lead again in a higher epoch. Raises DeposedError."""
        recorder = self._open_trace(epoch)
        self.term = Term(
            self._config,
            epoch=epoch,
            core=self._make_core(self._core_config),
            around=self._around,
            lease=self._lease,
            metrics=self._metrics,
            recorder=recorder,
        )
        try:
            await self.term.run(stop, lambda: _log.info("ready", epoch=epoch))
        except* DeposedError as deposed:
            raise DeposedError(str(_first(deposed))) from None
        except* EpochTooLowError as refused:
            error = _first(refused)
            assert isinstance(error, EpochTooLowError)
            _log.error("epoch_too_low", epoch=epoch, highest=error.highest_epoch)
            await self._lease.step_over(epoch, error.highest_epoch)
        finally:
            self.term = None
            if recorder is not None:
                recorder.close()

    def _open_trace(self, epoch: int) -> TraceRecorder | None:
        if not self._config.trace_dir:
            return None
        return TraceRecorder(
            Path(self._config.trace_dir).expanduser(),
            epoch=epoch,
            config=self._core_config,
            max_bytes=self._config.trace_max_mib * 2**20,
        )


async def _check_redis(redis: Redis, health: RedisHealth) -> None:
    """Waits for Redis; RuntimeError if it may drop keys."""
    while True:
        try:
            await redis_client.require_noeviction(redis)
        except FAILURES as error:
            if "unknown command" in str(error).lower() or "NOPERM" in str(error):
                _log.warning("eviction_policy_unknown", detail=str(error)[:200])
                return
            health.failed(error)
            await asyncio.sleep(0.5)
        else:
            health.answered()
            return


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `stop` comes first."""
    loop = asyncio.get_running_loop()
    working, stopping = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait({working, stopping})


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
