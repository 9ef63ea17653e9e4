"""How far to run ahead of one worker, and when its next plan is due.

A plan should reach the worker just before the step before it ends: later, and the worker is idle;
earlier, and a request that comes meanwhile has missed it. So at most k plans are in flight,

    k = 1 + ceil((round trip + lead) / step time),  clamped to 1..MAX_STEPS,

and within k a plan is held until round trip + lead before the last step in flight should end.

- The round trip is the time from a plan to its result, less what the worker spent between receiving
  the one and having the other; planning is part of it. Its median is followed, by small steps: a
  pause of either process says nothing about the next plan.
- The lead is what the estimates get wrong. It grows by every wait of a worker whose plan came too
  late and fades otherwise.
- k rises at once, since a worker that waits costs most, and falls only after the lower value was
  enough for a while with something to spare: it does not flap between two values.
"""

import math
from collections.abc import Sequence

from scheduler_svc.core.events import StepCompleted
from scheduler_svc.core.flight import StepInFlight

MAX_STEPS = 8
# Before anything has been measured.
_FIRST = 2
# Results before a plan is held.
_MIN_RESULTS = 8
# Share of the estimate by which a sample above or below it moves it.
_ROUND_TRIP_SHARE = 0.05
_LEAST_ROUND_TRIP_US = 20.0
_LEAST_LEAD_US = 1000.0
_LEAD_FADE = 0.995
# By which one wait may raise the lead: a longer one was a pause.
_MOST_OF_A_STEP = 0.25
_MOST_STEPS = 3
# A worker always waits a little between two steps; its lower quartile is followed by such steps, up
# to a bound. What is so much longer was a wait for its plan.
_IDLE_UP_US, _IDLE_DOWN_US, _MOST_OWN_IDLE_US = 2, 6, 200
_FREE_IDLE_US = 50
# Timers are no finer: what is due so soon is due now.
TIMER_NS = 1_000_000
# k falls if that share of a step was to spare in so many results in a row.
_SPARE = 0.25
_NUM_SPARE = 32


class Depth:
    """Mutable; owned by the worker's state. With a `limit` above 0, k is that and nothing is held.

    k is the most plans that may be in flight; held_until_ns when the next one is due, if that alone
    holds it back.
    """

    def __init__(self, limit: int) -> None:
        self.k = limit or _FIRST
        self.round_trip_us = 0.0
        self.held_until_ns: int | None = None
        self.adapts = limit == 0
        self._lead_us = _LEAST_LEAD_US
        self._own_idle_us = 0
        self._num_results = 0
        self._num_spare = 0
        self._last_result_ns = 0
        # When the result of the last step in flight should come.
        self._last_end_ns = 0

    def may_plan(self, now_ns: int, in_flight: Sequence[StepInFlight]) -> bool:
        """Whether a plan may go out now. Says in held_until_ns what to wait for.

        Need not be asked while k are in flight, nor again before that is TIMER_NS away, as long as
        nothing has been planned or has returned and something is in flight.
        """
        self.held_until_ns = None
        if len(in_flight) >= self.k:
            return False
        if not self.adapts or not in_flight or self._num_results < _MIN_RESULTS:
            return True
        due_ns = self._last_end_ns - int(1000 * (self.round_trip_us + self._lead_us))
        if due_ns - now_ns <= TIMER_NS:
            return True
        self.held_until_ns = due_ns
        return False

    def planned(self, flight: StepInFlight, in_flight: Sequence[StepInFlight]) -> None:
        """`flight` goes out after those in flight."""
        self.held_until_ns = None
        now_ns = flight.planned_ns
        flight.follows = bool(in_flight) or (
            now_ns - self._last_result_ns < 1000 * flight.expected_us
        )
        begin_ns = now_ns + int(1000 * self.round_trip_us)
        if in_flight:
            begin_ns = max(begin_ns, self._last_end_ns)
        self._last_end_ns = begin_ns + int(1000 * flight.expected_us)

    def returned(
        self, flight: StepInFlight, event: StepCompleted, in_flight: Sequence[StepInFlight]
    ) -> None:
        """The result of `flight`; in_flight are those that are left. Without times nothing is
        learnt."""
        self.held_until_ns = None
        now_ns = self._last_result_ns = event.now_ns
        if event.total_us > 0:
            self._measure(flight, event)
        if in_flight:
            last = in_flight[-1]
            left_us = sum(step.expected_us for step in in_flight)
            self._last_end_ns = max(
                now_ns + int(1000 * left_us),
                last.planned_ns + int(1000 * (self.round_trip_us + last.expected_us)),
            )

    def _measure(self, flight: StepInFlight, event: StepCompleted) -> None:
        sample_us = max(0.0, (event.now_ns - flight.planned_ns) / 1000 - event.total_us)
        if self._num_results == 0:
            self.round_trip_us = sample_us
        else:
            step_us = _ROUND_TRIP_SHARE * max(self.round_trip_us, _LEAST_ROUND_TRIP_US)
            difference_us = sample_us - self.round_trip_us
            self.round_trip_us += max(-step_us, min(step_us, difference_us))
        self._num_results += 1
        if self.adapts and flight.expected_us > 0:
            self._adapt(flight, event)

    def _adapt(self, flight: StepInFlight, event: StepCompleted) -> None:
        self._lead_us = max(_LEAST_LEAD_US, self._lead_us * _LEAD_FADE)
        if flight.follows:
            self._raise_lead(flight, event.idle_us)
        num_ahead = (self.round_trip_us + self._lead_us) / flight.expected_us
        wanted = min(MAX_STEPS, 1 + math.ceil(num_ahead))
        if wanted > self.k:
            self.k, self._num_spare = wanted, 0
            return
        lower = min(MAX_STEPS, 1 + math.ceil(num_ahead + _SPARE))
        if lower >= self.k:
            self._num_spare = 0
            return
        self._num_spare += 1
        if self._num_spare >= _NUM_SPARE:
            self.k, self._num_spare = lower, 0

    def _raise_lead(self, flight: StepInFlight, idle_us: int) -> None:
        own_us = self._own_idle_us
        if idle_us > own_us + _FREE_IDLE_US:
            more_us = min(idle_us, _MOST_OF_A_STEP * flight.expected_us)
            most_us = max(_LEAST_LEAD_US, _MOST_STEPS * flight.expected_us)
            self._lead_us = min(self._lead_us + more_us, most_us)
        own_us += _IDLE_UP_US if idle_us > own_us else -_IDLE_DOWN_US
        self._own_idle_us = max(0, min(own_us, _MOST_OWN_IDLE_US))
