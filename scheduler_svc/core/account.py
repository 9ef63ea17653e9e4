"""Where a request's time went: its account, kept on changes only.

A request that waits does so for one reason at a time; reasons are noted when the scheduler looks at
the request, so one that is not looked at keeps the last. Under `fair` the time it waited for its
turn after a later one had been admitted, while several tenants waited, counts as fairness.
"""

import enum
from bisect import bisect_right
from dataclasses import dataclass, field

from scheduler_svc.core.types import PrefixStop
from scheduler_svc.core.value import value

MAX_OVERTAKES = 4096


class Wait(enum.IntEnum):
    """What a request waits for."""

    # Slots or tokens are taken, or others come first.
    TURN = 0
    # Its tokens do not fit into what is free.
    BLOCKS = 1
    # Tenants that have been served less come first.
    FAIRNESS = 2
    # A running request fills the cache with what it shares.
    HELD_BACK = 3
    # There is no worker that could run it and that its gateway reads.
    WORKER = 4
    # It lost its slot while steps with it were unreturned.
    RETURNING = 5
    # What it computed is in host memory, or on its way there or back.
    SWAPPED = 6
    # It may be what its workers died of, and is tried alone.
    SUSPECT = 7


@value(frozen=True, slots=True, kw_only=True)
class Account:
    """What has become of a request's time.

    preempted_ns is the time from each preemption to the next token, waiting and computing anew
    included; set_back_ns the same for lost workers, failed steps and drains. `waited` holds all
    waiting, that in between too. prefix_stop is None before the first admission.
    """

    waited: tuple[tuple[Wait, int], ...] = ()
    preempted_ns: int = 0
    set_back_ns: int = 0
    num_moves: int = 0
    num_skips: int = 0
    num_swaps: int = 0
    prefix_stop: PrefixStop | None = None


@dataclass(slots=True)
class WaitBook:
    """The waiting of one request."""

    reason: Wait | None = None
    since_ns: int = 0
    # Only reasons for which it has waited.
    waited: dict[Wait, int] = field(default_factory=dict)

    def turn_to(self, reason: Wait | None, now_ns: int, overtaken_ns: int | None = None) -> None:
        """From now on it waits for `reason`, or no longer.

        overtaken_ns is when a later one was first admitted, with `fair`.
        """
        before, begin_ns, end_ns = self.reason, self.since_ns, now_ns
        if reason is before:
            return
        self.reason, self.since_ns = reason, now_ns
        if before is None:
            return
        if before is Wait.TURN and overtaken_ns is not None and overtaken_ns < now_ns:
            end_ns = max(begin_ns, overtaken_ns)
            if now_ns > end_ns:
                waited = self.waited.get(Wait.FAIRNESS, 0)
                self.waited[Wait.FAIRNESS] = waited + now_ns - end_ns
        if end_ns > begin_ns:
            self.waited[before] = self.waited.get(before, 0) + end_ns - begin_ns

    def until(self, now_ns: int, overtaken_ns: int | None = None) -> tuple[tuple[Wait, int], ...]:
        """All waiting up to now, by reason."""
        if (reason := self.reason) is not None:
            self.turn_to(None, now_ns, overtaken_ns)
            self.reason = reason
        return tuple(sorted(self.waited.items()))


class Overtakes:
    """When later arrivals were first admitted, for the last MAX_OVERTAKES that were the latest yet.

    One overtaken before what is remembered counts from there on.
    """

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._times_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def note(self, sequence: int, now_ns: int) -> None:
        """The sequence'th arrival is admitted."""
        if self._sequences and sequence <= self._sequences[-1]:
            return
        self._sequences.append(sequence)
        self._times_ns.append(now_ns)
        if len(self._sequences) > 2 * MAX_OVERTAKES:
            del self._sequences[:MAX_OVERTAKES]
            del self._times_ns[:MAX_OVERTAKES]

    def since_ns(self, sequence: int) -> int | None:
        """When one that arrived after the sequence'th was first admitted."""
        place = bisect_right(self._sequences, sequence)
        return self._times_ns[place] if place < len(self._times_ns) else None
