"""`python -m benchmarks.studies [a a32 b c d e f] [--quick]`: what each decision is worth.

Each study starts a stack of its own for every run: the real model on a CPU worker, gateway, Redis
and scheduler, the same code, one setting changed. Prints a table, writes JSON and a PNG, and, where
the folder has the page, the study's part of it. `--quick` is for trying the code.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import target
from benchmarks.stack import ROOT, StackError
from benchmarks.studies import page
from benchmarks.studies.catalogue import STUDIES
from benchmarks.studies.running import run
from benchmarks.studies.study import Bench, problems_of

DOCS = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__)
    add = parser.add_argument
    add("studies", nargs="*", metavar="LETTER", help=f"of {' '.join(STUDIES)}; default: all")
    add("--quick", action="store_true", help="less than a minute each; figures are rough")
    add("--model", default="", help="folder; default: the launcher's model cache")
    add("--set", action="append", type=target.setting, default=[], metavar="QUIRE_X=V",
        help="setting for all services")  # fmt: skip
    add("--out", type=Path, help="default: docs/benchmarks; with --quick benchmarks/results")
    options = parser.parse_args(argv)
    for letter in options.studies:
        if letter not in STUDIES:
            parser.error(f"no study {letter!r}; there are {' '.join(STUDIES)}")
    options.out = options.out or (RESULTS if options.quick else DOCS)
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the studies. Status 1 if an answer was wrong or a stack failed."""
    options = parse(argv)
    bench = Bench(
        quick=options.quick,
        model=options.model,
        settings=dict(pair.split("=", 1) for pair in options.set),
    )
    problems: list[str] = []
    for letter in options.studies or STUDIES:
        more = [f"--set {pair}" for pair in options.set] + ["--quick"] * options.quick
        command = " ".join(("python -m benchmarks.studies", letter, *more))
        try:
            rows = run(STUDIES[letter], bench, command, options.out / page.NAME)
        except StackError as error:
            problems.append(f"study {letter}: {error}")
            continue
        problems += [f"study {letter}, {problem}" for problem in problems_of(rows)]
    for problem in problems[:20]:
        print(f"[study] {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
