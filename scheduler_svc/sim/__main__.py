"""python -m scheduler_svc.sim --seed N [--trace OUT], or --seeds A..B: worlds with faults.

Exits with 1 if a promise was broken, with the seed, the promise, the number of the event at which
it broke and the command that plays it again; or if a run over CENSUS seeds or more shows a kind of
fault that never took effect. A run over seeds tells on stderr how far it is, and ends at MAX_BAD of
them that broke a promise.
"""

import argparse
import gc
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import structlog

from scheduler_svc.sim.faults import KINDS, MIN_EFFECTS
from scheduler_svc.sim.world import MIN_REQUESTS, Options, Outcome, run_seed

CENSUS = 100
# Seeds that a process runs in one go; those that broke a promise at which a run ends; seeds from
# one line about its progress to the next, and such lines at most.
PART, MAX_BAD, TELL_EVERY, LINES = 50, 20, 200, 100
_SILENT = 50
_LEVELS = {"info": 20, "warning": 30, "error": 40, "none": _SILENT}


@contextmanager
def quiet(level: int = _SILENT) -> Iterator[None]:
    """The services' logs below a level go nowhere; afterwards everything is as before."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def problem(outcome: Outcome, options: Options) -> str | None:
    """What is wrong with a seed's outcome, None if nothing is."""
    if outcome.rule:
        return outcome.detail
    if options.only is None:
        if outcome.num_requests < MIN_REQUESTS:
            return f"only {outcome.num_requests} requests"
        if (effects := sum(outcome.faults.values())) < MIN_EFFECTS:
            return f"only {effects} faults took effect"
    return None


def report(outcome: Outcome, what: str) -> str:
    """Of a seed that went wrong."""
    return (
        f"seed {outcome.seed}: {what}\n"
        f"  rule:   {outcome.rule or 'a seed tests what it says'}\n"
        f"  event:  {outcome.num_events}, at {outcome.virtual_s:.3f} virtual seconds\n"
        f"  commit: {_commit()}\n"
        f"  replay: python -m scheduler_svc.sim --seed {outcome.seed} --trace seed.trace\n"
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def census(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The table of a run over many seeds."""
    faults: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        ends.update(outcome.ends)
    lines = [f"{'fault that took effect':28} {'times':>8} {'seeds':>8}"]
    for kind in KINDS:
        num_seeds = sum(bool(outcome.faults[kind]) for outcome in outcomes)
        lines.append(f"{kind:28} {faults[kind]:>8} {num_seeds:>8}")
    count = len(outcomes)
    lines += [
        "",
        f"{count} seeds, {sum(o.num_requests for o in outcomes)} requests, "
        f"{sum(o.num_steps for o in outcomes)} steps, "
        f"{sum(o.num_events for o in outcomes)} events, "
        f"{sum(o.num_blocks_checked for o in outcomes)} blocks and "
        f"{sum(o.num_scored for o in outcomes)} log probabilities compared",
        f"ends: {', '.join(f'{name} {ends[name]}' for name in sorted(ends))}; "
        f"{sum(o.num_refused for o in outcomes)} times refused and asked again",
        f"{sum(o.virtual_s for o in outcomes):.0f} virtual seconds in {seconds:.1f} s, "
        f"{seconds / max(count, 1):.3f} s a seed",
    ]
    return "\n".join(lines) + "\n"


def missing(outcomes: Sequence[Outcome]) -> list[str]:
    """Kinds that never took effect."""
    return [kind for kind in KINDS if not any(outcome.faults[kind] for outcome in outcomes)]


def run_seeds(seeds: Sequence[int], options: Options) -> list[Outcome]:
    """One after the other, in this process."""
    outcomes = []
    with quiet():
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for seed in seeds:
                outcomes.append(run_seed(seed, options))
                gc.collect()
        finally:
            gc.enable()
            gc.unfreeze()
    return outcomes


def _outcomes(seeds: range, options: Options, jobs: int) -> Generator[Outcome, None, None]:
    """In the order of seeds, run PART at a time. Closed, it runs no part that has not begun."""
    parts = [seeds[at : at + PART] for at in range(0, len(seeds), PART)]
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for done in pool.map(run_seeds, parts, [options] * len(parts)):
                yield from done
        finally:
            pool.shutdown(cancel_futures=True)


def judge(
    outcomes: Iterable[Outcome],
    num_seeds: int,
    options: Options,
    say: Callable[[str], object],
    tell: Callable[[str], object],
) -> int:
    """Says what is wrong with seeds as they come, and the table. Returns the exit code.

    It ends at MAX_BAD seeds that broke a promise. `tell` is told how far it is, each TELL_EVERY
    seeds or, of very many, LINES times.
    """
    begin = time.perf_counter()
    seen: list[Outcome] = []
    bad = 0
    tell_every = max(TELL_EVERY, -(-num_seeds // LINES))
    for outcome in outcomes:
        seen.append(outcome)
        if (what := problem(outcome, options)) is not None:
            bad += 1
            say(report(outcome, what))
        if len(seen) % tell_every == 0:
            seconds = (time.perf_counter() - begin) / len(seen)
            tell(f"{len(seen)} of {num_seeds} seeds, {bad} bad, {seconds:.3f} s a seed\n")
        if bad >= MAX_BAD:
            break
    say(census(seen, time.perf_counter() - begin))
    is_whole = len(seen) == num_seeds
    lacking = missing(seen) if is_whole and options.only is None and num_seeds >= CENSUS else []
    if lacking:
        say(f"never took effect: {', '.join(lacking)}\n")
    say(f"{bad} of {len(seen)} seeds broke a promise\n")
    if not is_whole:
        say(f"it ended there: {num_seeds - len(seen)} seeds are left\n")
    return int(bool(bad or lacking))


def one(seed: int, options: Options, trace: Path | None, level: str) -> int:
    """A seed, with its trace if wanted. Returns the exit code."""
    with quiet(_LEVELS[level]):
        if trace is None:
            outcome = run_seed(seed, options)
        else:
            with trace.open("w", encoding="utf-8") as file:
                outcome = run_seed(seed, options, file.write)
    what = problem(outcome, options)
    if what is not None:
        sys.stdout.write(report(outcome, what))
        return 1
    faults = ", ".join(f"{kind} {outcome.faults[kind]}" for kind in KINDS if outcome.faults[kind])
    sys.stdout.write(
        f"seed {seed}: {outcome.num_requests} requests, {outcome.num_steps} steps, "
        f"{outcome.num_events} events in {outcome.virtual_s:.1f} virtual seconds; {faults}\n"
    )
    return 0


def main(argv: Sequence[str]) -> int:
    """Parses, runs, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", metavar="A..B", help="a run over seeds A to B, without B")
    parser.add_argument("--jobs", type=int, default=1, help="processes for --seeds")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="write down all that happens")
    parser.add_argument("--only", choices=("none", *KINDS), help="one kind of fault, or none")
    parser.add_argument("--requests", type=int, default=MIN_REQUESTS)
    parser.add_argument("--log", choices=tuple(_LEVELS), default="none", help="the services' logs")
    args = parser.parse_args(argv)
    only = "" if args.only == "none" else args.only
    options = Options(only=only, num_requests=args.requests)
    if args.seeds is None:
        return one(args.seed, options, args.trace, args.log)
    try:
        seeds = _seeds(args.seeds)
    except ValueError as error:
        parser.error(f"--seeds: {error}")
    with closing(_outcomes(seeds, options, args.jobs)) as outcomes:
        return judge(outcomes, len(seeds), options, sys.stdout.write, sys.stderr.write)


def _seeds(text: str) -> range:
    """A..B without B. ValueError if that is no seed at all."""
    first, _, last = text.partition("..")
    seeds = range(int(first), int(last))
    if not seeds:
        raise ValueError(f"there is no seed in {text}")
    return seeds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
