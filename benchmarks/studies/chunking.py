"""(c) Long prompts that arrive beside running decodes: whole, in chunks, in chunks by time.

Decodes run all the while; long prompts come one after the other, each when the one before has its
answer. Off means that a step's budget takes the whole prompt.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import measure as measuring
from benchmarks.client import Exchange, read_answer
from benchmarks.stack import StackError
from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Row, Study, Target, by_label
from benchmarks.workload import Job, Shape, jobs

NUM_DECODES, NUM_LONG, LONG_TOKENS = 8, 4, 2_048
QUICK_DECODES, QUICK_LONG, QUICK_LONG_TOKENS = 4, 1, 1_024
# More than any stream gets through; it is cut when the last long prompt has its answer.
DECODE_TOKENS, LONG_OUTPUT, CALM_S = 4_000, 4, 3.0
RUNS: tuple[tuple[str, dict[str, object]], ...] = (
    ("off", {"max_num_batched_tokens": LONG_TOKENS + 2 * NUM_DECODES, "max_prefill_gap_ms": 0}),
    ("on", {"max_prefill_gap_ms": 0}),
    ("on, gap 200 ms", {"max_prefill_gap_ms": 200}),
)


async def _run(at: Target, decodes: Sequence[Job], prompts: Sequence[Job]) -> dict[str, Any]:
    await at.warm_up("chunking")
    watch: list[Exchange] = []
    running = [
        asyncio.ensure_future(at.client.complete(job.body(at.model), watch=watch))
        for job in decodes
    ]
    try:
        while len(watch) < len(running) or not all(exchange.progress > 4 for exchange in watch):
            _raise_if_ended(running)
            await asyncio.sleep(0.1)
        calm_s = time.perf_counter()
        await asyncio.sleep(CALM_S)
        answers, spans = [], [(calm_s, calm_s + CALM_S)]
        for job in prompts:
            answer = await at.client.complete(job.body(at.model))
            answers.append(answer)
            spans.append((answer.started_s, answer.started_s + (answer.ttft_s or 0.0)))
            await asyncio.sleep(0.5)
        _raise_if_ended(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    times = [read_answer(exchange.pieces, 0.0).text_times_s for exchange in watch]
    gaps = [_gaps_ms(times, spans[1:]), _gaps_ms(times, spans[:1])]
    ttfts = [answer.ttft_s * 1e3 for answer in answers if answer.ttft_s is not None]
    problems = [a.problem(j.num_output) for j, a in zip(prompts, answers, strict=True)]
    return {
        "long_ttft_mean_ms": sum(ttfts) / max(1, len(ttfts)),
        "long_ttft_max_ms": max(ttfts, default=0.0),
        "gap_p50_ms": measuring.percentile(gaps[0], 0.5),
        "gap_p99_ms": measuring.percentile(gaps[0], 0.99),
        "gap_max_ms": max(gaps[0], default=0.0),
        "calm_gap_p50_ms": measuring.percentile(gaps[1], 0.5),
        "num_gaps": len(gaps[0]),
        "problems": [problem for problem in problems if problem],
    }


def _raise_if_ended(running: Sequence["asyncio.Future[Any]"]) -> None:
    for task in running:
        if task.done():
            raise StackError(f"a decode ended early: {task.result()}")


def _gaps_ms(times: Sequence[Sequence[float]], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Gaps of all streams that overlap one of the spans."""
    return [
        (b - a) * 1e3
        for stream in times
        for a, b in itertools.pairwise(stream)
        if any(a < end and b > start for start, end in spans)
    ]


def measure(bench: Bench) -> Iterator[Row]:
    """A row for each setting."""
    num_decodes, num_long, tokens = (
        (QUICK_DECODES, QUICK_LONG, QUICK_LONG_TOKENS)
        if bench.quick
        else (NUM_DECODES, NUM_LONG, LONG_TOKENS)
    )
    short = Shape(prompt=(64, 96), output=(DECODE_TOKENS, DECODE_TOKENS))
    long = Shape(prompt=(tokens, tokens), output=(LONG_OUTPUT, LONG_OUTPUT))
    decodes, prompts = jobs("decodes", num_decodes, short), jobs("long", num_long, long)
    for label, settings in RUNS[:2] if bench.quick else RUNS:
        with bench.stack(label, **settings) as at:
            row = asyncio.run(_run(at, decodes, prompts))
        yield {"run": label, "decodes": num_decodes, "prompt_tokens": tokens, **row}


def sentences(rows: Sequence[Row]) -> str:
    """The decodes' gap against the long prompts' first token."""
    run = by_label(rows)
    off, on = run["off"], run["on"]
    text = (
        f"While a prompt of {off['prompt_tokens']:,} tokens is computed in one step, the "
        f"{off['decodes']} running streams stand still for up to {off['gap_max_ms']:,.0f} ms; "
        f"in chunks their gap is {on['gap_p50_ms']:,.0f} ms at the median and "
        f"{on['gap_max_ms']:,.0f} ms at most"
    )
    bounded = run.get(RUNS[2][0])
    if bounded:
        text += (
            f", with `max_prefill_gap_ms=200` {bounded['gap_p50_ms']:,.0f} and "
            f"{bounded['gap_max_ms']:,.0f} ms"
        )
    price = (
        f" The prompt pays for it: its first token comes after {on['long_ttft_mean_ms']:,.0f} ms "
        f"instead of {off['long_ttft_mean_ms']:,.0f} ms"
    )
    if bounded:
        price += f", with the bound after {bounded['long_ttft_mean_ms']:,.0f} ms"
    return f"{text}.{price}."


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Gaps of the decodes; first token of the long prompts."""
    labels = [str(row["run"]) for row in rows]
    series = {
        "p50": [row["gap_p50_ms"] for row in rows],
        "p99": [row["gap_p99_ms"] for row in rows],
    }
    drawing.paired_bars(axes[0], labels, series, "gap of running decodes, ms")
    ttfts = [row["long_ttft_mean_ms"] for row in rows]
    drawing.bars(axes[1], labels, ttfts, "first token of the long prompts, mean ms")


STUDY = Study(
    letter="c",
    title="Long prompts beside running decodes",
    question=(
        "8 streams decode; 4 prompts of 2,048 tokens come one after the other. `off`: the step's "
        "budget takes a whole prompt; `on`: the default budget of 256 tokens a step on a CPU; the "
        "last row bounds the steps' time with `max_prefill_gap_ms` as well. Gaps are those of the "
        "streams between a long prompt's arrival and its first token; calm: before the first one."
    ),
    columns=(
        Column(key="run", heading="chunks"),
        Column(key="calm_gap_p50_ms", heading="calm gap p50 ms", spec=".0f"),
        Column(key="gap_p50_ms", heading="gap p50 ms", spec=",.0f"),
        Column(key="gap_p99_ms", heading="p99", spec=",.0f"),
        Column(key="gap_max_ms", heading="max", spec=",.0f"),
        Column(key="long_ttft_mean_ms", heading="long TTFT mean ms", spec=",.0f"),
        Column(key="long_ttft_max_ms", heading="max", spec=",.0f"),
        Column(key="num_gaps", heading="gaps", spec=",.0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
)
