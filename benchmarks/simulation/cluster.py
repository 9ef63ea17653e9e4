"""What a cluster of 1,000 workers would ask of the control plane."""

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.hop.plane import Load
from benchmarks.hop.plane import measure as measure_hop
from benchmarks.simulation.bench import Bench, h100, simulate
from benchmarks.studies import drawing
from benchmarks.studies.study import Column, Row, Study, by_label
from scheduler_svc.sim.arrivals import Arrival, Source

SIZES, QUICK_SIZES = (1, 4, 16, 64), (1, 4)
ROWS = 256
# Requests of a worker, by its slots: the last ones run in batches that are not full.
ROUNDS = 2
WIRE_WORKERS, WIRE_STEP_MS = 16, 20.0
WIRE = f"{WIRE_WORKERS}, with codec and gRPC"
CLUSTER = 1_000
STEPS_MS = (20, 50)
# Of a leader's core, so that its queue stays short.
BUSY = 0.7
# SSE tokens per second of one core, docs/benchmarks/gateway.md.
GATEWAY_TOKENS_PER_S = 42_000


def saturating(num_workers: int) -> Source:
    """Enough short requests to keep all slots of all workers taken for a while."""

    def passes() -> Iterator[Arrival]:
        chance = random.Random(num_workers)
        for _ in range(ROUNDS * ROWS * num_workers):
            yield Arrival(at=0.0, num_prompt_tokens=64, num_output_tokens=chance.randint(64, 192))

    return Source(name="saturating", prefix_block_tokens=64, passes=passes)


def measure(bench: Bench) -> Iterator[Row]:
    """The core alone for clusters of several sizes; then a real scheduler with real gRPC."""
    for size in QUICK_SIZES if bench.quick else SIZES:
        bench.say(f"{size} workers")
        figures = simulate(h100(size), saturating(size))
        yield {"run": f"{size}", **figures, "plans_per_s": 1e6 / figures["core_us"]}
    bench.say(WIRE)
    load = Load(num_workers=WIRE_WORKERS, num_rows=ROWS, step_ms=WIRE_STEP_MS, sleepers=True)
    seconds = 5.0 if bench.quick else 20.0
    reading = asyncio.run(measure_hop(load, warm_up_s=5.0, seconds=seconds))
    core_us = reading.core_share / reading.steps_per_s * 1e6
    yield {
        "run": WIRE,
        "workers": WIRE_WORKERS,
        "steps": round(reading.steps_per_s * reading.seconds),
        "rows_per_step": ROWS,
        "core_us": core_us,
        "plans_per_s": 1e6 / core_us,
    }


def workers_per_leader(row: Row, step_ms: float) -> int:
    """Workers with steps of that length which one core of a scheduler keeps busy."""
    return max(1, int(BUSY * row["plans_per_s"] * step_ms / 1e3))


def sentences(rows: Sequence[Row]) -> str:
    """Leaders, gateways and streams, by arithmetic from the rows."""
    wire = by_label(rows)[WIRE]
    alone = [row for row in rows if row["run"] != WIRE]
    parts = []
    for step_ms in STEPS_MS:
        group = workers_per_leader(wire, step_ms)
        gateways = math.ceil(group * ROWS * 1e3 / step_ms / GATEWAY_TOKENS_PER_S)
        messages = CLUSTER * 1e3 / step_ms
        parts.append(
            f"at steps of {step_ms} ms {CLUSTER * 1e3 / step_ms:,.0f} plans a second, "
            f"{math.ceil(CLUSTER / group)} leaders with {group} workers each and {gateways} "
            f"gateway cores beside each leader: {group * gateways:,} streams in a group and "
            f"{group * 1e3 / step_ms:,.0f} messages a second to each gateway, where gateways for "
            f"all workers would get {messages:,.0f} each"
        )
    return (
        f"A plan for {ROWS} rows costs the core {alone[0]['core_us']:,.0f} us with "
        f"{alone[0]['run']} worker and {alone[-1]['core_us']:,.0f} us with {alone[-1]['run']}, and "
        f"a scheduler with codec and gRPC {wire['core_us']:,.0f} us, so that one core gives "
        f"{wire['plans_per_s']:,.0f} plans a second. {CLUSTER:,} workers with {ROWS} requests each "
        f"need, with leaders {BUSY:.0%} busy, {'; '.join(parts)}. So one leader for a model is "
        f"enough up to the first of these numbers of workers; above it worker groups have a "
        f"leader, a queue and gateways of their own, and models come apart before groups do, "
        f"since they share neither cache nor workers."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """What a plan costs."""
    labels = [str(row["run"]) for row in rows]
    values = [row["core_us"] for row in rows]
    drawing.bars(axes[0], labels, values, f"CPU of a plan for {ROWS} rows, us")


STUDY = Study(
    letter="cluster",
    title="What 1,000 workers would need",
    question=(
        f"The core's own CPU time for each plan, result and arrivals included, where every worker "
        f"has {ROWS} slots and more requests than that, as many as the table says; and that of a "
        f"whole scheduler process with {WIRE_WORKERS} workers that sleep {WIRE_STEP_MS:.0f} ms a "
        "step (`make bench-control-plane`)."
    ),
    columns=(
        Column(key="run", heading="workers"),
        Column(key="requests", heading="requests", spec=","),
        Column(key="steps", heading="plans", spec=","),
        Column(key="rows_per_step", heading="rows/step", spec=".0f"),
        Column(key="core_us", heading="CPU us a plan", spec=",.0f"),
        Column(key="plans_per_s", heading="plans/s of a core", spec=",.0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
    num_axes=1,
)
