"""(d) The size of a KV block: speed, memory that is taken and not used, prefixes that are found.

Waste is taken at moments when all requests run and none has ended: then the tokens in blocks are
those of all requests less the scheduler's backlog. Prefixes are found by pairs of prompts that
share a beginning of a random length.
"""

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Gauges, Row, Study, Target, figures, listed
from benchmarks.workload import Job, Shape, jobs

SIZES = (4, 16, 64)
SHAPE, NUM_REQUESTS = Shape(prompt=(64, 192), output=(96, 192)), 32
QUICK_SHAPE, QUICK_REQUESTS = Shape(prompt=(64, 192), output=(24, 32)), 8
NUM_PAIRS, QUICK_PAIRS = 16, 4
PAIR = Shape(prompt=(192, 256), output=(1, 1))


def pairs(seed: str, count: int) -> list[tuple[Job, Job, int]]:
    """Two prompts and how many tokens they share, 64 to 191; the next token differs."""
    chance = random.Random(seed)
    found = []
    firsts, seconds = jobs(f"{seed}-1", count, PAIR), jobs(f"{seed}-2", count, PAIR)
    for first, second in zip(firsts, seconds, strict=True):
        shared = chance.randint(64, 191)
        other = first.prompt[shared] + 1
        prompt = (*first.prompt[:shared], other, *second.prompt[shared + 1 :])
        found.append((first, dataclasses.replace(second, prompt=prompt), shared))
    return found


def wasted_share(seen: Sequence[Gauges], work: Sequence[Job], block_size: int) -> float | None:
    """Mean share of the taken slots that holds no token, over the moments when all run."""
    total = sum(len(job.prompt) + job.num_output for job in work)
    shares = []
    for gauges in seen:
        taken = gauges.get("quire:blocks_used") * block_size
        if gauges.get("vllm:num_requests_running") == len(work) and taken:
            shares.append(1 - (total - gauges.get("quire:backlog_tokens")) / taken)
    return sum(shares) / len(shares) if shares else None


async def _run(at: Target, work: Sequence[Job], count: int, block_size: int) -> dict[str, Any]:
    await at.warm_up("block-size")
    async with at.watched() as seen:
        answers = await at.send(work, len(work))
    row = figures(work, answers)
    shared = found = 0
    for first, second, num_shared in pairs("pairs", count):
        answers = await at.send([first, second], 1)
        row["problems"] += [a.problem(1) for a in answers if a.problem(1)]
        shared += num_shared
        found += int(answers[1].usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
    return {
        **row,
        "peak_blocks": max(gauges.get("quire:blocks_used") for gauges in seen),
        "wasted": wasted_share(seen, work, block_size),
        "shared_tokens": shared,
        "found_tokens": found,
        "found": found / shared,
    }


def measure(bench: Bench) -> Iterator[Row]:
    """A row for each block size."""
    shape, count = (QUICK_SHAPE, QUICK_REQUESTS) if bench.quick else (SHAPE, NUM_REQUESTS)
    work = jobs("block-size", count, shape)
    num_pairs = QUICK_PAIRS if bench.quick else NUM_PAIRS
    for size in (SIZES[0], SIZES[2]) if bench.quick else SIZES:
        with bench.stack(f"block size {size}", block_size=size) as at:
            row = asyncio.run(_run(at, work, num_pairs, size))
        yield {"run": str(size), "block_size": size, **row}


def _share(row: Row) -> str:
    return "unknown" if row["wasted"] is None else f"{row['wasted']:.1%}"


def sentences(rows: Sequence[Row]) -> str:
    """Waste and hits by size; what it does to speed."""
    sizes = listed(row["run"] for row in rows)
    wasted = listed(_share(row) for row in rows)
    found = listed(f"{row['found']:.1%}" for row in rows)
    speed = listed(f"{row['tokens_per_s']:.0f}" for row in rows)
    return (
        f"With blocks of {sizes} tokens {wasted} of the memory taken holds no token, and {found} "
        f"of the tokens that prompts share are found in the cache, since only full blocks are "
        f"shared. Throughput is {speed} output tokens per second."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Throughput, waste, hits."""
    labels = [f"block size {row['run']}" for row in rows]
    drawing.bars(axes[0], labels, [row["tokens_per_s"] for row in rows], "output tokens per second")
    wasted = [100 * (row["wasted"] or 0.0) for row in rows]
    drawing.bars(axes[1], labels, wasted, "taken and not used, %")
    drawing.bars(axes[2], labels, [100 * row["found"] for row in rows], "shared tokens found, %")


STUDY = Study(
    letter="d",
    title="Block size",
    question=(
        "32 requests at once, prompts of 64 to 192 and outputs of 96 to 192 tokens. Wasted: share "
        "of the blocks' room that holds no token, over the moments when all run. Found: 16 pairs "
        "of prompts share their first 64 to 191 tokens; the share of these that the second one "
        "finds."
    ),
    columns=(
        Column(key="run", heading="block size"),
        Column(key="tokens_per_s", heading="out tok/s", spec=".1f"),
        Column(key="gap_p50_ms", heading="gap p50 ms", spec=".0f"),
        Column(key="gap_p99_ms", heading="p99", spec=".0f"),
        Column(key="peak_blocks", heading="blocks at the peak", spec=",.0f"),
        Column(key="wasted", heading="wasted", spec=".1%"),
        Column(key="found", heading="found", spec=".1%"),
        Column(key="found_tokens", heading="tokens found", spec=",.0f"),
        Column(key="shared_tokens", heading="shared", spec=",.0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
    num_axes=3,
)
