"""(a) Static against continuous batching, with outputs of very different length.

All requests are queued at the start. `static` takes its next batch in the step after the last one
of a batch has ended. Outputs are exponential, cut; one seed fixes lengths and prompts.
"""

import asyncio
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Row, Study, Target, by_label, figures
from benchmarks.workload import Job, Shape, jobs

SEED, NUM_REQUESTS, QUICK_REQUESTS = 7, 256, 24
MEAN_OUTPUT, MAX_OUTPUT, QUICK_MAX_OUTPUT = 128, 512, 64
SMALL, LARGE = 8, 32
# Slots unless the run bounds them: the setting's default.
SLOTS = 256
# Name of the run, policy, batch of `static` or bound of the slots.
Run = tuple[str, str, int]
UNBOUND: Run = ("continuous", "fcfs", SLOTS)


def equal_runs(batch: int) -> tuple[Run, Run]:
    """Both policies with the same batch."""
    return (f"static, {batch}", "static", batch), (f"continuous, {batch}", "fcfs", batch)


def exponential_jobs(count: int, *, mean: float, most: int, seed: int) -> list[Job]:
    """Random prompts of 64 to 192 tokens; outputs exponential with that mean, cut to 1 to most."""
    chance = random.Random(seed)
    prompts = jobs(f"exponential-{seed}", count, Shape())
    return [
        Job(
            prompt=job.prompt,
            num_output=min(most, max(1, round(chance.expovariate(1.0 / mean)))),
        )
        for job in prompts
    ]


async def _run(at: Target, work: Sequence[Job]) -> dict[str, Any]:
    await at.warm_up("batching")
    before = await at.gauges()
    answers = await at.send(work, len(work))
    after = await at.gauges()
    return {
        **figures(work, answers),
        "prefix_hits": after.since(before, "vllm:prefix_cache_hits_total"),
        "steps": after.since(before, "quire:steps_total"),
    }


def measure(bench: Bench, batch: int, *, unbound: bool) -> Iterator[Row]:
    """Both policies with that batch; `unbound` adds continuous batching with all slots."""
    runs: tuple[Run, ...] = equal_runs(batch)
    if unbound and not bench.quick:
        runs = (*runs, UNBOUND)
    count, most = (QUICK_REQUESTS, QUICK_MAX_OUTPUT) if bench.quick else (NUM_REQUESTS, MAX_OUTPUT)
    mean = most / 4 if bench.quick else MEAN_OUTPUT
    yield from measure_runs(bench, runs, exponential_jobs(count, mean=mean, most=most, seed=SEED))


def measure_runs(bench: Bench, runs: Sequence[Run], work: Sequence[Job]) -> Iterator[Row]:
    """The same requests with each of the runs."""
    for label, policy, size in runs:
        settings: dict[str, object] = {
            "scheduling_policy": policy,
            "static_batch_size": size,
            "max_num_seqs": SLOTS if policy == "static" else size,
        }
        with bench.stack(label, **settings) as at:
            row = asyncio.run(_run(at, work))
        problems = list(row["problems"])
        if row["prefix_hits"] or row["cached_tokens"]:
            problems.append(f"{row['prefix_hits']:.0f} prompt tokens came from the prefix cache")
        yield {"run": label, **row, "problems": problems}


def sentences(rows: Sequence[Row], batch: int) -> str:
    """Throughput and latency, at an equal batch and, where it was measured, with all slots."""
    run = by_label(rows)
    static, equal = run[f"static, {batch}"], run[f"continuous, {batch}"]
    best = run.get("continuous")

    def times(new: Row) -> str:
        return f"{new['tokens_per_s'] / static['tokens_per_s']:.2f} times"

    text = (
        f"With all {static['requests']} requests queued at the start, continuous batching at "
        f"{batch} slots gives {equal['tokens_per_s']:.0f} output tokens per second where static "
        f"batches of {batch} give {static['tokens_per_s']:.0f}, {times(equal)} as many"
    )
    if best:
        text += f", and {best['tokens_per_s']:.0f} with {SLOTS} slots, {times(best)} as many"
    means = " and ".join(f"{row['latency_mean_s']:.0f} s" for row in (equal, best) if row)
    return (
        f"{text}. Requests are answered after {means} on average instead of "
        f"{static['latency_mean_s']:.0f} s: no slot stands empty until the longest output of its "
        f"batch has ended, so that at {batch} slots {equal['steps']:,.0f} steps do what takes "
        f"{static['steps']:,.0f} in static batches."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Throughput; mean and p99 latency."""
    labels = [str(row["run"]) for row in rows]
    drawing.bars(axes[0], labels, [row["tokens_per_s"] for row in rows], "output tokens per second")
    series = {
        "mean": [row["latency_mean_s"] for row in rows],
        "p99": [row["latency_p99_s"] for row in rows],
    }
    drawing.paired_bars(axes[1], labels, series, "time from queueing to the end, s")


COLUMNS = (
    Column(key="run", heading="run"),
    Column(key="tokens_per_s", heading="out tok/s", spec=".1f"),
    Column(key="took_s", heading="took s", spec=".0f"),
    Column(key="latency_mean_s", heading="latency mean s", spec=".1f"),
    Column(key="latency_p50_s", heading="p50", spec=".1f"),
    Column(key="latency_p90_s", heading="p90", spec=".1f"),
    Column(key="latency_p99_s", heading="p99", spec=".1f"),
    Column(key="ttft_p50_ms", heading="TTFT p50 ms", spec=",.0f"),
    Column(key="gap_p50_ms", heading="gap p50 ms", spec=".0f"),
    Column(key="gap_p99_ms", heading="p99", spec=".0f"),
    Column(key="steps", heading="steps", spec=",.0f"),
    Column(key="prefix_hits", heading="prefix hits", spec=".0f"),
)


def study(letter: str, batch: int, *, unbound: bool) -> Study:
    """The same requests at one batch."""
    return Study(
        letter=letter,
        title=f"Static against continuous batching, batch {batch}",
        question=(
            "256 requests queued at the start, prompts of 64 to 192 tokens, outputs exponential "
            "with mean 128 cut to 1 to 512 (seed 7), end-of-sequence ignored. `static` takes its "
            "next batch as soon as the one before has ended; the number is the batch, for "
            f"`continuous` the slots ({SLOTS} without one). No prompt token may come from the "
            "prefix cache."
        ),
        columns=COLUMNS,
        measure=functools.partial(measure, batch=batch, unbound=unbound),
        sentences=functools.partial(sentences, batch=batch),
        draw=draw,
    )


STUDY = study("a", SMALL, unbound=True)
LARGE_STUDY = study("a32", LARGE, unbound=False)
