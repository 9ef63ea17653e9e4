"""Latency and throughput of serving, continuous batching (`fcfs`) beside `static`.

`python -m benchmarks.serving` first measures the machine's floor (benchmarks.floor), then starts a
stack of its own for each policy, with the same worker settings, and measures closed loops and
Poisson arrivals of random prompts. Prompts are token ids, so lengths are exact; end-of-sequence
tokens are ignored, so every answer has exactly the tokens asked for, which is checked. Warm-up
prompts differ from the measured ones, and no two prompts share a block: the prefix-hit rate must be
0. The first policy is also measured with sampled requests and with long prompts, once more in the
arithmetic of QUIRE_DETERMINISTIC=1, whose price that shows, and with weights of 8 bits. Prints
tables of the loads, of what a step takes besides its forward, of the floor and of the goals; writes
JSON and a PNG.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import floor, goals, measure, report, target
from benchmarks.client import Client
from benchmarks.floor import Floor
from benchmarks.measure import Counters, Load, Point
from benchmarks.stack import ROOT, Metrics, Stack, StackError, fetch
from benchmarks.steps import StepCounts
from benchmarks.workload import Job, Shape, jobs

CONCURRENCY = (1, 8, 32, 64)
QUICK_CONCURRENCY = (1, 32)
MANY = 32  # closed-loop clients; more of them send two requests each instead of four
SAMPLED_AT = (32,)  # clients of the loads that are sampled as well
LONG_AT = (32,)  # and of those that are also sent with prompts of LONG, a request a client
LONG = Shape(prompt=(256, 768))
DETERMINISTIC_AT = (1, 32)  # and of those in deterministic arithmetic
QUANTIZED_AT = (1,)  # and of those with weights of 8 bits
# Poisson rates, as shares of the best request rate that the first policy reached in closed loop.
LOAD_SHARES = (0.5, 0.8)
QUICK_LOAD_SHARES = (0.6,)
WARM_UP_REQUESTS = 4
DETERMINISTIC = ", deterministic"  # behind the policy's name
# The first policy once more, where native kernels are: behind its name, with what, at which loads.
VARIANTS = (
    (DETERMINISTIC, {"QUIRE_DETERMINISTIC": "1"}, DETERMINISTIC_AT),
    (goals.QUANTIZED, {"QUIRE_QUANTIZATION": "int8"}, QUANTIZED_AT),
)
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway, and the scheduler's and the workers' metrics if their addresses are known."""

    client: Client
    model: str
    metrics_url: str
    worker_urls: tuple[str, ...] = ()

    def counters(self) -> Counters | None:
        """Totals now; None if they can't be known."""
        if not self.metrics_url:
            return None
        scheduler = _scrape(self.metrics_url)
        workers = [_scrape(url) for url in self.worker_urls]
        return Counters(
            prefix_queries=scheduler.total("vllm:prefix_cache_queries_total"),
            prefix_hits=scheduler.total("vllm:prefix_cache_hits_total"),
            preemptions=scheduler.total("vllm:num_preemptions_total"),
            steps=StepCounts.of(workers) if workers else None,
        )


def _scrape(url: str) -> Metrics:
    status, text = fetch(url)
    if status != 200:
        raise StackError(f"{url} answered {status}")
    return Metrics(text)


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
    bodies = [job.body(at.model, **load.settings(i)) for i, job in enumerate(work)]
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
        shape = LONG if load.long else Shape()
        point = asyncio.run(run_load(at, policy, load, shape, options.seed))
        cells = zip(report.HEADINGS[3:], report.row(point)[3:], strict=True)
        say("  " + "  ".join(f"{heading} {cell}" for heading, cell in cells))
        if point.num_failed:
            say(f"  {point.num_failed} failed, the first: {point.problems[0]}")
        points.append(point)
    return points


def closed_loads(options: argparse.Namespace) -> list[Load]:
    """Four requests a client, two where they are many; the quick form has one.

    The first and the last one of each client meet an emptier batch: of two that is most of a load.
    """
    levels = options.concurrency or (QUICK_CONCURRENCY if options.quick else CONCURRENCY)

    def each(level: int) -> int:
        return 1 if options.quick else 4 if level <= MANY else 2

    return [Load(kind="closed", level=n, num_requests=each(n) * n) for n in levels]


def sampled_loads(loads: Sequence[Load]) -> list[Load]:
    """Those of the closed loops that are measured with sampled requests too."""
    return [replace(load, sampled=True) for load in loads if load.level in SAMPLED_AT]


def long_loads(loads: Sequence[Load]) -> list[Load]:
    """Those of the closed loops that are measured with long prompts too."""
    return [
        replace(load, long=True, num_requests=int(load.level))
        for load in loads
        if load.level in LONG_AT
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
def own_stack(
    policy: str, options: argparse.Namespace, more: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """A stack with that policy and `more` settings; all else is the same."""
    settings = {
        **dict(pair.split("=", 1) for pair in options.set),
        "QUIRE_SCHEDULING_POLICY": policy,
        "QUIRE_STATIC_BATCH_SIZE": str(options.static_batch_size),
        **(more or {}),
    }
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        say(
            " ".join(
                (f"starting Quire with {policy}", *(f"{k}={v}" for k, v in (more or {}).items()))
            )
        )
        model = target.model_folder(options.model)
        with Stack(Path(folder), model=model, workers=options.workers, settings=settings) as stack:
            scheduler, *workers = (
                f"http://127.0.0.1:{process.ports['ops']}/metrics"
                for process in (stack.scheduler, *stack.workers)
            )
            yield Target(
                client=stack.client,
                model=stack.model_name,
                metrics_url=scheduler,
                worker_urls=tuple(workers),
            )


def measure_all(options: argparse.Namespace, *, native: bool) -> list[Point]:
    """Every policy; the Poisson rates of all are those found for the first.

    A running gateway gets closed loops, long prompts and Poisson arrivals. Of own stacks the first
    is measured with sampled requests too and, with `native` kernels, in each variant.
    """
    if options.base_url:
        client, model = target.running(options.base_url)
        at = Target(client=client, model=model, metrics_url=options.scheduler_metrics)
        loads = closed_loads(options)
        closed = run_policy(at, "running", loads, options)
        more = [*([] if options.quick else long_loads(loads)), *poisson_loads(options, closed)]
        return closed + run_policy(at, "running", more, options)
    points: list[Point] = []
    open_loads: list[Load] = []
    loads = closed_loads(options)
    for policy in options.policies:
        first = policy == options.policies[0]
        with own_stack(policy, options) as at:
            closed = run_policy(at, policy, loads, options)
            open_loads = open_loads or poisson_loads(options, closed)
            more = [*sampled_loads(loads), *([] if options.quick else long_loads(loads))]
            points += closed + run_policy(at, policy, more if first else [], options)
            points += run_policy(at, policy, open_loads, options)
        for name, settings, levels in VARIANTS if first and native else ():
            if again := [load for load in loads if load.level in levels]:
                with own_stack(policy, options, settings) as at:
                    points += run_policy(at, f"{policy}{name}", again, options)
    return points


def price(points: Sequence[Point], policy: str) -> list[str]:
    """A line for each load that was measured in deterministic arithmetic too."""
    lines = []
    for again in points:
        if again.policy == f"{policy}{DETERMINISTIC}":
            plain = next(p for p in points if p.policy == policy and _same_load(p, again))
            lines.append(
                f"QUIRE_DETERMINISTIC=1, {again.level:g} at a time: "
                f"{again.output_tokens_per_s / plain.output_tokens_per_s:.2f} of the tokens/s, "
                f"{again.gap_p50_ms / max(plain.gap_p50_ms, 1e-9):.2f} of the median gap"
            )
    return lines


def _same_load(one: Point, other: Point) -> bool:
    def of(point: Point) -> tuple[str, float, bool, bool]:
        return point.kind, point.level, point.sampled, point.long

    return of(one) == of(other)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="at most five minutes; figures are rough")
    add("--policies", nargs="+", default=["fcfs", "static"], metavar="P")
    add("--concurrency", nargs="+", type=int, metavar="N", help="closed-loop clients")
    add("--rates", nargs="*", type=float, metavar="R", help="Poisson arrivals per second")
    add("--poisson-seconds", type=float, default=60.0, help="length of a Poisson load")
    add("--static-batch-size", type=int, default=32, help="batch of the static policy")
    add("--workers", type=int, default=1)
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--set", action="append", type=target.setting, default=[], metavar="QUIRE_X=V",
        help="setting for all services")  # fmt: skip
    add("--base-url", default="", help="http://HOST:PORT of a running gateway, not own stacks")
    add("--scheduler-metrics", default="", help="with --base-url: URL of the scheduler's /metrics")
    add("--seed", default="quire")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(argv)


def measure_floor(options: argparse.Namespace) -> Floor:
    """In the dtype that is served: as set, or what a worker takes here. Raises StackError."""
    chosen = dict(pair.split("=", 1) for pair in options.set).get("QUIRE_DTYPE", "")
    say("measuring the machine's floor")
    try:
        found = floor.in_a_process(DTYPES.get(chosen, ""), quick=options.quick)
    except OSError as error:
        raise StackError(str(error)) from error
    say(f"  {json.dumps(found.as_dict())}")
    return found


def print_report(points: Sequence[Point], found: Floor, options: argparse.Namespace) -> None:
    """All tables."""
    policy = points[0].policy
    print(report.table(points))
    print(
        "\nWhat a worker's step takes besides its forward, medians in ms (benchmarks/steps.py):\n"
    )
    print(report.step_table(points))
    print("", *price(points, policy), sep="\n")
    print(f"\nThe floor by plain torch in {found.dtype} on {found.threads} threads:\n")
    print(report.floor_table(found))
    if points and not options.model:
        print("\nGoals, multiplied by what the floor that bounds them is today:\n")
        print(report.goal_table(goals.verdicts(found, points, policy)))
    print()


def main(argv: Sequence[str]) -> int:
    """Measures and reports. Status 1 if an answer was wrong or a prompt hit the prefix cache."""
    options = parse(argv)
    try:
        found = measure_floor(options)
        points = measure_all(options, native=found.native)
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
        "floor": found.as_dict(),
        "floor_of_the_goals": {name: asdict(of) for name, of in goals.REFERENCE.items()},
        "goals": [of.as_dict() for of in goals.verdicts(found, points, points[0].policy)],
    }
    json_path, png_path = (options.out / f"serving-{stamp}.{end}" for end in ("json", "png"))
    report.write_json(json_path, points, about)
    about_machine = report.machine()
    title = (
        f"Quire, prompts and answers of 64 to 192 tokens; {about_machine['cores']} cores "
        f"{about_machine['cpu']}, commit {about_machine['commit'] or 'unknown'}"
    )
    report.write_plot(png_path, points, title)
    print_report(points, found, options)
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
