"""Says when a gateway is gone: out of the registry, and of every worker's subscriptions, too long.

Only a registry that answers counts: while Redis is away nobody is declared lost, and afterwards
every gateway has its whole grace again.
"""

import asyncio
from collections.abc import Callable

from redis.asyncio import Redis

from scheduler_svc.adapters.redis_access import FAILURES, RedisHealth
from scheduler_svc.core.events import GatewayLost
from scheduler_svc.ports import Clock, EventSink
from servicekit import redis_client
from servicekit.logs import get_logger

PERIOD_S = 1.0
GRACE_NS = 15_000_000_000
_log = get_logger("scheduler.gateways")


class GatewayWatch:
    """When each gateway was seen last."""

    def __init__(
        self,
        redis: Redis,
        *,
        model: str,
        clock: Clock,
        sink: EventSink,
        subscribed: Callable[[], frozenset[str]],
        health: RedisHealth,
    ) -> None:
        self._redis = redis
        self._model = model
        self._clock = clock
        self._sink = sink
        self._subscribed = subscribed
        self._health = health
        self._seen_ns: dict[str, int] = {}

    def saw_request(self, gateway_id: str) -> None:
        """A request names this gateway."""
        self._seen_ns[gateway_id] = self._clock.now_ns()

    async def run(self) -> None:
        """Watches until cancelled."""
        was_away = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                members = await redis_client.members(self._redis, self._model, "gateway")
            except FAILURES as error:
                self._health.failed(error)
                was_away = True
                continue
            self._health.answered()
            now_ns = self._clock.now_ns()
            alive = {*members, *self._subscribed()}
            if was_away:
                alive |= self._seen_ns.keys()
                was_away = False
            for gateway_id in self.lost(alive, now_ns):
                _log.warning("gateway_lost", gateway=gateway_id)
                await self._sink.put(GatewayLost(now_ns=now_ns, gateway_id=gateway_id))

    def lost(self, alive: set[str], now_ns: int) -> list[str]:
        """Notes who is alive; returns, and forgets, who has been gone for too long."""
        for gateway_id in alive:
            self._seen_ns[gateway_id] = now_ns
        gone = [g for g, seen_ns in self._seen_ns.items() if now_ns - seen_ns > GRACE_NS]
        for gateway_id in gone:
            del self._seen_ns[gateway_id]
        return gone
