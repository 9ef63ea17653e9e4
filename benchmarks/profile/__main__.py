"""Where each microsecond of a decode step goes: python -m benchmarks.profile.

A whole stack with the real model; the worker has a clock at every operator
(benchmarks.profile.worker). Streams are opened, and once all have decoded for a while, a window of
time is looked at in which every step has one token of each: means of those steps. Beside each part
stand the bytes and the arithmetic that it can't do without, and how long this machine takes for
them at least (benchmarks.profile.floors). What runs on other threads and in other processes while
the model computes has its CPU time by step. Then prompts are sent, one at a time, and the steps
that compute a chunk of one, not its last, have a table like it.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report, target
from benchmarks.gateway.streams import StreamError, hang_up, open_streams, read_for, request
from benchmarks.profile import floors
from benchmarks.profile.floors import Rates, Sizes, Work
from benchmarks.profile.record import PARTS, Record, Step
from benchmarks.stack import Stack, StackError, cpu_seconds
from benchmarks.workload import Shape, jobs

PROMPT_TOKENS = 128
MAX_TOKENS = 6000
MAX_PROMPTS = 100
CHUNKED_TOKENS = 1_281  # of a prompt that takes several steps, the last of them not counted
WARM_UP_S = 3.0
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
HEADINGS = ("part", "us a step", "share", "MB", "MFLOP", "floor us", "x floor")
BESIDE = ("beside the step", "CPU us a step")
NAMES = {
    "embed": "embedding",
    "norm": "norms with residual",
    "qkv": "queries, keys, values",
    "store": "rotary, store of keys and values",
    "attention": "attention over the blocks",
    "out": "output projection",
    "gate_up": "gate and up",
    "activation": "activation",
    "down": "down",
    "head": "head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A part of a step; `work` is None where nothing is known that it must do."""

    name: str
    us: float
    work: Work | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Of one number of streams, or of chunks of so many tokens of one prompt (0: of decodes).

    The lines add up to period_us. `beside` is CPU time by step.
    """

    num_streams: int
    chunk_tokens: int = 0
    num_steps: int
    mean_context: float
    period_us: float
    lines: tuple[Line, ...]
    beside: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When it was (nanoseconds), and CPU seconds in it by who had them."""

    ns: range
    cpu_s: dict[str, float]
    plan_wait_us: float


def full_steps(steps: Sequence[Step], window: range, num_streams: int) -> list[tuple[Step, Step]]:
    """Steps within the window with one token of every stream, each with the one before it."""
    found = []
    for before, step in itertools.pairwise(steps):
        shape = (step.num_rows, step.num_tokens)
        if before.began_ns in window and step.ended_ns in window and shape == (num_streams,) * 2:
            found.append((before, step))
    return found


def chunk_steps(steps: Sequence[Step], window: range) -> list[tuple[Step, Step]]:
    """Steps within the window with a chunk of a prompt behind another one, and that one.

    Of the size of chunk that is most frequent; a prompt's first and last chunk do not count.
    """
    found = []
    for before, step in itertools.pairwise(steps):
        alone = before.num_rows == step.num_rows == 1 < step.num_tokens == before.num_tokens
        follows = step.contexts == before.contexts + step.num_tokens
        last = step.contexts == CHUNKED_TOKENS
        if alone and follows and not last and before.began_ns in window and step.ended_ns in window:
            found.append((before, step))
    sizes = Counter(step.num_tokens for _, step in found)
    most = max(sizes, key=lambda size: (sizes[size], size), default=0)
    return [pair for pair in found if pair[1].num_tokens == most]


def profile(record: Record, window: Window, sizes: Sizes, num_streams: int) -> Profile:
    """The means of the window's full steps, or with 0 streams of those with a chunk of a prompt.

    Raises StreamError where there is none.
    """
    if num_streams:
        pairs = full_steps(record.steps, window.ns, num_streams)
    else:
        pairs = chunk_steps(record.steps, window.ns)
    if not pairs:
        what = f"a token of each of {num_streams} streams" if num_streams else "a chunk of a prompt"
        raise StreamError(f"no step of the window had {what}")
    steps = [step for _, step in pairs]
    chunk = 0 if num_streams else steps[0].num_tokens

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(pairs)

    period_us = mean([(step.ended_ns - before.ended_ns) / 1e3 for before, step in pairs])
    contexts = mean([step.contexts for step in steps])
    if chunk:
        seen = chunk * (contexts - chunk) + chunk * (chunk + 1) / 2  # keys, by all of its tokens
        works = floors.work(sizes, record.weight_bytes, chunk, contexts, pairs=seen, sampled=0)
    else:
        works = floors.work(sizes, record.weight_bytes, num_streams, contexts)
    apply_us, forward_us, sample_us = (
        mean([getattr(step, name) for step in steps])
        for name in ("apply_us", "forward_us", "sample_us")
    )
    parts = {name: mean([step.parts_ns[name] / 1e3 for step in steps]) for name in PARTS}
    rest_us = period_us - apply_us - forward_us - sample_us
    books = "the plan into rows; the step's books"
    if chunk:  # between prompts there is no plan for long, so the mean says nothing
        plan = [Line(name=f"wait for the plan; {books}", us=rest_us)]
    else:
        plan = [
            Line(name="wait for the plan", us=window.plan_wait_us),
            Line(name=books, us=rest_us - window.plan_wait_us),
        ]
    lines = (
        *plan,
        Line(name="apply: rows into the flat batch", us=apply_us),
        *(Line(name=NAMES[name], us=us, work=works.get(name)) for name, us in parts.items()),
        Line(name="tables, choosing rows, Python between", us=forward_us - sum(parts.values())),
        Line(name="sample, with the tokens' way back", us=sample_us, work=works.get("sample")),
    )
    return Profile(
        num_streams=num_streams,
        chunk_tokens=chunk,
        num_steps=len(pairs),
        mean_context=contexts / max(1, num_streams),
        period_us=period_us,
        lines=lines,
        beside=tuple(
            (who, cpu_s * 1e6 / (len(window.ns) / 1e3 / period_us))
            for who, cpu_s in window.cpu_s.items()
        ),
    )


def _cpu(stack: Stack) -> dict[str, float]:
    """CPU seconds so far. A worker's main thread is its event loop."""
    return {
        "plan: scheduler": cpu_seconds(stack.scheduler.pid),
        "wire and publish: the worker's event loop": cpu_seconds(
            stack.workers[0].pid, main_thread=True
        ),
        "SSE: gateway": cpu_seconds(stack.gateway.pid),
        "redis": cpu_seconds(stack.redis.pid),
    }


def _plan_waits(stack: Stack) -> tuple[float, float]:
    """Seconds of waiting for plans, and steps, so far."""
    metrics = stack.workers[0].metrics()
    name = "quire:worker_step_seconds"
    return metrics.total(f"{name}_sum", part="idle"), metrics.total(f"{name}_count", part="idle")


def _watch(stack: Stack, num_streams: int, seconds: float) -> Window:
    """A window in which so many streams decode, or, with 0, one prompt after the other is read."""
    port = stack.gateway.ports["rest"]
    count, length = (num_streams, PROMPT_TOKENS) if num_streams else (MAX_PROMPTS, CHUNKED_TOKENS)
    shape = Shape(prompt=(length, length), output=(1, 1))
    prompts = [job.prompt for job in jobs(f"profile-{num_streams}", count, shape)]
    requests = [request(stack.model_name, port, prompt, MAX_TOKENS) for prompt in prompts]
    readers = open_streams(port, requests[:num_streams])
    try:
        if num_streams:
            read_for(readers, WARM_UP_S)
        waits = _plan_waits(stack)
        cpu, began_ns = _cpu(stack), time.monotonic_ns()
        if num_streams:
            read_for(readers, seconds)
        else:
            _send(port, requests, seconds)
        cpu_after, ended_ns = _cpu(stack), time.monotonic_ns()
        waits_after = _plan_waits(stack)
    finally:
        hang_up(readers)
    waited_s, num_steps = (after - before for after, before in zip(waits_after, waits, strict=True))
    return Window(
        ns=range(began_ns, ended_ns),
        cpu_s={who: cpu_after[who] - cpu[who] for who in cpu},
        plan_wait_us=waited_s * 1e6 / max(1.0, num_steps),
    )


def _send(port: int, requests: Sequence[bytes], seconds: float) -> None:
    """One after the other until the time is over, at least one; each until its first token."""
    end = time.monotonic() + seconds
    for of in requests:
        hang_up(open_streams(port, [of]))
        if time.monotonic() > end:
            return


def measure(
    streams: Sequence[int], seconds: float, model: str, settings: dict[str, str]
) -> list[Profile]:
    """One after the other on one stack, 0 for prompts. Raises StackError or StreamError."""
    with tempfile.TemporaryDirectory(prefix="quire-profile-") as name:
        folder = Path(name)
        log = folder / "record"
        with Stack(
            folder,
            model=model,
            worker_module="benchmarks.profile.worker",
            settings={**settings, "PROFILE_LOG": str(log)},
        ) as stack:
            windows = []
            for num_streams in streams:
                windows.append(_watch(stack, num_streams, seconds))
                time.sleep(1.0)  # for the rows of those who have left
            events = list(stack.workers[0].events())
        loaded = next(event for event in events if event.get("event") == "loading weights")
        sizes = Sizes.of(Path(model), ITEM_BYTES[str(loaded["dtype"])])
        record = Record.read(log)
    return [
        profile(record, window, sizes, num_streams)
        for num_streams, window in zip(streams, windows, strict=True)
    ]


def table(of: Profile, rates: Rates) -> str:
    """The parts of a step, in their order."""
    rows = [_row(line, of.period_us, rates) for line in of.lines]
    known = [line for line in of.lines if line.work is not None]
    floor_us = sum(line.work.floor_us(rates) for line in known if line.work is not None)
    total = ("a step", f"{of.period_us:,.0f}", "100.0 %", "", "", f"{floor_us:,.0f}",
             f"{of.period_us / floor_us:.2f}")  # fmt: skip
    return report.markdown(HEADINGS, [*rows, total])


def _row(line: Line, period_us: float, rates: Rates) -> tuple[str, ...]:
    begin = (line.name, f"{line.us:,.0f}", f"{line.us / period_us:.1%}")
    if line.work is None:
        return (*begin, "", "", "", "")
    floor_us = line.work.floor_us(rates)
    return (
        *begin,
        f"{line.work.num_bytes / 1e6:,.2f}",
        f"{line.work.flops / 1e6:,.0f}" if line.work.flops else "",
        f"{floor_us:,.0f}",
        f"{line.us / floor_us:.2f}",
    )


def text(of: Profile, rates: Rates) -> str:
    """Both tables of one number of streams."""
    beside = report.markdown(BESIDE, [(who, f"{us:,.0f}") for who, us in of.beside])
    shape = (
        f"chunks of {of.chunk_tokens} tokens of one prompt, {of.num_steps} steps, at their ends "
        f"{of.mean_context:.0f} tokens of context"
        if of.chunk_tokens
        else f"{of.num_streams} streams, {of.num_steps} steps, {of.mean_context:.0f} tokens of "
        "context each"
    )
    return f"{shape}:\n\n{table(of, rates)}\n\n{beside}\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    add = parser.add_argument
    add("--streams", nargs="+", type=int, default=[1, 32, 0], metavar="N", help="0: prompts")
    add("--seconds", type=float, default=20.0, help="window of each number of streams")
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--set", action="append", type=target.setting, default=[], metavar="QUIRE_X=V",
        help="setting for all services")  # fmt: skip
    add("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Prints the tables."""
    options = parse(argv)
    settings = dict(pair.split("=", 1) for pair in options.set)
    try:
        rates = floors.in_a_process(DTYPES.get(settings.get("QUIRE_DTYPE", ""), ""))
        model = target.model_folder(options.model)
        profiles = measure(options.streams, options.seconds, model, settings)
    except (StackError, StreamError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(
        f"reading {rates.read_gb_per_s} GB/s, products of matrices {rates.gflop_per_s} GFLOP/s\n\n"
    )
    sys.stdout.write("\n".join(text(of, rates) for of in profiles))
    if options.json is not None:
        document = {
            "machine": report.machine(),
            "rates": asdict(rates),
            "profiles": [asdict(of) for of in profiles],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
