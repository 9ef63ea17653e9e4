"""Cancels, once each.

A gateway that can't know who runs a request tells the queue and every worker, and each worker tells
the scheduler: of these words the first after the request's arrival counts.

One before the arrival is nothing to the core, so after it the next one passes again. Of the last
MAX_REMEMBERED ids cancels are told apart; an older one may pass twice, which does no harm.
"""

from scheduler_svc.core.events import Event, RequestArrived, RequestCancelled
from scheduler_svc.core.types import RequestId
from scheduler_svc.ports import EventSink

MAX_REMEMBERED = 16_384


class CancelsOnce:
    """An EventSink before another one."""

    def __init__(self, sink: EventSink, max_remembered: int = MAX_REMEMBERED) -> None:
        self._sink = sink
        self._max_remembered = max_remembered
        self._passed: dict[RequestId, None] = {}

    async def put(self, event: Event) -> None:
        """Passes the event on, but for a cancel that says nothing new."""
        if isinstance(event, RequestCancelled) and event.request_id in self._passed:
            return
        await self._sink.put(event)
        if isinstance(event, RequestCancelled):
            # Not before: a put that is given up has told nobody, and the next word must pass.
            self._passed[event.request_id] = None
            if len(self._passed) > self._max_remembered:
                del self._passed[next(iter(self._passed))]
        elif isinstance(event, RequestArrived):
            # Not before it is in the queue: a cancel that comes meanwhile may still get ahead.
            self._passed.pop(event.request_id, None)
