"""How evenly a run has served its tenants: by totals, and against the bound of `fair`.

The bound (docs/scheduling.md) speaks of times in which two tenants wait without a break: over any
part of such a time their service by weight differs by at most 2 U. Here a tenant waits while any of
its requests has arrived and has no first token, which is a little longer than the core sees it
wait. Its service is what its requests' prompts cost, without what the cache gave, at the first
token, and its output, evenly between the first token and the end. So the figure is for reading.

On the way a Watch holds the core's own counters against the bound: those of tenants that wait may
differ by U. It looks at each end of a request up to the WATCH_ALL-th, then at one in WATCH_EVERY.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from scheduler_svc.core import SchedulerCore
from scheduler_svc.sim.runlog import RequestLog, RunLog

# Pairs are looked at for so many tenants only, those with the most service.
MAX_TENANTS = 24
WATCH_ALL, WATCH_EVERY = 10_000, 100

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the bound depends on besides the requests: slots of all workers, plans in flight."""

    max_model_len: int
    num_slots: int
    max_inflight_steps: int = 8
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """service_ratio is the most served tenant's tokens by weight over the least served one's.

    largest_lead is the most tokens by weight by which one tenant was served beyond another over a
    time in which both waited; bound what `fair` promises for that, None where limits are unknown.
    service_ratio is None with fewer than two tenants or one that got nothing.
    """

    num_tenants: int
    service_ratio: float | None
    largest_lead: float
    bound: float | None


def measure(log: RunLog, limits: Limits | None = None) -> Fairness:
    """Of a whole run."""
    weights = limits.weights if limits else {}
    served = {
        tenant: tokens / weights.get(tenant, 1.0) for tenant, tokens in log.tokens_by_tenant.items()
    }
    least = min(served.values(), default=0.0)
    ratio = max(served.values()) / least if len(served) > 1 and least > 0.0 else None
    by_tenant: dict[str, list[RequestLog]] = {}
    for request in log.requests:
        by_tenant.setdefault(request.tenant, []).append(request)
    busiest = sorted(by_tenant, key=lambda tenant: (-served.get(tenant, 0.0), tenant))
    tenants = [
        _Tenant.of(by_tenant[tenant], weights.get(tenant, 1.0), log.duration_s)
        for tenant in busiest[:MAX_TENANTS]
    ]
    lead = max((_lead(a, b) for a, b in itertools.combinations(tenants, 2)), default=0.0)
    return Fairness(
        num_tenants=len(by_tenant),
        service_ratio=ratio,
        largest_lead=lead,
        bound=2.0 * unit(log.requests, limits) if limits and log.requests else None,
    )


def unit(requests: Sequence[RequestLog], limits: Limits) -> float:
    """U of docs/scheduling.md: how far the counters of two tenants that wait may be apart."""
    most_prompt = max(of.num_prompt_tokens for of in requests)
    most_output = max(of.num_output_tokens for of in requests)
    weight = min((limits.weights.get(of.tenant, 1.0) for of in requests), default=1.0)
    return _unit(limits, most_prompt, most_output, weight)


def _unit(limits: Limits, most_prompt: int, most_output: int, weight: float) -> float:
    given = most_prompt + limits.num_slots * (most_output + limits.max_inflight_steps)
    return limits.max_model_len + given / weight


class Watch:
    """Holds a core's counters against the bound while it serves. `num_looks` counts how often."""

    def __init__(self, core: SchedulerCore, limits: Limits) -> None:
        self.num_looks = 0
        self._core = core
        self._limits = limits
        self._num_ends = 0
        self._most_prompt = self._most_output = 0

    def arrives(self, num_prompt: int, max_tokens: int) -> None:
        """A request comes, which may have so many tokens of output."""
        self._most_prompt = max(self._most_prompt, num_prompt)
        self._most_output = max(self._most_output, max_tokens)

    def ended(self) -> None:
        """A request has ended. Raises AssertionError where the bound does not hold."""
        self._num_ends += 1
        if self._num_ends <= WATCH_ALL or self._num_ends % WATCH_EVERY == 0:
            self._look()

    def _look(self) -> None:
        # Who waits for the second time costs nothing more.
        heads = [request for request in self._core._waiting.heads() if not request.is_charged]
        if len(heads) < 2:
            return
        self.num_looks += 1
        waiting = sorted((of.tenant for of in heads), key=lambda tenant: tenant.counter)
        least, most = waiting[0], waiting[-1]
        weight = min(tenant.weight for tenant in waiting)
        bound = _unit(self._limits, self._most_prompt, self._most_output, weight)
        assert most.counter - least.counter <= bound, (
            f"{most.name} has had {most.counter:,.0f} tokens by weight and {least.name}, which "
            f"waits, too, {least.counter:,.0f}: more than {bound:,.0f} apart"
        )


@dataclass(frozen=True, slots=True)
class _Tenant:
    """Times in which it waits, [n, 2], apart and in order.

    Its service from times[i] on is service[i], and grows by slope[i] a second up to times[i + 1].
    """

    waits: _Floats
    times: _Floats
    service: _Floats
    slope: _Floats

    @classmethod
    def of(cls, requests: Sequence[RequestLog], weight: float, end_s: float) -> "_Tenant":
        """Of its requests; those without an end run to the run's."""
        served = [of for of in requests if of.first_token_s is not None]
        begins = np.array([of.first_token_s for of in served], dtype=np.float64)
        ends = np.array(
            [end_s if of.finished_s is None else of.finished_s for of in served], dtype=np.float64
        )
        # Of each request a jump at its first token, then a slope up to its end.
        jumps = np.array([of.num_prompt_tokens - of.num_cached_tokens for of in served])
        lengths = np.maximum(ends - begins, 1e-9)
        slopes = np.array([of.num_output_tokens for of in served], dtype=np.float64) / lengths
        times = np.concatenate([begins, begins + lengths])
        order = np.argsort(times, kind="stable")
        times = times[order]
        slope = np.concatenate([slopes, -slopes])[order].cumsum() / weight
        jump = np.concatenate([jumps, np.zeros(len(served))])[order].cumsum() / weight
        grown = np.zeros(len(times))
        grown[1:] = (slope[:-1] * np.diff(times)).cumsum()
        return cls(_waits(requests, end_s), times, grown + jump, slope)

    def at(self, times: _Floats, side: Literal["left", "right"]) -> _Floats:
        """Service at each of the times; `left` leaves out what is given at that very time."""
        if not len(self.times):
            return np.zeros(len(times))
        last = np.searchsorted(self.times, times, side=side) - 1
        known = np.maximum(last, 0)
        grown = self.service[known] + self.slope[known] * (times - self.times[known])
        return np.where(last < 0, 0.0, grown)


def _waits(requests: Sequence[RequestLog], end_s: float) -> _Floats:
    """When at least one of them had come and had no token yet."""
    waits: list[list[float]] = []
    for of in sorted(requests, key=lambda of: of.arrived_s):
        end = next((at for at in (of.first_token_s, of.finished_s) if at is not None), end_s)
        if waits and of.arrived_s <= waits[-1][1]:
            waits[-1][1] = max(waits[-1][1], end)
        else:
            waits.append([of.arrived_s, end])
    return np.array(waits, dtype=np.float64).reshape(-1, 2)


def _lead(a: _Tenant, b: _Tenant) -> float:
    """The most by which one gained on the other within a time in which both waited."""
    most = 0.0
    points = np.union1d(a.times, b.times)
    for begin, end in _common(a.waits, b.waits):
        inside = points[np.searchsorted(points, begin, "right") : np.searchsorted(points, end)]
        after = np.concatenate([[begin], inside])
        before = np.concatenate([inside, [end]])
        values = np.concatenate(
            [
                a.at(after, "right") - b.at(after, "right"),
                a.at(before, "left") - b.at(before, "left"),
            ]
        )
        most = max(most, float(values.max() - values.min()))
    return most


def _common(a: _Floats, b: _Floats) -> list[tuple[float, float]]:
    """Where the intervals of both overlap."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if begin < end:
            found.append((float(begin), float(end)))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return found
