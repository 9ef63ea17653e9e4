"""Continuous against static batches of 8: the ratio of one run, against its goal. No stack runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import batching
from benchmarks.stack import StackError
from benchmarks.studies import batching as study
from benchmarks.workload import Job

RATES = {"static, 8": 80.0, "continuous": 200.0}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Job]]:
    """The work of each load; runs give RATES."""
    loads: list[list[Job]] = []

    def measure_runs(
        _: Any, runs: Sequence[study.Run], work: list[Job]
    ) -> Iterator[dict[str, Any]]:
        loads.append(work)
        for label, policy, _size in runs:
            row = dict.fromkeys((column.key for column in study.COLUMNS), 1.0)
            problems = ["an answer was cut"] if policy == "fcfs" and len(work) < 100 else []
            yield {**row, "run": label, "tokens_per_s": RATES[label], "problems": problems}

    monkeypatch.setattr(study, "measure_runs", measure_runs)
    return loads


def test_the_goal_is_the_ratio_of_the_same_requests(
    sent: list[list[Job]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batching.json"
    assert batching.main(["--json", str(path)]) == 0
    (goal,) = json.loads(path.read_text())["goals"]
    assert (goal["found"], goal["scaled"], goal["verdict"]) == (2.5, 5.0, "missed")
    assert [len(work) for work in sent] == [128]
    assert "| 2.5   | x    | missed  |" in capsys.readouterr().out


def test_a_wrong_answer_fails_the_run_but_the_figures_stay(
    sent: list[list[Job]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batching.json"
    assert batching.main(["--quick", "--json", str(path)]) == 1
    assert [len(work) for work in sent] == [32]
    assert path.is_file()
    assert "continuous: an answer was cut" in capsys.readouterr().err


def test_a_stack_that_does_not_start_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_runs(*_: Any) -> list[Any]:
        raise StackError("no worker came")

    monkeypatch.setattr(study, "measure_runs", measure_runs)
    assert batching.main(["--json", str(tmp_path / "batching.json")]) == 1
    assert "no worker came" in capsys.readouterr().err
