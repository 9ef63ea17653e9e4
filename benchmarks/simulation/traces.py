"""Recorded traffic on 1, 4 and 16 workers: throughput and tails."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.simulation.bench import AZURE_CHAT, AZURE_CODE, MOONCAKE, Bench, h100, simulate
from benchmarks.studies import drawing
from benchmarks.studies.study import Column, Row, Study, by_label
from scheduler_svc.sim.arrivals import faster, mean_rate_per_s

TRACES = {"chat": AZURE_CHAT, "code": AZURE_CODE, "long chat": MOONCAKE}
SIZES = (1, 4, 16)


def measure(bench: Bench) -> Iterator[Row]:
    """Each trace at its own rate on 1 worker, at 4 and 16 times that on as many, and at its own."""
    for kind, name in TRACES.items():
        source = bench.trace(name, bench.most)
        rate = mean_rate_per_s(source)
        loads = [(size, size) for size in SIZES] + [(size, 1) for size in SIZES[1:]]
        for size, factor in loads:
            label = f"{kind}, {size} at {factor}x"
            bench.say(label)
            figures = simulate(h100(size), faster(source, factor))
            yield {"run": label, "offered_per_s": rate * factor, **figures}


def sentences(rows: Sequence[Row]) -> str:
    """How tails change with the cluster at an equal load for each worker."""
    run = by_label(rows)
    small, large = SIZES[0], SIZES[-1]
    parts = []
    for kind in TRACES:
        one, many = run[f"{kind}, {small} at {small}x"], run[f"{kind}, {large} at {large}x"]
        parts.append(
            f"{kind} from {one['ttft_p99_ms'] / 1e3:,.2f} to {many['ttft_p99_ms'] / 1e3:,.2f} s "
            f"(output tokens per second {one['tokens_per_s']:,.0f} and {many['tokens_per_s']:,.0f})"
        )
    slow = run[f"long chat, {small} at {small}x"]
    fast = run[f"long chat, {large} at {large}x"]
    relief = run[f"long chat, {SIZES[1]} at 1x"]
    return (
        f"With as much load for each worker, {large} workers in place of {small} take the p99 time "
        f"to the first token of {'; of '.join(parts)}: workers that share a queue share its "
        f"bursts, and their caches hold more of what comes again (of the long chats "
        f"{slow['hit_rate']:.1%} and {fast['hit_rate']:.1%}). The long chats are more than "
        f"{small} worker can compute as they come, so a backlog grows with each "
        f"request of the run, and where they come {large} times as fast the run is over in less "
        f"time; {SIZES[1]} workers at the recorded rate answer half of them within "
        f"{relief['ttft_p50_ms'] / 1e3:,.2f} s."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Time to the first token and gaps, p99, where each worker has as much load."""
    equal = {str(row["run"]): row for row in rows}
    labels = [f"{size} workers" for size in SIZES]
    for axis, key, heading in (
        (axes[0], "ttft_p99_ms", "time to first token, p99, ms"),
        (axes[1], "gap_p99_ms", "gap between tokens, p99, ms"),
    ):
        series = {
            kind: [equal[f"{kind}, {size} at {size}x"][key] for size in SIZES] for kind in TRACES
        }
        drawing.paired_bars(axis, labels, series, heading)
    axes[0].set_yscale("log")


STUDY = Study(
    letter="traces",
    title="Recorded traffic on 1, 4 and 16 workers",
    question=(
        "An hour of two production services of 2023 (Azure: chat and code completion) and of one "
        "with long conversations (Mooncake), its first requests as many as the table says. "
        "Workers are H100s with Llama 3.1 8B by data sheet; `16 at 16x` is 16 workers with the "
        "requests coming 16 times as fast as recorded."
    ),
    columns=(
        Column(key="run", heading="traffic, workers"),
        Column(key="requests", heading="requests", spec=","),
        Column(key="offered_per_s", heading="req/s", spec=".1f"),
        Column(key="tokens_per_s", heading="out tok/s", spec=",.0f"),
        Column(key="ttft_p50_ms", heading="TTFT p50 ms", spec=",.0f"),
        Column(key="ttft_p99_ms", heading="p99", spec=",.0f"),
        Column(key="gap_p50_ms", heading="gap p50 ms", spec=".1f"),
        Column(key="gap_p99_ms", heading="p99", spec=".0f"),
        Column(key="e2e_p99_s", heading="E2E p99 s", spec=",.1f"),
        Column(key="rows_per_step", heading="rows/step", spec=".1f"),
        Column(key="blocks_used", heading="blocks", spec=".0%"),
        Column(key="preempted", heading="preempted", spec=","),
        Column(key="hit_rate", heading="hits", spec=".1%"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
)
