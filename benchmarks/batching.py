"""Continuous batching against static batches of 8, against its goal: python -m benchmarks.batching.

The runs of study (a) (benchmarks.studies.batching) that its goal is about, with half as many of the
same requests: `make bench` has five minutes for it, the study takes twelve. Prints a row for each
run and the goal, and writes JSON. Nothing scales this goal: both sides run on the machine of today.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.goals import STATIC, Verdict
from benchmarks.stack import ROOT, StackError
from benchmarks.studies import batching, page
from benchmarks.studies.study import Bench, by_label, problems_of

NUM_REQUESTS, QUICK_REQUESTS = 128, 32
RUNS = ((f"static, {batching.SMALL}", "static", batching.SMALL), batching.UNBOUND)


def main(argv: Sequence[str]) -> int:
    """Measures and reports. Status 1 if an answer was wrong or a stack failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 requests; a rough figure")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(argv)
    name = f"batching-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = options.json or ROOT / "benchmarks" / "results" / name
    work = batching.exponential_jobs(
        QUICK_REQUESTS if options.quick else NUM_REQUESTS,
        mean=batching.MEAN_OUTPUT,
        most=batching.MAX_OUTPUT,
        seed=batching.SEED,
    )
    try:
        bench = Bench(quick=options.quick, model="", settings={})
        rows = list(batching.measure_runs(bench, RUNS, work))
    except StackError as error:
        print(f"[batching] {error}", file=sys.stderr)
        return 1
    static, continuous = (by_label(rows)[label] for label, _, _ in RUNS)
    ratio = continuous["tokens_per_s"] / max(static["tokens_per_s"], 1e-9)
    verdict = Verdict(goal=STATIC, factor=1.0, found=ratio)
    document = {"machine": report.machine(), "rows": rows, "goals": [verdict.as_dict()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"\n{page.table(batching.COLUMNS, rows)}\n\n{report.goal_table([verdict])}\n\nwrote {path}"
    )
    problems = problems_of(rows)
    for problem in problems[:10]:
        print(f"[batching] {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
