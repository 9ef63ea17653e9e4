"""The GPU script's dry run: all stages in the interpreter, and a report whatever a stage does."""

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import carried, correctness, stages
from benchmarks.gpu.common import Place
from benchmarks.gpu.stages import Stage
from tests.kernels.on_device import carried as carried_over
from tests.kernels.on_device import through

ROOT = Path(__file__).parents[2]
AMPLE_S = 40.0  # for a stage that ends by itself
DRY = Place(device=torch.device("cpu"), dry=True, seconds=60.0)

# Stages as small scripts.
FAKES = {
    "finds": """
        print('{"found": 1}')
    """,
    "hangs": """
        import time
        time.sleep(600)
    """,
    "waits_for_its_line": """
        import json, os, pathlib, sys, time
        report = pathlib.Path(os.environ["REPORT"])
        print('{"case": "first", "passed": true}', flush=True)
        while "first" not in report.read_text():
            time.sleep(0.01)
        sys.exit(3)
    """,
    "finds_nothing": """
        print("no line of results")
    """,
    "babbles": """
        print('{"cut off')
        print('[1, 2]')
        print('{"found": 1}')
    """,
    "imports": """
        import json, iniconfig, quire_carried
        places = {"carried": quire_carried.__file__, "own": iniconfig.__file__}
        print(json.dumps(places))
    """,
}

Run = Callable[..., tuple[int, dict[str, Any]]]


def report_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def run_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs stages that are fakes, name and limit each; their exit status and the report."""
    folder, out = tmp_path / "fakes", tmp_path / "gpu.json"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / f"{name}.py").write_text("\n".join(line[8:] for line in text.splitlines()))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("REPORT", str(out))

    def run(*chosen: tuple[str, float], wheels: Path | None = None) -> tuple[int, dict[str, Any]]:
        faked = tuple(Stage(module=name, limit_s=limit) for name, limit in chosen)
        monkeypatch.setattr(stages, "STAGES", faked)
        more = [] if wheels is None else ["--wheels", str(wheels)]
        status = stages.main(["--dry-run", "--out", str(out), *more])
        return status, report_of(out)

    return run


def ends(report: dict[str, Any]) -> dict[str, str]:
    """How each stage ended, by name."""
    return {stage["stage"]: stage["ended"] for stage in report["stages"]}


def small_wheel(folder: Path) -> Path:
    """A folder with one wheel: a package of its own, and one that the machine has."""
    folder.mkdir()
    about = "quire_carried-1.0.dist-info"
    files = {
        "quire_carried.py": "",
        "iniconfig.py": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: quire-carried\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / "quire_carried-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{about}/RECORD": record}.items():
            wheel.writestr(name, text)
    return folder


def run_script(tmp_path: Path, wheels: Path, *arguments: str) -> dict[str, Any]:
    """The report of a dry run of the script itself, which must end well."""
    environ = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "WHEELS": str(wheels)}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run.sh"), "--dry-run", *arguments],
        env={**os.environ, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return report_of(tmp_path / "out/gpu.json")


def told_cases(lines: list[dict[str, Any]]) -> int:
    """How many cases have a line, which the last line must say too."""
    count = sum("case" in line for line in lines)
    assert lines[-1]["cases"] == count
    return count


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_dry_run(tmp_path: Path) -> None:
    report = run_script(tmp_path, tmp_path / "no wheels")
    assert report["dry_run"]
    assert report["wheels"] is None
    assert report["packages"]["torch"] != "missing"
    results = {stage["stage"]: stage["results"] for stage in report["stages"]}
    assert list(results) == [stage.name for stage in stages.STAGES]
    assert told_cases(results["correctness"]) >= 15
    passed = [line["passed"] for line in results["worker"] if line["check"] == "parity"]
    assert passed == [True, True]
    assert [line["passed"] for line in results["worker"] if line["check"] == "swap"] == [True]
    kernels = {line["kernel"] for line in results["sweeps"] if "kernel" in line}
    assert {"decode", "prefill", "rms_norm", "rotary_store", "sample"} <= kernels


def test_dry_run_of_the_cheap_stages_with_a_carried_wheel(tmp_path: Path) -> None:
    wheels = small_wheel(tmp_path / "wheels")
    report = run_script(tmp_path, wheels, "--only", "bandwidth", "--only", "correctness")
    assert report["wheels"]["files"] == ["quire_carried-1.0-py3-none-any.whl"]
    assert report["wheels"]["ended"] == "ok"
    assert ends(report) == {"bandwidth": "ok", "correctness": "ok"}
    floor, cases = (stage["results"] for stage in report["stages"])
    assert floor[0]["copy_gb_per_s"] > 0
    assert told_cases(cases) >= 15


def test_carried_packages_stand_behind_the_machines_own(run_fakes: Run, tmp_path: Path) -> None:
    wheels = small_wheel(tmp_path / "wheels")
    status, report = run_fakes(("imports", AMPLE_S), wheels=wheels)
    assert (status, ends(report)) == (0, {"imports": "ok"}), report
    places = report["stages"][0]["results"][0]
    assert Path(places["carried"]).parent != Path(places["own"]).parent
    assert "iniconfig.py" not in places["own"]
    assert not Path(places["carried"]).exists()  # gone with the run


def test_wheels_that_do_not_install_are_told_and_left_out(run_fakes: Run, tmp_path: Path) -> None:
    wheels = small_wheel(tmp_path / "wheels")
    (wheels / "torn-1.0-py3-none-any.whl").write_bytes(b"no archive")
    status, report = run_fakes(("imports", AMPLE_S), ("finds", AMPLE_S), wheels=wheels)
    assert report["wheels"]["ended"] == "failed (1)"
    assert "torn" in str(report["wheels"]["output"])
    assert ends(report) == {"imports": "failed (1)", "finds": "ok"}
    assert status == 2  # the wheels, and the stage that could not do without


def test_wheels_have_a_limit_of_their_own(
    run_fakes: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "WHEELS_S", 0.01)  # no pip starts in that
    status, report = run_fakes(("finds", AMPLE_S), wheels=small_wheel(tmp_path / "wheels"))
    assert (status, report["wheels"]["ended"]) == (1, "out of time")
    assert ends(report) == {"finds": "ok"}


def test_putting_wheels_in_place_is_within_the_whole(
    run_fakes: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*_: Any) -> dict[str, Any]:
        time.sleep(0.3)
        return {"ended": "ok"}

    monkeypatch.setattr(carried, "install", slowly)
    monkeypatch.setattr(stages, "TOTAL_S", stages.LEAST_S + 0.2)
    status, report = run_fakes(("finds", AMPLE_S), wheels=tmp_path)
    assert (status, ends(report)) == (1, {"finds": "skipped"})


def test_a_stage_that_ends_badly_does_not_keep_the_next_one(run_fakes: Run) -> None:
    chosen = (("hangs", 0.2), ("nothing_there", AMPLE_S), ("finds", AMPLE_S))
    status, report = run_fakes(*chosen)
    assert status == 2
    assert ends(report) == {
        "hangs": "out of time",
        "nothing_there": "failed (1)",
        "finds": "ok",
    }
    assert "No module named" in str(report["stages"][1]["output"])


def test_a_line_is_in_the_report_as_soon_as_it_is_said(run_fakes: Run) -> None:
    """The stage goes on when it sees its line in the report, and then ends badly."""
    status, report = run_fakes(("waits_for_its_line", AMPLE_S))
    assert (status, ends(report)) == (1, {"waits_for_its_line": "failed (3)"})
    assert report["stages"][0]["results"] == [{"case": "first", "passed": True}]


def test_a_stage_for_which_no_time_is_left_is_told_as_skipped(
    run_fakes: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "TOTAL_S", 0.0)
    status, report = run_fakes(("hangs", AMPLE_S), ("finds", AMPLE_S))
    assert (status, ends(report)) == (2, {"hangs": "skipped", "finds": "skipped"})
    assert report["stages"][1]["reason"] == "0.0 s left, a stage needs 5"
    assert report["stages"][1]["results"] == []


def test_a_stage_without_a_result_did_not_end_well(run_fakes: Run) -> None:
    status, report = run_fakes(("finds_nothing", AMPLE_S))
    assert (status, ends(report)) == (1, {"finds_nothing": "nothing done"})
    assert report["stages"][0]["output"] == ["no line of results"]


def test_a_line_that_is_no_result_costs_nothing_else(run_fakes: Run) -> None:
    status, report = run_fakes(("babbles", AMPLE_S))
    assert (status, report["stages"][0]["results"]) == (0, [{"found": 1}])


def test_stages_and_wheels_fit_in_six_minutes() -> None:
    limits = sum(stage.limit_s for stage in stages.STAGES)
    assert limits + stages.WHEELS_S <= stages.TOTAL_S < 355
    assert "timeout --kill-after=5 355 " in (ROOT / "benchmarks/gpu/run.sh").read_text()


def said_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """What has left the process through its standard output, which keeps what is not flushed."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    return lambda: [json.loads(line) for line in raw.getvalue().splitlines()]


def give_cases(monkeypatch: pytest.MonkeyPatch, cases: dict[str, Callable[[], float]]) -> None:
    monkeypatch.setattr(correctness, "checks", lambda *_: list(cases.items()))
    monkeypatch.setattr(correctness, "DRY_EVERY", 1)


def test_a_case_is_told_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that hangs takes nothing with it, and has its name told."""
    said = said_by(monkeypatch)
    before: dict[str, list[dict[str, Any]]] = {}

    def case(name: str) -> Callable[[], float]:
        def check() -> float:
            before[name] = said()
            return 0.25

        return check

    give_cases(monkeypatch, {name: case(name) for name in ("a", "b", "c", "d")})
    correctness.shard(1, 2, DRY)
    assert before["b"] == [{"shard": 1, "of": 2, "next": "b"}]
    done = {"shard": 1, "case": "b", "error": 0.25, "passed": True, "next": "d"}
    assert before["d"] == [*before["b"], done]
    assert said()[-1] == {"shard": 1, "case": "d", "error": 0.25, "passed": True, "next": None}


def test_a_case_that_fails_does_not_keep_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by(monkeypatch)

    def raises() -> float:
        raise ValueError("bad shape")

    cases = {"raises": raises, "nan": lambda: float("nan"), "over": lambda: 1.00001}
    give_cases(monkeypatch, {**cases, "fits": lambda: 1.0})
    tally = correctness.shard(0, 1, DRY)
    assert (tally.done, tally.of, tally.failed, tally.worst_passing) == (4, 4, 3, 1.0)
    lines = {line["case"]: line for line in said()[1:]}
    assert [line["passed"] for line in lines.values()] == [False, False, False, True]
    assert lines["raises"]["problem"] == "ValueError: bad shape"
    with pytest.raises(SystemExit, match="3 cases are over"):
        correctness.conclude([tally])


def test_no_case_done_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by(monkeypatch)
    give_cases(monkeypatch, {"a": lambda: 0.0})
    late = Place(device=DRY.device, dry=True, seconds=-1.0)
    with pytest.raises(SystemExit, match="no case was done"):
        correctness.conclude([correctness.shard(0, 1, late)])
    assert said()[-1] == {"cases": 0, "of": 1, "failed": 0, "worst_passing": 0.0}


def test_what_changes_on_a_device_comes_back() -> None:
    """Seen on the CPU, where the copies are real ones too."""
    wide = torch.arange(12.0).view(3, 4)
    part = wide[:, 1:3]
    assert carried_over(part, torch.device("cpu")).stride() == (4, 1)

    def double(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x[1:]

    result = through(double, torch.device("cpu"))(part)
    assert part.tolist() == [[2.0, 4.0], [10.0, 12.0], [18.0, 20.0]]
    assert result.data_ptr() == part[1:].data_ptr()
    assert wide[:, 0].tolist() == [0.0, 4.0, 8.0]
