"""All that has a goal, in one run: python -m benchmarks [--quick].

Serving (benchmarks.serving), continuous against static batching (benchmarks.batching), the gateway
alone (benchmarks.gateway), and a second start with the worker's memory (benchmarks.start), one
after the other; each prints its tables and writes JSON to benchmarks/results. At the end stands
every goal, as it is and multiplied by the floor of the day, and below them each part that wrote no
figures.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.goals import Goal, Verdict
from benchmarks.stack import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def parts(stamp: str, *, quick: bool) -> tuple[tuple[list[str], Path], ...]:
    """Command lines, each with the file or, ending in *, the files that it writes."""
    names = ("batching", "gateway", "start")
    batching, gateway, start = (RESULTS / f"{name}-{stamp}.json" for name in names)
    rough = ["--quick"] if quick else []
    shorter = ["--seconds", "5"] if quick else []
    fewer = ["--starts", "1"] if quick else []
    return (
        (["benchmarks.serving", *rough], RESULTS / "serving-*.json"),
        (["benchmarks.batching", "--json", str(batching), *rough], batching),
        (["benchmarks.gateway", "--json", str(gateway), *shorter], gateway),
        (["benchmarks.start", "--json", str(start), *fewer], start),
    )


def verdicts(document: dict[str, Any]) -> list[Verdict]:
    """As they were written."""
    names = ("meaning", "value", "unit", "at_least", "floor")
    return [
        Verdict(
            goal=Goal(**{name: of[name] for name in names}), factor=of["factor"], found=of["found"]
        )
        for of in document["goals"]
    ]


def main(argv: Sequence[str]) -> int:
    """Runs all, also behind one that failed; the largest status, not 0 if figures are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some twelve minutes; rough")
    options = parser.parse_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    found: list[Verdict] = []
    without: list[str] = []
    status = 0
    for command, written in parts(time.strftime("%Y%m%d-%H%M%S"), quick=options.quick):
        before = set(RESULTS.glob(written.name))
        ended = subprocess.run([sys.executable, "-m", *command], check=False)
        status = max(status, abs(ended.returncode))
        paths = sorted(set(RESULTS.glob(written.name)) - before)
        for path in paths:
            found += verdicts(json.loads(path.read_text()))
        if not paths:
            without.append(f"{command[0]} wrote no figures: it ended with {ended.returncode}")
    sys.stdout.write("\nEvery goal, multiplied by today's floor:\n\n")
    sys.stdout.write(report.goal_table(found) + "\n")
    for line in without:
        sys.stdout.write(f"\n{line}\n")
    return status or len(without)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
