"""`python -m benchmarks.simulation --traces FOLDER [traces prefixes published cluster] [--quick]`.

Studies in virtual time: the scheduler's own core, modelled workers, recorded traffic. Prints a
table each, writes JSON and a PNG, and the study's part of the page. The folder
holds azure_2023_conv.csv and azure_2023_code.csv (Azure LLM inference traces), and
mooncake_conversation.jsonl (Mooncake traces).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation import cluster, prefixes, published, traces
from benchmarks.simulation.bench import Bench
from benchmarks.stack import ROOT, StackError
from benchmarks.studies.running import run
from benchmarks.studies.study import Study, problems_of

PAGE = ROOT / "docs" / "benchmarks" / "simulation.md"
RESULTS = ROOT / "benchmarks" / "results"
STUDIES: dict[str, Study] = {
    study.letter: study for study in (traces.STUDY, prefixes.STUDY, published.STUDY, cluster.STUDY)
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    add = parser.add_argument
    add("studies", nargs="*", metavar="STUDY", help=f"of {' '.join(STUDIES)}; default: all")
    add("--traces", type=Path, default=Path("traces"), help="folder of the recorded traces")
    add("--requests", type=int, default=3000, help="of a trace, in `traces`")
    add("--quick", action="store_true", help="a tenth of the requests; figures are rough")
    options = parser.parse_args(argv)
    for name in options.studies:
        if name not in STUDIES:
            parser.error(f"no study {name!r}; there are {' '.join(STUDIES)}")
    if options.requests < 1:
        parser.error("--requests is at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the studies. Status 1 if a trace is missing or a run left a request without an end."""
    options = parse(argv)
    bench = Bench(quick=options.quick, traces=options.traces, requests=options.requests)
    problems: list[str] = []
    for name in options.studies or STUDIES:
        command = f"make bench-simulation STUDIES={name}" + " ARGS=--quick" * options.quick
        page = RESULTS / PAGE.name if options.quick else PAGE
        try:
            rows = run(STUDIES[name], bench, command, page)
        except StackError as error:
            problems.append(f"study {name}: {error}")
            continue
        problems += [f"study {name}, {problem}" for problem in problems_of(rows)]
    for problem in problems:
        print(f"[simulation] {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
