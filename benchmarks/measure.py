"""Sending a workload and summing up what came back.

Closed loop: a fixed number of clients, each sends its next request when its last one has ended.
Poisson: requests arrive at random moments of a given mean rate, whatever the server does.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.client import Answer, Client
from benchmarks.steps import StepCounts, StepTimes
from benchmarks.workload import Job, arrivals_s

# A server that can't keep up must not make the load generator open connections without end.
MAX_OPEN = 1_024
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One point of a measurement: `closed` with `level` clients, or `poisson` per second.

    `long` has longer prompts than the others.
    """

    kind: str
    level: float
    num_requests: int
    sampled: bool = False
    long: bool = False

    @property
    def label(self) -> str:
        """For tables and seeds."""
        kinds = f"{' sampled' if self.sampled else ''}{' long' if self.long else ''}"
        return f"{self.kind} {self.level:g}{kinds}"

    def settings(self, number: int) -> dict[str, Any]:
        """Of the load's request of that number, besides its lengths."""
        return {**SAMPLED, "seed": number} if self.sampled else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a load gave. Percentiles are over all requests, or over all gaps of all requests.

    The prefix-hit figures count tokens; they are None where the scheduler's metrics are not known,
    and `steps` where the workers' are not.
    """

    policy: str
    kind: str
    level: float
    sampled: bool
    num_requests: int
    num_failed: int
    took_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    e2e_p50_s: float
    e2e_p99_s: float
    cached_tokens: int
    prefix_queries: float | None
    prefix_hits: float | None
    preemptions: float | None
    steps: StepTimes | None
    problems: tuple[str, ...]
    long: bool = False

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a prefix cache."""
        if self.prefix_queries is None or self.prefix_hits is None:
            return self.cached_tokens / max(1, self.prompt_tokens)
        return self.prefix_hits / max(1.0, self.prefix_queries)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}


async def closed_loop(
    client: Client, bodies: Sequence[dict[str, Any]], clients: int
) -> list[Answer]:
    """Answers in the order of the bodies."""
    answers: dict[int, Answer] = {}
    todo = iter(enumerate(bodies))

    async def one_client() -> None:
        for i, body in todo:
            answers[i] = await client.complete(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one_client())
    return [answers[i] for i in range(len(bodies))]


async def poisson(
    client: Client, bodies: Sequence[dict[str, Any]], rate_per_s: float, seed: str
) -> list[Answer]:
    """Answers in the order of the bodies, which is that of their arrival."""
    return await open_loop(client, bodies, arrivals_s(seed, rate_per_s))


async def open_loop(
    client: Client, bodies: Sequence[dict[str, Any]], times_s: Iterable[float]
) -> list[Answer]:
    """Sends each body at its time from now on, whatever the server does; answers in their order."""
    answers: dict[int, Answer] = {}
    open_ = asyncio.Semaphore(MAX_OPEN)
    began_s = time.perf_counter()

    async def one(i: int, body: dict[str, Any]) -> None:
        try:
            answers[i] = await client.complete(body)
        finally:
            open_.release()

    async with asyncio.TaskGroup() as group:
        for i, (body, at_s) in enumerate(zip(bodies, times_s, strict=False)):
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            await open_.acquire()
            group.create_task(one(i, body))
    return [answers[i] for i in range(len(bodies))]


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals of the scheduler's and the workers' metrics at one moment."""

    prefix_queries: float
    prefix_hits: float
    preemptions: float
    steps: StepCounts | None = None

    def since(self, before: "Counters") -> "Counters":
        """What was added."""
        return Counters(
            prefix_queries=self.prefix_queries - before.prefix_queries,
            prefix_hits=self.prefix_hits - before.prefix_hits,
            preemptions=self.preemptions - before.preemptions,
            steps=self.steps.since(before.steps) if self.steps and before.steps else None,
        )


def summarize(
    policy: str,
    load: Load,
    work: Sequence[Job],
    answers: Sequence[Answer],
    counted: Counters | None,
) -> Point:
    """The point; failed requests count as such and add nothing to the figures."""
    problems = [a.problem(j.num_output) for j, a in zip(work, answers, strict=True)]
    good = [a for a, problem in zip(answers, problems, strict=True) if not problem]
    began_s = min(a.started_s for a in answers)
    took_s = max(1e-9, max(a.ended_s for a in answers) - began_s)
    ttfts = [a.ttft_s * 1e3 for a in good if a.ttft_s is not None]
    gaps = [gap * 1e3 for gap in itertools.chain.from_iterable(a.gaps_s for a in good)]
    e2es = [a.e2e_s for a in good]
    output_tokens = sum(a.num_tokens for a in good)
    return Point(
        policy=policy,
        kind=load.kind,
        level=load.level,
        sampled=load.sampled,
        num_requests=len(answers),
        num_failed=len(answers) - len(good),
        took_s=took_s,
        prompt_tokens=sum(len(job.prompt) for job in work),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / took_s,
        requests_per_s=len(good) / took_s,
        ttft_p50_ms=percentile(ttfts, 0.5),
        ttft_p99_ms=percentile(ttfts, 0.99),
        gap_p50_ms=percentile(gaps, 0.5),
        gap_p99_ms=percentile(gaps, 0.99),
        e2e_p50_s=percentile(e2es, 0.5),
        e2e_p99_s=percentile(e2es, 0.99),
        cached_tokens=sum(_cached(a) for a in good),
        prefix_queries=counted.prefix_queries if counted else None,
        prefix_hits=counted.prefix_hits if counted else None,
        preemptions=counted.preemptions if counted else None,
        steps=StepTimes.of(counted.steps) if counted and counted.steps else None,
        problems=tuple(problem for problem in problems if problem)[:20],
        long=load.long,
    )


def _cached(answer: Answer) -> int:
    details = answer.usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
