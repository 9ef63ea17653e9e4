"""`python -m benchmarks.simulation.belief [--quick]`: how far the load simulator can be believed.

Five kinds of traffic go through a whole stack with the real model, each twice from two seeds. The
cost of the simulator's worker is fitted to the first halves; then the simulator says what clients
see in the second ones, and both stand side by side. About 8 minutes on two quiet cores. Prints the
table, writes JSON and, where the folder has the page, its part of it. Status 0 whatever the error
is; 1 if an answer was wrong, a stack failed or its trace does not replay.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure, report, target
from benchmarks.client import Answer, Client
from benchmarks.simulation import belief_page, belief_predict, belief_trace
from benchmarks.simulation.belief_predict import Fitted
from benchmarks.simulation.belief_trace import BeliefError, Recorded, Step
from benchmarks.simulation.belief_work import FIT, QUICK_SECONDS, SECONDS, Half, halves
from benchmarks.stack import ROOT, Stack, StackError
from benchmarks.workload import Job, Shape, jobs
from scheduler_svc import replay, trace_file
from scheduler_svc.sim.cost_fit import CostError
from scheduler_svc.trace_file import Trace, TraceError

DOCS = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
WARM_UP = Shape(prompt=(64, 96), output=(8, 8))
WARM_UP_REQUESTS = 8
TRACE_MAX_MIB = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A half that was sent; times are those of the answers' clock."""

    half: Half
    began_s: float
    ended_s: float
    jobs: Sequence[Job]
    answers: Sequence[Answer]

    def problems(self) -> list[str]:
        """Of answers that were not whole."""
        pairs = zip(self.jobs, self.answers, strict=True)
        return [
            f"{self.half.label}: {problem}"
            for job, answer in pairs
            if (problem := answer.problem(job.num_output))
        ]

    def steps(self, of: Recorded) -> list[Step]:
        """Those that were planned and returned while it ran."""
        return belief_trace.between(of.steps, self.began_s, self.ended_s)


def say(text: str) -> None:
    """Progress, at once."""
    print(f"[belief] {text}", flush=True)


async def send(client: Client, model: str, half: Half) -> Run:
    """Each request at its time; returns at the last one's end."""
    work = half.jobs()
    bodies = [job.body(model, return_token_ids=True) for job in work]
    began_s = time.perf_counter()
    answers = await measure.open_loop(client, bodies, [of.at for of in half.source()])
    return Run(half=half, began_s=began_s, ended_s=time.perf_counter(), jobs=work, answers=answers)


def measure_all(
    todo: Sequence[Half], model: str, settings: Mapping[str, str]
) -> tuple[list[Run], Trace]:
    """All halves through one stack, and its scheduler's trace. Raises StackError, TraceError."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="quire-belief-") as name:
        folder = Path(name)
        traces = folder / "traces"
        own = {"QUIRE_TRACE_DIR": str(traces), "QUIRE_TRACE_MAX_MIB": str(TRACE_MAX_MIB)}
        say("starting Quire")
        with Stack(folder, model=target.model_folder(model), settings={**own, **settings}) as stack:
            warm_up = jobs("belief-warm", WARM_UP_REQUESTS, WARM_UP)
            bodies = [job.body(stack.model_name) for job in warm_up]
            asyncio.run(measure.closed_loop(stack.client, bodies, len(bodies)))
            for half in todo:
                run = asyncio.run(send(stack.client, stack.model_name, half))
                runs.append(run)
                say(f"{half.label}: {len(run.answers)} requests, {run.ended_s - run.began_s:.0f} s")
        files = list(traces.glob("*.trace"))
        if len(files) != 1:
            raise TraceError(f"{len(files)} traces of one term")
        with files[0].open(encoding="utf-8", newline="\n") as lines:
            return runs, trace_file.read(lines)


def compare(runs: Sequence[Run], trace: Trace) -> dict[str, Any]:
    """Fits on the halves that are there for it and predicts all. Raises BeliefError, CostError."""
    num_rounds, difference = replay.replay(trace)
    if difference is not None:
        raise BeliefError(f"the trace does not replay: {difference}")
    recorded = belief_trace.read(trace)
    steps = {run.half: run.steps(recorded) for run in runs}
    pairs = {
        run.half: belief_predict.matched(run.jobs, run.answers, recorded.requests) for run in runs
    }
    to_fit = [run.half for run in runs if run.half.role == FIT]
    fit_steps = [step for half in to_fit for step in steps[half]]
    fit_pairs = [pair for half in to_fit for pair in pairs[half]]
    fitted = belief_predict.fit(fit_steps, belief_predict.ways(fit_pairs, fit_steps))

    def predict(half: Half, of: Fitted) -> dict[str, float]:
        cluster = belief_predict.cluster(recorded.worker, trace.config, of)
        return belief_predict.predict(cluster, of.ways, half.source())

    def row(half: Half, answers: Sequence[Answer]) -> dict[str, Any]:
        own_ways = belief_predict.ways(pairs[half], steps[half])
        return {
            "workload": half.workload.kind,
            "half": half.role,
            "requests": len(answers),
            "steps": len(steps[half]),
            "step_time": belief_predict.step_time(fitted, steps[half]),
            "measured": belief_predict.measured(answers),
            "predicted": predict(half, fitted),
            "told": predict(half, belief_predict.told(fitted, steps[half], own_ways)),
        }

    return {
        "replayed_rounds": num_rounds,
        "fit": belief_predict.described(fitted),
        "rows": [row(run.half, run.answers) for run in runs],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.belief", description=__doc__
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two minutes; figures are rough")
    add("--seed", type=int, default=1, help="of the arrivals")
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--set", action="append", type=target.setting, default=[], metavar="QUIRE_X=V",
        help="setting for all services")  # fmt: skip
    add("--out", type=Path, help="default: docs/benchmarks; with --quick benchmarks/results")
    options = parser.parse_args(argv)
    options.out = options.out or (RESULTS if options.quick else DOCS)
    return options


def main(argv: Sequence[str]) -> int:
    """Measures, compares, prints and writes."""
    options = parse(argv)
    seconds = QUICK_SECONDS if options.quick else SECONDS
    began_s, load_before = time.perf_counter(), os.getloadavg()[0]
    date = time.strftime("%Y-%m-%d %H:%M")
    try:
        runs, trace = measure_all(
            halves(options.seed, seconds),
            options.model,
            dict(pair.split("=", 1) for pair in options.set),
        )
        problems = [problem for run in runs for problem in run.problems()]
        if problems:
            raise BeliefError("; ".join(problems[:5]))
        found = compare(runs, trace)
    except (BeliefError, CostError, StackError, TraceError) as error:
        print(f"[belief] {error}", file=sys.stderr)
        return 1
    document = {
        "command": " ".join(("python -m benchmarks.simulation.belief", *argv)),
        "quick": options.quick,
        "seed": options.seed,
        "seconds": seconds,
        "date": date,
        "took_s": time.perf_counter() - began_s,
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "machine": report.machine(),
        **found,
    }
    text = belief_page.section(document)
    print(f"\n{text}\n")
    for path in belief_page.write(options.out, document, text):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
