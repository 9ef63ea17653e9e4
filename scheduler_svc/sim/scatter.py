"""How a real worker's times vary, drawn by seed from what was measured.

A step takes the time that it is expected to take, times measured over expected of one of the
NEIGHBOURS measured steps whose expected times are nearest: short steps scatter in another way than
long ones, and what the cost has wrong for steps of one size is mended on the way. Plans and results
have half of a measured round trip each. Each is drawn on its own: that slow moments of a machine
last for a while is not modelled. Without samples nothing varies.
"""

import bisect
import random
from dataclasses import dataclass

MAX_SAMPLES = 100_000
NEIGHBOURS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Samples in seconds: expected and measured times of steps, and round trips."""

    steps_s: tuple[tuple[float, float], ...] = ()
    round_trips_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.steps_s), len(self.round_trips_s)) > MAX_SAMPLES:
            raise ValueError(f"scatter is drawn from at most {MAX_SAMPLES} samples")
        if not all(expected_s > 0.0 <= measured_s for expected_s, measured_s in self.steps_s):
            raise ValueError("steps are expected to take a time, and take 0 or more")
        if min(self.round_trips_s, default=0.0) < 0.0:
            raise ValueError("round trips are 0 or more")


class Draws:
    """One worker's draws; two of the same seed draw the same."""

    def __init__(self, scatter: Scatter, seed: str) -> None:
        by_size = sorted(scatter.steps_s)
        self._expected_s = [expected_s for expected_s, _ in by_size]
        self._ratios = [measured_s / expected_s for expected_s, measured_s in by_size]
        self._trips_s = scatter.round_trips_s
        self._for_steps = random.Random(f"steps {seed}")
        self._for_trips = random.Random(f"trips {seed}")

    def step_s(self, expected_s: float) -> float:
        """What a step takes that is expected to take so long."""
        if not self._ratios:
            return expected_s
        middle = bisect.bisect_left(self._expected_s, expected_s)
        begin = max(0, min(middle - NEIGHBOURS // 2, len(self._ratios) - NEIGHBOURS))
        end = min(begin + NEIGHBOURS, len(self._ratios))
        return expected_s * self._ratios[self._for_steps.randrange(begin, end)]

    def half_trip_s(self, usual_s: float) -> float:
        """Of the way of a plan or a result, where a round trip usually takes usual_s."""
        return (self._for_trips.choice(self._trips_s) if self._trips_s else usual_s) / 2
