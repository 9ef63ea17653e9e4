"""The pages of studies say what their JSON files say, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.simulation.__main__ as simulation
from benchmarks.simulation.__main__ import PAGE as SIMULATED
from benchmarks.studies import page
from benchmarks.studies.__main__ import DOCS
from benchmarks.studies.catalogue import STUDIES
from benchmarks.studies.study import Column, Study, by_label

PAGES = {
    name: (DOCS / file_name, study)
    for file_name, studies in ((page.NAME, STUDIES), (SIMULATED.name, simulation.STUDIES))
    for name, study in studies.items()
}


@pytest.mark.parametrize(("page_path", "study"), PAGES.values(), ids=list(PAGES))
def test_each_study_stands_on_its_page_as_its_json_has_it(page_path: Path, study: Study) -> None:
    json_path, png_path = page.paths(DOCS, study)
    found = page.find_section(page_path.read_text(), study)
    assert found is not None
    if not json_path.exists():
        assert found == page.NOT_YET
        return
    assert found == page.section(study, json.loads(json_path.read_text()))
    assert png_path.is_file()


def test_a_table_is_aligned_and_leaves_out_what_a_run_lacks() -> None:
    columns = (Column(key="run", heading="run"), Column(key="speed", heading="tok/s", spec=",.1f"))
    rows: list[dict[str, Any]] = [{"run": "fcfs", "speed": 1234.56}, {"run": "x", "speed": None}]
    assert page.table(columns, rows) == (
        "| run  | tok/s   |\n"
        "|------|---------|\n"
        "| fcfs | 1,234.6 |\n"
        "| x    |         |"
    )  # fmt: skip


def test_a_section_replaces_its_own_and_no_other() -> None:
    a, b = STUDIES["a"], STUDIES["b"]
    text = (
        "# Title\n\n<!-- study a -->\nold\n<!-- end of study a -->\n\n"
        "<!-- study b -->\nother\n<!-- end of study b -->\nend\n"
    )
    changed = page.with_section(text, a, "new\n\nlines")
    assert page.find_section(changed, a) == "new\n\nlines"
    assert page.find_section(changed, b) == "other"
    assert changed.startswith("# Title\n")
    assert changed.endswith("\nend\n")
    with pytest.raises(ValueError, match="no marks of study c"):
        page.with_section(text, STUDIES["c"], "new")


def test_a_quick_run_is_called_one() -> None:
    machine = {"commit": "abc", "cores": 2, "cpu": "X", "memory_gib": 24, "torch": "2"}
    machine["load_before"] = 7.5
    document: dict[str, Any] = {"command": "c", "took_s": 1.0, "machine": machine}
    assert "load average 7.5" in page.source({**document, "quick": True})
    assert page.source({**document, "quick": True}).startswith("A quick run")
    assert not page.source({**document, "quick": False}).startswith("A quick run")


def test_sentences_have_their_numbers_from_the_rows() -> None:
    figures = {"static, 8": (50, 300, 10_707), "continuous": (150, 99, 700)}
    figures["continuous, 8"] = (100, 160, 4_100)
    rows = [
        {"run": run, "requests": 256, "tokens_per_s": t, "latency_mean_s": s, "steps": steps}
        for run, (t, s, steps) in figures.items()
    ]
    text = STUDIES["a"].sentences(rows)
    assert by_label(rows)["continuous"] is rows[1]
    for words in ("gives 100", "give 50, 2.00 times", "150 with", "3.00 times", "99 s", "300 s"):
        assert words in text


def test_files_of_a_study(tmp_path: Path) -> None:
    json_path, png_path = page.paths(tmp_path, STUDIES["d"])
    assert (json_path.name, png_path.name) == ("study-d.json", "study-d.png")
