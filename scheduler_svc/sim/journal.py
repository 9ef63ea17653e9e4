"""What happens in a world, numbered; as text where a trace is wanted.

    number  virtual ns  who  what

Rounds of a core are the lines of scheduler_svc.trace_file. The same seed gives the same bytes in
every process. Without a trace only the numbers are kept.
"""

from collections.abc import Callable

from scheduler_svc import trace_file
from scheduler_svc.core import Ready
from scheduler_svc.core.events import Event
from scheduler_svc.sim.loop import VirtualLoop


class Journal:
    """`write` takes lines; None keeps nothing."""

    def __init__(self, loop: VirtualLoop, write: Callable[[str], object] | None = None) -> None:
        self.num_events = 0
        self._loop = loop
        self._write = write

    @property
    def is_kept(self) -> bool:
        """Somebody reads it."""
        return self._write is not None

    def note(self, who: str, what: str) -> None:
        """Something of the world's own."""
        self.num_events += 1
        if self._write is not None:
            self._line(who, what)

    def event(self, who: str, event: Event) -> None:
        """What a core is fed."""
        self.num_events += 1
        if self._write is not None:
            for line in trace_file.event_lines([event]):
                self._line(who, line)

    def ready(self, who: str, ready: Ready) -> None:
        """What a core wants done."""
        if self._write is not None:
            for line in trace_file.answer_lines(ready):
                self._line(who, line)

    def _line(self, who: str, what: str) -> None:
        assert self._write is not None
        self._write(f"{self.num_events} {self._loop.now_ns()} {who} {what}\n")
