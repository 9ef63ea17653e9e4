"""What a study is, and the stack that it measures.

A study compares runs that differ in one setting. Each run has a stack of its own and gives a row; a
row is a flat mapping from names to numbers or words, which is all that goes into JSON, table,
sentences and plot. Owns the stacks and the watching of their gauges.
"""

import asyncio
import contextlib
import dataclasses
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure, target
from benchmarks.client import Answer, Client
from benchmarks.measure import Load
from benchmarks.stack import Stack, StackError, fetch
from benchmarks.workload import Job, Shape, jobs

Row = Mapping[str, Any]
# A static batch of long answers keeps the last of 256 requests waiting for minutes.
PATIENCE_S = 7_200
WARM_UP = Shape(prompt=(64, 96), output=(8, 8))
WARM_UP_REQUESTS = 8
WATCH_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: a row's field, its heading and its format."""

    key: str
    heading: str
    spec: str = ""

    def cell(self, row: Row) -> str:
        """As text; what a run does not have is empty."""
        value = row.get(self.key)
        return "" if value is None else format(value, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The scheduler's samples at one moment, summed over labels. Absent ones are 0."""

    at_s: float
    values: Mapping[str, float]

    def get(self, name: str) -> float:
        """The sum of all samples of that name."""
        return self.values.get(name, 0.0)

    def since(self, before: "Gauges", name: str) -> float:
        """What a counter has gained."""
        return self.get(name) - before.get(name)


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)


def read_gauges(text: str, at_s: float) -> Gauges:
    """All samples of a scrape but histograms' buckets; counters by labels too, as in the text.

    Cheaper than a full parser, since it runs several times a second beside what is measured.
    """
    values: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name.endswith("_bucket"):
            continue
        values[name] = values.get(name, 0.0) + float(value)
        for label in re.findall(r'(\w+="[^"]*")', labels):
            if not label.startswith(("model_name=", "worker=")):
                key = f"{name}{{{label}}}"
                values[key] = values.get(key, 0.0) + float(value)
    return Gauges(at_s=at_s, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stack that serves."""

    client: Client
    model: str
    metrics_url: str

    async def gauges(self) -> Gauges:
        """Now. Raises StackError."""
        at_s = asyncio.get_running_loop().time()
        status, text = await asyncio.to_thread(fetch, self.metrics_url)
        if status != 200:
            raise StackError(f"{self.metrics_url} answered {status}")
        return read_gauges(text, at_s)

    @contextlib.asynccontextmanager
    async def watched(self, every_s: float = WATCH_EVERY_S) -> AsyncIterator[list[Gauges]]:
        """Gathers the gauges while the block runs; at its end the list has all of them."""
        seen = [await self.gauges()]

        async def watch() -> None:
            while True:
                await asyncio.sleep(every_s)
                seen.append(await self.gauges())

        task = asyncio.ensure_future(watch())
        try:
            yield seen
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        seen.append(await self.gauges())

    async def warm_up(self, seed: str) -> None:
        """A few short requests whose prompts nothing measured shares."""
        work = jobs(f"{seed}-warm", WARM_UP_REQUESTS, WARM_UP)
        await self.send(work, len(work))

    async def send(self, work: Sequence[Job], clients: int, **more: Any) -> list[Answer]:
        """A closed loop; answers in the order of the work."""
        bodies = [job.body(self.model, **more) for job in work]
        return await measure.closed_loop(self.client, bodies, clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a study runs with."""

    quick: bool
    model: str
    settings: Mapping[str, str]

    @contextlib.contextmanager
    def stack(self, label: str, **settings: object) -> Iterator[Target]:
        """A stack whose settings are those of all runs, and these by their catalogue names."""
        self.say(f"starting Quire: {label}")
        own = {f"QUIRE_{name.upper()}": str(value) for name, value in settings.items()}
        common = {"QUIRE_DEFAULT_DEADLINE_S": str(PATIENCE_S), **self.settings}
        with (
            tempfile.TemporaryDirectory(prefix="quire-study-") as folder,
            Stack(
                Path(folder), model=target.model_folder(self.model), settings={**common, **own}
            ) as stack,
        ):
            yield Target(
                client=dataclasses.replace(stack.client, timeout_s=PATIENCE_S),
                model=stack.model_name,
                metrics_url=f"http://127.0.0.1:{stack.scheduler.ports['ops']}/metrics",
            )

    def say(self, text: str) -> None:
        """Progress, at once."""
        print(f"[study] {text}", flush=True)


def figures(work: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
    """What every load gives; latency from sending on, over all requests that were whole."""
    load = Load(kind="closed", level=len(work), num_requests=len(work))
    point = measure.summarize("", load, work, answers, None)
    whole = [a for j, a in zip(work, answers, strict=True) if not a.problem(j.num_output)]
    e2es = [answer.e2e_s for answer in whole]
    return {
        "requests": point.num_requests,
        "failed": point.num_failed,
        "took_s": point.took_s,
        "prompt_tokens": point.prompt_tokens,
        "output_tokens": point.output_tokens,
        "tokens_per_s": point.output_tokens_per_s,
        "latency_mean_s": sum(e2es) / max(1, len(e2es)),
        "latency_p50_s": point.e2e_p50_s,
        "latency_p90_s": measure.percentile(e2es, 0.9),
        "latency_p99_s": point.e2e_p99_s,
        "ttft_p50_ms": point.ttft_p50_ms,
        "ttft_p99_ms": point.ttft_p99_ms,
        "gap_p50_ms": point.gap_p50_ms,
        "gap_p99_ms": point.gap_p99_ms,
        "cached_tokens": point.cached_tokens,
        "problems": list(point.problems),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One question.

    `measure` gets the bench that it is made for and gives row after row. `sentences` says in two
    sentences what the rows show, with numbers from the rows alone. `draw` fills a row of matplotlib
    axes, as many as `num_axes`.
    """

    letter: str
    title: str
    question: str
    columns: tuple[Column, ...]
    measure: Callable[[Any], Iterator[Row]]
    sentences: Callable[[Sequence[Row]], str]
    draw: Callable[[Any, Sequence[Row]], None]
    num_axes: int = 2


def listed(words: Iterable[str]) -> str:
    """As in a sentence: "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def by_label(rows: Sequence[Row]) -> dict[str, Row]:
    """Rows by the name of their run."""
    return {str(row["run"]): row for row in rows}


def problems_of(rows: Sequence[Row]) -> list[str]:
    """What went wrong in any run, with the run's name."""
    return [f"{row['run']}: {problem}" for row in rows for problem in row.get("problems", ())]
