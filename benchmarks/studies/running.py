"""Runs a study: rows as they come, then JSON, picture, and its part of the page."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from benchmarks import report
from benchmarks.studies import drawing, page
from benchmarks.studies.study import Row, Study


class Bench(Protocol):
    """What a study is measured with; the rest is between the two."""

    @property
    def quick(self) -> bool:
        """Whether figures may be rough."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What differs from the defaults in all of its runs."""


def run(study: Study, bench: Bench, command: str, page_path: Path) -> list[Row]:
    """Measures, prints and writes one study, into the page if there is one; its rows."""
    out = page_path.parent
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
    if page_path.is_file():
        page_path.write_text(page.with_section(page_path.read_text(), study, text))
    return rows
