"""The load simulator's word on a half: fitted to what was measured, asked for what was not.

Fitted are the parts of a step's cost, the scatter of steps around it, and three constants: what
lies between two steps, the way of a request to the scheduler and that of a token to its client.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.client import Answer
from benchmarks.measure import percentile
from benchmarks.simulation.belief_trace import BeliefError, Request, Step
from benchmarks.workload import Job
from scheduler_svc.core import CoreConfig
from scheduler_svc.core.events import WorkerJoined
from scheduler_svc.sim import cost_fit
from scheduler_svc.sim.arrivals import Source
from scheduler_svc.sim.cost_fit import Fit, Observation
from scheduler_svc.sim.load import Cluster, Load
from scheduler_svc.sim.runlog import GapHistogram
from scheduler_svc.sim.scatter import Scatter

FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Samples in seconds: a request's way from its client to the core, a first token's from the
    core's result to its client, and from a plan to its result less the worker's own time."""

    request_s: tuple[float, ...]
    token_s: tuple[float, ...]
    round_trip_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """All that a prediction needs of what was measured. steps_s as in Scatter."""

    fit: Fit
    steps_s: tuple[tuple[float, float], ...]
    between_s: float
    ways: Ways


def between_s(steps: Sequence[Step]) -> float:
    """What a worker does between two steps that follow each other, beyond the steps' own time."""
    gaps = [
        after.returned_s - before.returned_s - after.step_s
        for before, after in itertools.pairwise(steps)
        if after.follows
    ]
    if not gaps:
        raise BeliefError("no step followed another")
    return max(0.0, statistics.median(gaps))


def observations(steps: Sequence[Step], more_s: float) -> Iterator[Observation]:
    """Of steps that computed something; `more_s` is added to each."""
    for step in steps:
        if step.num_decode_tokens + step.num_prefill_tokens and step.step_s:
            yield Observation(
                num_decode_tokens=step.num_decode_tokens,
                num_prefill_tokens=step.num_prefill_tokens,
                kv_tokens_read=step.kv_tokens_read,
                copied_bytes=step.copied_bytes,
                seconds=step.step_s + more_s,
            )


def matched(
    jobs: Sequence[Job], answers: Sequence[Answer], requests: Sequence[Request]
) -> list[tuple[Answer, Request]]:
    """Each answer and what the scheduler saw of its request. Raises BeliefError if one lacks.

    Equal prompts are taken in order.
    """
    waiting: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        waiting.setdefault(request.prompt, []).append(request)
    pairs = []
    for job, answer in zip(jobs, answers, strict=True):
        found = waiting.get(job.prompt)
        if not found:
            raise BeliefError("a request is missing in the trace")
        pairs.append((answer, found.pop(0)))
    return pairs


def ways(pairs: Sequence[tuple[Answer, Request]], steps: Sequence[Step]) -> Ways:
    """Of requests that were answered and steps that were computed."""
    answered = [(answer, of) for answer, of in pairs if answer.token_times_s]
    if not answered or not steps:
        raise BeliefError("nothing was answered")
    return Ways(
        request_s=tuple(of.arrived_s - answer.started_s for answer, of in answered),
        token_s=tuple(answer.token_times_s[0] - of.first_token_s for answer, of in answered),
        round_trip_s=tuple(max(0.0, step.round_trip_s) for step in steps),
    )


def fit(steps: Sequence[Step], ways_: Ways) -> Fitted:
    """The cost of steps, what lies between them, and how they scatter. Raises CostError."""
    more_s = between_s(steps)
    seen = list(observations(steps, more_s))
    found = cost_fit.fit(seen)
    return Fitted(fit=found, steps_s=times(found, seen), between_s=more_s, ways=ways_)


def told(fitted: Fitted, steps: Sequence[Step], ways_: Ways) -> Fitted:
    """With the scatter of other steps and other ways: what is left if the machine's speed is known.

    The parts of a step's cost stay.
    """
    steps_s = times(fitted.fit, observations(steps, fitted.between_s))
    return dataclasses.replace(fitted, steps_s=steps_s, ways=ways_)


def times(found: Fit, seen: Iterable[Observation]) -> tuple[tuple[float, float], ...]:
    """Fitted and measured seconds of each observation."""
    return tuple(
        (
            found.cost.seconds(
                of.num_decode_tokens, of.num_prefill_tokens, of.kv_tokens_read, of.copied_bytes
            ),
            of.seconds,
        )
        for of in seen
    )


class ExactGaps(GapHistogram):
    """All gaps as they were, for percentiles without buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps_s: list[float] = []

    def add(self, seconds: float, count: int = 1) -> None:
        """Keeps them, too."""
        super().add(seconds, count)
        self.gaps_s += [seconds] * count


def cluster(worker: WorkerJoined, config: CoreConfig, fitted: Fitted) -> Cluster:
    """One worker as the one that was measured, under the same configuration."""
    has = worker.capacity
    return Cluster(
        num_workers=1,
        num_slots=has.num_slots,
        num_blocks=has.num_blocks,
        num_host_blocks=has.num_host_blocks,
        block_size=has.block_size,
        block_bytes=has.block_bytes,
        max_num_batched_tokens=has.max_num_batched_tokens,
        max_model_len=has.max_model_len,
        cost=fitted.fit.cost,
        config=config,
        known_lengths=True,
        scatter=Scatter(steps_s=fitted.steps_s, round_trips_s=fitted.ways.round_trip_s),
    )


def predict(of: Cluster, ways_: Ways, source: Source) -> dict[str, float]:
    """FIGURES of a half as its clients would see them; ways are drawn by its name."""
    chance = random.Random(source.name)
    delays_s = [chance.choice(ways_.request_s) for _ in source]
    shifted = sorted(
        (
            (dataclasses.replace(arrival, at=arrival.at + delay_s), delay_s)
            for arrival, delay_s in zip(source, delays_s, strict=True)
        ),
        key=lambda pair: pair[0].at,
    )
    load = Load(of, dataclasses.replace(source, passes=lambda: (a for a, _ in shifted)))
    gaps = ExactGaps()
    load.log.token_gaps = gaps
    ttfts_s = [
        request.first_token_s - request.arrived_s + delay_s + chance.choice(ways_.token_s)
        for request, (_, delay_s) in zip(load.run().requests, shifted, strict=True)
        if request.first_token_s is not None
    ]
    return figures(ttfts_s, gaps.gaps_s)


def measured(answers: Sequence[Answer]) -> dict[str, float]:
    """FIGURES of a half as its clients saw them."""
    times_s = [(answer.started_s, answer.token_times_s) for answer in answers]
    return figures(
        [times[0] - began for began, times in times_s if times],
        [after - before for _, times in times_s for before, after in itertools.pairwise(times)],
    )


def figures(ttfts_s: Sequence[float], gaps_s: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    values = (percentile(of, share) * 1e3 for of in (ttfts_s, gaps_s) for share in (0.5, 0.99))
    return dict(zip(FIGURES, values, strict=True))


def step_time(fitted: Fitted, steps: Sequence[Step]) -> float:
    """What steps took, over what the fit expects of them: 1.1 is a slower machine.

    The fitted steps, together, have 1.
    """
    seen = times(fitted.fit, observations(steps, fitted.between_s))
    return _slowness(seen) / _slowness(fitted.steps_s) if seen else 1.0


def _slowness(steps_s: Iterable[tuple[float, float]]) -> float:
    expected_s, measured_s = map(sum, zip(*steps_s, strict=True))
    return measured_s / expected_s


def described(fitted: Fitted) -> dict[str, Any]:
    """For JSON and the page; medians of the ways in milliseconds."""
    ways_ = fitted.ways
    return {
        "cost": str(fitted.fit),
        **dataclasses.asdict(fitted.fit.cost),
        "between_ms": fitted.between_s * 1e3,
        "request_ms": statistics.median(ways_.request_s) * 1e3,
        "token_ms": statistics.median(ways_.token_s) * 1e3,
        "round_trip_ms": statistics.median(ways_.round_trip_s) * 1e3,
    }
