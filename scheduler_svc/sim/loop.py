"""An event loop whose time jumps to the next timer, and processes that can pause and die in it.

Modelled: the clock, and what a process is. A process is a context: what is scheduled from within it
belongs to it. While it is paused its callbacks wait, in their order; when it dies they are dropped
and nothing of it runs again, not even what stands in `finally`.

Rules: nothing here waits for real time or looks at a file; callbacks that are due at the same time
run in the order in which they were asked for; tasks hash by their number, so that sets of them are
walked in the same order in every run. Time has to go on: at most MAX_AT_ONCE callbacks run at one
moment, then the run ends with a StandstillError.
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")
MAX_AT_ONCE = 1_000_000
_MAX_WIND_UPS, _TURNS_A_WIND_UP = 40, 200
_PROCESS: "ContextVar[Process | None]" = ContextVar("quire_sim_process", default=None)


class StandstillError(Exception):
    """Time can't go on: nothing is left to happen, or too much happens at one moment."""


class VirtualTask(asyncio.Task[Any]):
    """A task whose hash is its number."""

    _number = 0

    def __init__(self, coro: Any, *, loop: "VirtualLoop", **options: Any) -> None:
        loop.num_tasks += 1
        self._number = loop.num_tasks
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _make_task(loop: "VirtualLoop", coro: Any, **options: Any) -> VirtualTask:
    return VirtualTask(coro, loop=loop, **options)


class _Timer(asyncio.TimerHandle):
    """As the loop's own handles are, without what they do for debugging: a world makes many."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None


class Process:
    """One simulated process. `halted`: it is dead or paused, so nothing of it runs."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.dead = False
        self.halted = False
        self._num_pauses = 0
        self._loop = loop
        self._parked: deque[asyncio.Handle] = deque()
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        loop.add_process(self)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs a coroutine within the process."""
        task = self._loop.create_task(work, context=self._context)
        self._loop.keep(task)
        return task

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function within the process; it must not be paused or dead."""
        return self._context.copy().run(function, *args)

    @property
    def context(self) -> Context:
        """What is scheduled with a copy of this belongs to the process."""
        return self._context

    @property
    def paused(self) -> bool:
        """Somebody has paused it."""
        return self._num_pauses > 0

    def pause(self) -> None:
        """Stands still from now on, until it is resumed as often. Its clock goes on."""
        self._num_pauses += 1
        self.halted = True

    def resume(self, *, whoever_paused: bool = False) -> None:
        """What became due meanwhile is done now, in order."""
        if not self.paused or self.dead:
            return
        self._num_pauses = 0 if whoever_paused else self._num_pauses - 1
        if not self._num_pauses:
            self.revive()

    def kill(self) -> None:
        """Ends it where it stands."""
        self.dead, self.halted, self._num_pauses = True, True, 0

    def park(self, handle: asyncio.Handle) -> None:
        """Keeps a callback of a process that does not run."""
        self._parked.append(handle)

    def revive(self) -> None:
        """For the end of a world: what was left undone may end."""
        self.dead, self.halted, self._num_pauses = False, False, 0
        self._loop.put_first(self._parked)
        self._parked.clear()


def current_process() -> Process | None:
    """Whose turn it is; None for the world's own."""
    return _PROCESS.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """Run it with `run`. `max_at_once` bounds the callbacks of one moment."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        super().__init__()
        self._max_at_once = max_at_once
        self._last_at_once = max_at_once
        self.num_tasks = 0
        self.num_callbacks = 0
        self._now_s = 0.0
        self._num_timers = 0
        self._due: deque[asyncio.Handle] = deque()
        self._processes: list[Process] = []
        self._kept: set[asyncio.Task[Any]] = set()
        # Timers of one moment keep their order.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._failure: BaseException | None = None
        self.set_debug(False)
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._unexpected)

    def time(self) -> float:
        """Virtual seconds since the begin."""
        return self._now_s

    def now_ns(self) -> int:
        """The same in nanoseconds; ports.Clock."""
        return round(self._now_s * 1e9)

    def add_process(self, process: Process) -> None:
        """Known from now on."""
        self._processes.append(process)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """It is not collected before it is done, even if nobody holds it."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def fail(self, error: BaseException) -> None:
        """`run` raises this once the present callback is over; the first one counts."""
        self._failure = self._failure or error

    def _unexpected(self, _: object, context: dict[str, Any]) -> None:
        """Something raised where nobody waits for it."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self.fail(error)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs until `work` is done. Raises what it raises, or StandstillError."""
        asyncio._set_running_loop(self)
        task = self.create_task(work)
        try:
            while not task.done():
                self._turn()
                if self._failure is not None:
                    raise self._failure
            return task.result()  # type: ignore[no-any-return]
        finally:
            asyncio._set_running_loop(None)

    def wind_up(self) -> None:
        """Lets everything end that is left, dead processes too; what it raises is of no interest.

        What is collected half done would run its `finally` in another run's midst.
        """
        asyncio._set_running_loop(self)
        try:
            for _ in range(_MAX_WIND_UPS):
                self._last_at_once = self.num_callbacks + self._max_at_once
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                for process in self._processes:
                    process.revive()
                for task in left:
                    task.cancel()
                with contextlib.suppress(StandstillError):
                    for _ in range(_TURNS_A_WIND_UP):
                        self._turn()
                        self._failure = None
                if not left:
                    break
        finally:
            asyncio._set_running_loop(None)
            self.close()

    def put_first(self, handles: deque[asyncio.Handle]) -> None:
        """These are due before all others."""
        self._due.extendleft(reversed(handles))

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As any loop."""
        handle = _Timer(self._now_s, callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        """As any loop."""
        timer = _Timer(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        """As any loop."""
        when = self._now_s + delay
        timer = _Timer(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""

    def _turn(self) -> None:
        """Moves the time if nothing is due, then calls what is due now."""
        timers, due = self._timers, self._due
        if not due:
            while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
                heapq.heappop(timers)
            if not timers:
                raise StandstillError(f"nothing is left to do at {self._now_s:.3f} s")
            if timers[0][0] > self._now_s:
                self._now_s = timers[0][0]
                self._last_at_once = self.num_callbacks + self._max_at_once
        while timers and timers[0][0] <= self._now_s:
            due.append(heapq.heappop(timers)[2])
        if self.num_callbacks > self._last_at_once:
            raise StandstillError(
                f"time stands still at {self._now_s:.3f} s: more than {self._max_at_once} callbacks"
            )
        for _ in range(len(due)):
            handle = due.popleft()
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
            if process is not None and process.halted:
                process.park(handle)
                continue
            self.num_callbacks += 1
            # As the handle's own _run, without a call for each.
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._unexpected(self, {"exception": error})
            if self._failure is not None:
                return
