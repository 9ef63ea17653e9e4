"""(f) Requests that begin with one system prompt: KV blocks and the time to the first token.

All requests of a load come at once. Each load has a system prompt of its own, so that none finds
what another has left. Blocks saved are those that requests did not take because they share them, by
the answers' own usage.
"""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Row, Study, Target, figures, listed
from benchmarks.workload import Job, Shape, jobs

BLOCK = 16
SYSTEM_TOKENS = 256
LOADS, QUICK_LOADS = (3, 30, 300), (3, 8)
REQUEST = Shape(prompt=(16, 48), output=(16, 16))


def shared_prompts(seed: str, count: int) -> list[Job]:
    """Requests of one system prompt and a question each."""
    shape = Shape(prompt=(SYSTEM_TOKENS, SYSTEM_TOKENS), output=(1, 1))
    system = jobs(f"{seed}-system", 1, shape)[0].prompt
    return [
        dataclasses.replace(job, prompt=(*system, *job.prompt))
        for job in jobs(f"{seed}-questions", count, REQUEST)
    ]


def num_blocks(work: Sequence[Job]) -> int:
    """Blocks that the requests take if they share none."""
    return sum(-(-(len(job.prompt) + job.num_output) // BLOCK) for job in work)


async def _run(at: Target, work: Sequence[Job]) -> dict[str, Any]:
    async with at.watched() as seen:
        answers = await at.send(work, len(work))
    row = figures(work, answers)
    needed = num_blocks(work)
    saved = row["cached_tokens"] // BLOCK
    return {
        **row,
        "blocks": needed,
        "blocks_saved": saved,
        "blocks_taken": needed - saved,
        "peak_blocks": max(gauges.get("quire:blocks_used") for gauges in seen),
        "held_back": seen[-1].since(seen[0], "quire:requests_held_back_total"),
    }


def measure(bench: Bench) -> Iterator[Row]:
    """A row for each load, with and without the cache."""
    for caching in (True, False):
        word = "on" if caching else "off"
        with bench.stack(
            f"prefix caching {word}", enable_prefix_caching=caching, block_size=BLOCK
        ) as at:
            asyncio.run(at.warm_up("prefixes"))
            for count in QUICK_LOADS if bench.quick else LOADS:
                bench.say(f"{count} requests")
                row = asyncio.run(_run(at, shared_prompts(f"prefixes-{count}", count)))
                yield {"run": f"{word}, {count}", "caching": word, **row}


def _of(rows: Sequence[Row], caching: str) -> list[Row]:
    return [row for row in rows if row["caching"] == caching]


def sentences(rows: Sequence[Row]) -> str:
    """Blocks and time to first token by load."""
    on, off = _of(rows, "on"), _of(rows, "off")
    counts = listed(str(row["requests"]) for row in on)
    saved = listed(f"{row['blocks_saved']:,} of {row['blocks']:,}" for row in on)
    waits = listed(f"{row['ttft_p50_ms'] / 1e3:.1f}" for row in on)
    longer = listed(f"{row['ttft_p50_ms'] / 1e3:.1f}" for row in off)
    return (
        f"{counts} requests with one system prompt of {SYSTEM_TOKENS} tokens save {saved} blocks. "
        f"The median time to the first token, all of them sent at once, is {waits} s, and {longer} "
        f"s without the cache."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Blocks taken; time to first token."""
    on, off = _of(rows, "on"), _of(rows, "off")
    labels = [f"{row['requests']} requests" for row in on]
    series = {"cache on": on, "cache off": off}
    for axis, key, heading in (
        (axes[0], "blocks_taken", "KV blocks taken by all requests"),
        (axes[1], "ttft_p50_ms", "time to first token, p50 ms"),
    ):
        drawing.paired_bars(
            axis, labels, {name: [r[key] for r in own] for name, own in series.items()}, heading
        )
        axis.set_yscale("log")
        axis.set_ylim(1, 8 * max(row[key] for row in rows))


STUDY = Study(
    letter="f",
    title="Prefix sharing",
    question=(
        "3, 30 and 300 requests at once that begin with the same 256 random tokens, then 16 to 48 "
        "of their own, 16 output tokens each; 256 slots. Blocks: what the requests need if they "
        "share none; saved: those found in the cache, by the answers' usage; at the peak: most "
        "blocks in use at a time. Held back: requests that waited for the first one to fill the "
        "cache."
    ),
    columns=(
        Column(key="run", heading="cache, requests"),
        Column(key="blocks", heading="blocks", spec=",.0f"),
        Column(key="blocks_saved", heading="saved", spec=",.0f"),
        Column(key="peak_blocks", heading="at the peak", spec=",.0f"),
        Column(key="ttft_p50_ms", heading="TTFT p50 ms", spec=",.0f"),
        Column(key="ttft_p99_ms", heading="p99", spec=",.0f"),
        Column(key="tokens_per_s", heading="out tok/s", spec=".1f"),
        Column(key="took_s", heading="took s", spec=".1f"),
        Column(key="held_back", heading="held back", spec=".0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
)
