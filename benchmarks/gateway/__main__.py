"""What the gateway costs a token and adds to its way: python -m benchmarks.gateway.

A whole stack: Redis, a scheduler, a worker whose steps only wait (benchmarks.gateway.worker), and
the gateway; streamed completions over REST, read by this process. Two loads:

- `fast`: every stream has a token each 1.5 ms, or as fast as plans come. Tokens by the CPU seconds
  of the gateway's process, all its threads, are what one core could carry; where the machine has
  too few cores for all processes, the gateway does not see as many as it could take.
- `paced`: every stream has a token each 20 ms. The delay of a token is the time from the worker's
  giving it to its streams to its coming into the client's socket; all streams have theirs in the
  same step.

Two floors: the CPU of a chunk through uvicorn alone (benchmarks.gateway.floor), by which the goals
are scaled, and `paced` through the libraries alone (benchmarks.gateway.bare), printed as a row of
its own. Everything runs on one machine, the clients too.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report, target
from benchmarks.gateway import worker
from benchmarks.gateway.bare import given_in
from benchmarks.gateway.streams import (
    Arrivals,
    Reader,
    StreamError,
    arrivals,
    hang_up,
    open_streams,
    read_for,
    request,
)
from benchmarks.goals import Goal, Verdict
from benchmarks.measure import percentile
from benchmarks.stack import START_S, Stack, StackError, cpu_seconds

MODEL = "bench"
BARE = "libraries alone"
TEXT = " the"  # a token of many vocabularies, and in no other place of a frame
PROMPT_TOKENS = 8
MAX_TOKENS = 8000  # more than a window takes, less than the model's context
WARM_UP_S = 2.0
REFERENCE_US = 4.5  # of a chunk, on the machine on which the goals were set
HEADINGS = (
    "load", "streams", "tokens/s", "gateway's cores", "tokens per CPU s", "tokens a frame",
    "added p50 ms", "p99", "worst",
)  # fmt: skip
PER_CORE = Goal(
    meaning="SSE tokens of one core", value=20_000.0, unit="tok/s", at_least=True, floor="chunk"
)
ADDED_P50 = Goal(
    meaning="added, 64 x 50 tok/s, p50", value=1.0, unit="ms", at_least=False, floor="chunk"
)
ADDED_P99 = Goal(
    meaning="added, 64 x 50 tok/s, p99", value=5.0, unit="ms", at_least=False, floor="chunk"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams at once, and the time from one token to the next of each."""

    name: str
    num_streams: int
    step_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What streams had in a time (CLOCK_MONOTONIC), and the CPU seconds of the gateway in it."""

    streams: Sequence[Arrivals]
    time_ns: range
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The windows of a load. Delays are of all tokens that came in it."""

    load: str
    num_streams: int
    seconds: float
    tokens_per_s: float
    cores: float
    tokens_per_cpu_s: float
    tokens_per_frame: float
    added_p50_ms: float
    added_p99_ms: float
    added_worst_ms: float


FAST = Load(name="fast", num_streams=64, step_ms=1.5)
PACED = Load(name="paced", num_streams=64, step_ms=20.0)


def split(seconds: float, load: Load) -> list[float]:
    """Equal windows of so long in all, none longer than streams of MAX_TOKENS can fill.

    None may end within its window; on a busy machine the first has long begun when the last does.
    """
    longest_s = 0.5 * MAX_TOKENS * load.step_ms / 1000 - WARM_UP_S
    count = max(1, math.ceil(seconds / longest_s))
    return [seconds / count] * count


def delays_ms(window: Window, published: Mapping[bytes, Mapping[int, int]]) -> list[float]:
    """Of the tokens that came within it. Raises StreamError."""
    found = []
    for stream in window.streams:
        given = published.get(stream.request_id, {})
        for position, at_ns in enumerate(stream.token_ns):
            if at_ns in window.time_ns:
                if position not in given:
                    raise StreamError(f"token {position} came, and no worker has given it")
                found.append((at_ns - given[position]) / 1e6)
    return found


def published_by(path: Path) -> dict[bytes, dict[int, int]]:
    """When each token of each request was given: by request and position."""
    found: dict[bytes, dict[int, int]] = defaultdict(dict)
    for of in worker.read_log(path):
        for position in range(of.first, of.first + of.count):
            found[of.request_id][position] = of.at_ns
    return found


def reading(
    load: Load, windows: Sequence[Window], published: Mapping[bytes, Mapping[int, int]]
) -> Reading:
    """Of all windows together. Raises StreamError."""
    delays = [delay for window in windows for delay in delays_ms(window, published)]
    num_frames = sum(
        at in window.time_ns
        for window in windows
        for stream in window.streams
        for at in stream.frame_ns
    )
    seconds = sum(len(window.time_ns) for window in windows) / 1e9
    cpu_s = sum(window.cpu_s for window in windows)
    return Reading(
        load=load.name,
        num_streams=load.num_streams,
        seconds=seconds,
        tokens_per_s=len(delays) / seconds,
        cores=cpu_s / seconds,
        tokens_per_cpu_s=len(delays) / max(cpu_s, 1e-9),
        tokens_per_frame=len(delays) / max(num_frames, 1),
        added_p50_ms=percentile(delays, 0.5),
        added_p99_ms=percentile(delays, 0.99),
        added_worst_ms=max(delays, default=0.0),
    )


def _window(readers: Sequence[Reader], seconds: float, pid: int) -> Window:
    """Of open streams, which it ends; `pid` is whose CPU time counts. Raises StreamError."""
    try:
        read_for(readers, WARM_UP_S)
        began_ns, cpu_before = time.monotonic_ns(), cpu_seconds(pid)
        if read_for(readers, seconds):
            raise StreamError("the kernel does not say when bytes come")
        ended_ns, cpu_after = time.monotonic_ns(), cpu_seconds(pid)
    finally:
        hang_up(readers)
    return Window(
        streams=[arrivals(reader.pieces, TEXT.encode()) for reader in readers],
        time_ns=range(began_ns, ended_ns),
        cpu_s=cpu_after - cpu_before,
    )


def _watch(stack: Stack, load: Load, seconds: float, vocab_size: int) -> Window:
    port = stack.gateway.ports["rest"]
    prompts = (
        [(number * PROMPT_TOKENS + i) % vocab_size for i in range(PROMPT_TOKENS)]
        for number in range(load.num_streams)
    )
    readers = open_streams(port, [request(MODEL, port, of, MAX_TOKENS) for of in prompts])
    return _window(readers, seconds, stack.gateway.pid)


def measure(load: Load, seconds: float, model: str) -> Reading:
    """With a stack of its own. Raises StackError or StreamError."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    if len(token_ids) != 1:
        raise StreamError(f"{TEXT!r} is not one token of the model in {model}")
    with tempfile.TemporaryDirectory(prefix="quire-gateway-") as name:
        folder = Path(name)
        log = folder / "published"
        settings = {
            "QUIRE_SERVED_MODEL_NAME": MODEL,
            "QUIRE_MAX_NUM_SEQS": str(load.num_streams),
            "QUIRE_DRAIN_S": "0",
            "PACED_STEP_MS": f"{load.step_ms:g}",
            "PACED_TOKEN_ID": str(token_ids[0]),
            "PACED_LOG": str(log),
        }
        with Stack(
            folder, model=model, worker_module="benchmarks.gateway.worker", settings=settings
        ) as stack:
            windows = [
                _watch(stack, load, of_window, tokenizer.get_vocab_size())
                for of_window in split(seconds, load)
            ]
        return reading(load, windows, published_by(log))


@contextlib.contextmanager
def _part(*argv: str) -> Iterator[tuple[int, int]]:
    """A process of benchmarks.gateway.bare while the context lasts: its pid and its port."""
    command = [sys.executable, "-m", "benchmarks.gateway.bare", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # The line ends when the process does.
            too_late = threading.Timer(START_S, process.kill)
            too_late.start()
            try:
                told = process.stdout.readline()
            finally:
                too_late.cancel()
            if not told:
                raise StackError(f"{' '.join(argv)} did not start within {START_S:.0f} s")
            yield process.pid, int(told)
        finally:
            process.kill()


def bare(load: Load, seconds: float) -> Reading:
    """The load through the libraries alone. Raises StackError or StreamError."""
    count = str(load.num_streams)
    with (
        _part("source", count, f"{load.step_ms:g}") as (_, source),
        _part("relay", count, f"127.0.0.1:{source}") as (pid, port),
    ):
        asking = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        readers = open_streams(port, [asking] * load.num_streams)
        window = _window(readers, seconds, pid)
    given = {
        of.request_id: given_in(reader.pieces)
        for of, reader in zip(window.streams, readers, strict=True)
    }
    return reading(dataclasses.replace(load, name=f"{load.name}, {BARE}"), [window], given)


def chunk_us() -> float:
    """The floor of its CPU, in a process of its own. Raises StackError."""
    command = [sys.executable, "-m", "benchmarks.gateway.floor"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise StackError(f"the floor could not be measured: {ended.stderr[-500:]}")
    return float(ended.stdout)


def verdicts(readings: Sequence[Reading], floor_us: float) -> list[Verdict]:
    """Of the loads that were measured, by today's floor."""
    fast, paced = (
        next((of for of in readings if of.load == load.name), None) for load in (FAST, PACED)
    )
    longer = floor_us / REFERENCE_US
    found = fast.tokens_per_cpu_s if fast else None
    return [
        Verdict(goal=PER_CORE, factor=1.0 / longer, found=found),
        Verdict(goal=ADDED_P50, factor=longer, found=paced.added_p50_ms if paced else None),
        Verdict(goal=ADDED_P99, factor=longer, found=paced.added_p99_ms if paced else None),
    ]


def row(of: Reading) -> tuple[str, ...]:
    """One line of the table."""
    return (
        of.load,
        f"{of.num_streams}",
        f"{of.tokens_per_s:,.0f}",
        f"{of.cores:.2f}",
        f"{of.tokens_per_cpu_s:,.0f}",
        f"{of.tokens_per_frame:.2f}",
        f"{of.added_p50_ms:.2f}",
        f"{of.added_p99_ms:.2f}",
        f"{of.added_worst_ms:.1f}",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=8.0, help="window of each load")
    add("--streams", type=int, default=FAST.num_streams)
    add("--only", choices=(FAST.name, PACED.name), help="one of the loads")
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Prints the tables."""
    options = parse(argv)
    try:
        floor_us = chunk_us()
        model = target.model_folder(options.model)
        readings = []
        for load in (FAST, PACED):
            if options.only in (None, load.name):
                of = Load(name=load.name, num_streams=options.streams, step_ms=load.step_ms)
                readings.append(measure(of, options.seconds, model))
                if load is PACED:
                    readings.append(bare(of, options.seconds))
    except (StackError, StreamError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    of_goals = verdicts(readings, floor_us)
    lines = (
        report.markdown(HEADINGS, [row(of) for of in readings]),
        "",
        f"A chunk through uvicorn alone: {floor_us:.1f} us of CPU (reference {REFERENCE_US})",
        "",
        report.goal_table(of_goals),
    )
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json is not None:
        document = {
            "machine": report.machine(),
            "chunk_us": floor_us,
            "readings": [asdict(of) for of in readings],
            "goals": [of.as_dict() for of in of_goals],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
