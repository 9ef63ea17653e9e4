"""(b) What to do with a request that loses its blocks, at 60 % of the KV memory that is needed.

A first run with room for everything says how many blocks the load needs at its peak, and which
tokens are right; the others get 60 % of that, and must give the same number of tokens.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Row, Study, Target, by_label, figures
from benchmarks.workload import Job, Shape, jobs

SHARE = 0.6
SHAPE, NUM_REQUESTS = Shape(prompt=(96, 224), output=(96, 224)), 32
QUICK_SHAPE, QUICK_REQUESTS = Shape(prompt=(48, 96), output=(32, 64)), 10
MODES = ("swap", "recompute", "auto")
WHOLE = "all blocks"


async def _run(at: Target, work: Sequence[Job]) -> dict[str, Any]:
    await at.warm_up("memory")
    async with at.watched() as seen:
        answers = await at.send(work, len(work))
    first, last = seen[0], seen[-1]
    preemptions = last.since(first, "vllm:num_preemptions_total")
    swaps = last.since(first, 'quire:preemptions_total{mode="swap"}')
    planned = last.since(first, "vllm:iteration_tokens_total_sum")
    row = figures(work, answers)
    # Each token of a request is computed once, but for its last one.
    needed = row["prompt_tokens"] + row["output_tokens"] - row["requests"]
    return {
        **row,
        "peak_blocks": max(gauges.get("quire:blocks_used") for gauges in seen),
        "preemptions": preemptions,
        "swaps": swaps,
        "recomputes": preemptions - swaps,
        "again_tokens": max(0.0, planned - needed),
    }


def measure(bench: Bench) -> Iterator[Row]:
    """A row with all blocks, then one for each way to preempt."""
    shape, count = (QUICK_SHAPE, QUICK_REQUESTS) if bench.quick else (SHAPE, NUM_REQUESTS)
    work = jobs("memory", count, shape)
    with bench.stack(WHOLE) as at:
        whole = asyncio.run(_run(at, work))
    yield {"run": WHOLE, "blocks": whole["peak_blocks"], **whole}
    blocks = math.floor(SHARE * whole["peak_blocks"])
    for mode in MODES[:2] if bench.quick else MODES:
        settings: dict[str, object] = {"preemption_mode": mode, "num_gpu_blocks_override": blocks}
        if mode != "recompute":
            settings["swap_space_gib"] = 1
        with bench.stack(mode, **settings) as at:
            row = asyncio.run(_run(at, work))
        yield {"run": mode, "blocks": blocks, **row}


def sentences(rows: Sequence[Row]) -> str:
    """What is left of the throughput, and what auto has chosen."""
    run = by_label(rows)
    whole, modes = run[WHOLE], [row for row in rows if row["run"] != WHOLE]
    best = max(modes, key=lambda row: row["tokens_per_s"])
    all_s = whole["tokens_per_s"]
    left = ", ".join(
        f"`{row['run']}` {row['tokens_per_s']:.0f} ({row['tokens_per_s'] / all_s:.0%})"
        for row in modes
    )
    text = (
        f"With {best['blocks']:.0f} of the {whole['peak_blocks']:.0f} blocks that "
        f"{whole['requests']} requests hold at their peak, the {all_s:.0f} output "
        f"tokens per second become {left}."
    )
    costs = "; ".join(
        f"`{row['run']}` {row['preemptions']:.0f} preemptions, {row['swaps']:.0f} of them by swap, "
        f"{row['again_tokens']:,.0f} tokens computed again"
        for row in modes
    )
    return f"{text} The fastest of them here is `{best['run']}`: {costs}."


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Throughput; how requests lost their blocks."""
    labels = [str(row["run"]) for row in rows]
    drawing.bars(axes[0], labels, [row["tokens_per_s"] for row in rows], "output tokens per second")
    series = {
        "swaps": [row["swaps"] for row in rows],
        "recomputes": [row["recomputes"] for row in rows],
    }
    drawing.paired_bars(axes[1], labels, series, "preemptions")


STUDY = Study(
    letter="b",
    title="KV memory at 60 % of what is needed",
    question=(
        "32 requests queued at the start, prompts and outputs of 96 to 224 tokens. A first run has "
        "room for all of them and tells the peak of blocks in use; the others get 60 % of it. "
        "Again: tokens computed more than once."
    ),
    columns=(
        Column(key="run", heading="preemption_mode"),
        Column(key="blocks", heading="blocks", spec=".0f"),
        Column(key="tokens_per_s", heading="out tok/s", spec=".1f"),
        Column(key="latency_mean_s", heading="latency mean s", spec=".1f"),
        Column(key="latency_p99_s", heading="p99", spec=".1f"),
        Column(key="gap_p50_ms", heading="gap p50 ms", spec=".0f"),
        Column(key="gap_p99_ms", heading="p99", spec=",.0f"),
        Column(key="preemptions", heading="preemptions", spec=".0f"),
        Column(key="swaps", heading="swaps", spec=".0f"),
        Column(key="recomputes", heading="recomputes", spec=".0f"),
        Column(key="again_tokens", heading="again", spec=",.0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
)
