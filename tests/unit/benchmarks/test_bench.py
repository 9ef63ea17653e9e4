"""`make bench` runs every part and shows every goal, whatever a part says."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.goals import GAP, THROUGHPUT, Verdict


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Parts that write one goal each, the first of which fails."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        first = len(commands) == 1
        path = tmp_path / "serving-1.json" if first else Path(command[command.index("--json") + 1])
        goal = THROUGHPUT if first else GAP
        document = {"goals": [Verdict(goal=goal, factor=0.5, found=100.0).as_dict()]}
        path.write_text(json.dumps(document))
        return subprocess.CompletedProcess(command, 3 if first else 0)

    (tmp_path / "serving-0.json").write_text("of another run")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_every_part_runs_and_every_goal_stands_in_one_table(
    ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([]) == 3
    modules = [command[2] for command in ran]
    assert modules == [f"benchmarks.{part}" for part in ("serving", "batching", "gateway", "start")]
    table = capsys.readouterr().out
    assert table.count(GAP.meaning) == 3
    (line,) = (line for line in table.splitlines() if THROUGHPUT.meaning in line)
    assert [cell.strip() for cell in line.split("|")][2:8] == [
        "at least 460", "0.50", "230", "100", "tok/s", "missed",
    ]  # fmt: skip


def test_a_quick_run_is_quick_in_each_part(ran: list[list[str]]) -> None:
    bench.main(["--quick"])
    assert ran[0][3:] == ["--quick"]
    assert ran[1][-1] == "--quick"
    assert ran[2][-2:] == ["--seconds", "5"]
    assert ran[3][-2:] == ["--starts", "1"]


def test_a_part_without_figures_is_named_below_the_goals(
    ran: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if command[2] != "benchmarks.gateway":
            return writes(command, **options)
        ran.append(command)
        return subprocess.CompletedProcess(command, -9)

    monkeypatch.setattr(subprocess, "run", run)
    assert bench.main([]) == 9
    *_, table, last = capsys.readouterr().out.strip().split("\n\n")
    assert THROUGHPUT.meaning in table
    assert last == "benchmarks.gateway wrote no figures: it ended with -9"


def test_all_figures_need_no_word(ran: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([])
    assert "no figures" not in capsys.readouterr().out
