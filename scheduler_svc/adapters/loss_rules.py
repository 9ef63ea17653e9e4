"""When a worker is lost. Pure: time comes as a parameter.

A worker is lost when its stream has been gone for longer than the grace, when it says nothing for
max(2 s, 5 x expected step) while plans are in flight, or when it says nothing but heartbeats for
max(10 s, 5 x expected step) while a step runs. A silent worker without plans loses its stream
only. Time in which this process itself stood still does not count.

A worker lost over a step that did not end may be slow, not stuck: its processor is shared, and the
next life brings it the same work. Each such loss doubles the patience with the same incarnation, up
to MAX_PATIENCE, so that it gets through instead of being lost over and over.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.core.types import CostProfile

SILENT_NS = 2_000_000_000
STUCK_NS = 10_000_000_000
EXPECTED_FACTOR = 5
MAX_PATIENCE = 16
PAUSE_NS = 500_000_000
_NEW_SHARE = 0.2


class _Sent(NamedTuple):
    step: int
    num_tokens: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong. `lost` is False if only the stream is to be cut and opened again."""

    reason: str
    lost: bool
    stuck: bool = False


class WorkerHealth:
    """Signs of life of one worker."""

    def __init__(self, *, cost: CostProfile, grace_ns: int, now_ns: int, patience: int = 1) -> None:
        self._cost = cost
        self._patience = patience
        self._grace_ns = grace_ns
        self._in_flight: deque[_Sent] = deque()
        self._last_message_ns = now_ns
        self._last_result_ns = now_ns
        self._checked_ns = now_ns
        self._broken_since_ns: int | None = None
        self._average_ns = 0.0

    def sent(self, step: int, num_tokens: int, now_ns: int) -> None:
        """A plan has been handed to the session."""
        self._in_flight.append(_Sent(step, num_tokens, now_ns))

    def heard(self, now_ns: int) -> None:
        """The worker said something."""
        self._last_message_ns = now_ns

    def returned(self, now_ns: int) -> int:
        """The oldest step in flight has ended; returns the time since its plan was sent."""
        sent = self._in_flight.popleft()
        duration_ns = now_ns - max(sent.at_ns, self._last_result_ns)
        self._last_result_ns = now_ns
        share = _NEW_SHARE if self._average_ns else 1.0
        self._average_ns += share * (duration_ns - self._average_ns)
        return now_ns - sent.at_ns

    def stream_broken(self, now_ns: int) -> None:
        """The stream has ended or could not be opened again."""
        if self._broken_since_ns is None:
            self._broken_since_ns = now_ns

    def stream_open(self, now_ns: int) -> None:
        """A resync has succeeded."""
        self._broken_since_ns = None
        self._last_message_ns = now_ns

    def check(self, now_ns: int) -> Verdict | None:
        """The verdict now; call it every 50 ms or so."""
        self._excuse_own_pause(now_ns)
        if self._broken_since_ns is not None:
            if now_ns - self._broken_since_ns > self._grace_ns:
                return Verdict(reason="the stream was gone for longer than the grace", lost=True)
            return None
        allowed_ns = EXPECTED_FACTOR * self._expected_ns()
        silent_ns = now_ns - self._last_message_ns
        if silent_ns > max(SILENT_NS, allowed_ns):
            return Verdict(reason="no sign of life", lost=bool(self._in_flight))
        if self._in_flight:
            running_ns = now_ns - max(self._in_flight[0].at_ns, self._last_result_ns)
            if running_ns > max(STUCK_NS, allowed_ns) * self._patience:
                return Verdict(reason="a step does not end", lost=True, stuck=True)
        return None

    def _expected_ns(self) -> float:
        if not self._in_flight:
            return 0.0
        tokens = self._in_flight[0].num_tokens
        by_profile_ns = (self._cost.step_us + tokens * self._cost.token_us) * 1000
        return max(by_profile_ns, self._average_ns)

    def _excuse_own_pause(self, now_ns: int) -> None:
        gap_ns = now_ns - self._checked_ns
        self._checked_ns = now_ns
        if gap_ns < PAUSE_NS:
            return
        self._last_message_ns += gap_ns
        self._last_result_ns += gap_ns
        self._in_flight = deque(
            sent._replace(at_ns=sent.at_ns + gap_ns) for sent in self._in_flight
        )
        if self._broken_since_ns is not None:
            self._broken_since_ns += gap_ns
