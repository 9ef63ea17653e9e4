"""(e) Two tenants, one greedy: `fcfs` against `fair`.

The greedy tenant keeps four times as many requests open as there are slots; the modest one has two
clients, each of which sends its next request when its last one has ended. First the modest tenant
is alone, for comparison. Both have equal weight. After a window of time the modest tenant sends no
more; when its last answer is there, what the greedy one still has open is cut off and not counted.
"""

import asyncio
import dataclasses
import hashlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure as measuring
from benchmarks.client import Answer, Client
from benchmarks.stack import StackError
from benchmarks.studies import drawing
from benchmarks.studies.study import Bench, Column, Row, Study, Target, by_label
from benchmarks.workload import Shape, jobs

SLOTS, GREEDY_CLIENTS, MODEST_CLIENTS = 8, 32, 2
SHAPE = Shape(prompt=(64, 128), output=(32, 64))
WINDOW_S, QUICK_WINDOW_S = 75.0, 5.0
NUM_ALONE, QUICK_ALONE = 6, 2
# The flood is there before the modest tenant comes.
HEAD_START_S = 1.0
# More than a tenant gets through in a window.
NUM_JOBS = 1_000
TENANTS = ("greedy", "modest")


def write_keys(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file of key hashes for the gateway, and the tenants' keys."""
    keys = {tenant: f"study-key-of-{tenant}" for tenant in TENANTS}
    lines = [f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in keys.items()]
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n")
    return path, keys


@dataclass(slots=True, kw_only=True)
class _Crowd:
    """A tenant's clients: a closed loop that sends nothing after end_s."""

    client: Client
    bodies: Sequence[dict[str, Any]]
    size: int
    end_s: float
    ended: list[tuple[int, Answer]] = field(default_factory=list)

    async def run(self) -> None:
        """Until the last answer is there. A cancelled crowd keeps the answers that have ended."""
        todo = iter(enumerate(self.bodies))
        async with asyncio.TaskGroup() as group:
            for _ in range(self.size):
                group.create_task(self._one_client(todo))

    async def _one_client(self, todo: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for i, body in todo:
            if time.perf_counter() > self.end_s:
                return
            self.ended.append((i, await self.client.complete(body)))


async def _run(at: Target, keys: dict[str, str], seconds: float, num_alone: int) -> dict[str, Any]:
    clients = {name: dataclasses.replace(at.client, key=key) for name, key in keys.items()}
    work = {name: jobs(f"tenants-{name}", NUM_JOBS, SHAPE) for name in TENANTS}
    bodies = {name: [job.body(at.model) for job in own] for name, own in work.items()}
    warm = [job.body(at.model) for job in jobs("tenants-warm", 4, SHAPE)]
    await measuring.closed_loop(clients["modest"], warm, MODEST_CLIENTS)
    first = [job.body(at.model) for job in jobs("tenants-alone", num_alone, SHAPE)]
    alone = await measuring.closed_loop(clients["modest"], first, MODEST_CLIENTS)
    began_s = time.perf_counter()
    greedy = _Crowd(
        client=clients["greedy"], bodies=bodies["greedy"], size=GREEDY_CLIENTS, end_s=math.inf
    )
    modest = _Crowd(
        client=clients["modest"],
        bodies=bodies["modest"],
        size=MODEST_CLIENTS,
        end_s=began_s + HEAD_START_S + seconds,
    )
    flood = asyncio.ensure_future(greedy.run())
    try:
        await asyncio.sleep(HEAD_START_S)
        await modest.run()
        took_s = time.perf_counter() - began_s
        if flood.done():
            raise StackError(f"the greedy tenant ended early: {flood.result()}")
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    found = (greedy.ended, modest.ended)
    row: dict[str, Any] = {"took_s": took_s, "problems": []}
    for name, ended in zip(TENANTS, found, strict=True):
        answers = [answer for _, answer in ended]
        problems = [answer.problem(work[name][i].num_output) for i, answer in ended]
        row["problems"] += [f"{name}: {problem}" for problem in problems if problem]
        tokens = sum(len(work[name][i].prompt) + answer.num_tokens for i, answer in ended)
        row |= {f"{name}_{key}": value for key, value in _times(answers).items()}
        row |= {f"{name}_requests": len(answers), f"{name}_tokens": tokens}
    both = row["greedy_tokens"] + row["modest_tokens"]
    row["modest_share"] = row["modest_tokens"] / max(1, both)
    row["tokens_per_s"] = both / took_s
    return row | {f"alone_{key}": value for key, value in _times(alone).items()}


def _times(answers: Sequence[Answer]) -> dict[str, float]:
    e2es = [answer.e2e_s for answer in answers]
    ttfts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return {
        "ttft_p50_s": measuring.percentile(ttfts, 0.5),
        "latency_p50_s": measuring.percentile(e2es, 0.5),
        "latency_max_s": max(e2es, default=0.0),
    }


def measure(bench: Bench) -> Iterator[Row]:
    """A row for each policy."""
    seconds, num_alone = (QUICK_WINDOW_S, QUICK_ALONE) if bench.quick else (WINDOW_S, NUM_ALONE)
    for policy in ("fcfs", "fair"):
        with tempfile.TemporaryDirectory(prefix="quire-keys-") as folder:
            path, keys = write_keys(Path(folder))
            settings: dict[str, object] = {
                "scheduling_policy": policy,
                "max_num_seqs": SLOTS,
                "api_keys_file": path,
            }
            with bench.stack(policy, **settings) as at:
                row = asyncio.run(_run(at, keys, seconds, num_alone))
        yield {"run": policy, **row}


def sentences(rows: Sequence[Row]) -> str:
    """The modest tenant's latency and share."""
    run = by_label(rows)
    fcfs, fair = run["fcfs"], run["fair"]
    return (
        f"Beside a tenant that keeps {GREEDY_CLIENTS} requests open at {SLOTS} slots, a modest one "
        f"with {MODEST_CLIENTS} has its answers after {fcfs['modest_latency_p50_s']:.1f} s at the "
        f"median with `fcfs` and after {fair['modest_latency_p50_s']:.1f} s with `fair`; alone it "
        f"takes {fair['alone_latency_p50_s']:.1f} s. Its share of the tokens is "
        f"{fcfs['modest_share']:.1%} and {fair['modest_share']:.1%}, with never more than "
        f"{MODEST_CLIENTS} of the {SLOTS} slots, and both tenants together get "
        f"{fcfs['tokens_per_s']:.0f} and {fair['tokens_per_s']:.0f} tokens per second."
    )


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Latency of both tenants; the modest one's share."""
    labels = [str(row["run"]) for row in rows]
    series = {
        "modest": [row["modest_latency_p50_s"] for row in rows],
        "greedy": [row["greedy_latency_p50_s"] for row in rows],
        "modest, alone": [row["alone_latency_p50_s"] for row in rows],
    }
    drawing.paired_bars(axes[0], labels, series, "latency p50, s")
    shares = [100 * row["modest_share"] for row in rows]
    drawing.bars(axes[1], labels, shares, "the modest tenant's share of tokens, %")


STUDY = Study(
    letter="e",
    title="A greedy tenant beside a modest one",
    question=(
        "8 slots, prompts of 64 to 128 and outputs of 32 to 64 tokens, 75 s. The greedy tenant "
        "keeps 32 requests open, the modest one 2; both have weight 1. Tokens are those of prompts "
        "and outputs of the requests that ended before the modest tenant's last one. Alone: the "
        "modest tenant before the other one came."
    ),
    columns=(
        Column(key="run", heading="policy"),
        Column(key="modest_ttft_p50_s", heading="modest TTFT p50 s", spec=".1f"),
        Column(key="modest_latency_p50_s", heading="latency p50 s", spec=".1f"),
        Column(key="modest_latency_max_s", heading="max", spec=".1f"),
        Column(key="alone_latency_p50_s", heading="alone", spec=".1f"),
        Column(key="modest_requests", heading="answers", spec=".0f"),
        Column(key="greedy_latency_p50_s", heading="greedy latency p50 s", spec=".1f"),
        Column(key="greedy_requests", heading="answers", spec=".0f"),
        Column(key="modest_share", heading="modest share", spec=".1%"),
        Column(key="tokens_per_s", heading="tok/s", spec=".0f"),
    ),
    measure=measure,
    sentences=sentences,
    draw=draw,
)
