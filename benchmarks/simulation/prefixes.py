"""Prefix hits of long conversations, beside what caches could give at most."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.simulation import cache_bound
from benchmarks.simulation.bench import MOONCAKE, Bench, h100, simulate
from benchmarks.studies import drawing
from benchmarks.studies.study import Column, Row, Study

SIZES = (1, 4)


def measure(bench: Bench) -> Iterator[Row]:
    """The whole trace, or in a quick run its beginning."""
    source = bench.trace(MOONCAKE, bench.most if bench.quick else None)
    trace = cache_bound.accesses(source, source.prefix_block_tokens)
    num_tokens = sum(arrival.num_prompt_tokens for arrival in source)
    for size in SIZES:
        cluster = h100(size)
        num_blocks = size * cluster.num_blocks * cluster.block_size // source.prefix_block_tokens
        bench.say(f"{size} workers")
        figures = simulate(cluster, source)
        row = {
            **figures,
            "run": f"{size}",
            "kv_tokens": size * cluster.num_blocks * cluster.block_size,
            "lru": cache_bound.least_recently_used(trace, num_blocks) / num_tokens,
            "best": cache_bound.best(trace, num_blocks) / num_tokens,
            "unlimited": cache_bound.unlimited(trace) / num_tokens,
        }
        problems = list(row["problems"])
        if not row["hit_rate"] <= row["best"] <= row["unlimited"]:
            problems.append("a bound does not hold")
        yield {**row, "problems": problems}


def sentences(rows: Sequence[Row]) -> str:
    """How near the caches come to what is possible."""
    small, large = rows[0], rows[-1]
    return (
        f"Of {small['prompt_tokens'] / 1e6:,.0f} million prompt tokens {small['unlimited']:.1%} "
        f"were asked for before; {small['run']} worker's memory of {small['kv_tokens']:,} tokens, "
        f"in which the running requests stand too, gives {small['hit_rate']:.1%} where the best "
        f"cache of that size, which knows the future and holds nothing else, gives "
        f"{small['best']:.1%}, and {large['run']} workers give {large['hit_rate']:.1%} of "
        f"{large['best']:.1%}. A cache of that size by last use alone, without running requests "
        f"in it, gives {small['lru']:.1%} and {large['lru']:.1%}: what is missing to the best is "
        f"mostly knowledge of the future."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Hit rates beside their bounds."""
    labels = [f"{row['run']} workers" for row in rows]
    series = {
        name: [100 * row[key] for row in rows]
        for name, key in (
            ("simulated", "hit_rate"),
            ("last use, cache alone", "lru"),
            ("best of that size", "best"),
            ("unlimited", "unlimited"),
        )
    }
    drawing.paired_bars(axes[0], labels, series, "prompt tokens from the prefix cache, %")


STUDY = Study(
    letter="prefixes",
    title="Prefix hits of long conversations",
    question=(
        "An hour of a service with long conversations (Mooncake): 12,031 requests of 12,000 prompt "
        "tokens on average, at their recorded times. The hit rate of the simulated cluster beside "
        "that of three caches which keep prompts alone: by last use, the best that any cache of "
        "that size can reach, and one without a limit."
    ),
    columns=(
        Column(key="run", heading="workers"),
        Column(key="requests", heading="requests", spec=","),
        Column(key="kv_tokens", heading="KV tokens", spec=","),
        Column(key="hit_rate", heading="hits", spec=".1%"),
        Column(key="lru", heading="last use", spec=".1%"),
        Column(key="best", heading="best of that size", spec=".1%"),
        Column(key="unlimited", heading="unlimited", spec=".1%"),
        Column(key="ttft_p50_ms", heading="TTFT p50 ms", spec=",.0f"),
        Column(key="ttft_p99_ms", heading="p99", spec=",.0f"),
        Column(key="tokens_per_s", heading="out tok/s", spec=",.0f"),
        Column(key="blocks_used", heading="blocks", spec=".0%"),
        Column(key="preempted", heading="preempted", spec=","),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
    num_axes=1,
)
