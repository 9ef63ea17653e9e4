"""The one task that owns the core.

Rules: everything reaches the core through the bounded queue; a round drains all that is queued,
feeds it, takes one Ready and acts on it in the order that Ready states, without waiting anywhere.
An exception out of the core is a bug of ours: it is logged with the event and ends the process.
"""

import asyncio
import time
from collections import deque

from scheduler_svc.core.events import BecameLeader, Event, Tick
from scheduler_svc.core.ready import Finish, Ready
from scheduler_svc.ports import (
    Clock,
    Completion,
    CompletionSink,
    Core,
    Notice,
    PlanSink,
    RoundObserver,
    RoundRecorder,
)
from servicekit.logs import get_logger

MAX_QUEUED_EVENTS = 4096
MIN_TIMER_S = 0.001
_log = get_logger("scheduler.driver")


class EventQueue:
    """Bounded queue of events with one reader. Writers wait while it is full."""

    def __init__(self, max_events: int = MAX_QUEUED_EVENTS) -> None:
        self._events: deque[Event] = deque()
        self._max_events = max_events
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._events)

    async def put(self, event: Event) -> None:
        """Appends an event; does not wait while there is room."""
        while len(self._events) >= self._max_events:
            room = asyncio.get_running_loop().create_future()
            self._writers.append(room)
            await room
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Lets the reader's `wait` return."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Returns when there are events or after `wake`."""
        if self._events:
            return
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def drain(self) -> list[Event]:
        """Takes everything, oldest first."""
        events = list(self._events)
        self._events.clear()
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)
        return events


class Driver:
    """Feeds the core and carries out what it decides."""

    def __init__(
        self,
        core: Core,
        *,
        clock: Clock,
        plans: PlanSink,
        completions: CompletionSink,
        observer: RoundObserver,
        queue: EventQueue,
        recorder: RoundRecorder | None = None,
    ) -> None:
        self.queue = queue
        self._core = core
        self._clock = clock
        self._plans = plans
        self._completions = completions
        self._observer = observer
        self._recorder = recorder
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at_ns: int | None = None

    async def run(self, epoch: int) -> None:
        """Leads in `epoch` until cancelled. Raises what the core raises."""
        self._round([BecameLeader(now_ns=self._clock.now_ns(), epoch=epoch)])
        try:
            while True:
                await self.queue.wait()
                events = self.queue.drain()
                now_ns = self._clock.now_ns()
                if self._wake_at_ns is not None and now_ns >= self._wake_at_ns:
                    events.append(Tick(now_ns=now_ns))
                if events:
                    self._round(events)
                else:
                    self._set_timer(self._wake_at_ns)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _round(self, events: list[Event]) -> None:
        if self._recorder is not None:
            self._recorder.fed(events)
        started = time.perf_counter()
        for event in events:
            try:
                self._core.feed(event)
            except Exception:
                _log.error("core_failed", fed=type(event).__name__, exc_info=True)
                raise
        ready = self._core.take_ready()
        core_s = time.perf_counter() - started
        if self._recorder is not None:
            self._recorder.answered(ready)
        self._act(ready)
        self._observer.round_done(ready, core_s)

    def _act(self, ready: Ready) -> None:
        for plan in ready.plans:
            self._plans.send(plan)
        for finish in ready.finishes:
            self._completions.complete(_completion(finish))
        if ready.discards:
            self._completions.complete(Completion(entry_ids=ready.discards))
        for given_up in ready.given_up:
            self._plans.give_up(given_up.worker_id, given_up.reason)
        self._set_timer(ready.wake_at_ns)

    def _set_timer(self, wake_at_ns: int | None) -> None:
        if wake_at_ns == self._wake_at_ns and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at_ns = wake_at_ns
        if wake_at_ns is not None:
            delay_s = max(MIN_TIMER_S, (wake_at_ns - self._clock.now_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.queue.wake()


def _completion(finish: Finish) -> Completion:
    if not finish.notify:
        return Completion(entry_ids=(finish.entry_id,))
    notice = Notice(
        gateway_id=finish.gateway_id,
        request_id=finish.request_id,
        attempt=finish.attempt,
        reason=finish.reason,
        message=finish.message,
    )
    return Completion(entry_ids=(finish.entry_id,), notice=notice)
