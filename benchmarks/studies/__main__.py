"""`python -m benchmarks.studies [a a32 b c d e f] [--quick]`: what each decision is worth.

Each study starts a stack of its own for every run: the real model on a CPU worker, gateway, Redis
and scheduler, the same code, one setting changed. Prints a table, writes JSON and a PNG, and, where
the folder has the page, the study's part of it. `--quick` is for trying the code.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report, target
from benchmarks.stack import ROOT, StackError
from benchmarks.studies import drawing, page
from benchmarks.studies.catalogue import STUDIES
from benchmarks.studies.study import Bench, Row, Study, problems_of

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


def run(study: Study, bench: Bench, command: str, out: Path) -> list[Row]:
    """Measures, prints and writes one study; its rows."""
    began_s = time.perf_counter()
    about = {**report.machine(), "load_before": round(os.getloadavg()[0], 1)}
    rows: list[Row] = []
    for row in study.measure(bench):
        rows.append(row)
        print(page.table(study.columns, [row]), flush=True)
    document = {
        "study": study.letter,
        "title": study.title,
        "command": command,
        "quick": bench.quick,
        "settings": dict(bench.settings),
        "took_s": time.perf_counter() - began_s,
        "machine": about,
        "rows": rows,
    }
    json_path, png_path = page.paths(out, study)
    page.write_json(json_path, document)
    note = f"{about['cores']} cores {about['cpu']}, commit {about['commit'] or 'unknown'}"
    drawing.write(png_path, study, rows, note)
    text = page.section(study, document)
    print(f"\n({study.letter}) {study.title}\n\n{text}\n\nwrote {json_path} and {png_path}\n")
    page_path = out / page.NAME
    if page_path.is_file():
        page_path.write_text(page.with_section(page_path.read_text(), study, text))
    return rows


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
            rows = run(STUDIES[letter], bench, command, options.out)
        except StackError as error:
            problems.append(f"study {letter}: {error}")
            continue
        problems += [f"study {letter}, {problem}" for problem in problems_of(rows)]
    for problem in problems[:20]:
        print(f"[study] {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
