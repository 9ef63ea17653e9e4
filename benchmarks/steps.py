"""Medians of the parts of a worker's steps, from its metrics before and after a load.

Outside the forward is all that lies between the end of one step that computed tokens and the end of
the next on the worker's model thread, less the forward: the wait for the plan (`idle`), taking the
plan and laying out the flat batch (`apply`), sampling and logprobs (`sample`), and booking, which
has no series of its own. Tokens are published on the event loop meanwhile; that counts as far as it
delays the thread. Steps of the load's beginning and end are in it, and those that carry prefill.
Medians are read out of buckets a quarter apart, linearly within a bucket; they do not add up.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.stack import Metrics

OUTSIDE = "quire:worker_step_outside_forward_seconds"
STEP = "quire:worker_step_seconds"
PARTS = ("idle", "apply", "sample", "forward")

Buckets = dict[float, float]  # upper bound in seconds -> observations up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Totals of all workers at one moment."""

    outside: Buckets
    parts: dict[str, Buckets]

    @classmethod
    def of(cls, scrapes: Sequence[Metrics]) -> "StepCounts":
        """Summed over the workers."""
        return cls(
            outside=_sum([scrape.buckets(OUTSIDE) for scrape in scrapes]),
            parts={part: _sum([s.buckets(STEP, part=part) for s in scrapes]) for part in PARTS},
        )

    def since(self, before: "StepCounts") -> "StepCounts":
        """What was added."""
        return StepCounts(
            outside=_less(self.outside, before.outside),
            parts={part: _less(self.parts[part], before.parts[part]) for part in PARTS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one load; medians in milliseconds."""

    num_steps: int
    outside_ms: float
    idle_ms: float
    apply_ms: float
    sample_ms: float
    forward_ms: float

    @classmethod
    def of(cls, counts: StepCounts) -> "StepTimes":
        """The medians of what was counted."""
        medians = {f"{part}_ms": quantile(counts.parts[part], 0.5) * 1e3 for part in PARTS}
        return cls(
            num_steps=int(max(counts.outside.values(), default=0.0)),
            outside_ms=quantile(counts.outside, 0.5) * 1e3,
            **medians,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def quantile(buckets: Buckets, share: float) -> float:
    """By linear interpolation within a bucket; the last finite bound above it, 0 of nothing."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return 0.0
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket holds everything")


def _sum(parts: Sequence[Buckets]) -> Buckets:
    return {bound: sum(part[bound] for part in parts) for bound in parts[0]}


def _less(now: Buckets, before: Buckets) -> Buckets:
    return {bound: count - before[bound] for bound, count in now.items()}
