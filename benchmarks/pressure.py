"""A stack under pressure for memory: nothing fails and no token differs.

`python -m benchmarks.pressure` gives a stack in deterministic mode a third of the KV blocks that
its clients need, and lets them stream for a while, half of their requests sampled. First with a
small host pool: what does not fit there is computed again. Then with costs overridden, so that
swapping is chosen for one half of the time and computing again for the other. At last a stack with
room for all repeats every request that was answered. Ends with status 1 if a request failed, if any
token differs, or if there were fewer swaps or recomputations than asked for, by the scheduler's
counters.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak import Tally, soak
from benchmarks.stack import Metrics, Stack, StackError
from benchmarks.target import model_folder
from benchmarks.workload import Job, Shape, jobs

SHARE = 1 / 3
BLOCK_SIZE = 16
# Outputs longer than prompts: requests are admitted with little and then grow.
SHAPE = Shape(prompt=(32, 96), output=(96, 192))
# More than a client gets through.
JOBS_PER_CLIENT = 256
MODES = ("swap", "recompute")
PARTS = ("pool", *MODES)
PREEMPTIONS = "quire:preemptions_total"
COMMON = {
    "QUIRE_DETERMINISTIC": "1",
    "QUIRE_DTYPE": "bfloat16",
    "QUIRE_BLOCK_SIZE": str(BLOCK_SIZE),
    "QUIRE_DEFAULT_DEADLINE_S": "3600",
}
DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One constrained run: its share of the time, its settings, and what it must have done."""

    name: str
    share: float
    settings: dict[str, str]
    must: tuple[str, ...]


def make_work(num_clients: int) -> list[list[Job]]:
    """What each client sends; every second request is sampled, with a seed of its own."""
    return [
        [
            dataclasses.replace(job, temperature=0.8, seed=1_000 * client + i) if i % 2 else job
            for i, job in enumerate(jobs(f"pressure-{client}", JOBS_PER_CLIENT, SHAPE))
        ]
        for client in range(num_clients)
    ]


def needed_blocks(work: Sequence[Sequence[Job]]) -> int:
    """Blocks that the first request of each client takes at its end."""
    return sum(math.ceil((len(own[0].prompt) + own[0].num_output) / BLOCK_SIZE) for own in work)


def block_gib(model: str) -> float:
    """Memory of one KV block of all layers."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return float(2 * config["num_hidden_layers"] * heads * dim * BLOCK_SIZE * DTYPE_BYTES / 2**30)


def parts(num_blocks: int, gib_per_block: float) -> list[Part]:
    """The constrained runs of a stack with num_blocks: a small host pool, and one way made dear."""
    blocks = {"QUIRE_NUM_GPU_BLOCKS_OVERRIDE": str(num_blocks)}
    large = f"{3 * num_blocks * gib_per_block:.6f}"
    # Room for a tenth of what the device holds, a few requests.
    small = f"{max(16, num_blocks // 10) * gib_per_block + 1e-6:.6f}"
    dear_tokens = {"QUIRE_PREFILL_US_PER_TOKEN_OVERRIDE": "1000000"}
    dear_copies = {"QUIRE_SWAP_GBPS_OVERRIDE": "0.001"}
    return [
        Part(
            name="pool",
            share=1.0,
            settings={**blocks, "QUIRE_SWAP_SPACE_GIB": small},
            must=MODES,
        ),
        Part(
            name="swap",
            share=0.5,
            settings={**blocks, "QUIRE_SWAP_SPACE_GIB": large, **dear_tokens},
            must=("swap",),
        ),
        Part(
            name="recompute",
            share=0.5,
            settings={**blocks, "QUIRE_SWAP_SPACE_GIB": large, **dear_copies},
            must=("recompute",),
        ),
    ]


def differing(found: Tally, expected: Tally) -> list[str]:
    """Answers whose tokens are not those expected, and how far they agree."""
    problems = []
    for place, token_ids in sorted(found.tokens.items()):
        right = expected.tokens.get(place, ())
        if token_ids != right:
            same = next(
                (i for i, (a, b) in enumerate(zip(token_ids, right, strict=False)) if a != b),
                min(len(token_ids), len(right)),
            )
            problems.append(f"client {place[0]}, request {place[1]}: tokens differ from {same} on")
    return problems


def counted(metrics: Metrics) -> dict[str, int]:
    """Preemptions so far, by mode; a mode without a sample is not built."""
    return {mode: int(metrics.total(PREEMPTIONS, mode=mode)) for mode in MODES}


def run(
    model: str, settings: dict[str, str], work: Sequence[Sequence[Job]], seconds: float
) -> tuple[Tally, dict[str, int]]:
    """One stack; what its clients saw, and its preemptions. Raises KeyError without counters."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-pressure-") as folder,
        Stack(Path(folder), model=model, settings={**COMMON, **settings}) as stack,
    ):
        counted(stack.scheduler.metrics())
        tally = asyncio.run(
            soak(
                stack.client,
                stack.grpc_address,
                stack.model_name,
                num_clients=len(work),
                seconds=seconds,
                work=work,
            )
        )
        return tally, counted(stack.scheduler.metrics())


def say(text: str) -> None:
    """Progress, at once."""
    print(f"[pressure] {text}", flush=True)


def press(
    model: str, *, clients: int, seconds: float, least: int, names: Sequence[str] = PARTS
) -> dict[str, object]:
    """Those parts and the comparison; `problems` is empty if all is well."""
    work = make_work(clients)
    num_blocks = int(needed_blocks(work) * SHARE)
    problems: list[str] = []
    results: list[tuple[Part, Tally]] = []
    shown: dict[str, object] = {}
    for part in parts(num_blocks, block_gib(model)):
        if part.name not in names:
            continue
        say(f"{part.name}: {num_blocks} blocks, {clients} clients, {seconds * part.share:.0f} s")
        tally, counts = run(model, part.settings, work, seconds * part.share)
        say(f"  {tally.num_streams} answers, {len(tally.problems)} not whole, {counts}")
        results.append((part, tally))
        shown[part.name] = {**tally.summary, **counts}
        problems += [f"{part.name}: {problem}" for problem in tally.problems]
        problems += [] if tally.num_streams else [f"{part.name}: no answer"]
        problems += [
            f"{part.name}: {counts[mode]} by {mode}, at least {least} were wanted"
            for mode in part.must
            if counts[mode] < least
        ]
    done = [
        max((i + 1 for _, t in results for c, i in t.tokens if c == client), default=0)
        for client in range(clients)
    ]
    say(f"room for all: the same {sum(done)} requests again")
    repeated = [own[:count] for own, count in zip(work, done, strict=True)]
    expected, counts = run(model, {}, repeated, math.inf)
    shown["room for all"] = {**expected.summary, **counts}
    problems += [f"room for all: {problem}" for problem in expected.problems]
    problems += [f"{part.name}: {text}" for part, t in results for text in differing(t, expected)]
    return {**shown, "num_blocks": num_blocks, "problems": problems}


def main(argv: Sequence[str]) -> int:
    """Runs it; status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each of the two runs")
    parser.add_argument("--least", type=int, default=20, help="swaps, and recomputations, of each")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="", help="folder; default: the launcher's model cache")
    options = parser.parse_args(argv)
    try:
        result = press(
            model_folder(options.model),
            clients=options.clients,
            seconds=options.seconds,
            least=options.least,
            names=options.parts,
        )
    except StackError as error:
        print(f"[pressure] {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
