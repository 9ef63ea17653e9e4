"""Latency and throughput of serving, continuous batching (`fcfs`) beside `static`.

`python -m benchmarks.serving` starts a stack of its own for each policy, with the same worker
settings, and measures closed loops and Poisson arrivals of random prompts. Prompts are token ids,
so lengths are exact; end-of-sequence tokens are ignored, so every answer has exactly the tokens
asked for, which is checked. Warm-up prompts differ from the measured ones, and no two prompts share
a block: the prefix-hit rate must be 0. Prints a table, writes JSON and a PNG.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure, report, target
from benchmarks.client import Client
from benchmarks.measure import Counters, Load, Point
from benchmarks.stack import ROOT, Metrics, Stack, StackError, fetch
from benchmarks.workload import Job, Shape, jobs

CONCURRENCY = (1, 8, 32, 64)
QUICK_CONCURRENCY = (1, 8)
# Poisson rates, as shares of the best request rate that the first policy reached in closed loop.
LOAD_SHARES = (0.5, 0.8)
QUICK_LOAD_SHARES = (0.6,)
WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway, and the scheduler's metrics if their address is known."""

    client: Client
    model: str
    metrics_url: str

    def counters(self) -> Counters | None:
        """Totals now; None if they can't be known."""
        if not self.metrics_url:
            return None
        status, text = fetch(self.metrics_url)
        if status != 200:
            raise StackError(f"{self.metrics_url} answered {status}")
        scrape = Metrics(text)
        return Counters(
            prefix_queries=scrape.total("vllm:prefix_cache_queries_total"),
            prefix_hits=scrape.total("vllm:prefix_cache_hits_total"),
            preemptions=scrape.total("vllm:num_preemptions_total"),
        )


def say(text: str) -> None:
    """Progress, at once."""
    print(f"[bench] {text}", flush=True)


async def run_load(at: Target, policy: str, load: Load, shape: Shape, seed: str) -> Point:
    """Warms up with other prompts, then measures one load."""
    warm = jobs(
        f"{seed}-warm-{load.label}", WARM_UP_REQUESTS, Shape(prompt=shape.prompt, output=(8, 8))
    )
    warm_bodies = [job.body(at.model) for job in warm]
    await measure.closed_loop(at.client, warm_bodies, min(len(warm), int(max(1, load.level))))
    work: list[Job] = jobs(f"{seed}-{load.label}", load.num_requests, shape)
    bodies = [job.body(at.model) for job in work]
    before = await asyncio.to_thread(at.counters)
    if load.kind == "closed":
        answers = await measure.closed_loop(at.client, bodies, int(load.level))
    else:
        answers = await measure.poisson(at.client, bodies, load.level, f"{seed}-arrivals")
    after = await asyncio.to_thread(at.counters)
    counted = after.since(before) if after and before else None
    return measure.summarize(policy, load, work, answers, counted)


def run_policy(
    at: Target, policy: str, loads: Sequence[Load], options: argparse.Namespace
) -> list[Point]:
    """All loads, one after the other."""
    points = []
    for load in loads:
        say(f"{policy}: {load.label}, {load.num_requests} requests")
        point = asyncio.run(run_load(at, policy, load, Shape(), options.seed))
        cells = zip(report.HEADINGS[3:], report.row(point)[3:], strict=True)
        say("  " + "  ".join(f"{heading} {cell}" for heading, cell in cells))
        if point.num_failed:
            say(f"  {point.num_failed} failed, the first: {point.problems[0]}")
        points.append(point)
    return points


def closed_loads(options: argparse.Namespace) -> list[Load]:
    """Twice as many requests as clients and at least four; the quick form has one a client."""
    levels = options.concurrency or (QUICK_CONCURRENCY if options.quick else CONCURRENCY)
    factor, least = (1, 1) if options.quick else (2, 4)
    return [
        Load(kind="closed", level=level, num_requests=max(least, int(factor * level)))
        for level in levels
    ]


def poisson_loads(options: argparse.Namespace, points: Sequence[Point]) -> list[Load]:
    """Rates as asked, or as shares of the best closed loop."""
    rates = options.rates
    if rates is None:
        best = max(point.requests_per_s for point in points)
        shares = QUICK_LOAD_SHARES if options.quick else LOAD_SHARES
        rates = [float(f"{best * share:.2g}") for share in shares]
    seconds = 12.0 if options.quick else options.poisson_seconds
    return [
        Load(kind="poisson", level=rate, num_requests=max(4, round(rate * seconds)))
        for rate in rates
        if rate > 0
    ]


@contextlib.contextmanager
def own_stack(policy: str, options: argparse.Namespace) -> Iterator[Target]:
    """A stack with that policy; all else is the same."""
    settings = {
        **dict(pair.split("=", 1) for pair in options.set),
        "QUIRE_SCHEDULING_POLICY": policy,
        "QUIRE_STATIC_BATCH_SIZE": str(options.static_batch_size),
    }
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        say(f"starting Quire with {policy}")
        model = target.model_folder(options.model)
        with Stack(Path(folder), model=model, workers=options.workers, settings=settings) as stack:
            metrics_url = f"http://127.0.0.1:{stack.scheduler.ports['ops']}/metrics"
            yield Target(client=stack.client, model=stack.model_name, metrics_url=metrics_url)


def measure_all(options: argparse.Namespace) -> list[Point]:
    """Every policy; the Poisson rates of all are those found for the first."""
    if options.base_url:
        client, model = target.running(options.base_url)
        at = Target(client=client, model=model, metrics_url=options.scheduler_metrics)
        closed = run_policy(at, "running", closed_loads(options), options)
        return closed + run_policy(at, "running", poisson_loads(options, closed), options)
    points: list[Point] = []
    open_loads: list[Load] = []
    for policy in options.policies:
        with own_stack(policy, options) as at:
            closed = run_policy(at, policy, closed_loads(options), options)
            open_loads = open_loads or poisson_loads(options, closed)
            points += closed + run_policy(at, policy, open_loads, options)
    return points


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="about two minutes; figures are rough")
    add("--policies", nargs="+", default=["fcfs", "static"], metavar="P")
    add("--concurrency", nargs="+", type=int, metavar="N", help="closed-loop clients")
    add("--rates", nargs="*", type=float, metavar="R", help="Poisson arrivals per second")
    add("--poisson-seconds", type=float, default=60.0, help="length of a Poisson load")
    add("--static-batch-size", type=int, default=32, help="batch of the static policy")
    add("--workers", type=int, default=1)
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--set", action="append", default=[], metavar="QUIRE_X=V", help="setting for all services")
    add("--base-url", default="", help="http://HOST:PORT of a running gateway, not own stacks")
    add("--scheduler-metrics", default="", help="with --base-url: URL of the scheduler's /metrics")
    add("--seed", default="quire")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(argv)
    for pair in options.set:
        if not pair.startswith("QUIRE_") or "=" not in pair:
            parser.error(f"--set {pair}: must be QUIRE_NAME=VALUE")
    return options


def main(argv: Sequence[str]) -> int:
    """Measures and reports. Status 1 if an answer was wrong or a prompt hit the prefix cache."""
    options = parse(argv)
    try:
        points = measure_all(options)
    except StackError as error:
        print(f"[bench] {error}", file=sys.stderr)
        return 1
    stamp = time.strftime("%Y%m%d-%H%M%S")
    about = {
        "command": "python -m benchmarks.serving " + " ".join(argv),
        "seed": options.seed,
        "settings": options.set,
        "static_batch_size": options.static_batch_size,
        "workers": options.workers,
    }
    json_path, png_path = (options.out / f"serving-{stamp}.{end}" for end in ("json", "png"))
    report.write_json(json_path, points, about)
    about_machine = report.machine()
    title = (
        f"Quire, prompts and answers of 64 to 192 tokens; {about_machine['cores']} cores "
        f"{about_machine['cpu']}, commit {about_machine['commit'] or 'unknown'}"
    )
    report.write_plot(png_path, points, title)
    print(report.table(points))
    cached = sum(point.cached_tokens for point in points)
    worst = max(point.hit_rate for point in points)
    known = all(point.prefix_queries for point in points)
    source = "the scheduler's metrics" if known else "the answers' usage"
    print(f"prefix-cache hit rate, by {source}: {worst:.2%} (must be 0), {cached} tokens cached")
    print(f"wrote {json_path} and {png_path}")
    problems = [problem for point in points for problem in point.problems]
    for problem in problems[:10]:
        print(f"[bench] {problem}", file=sys.stderr)
    return 1 if problems or worst > 0 or cached else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
