"""The GPU script's dry run: all stages in the interpreter, and a report whatever a stage does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import stages
from benchmarks.gpu.stages import Stage
from tests.kernels.on_device import carried, through

ROOT = Path(__file__).parents[2]


def report_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_dry_run(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run.sh"), "--dry-run"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    report = report_of(tmp_path / "gpu.json")
    assert report["dry_run"]
    assert report["packages"]["torch"] != "missing"
    results = {stage["stage"]: stage["results"] for stage in report["stages"]}
    assert list(results) == [stage.name for stage in stages.STAGES]
    assert results["correctness"][0]["cases"] >= 15
    passed = [line["passed"] for line in results["worker"] if line["check"] == "parity"]
    assert passed == [True, True]
    assert [line["passed"] for line in results["worker"] if line["check"] == "swap"] == [True]
    kernels = {line["kernel"] for line in results["sweeps"] if "kernel" in line}
    assert {"decode", "prefill", "rms_norm", "rotary_store", "sample"} <= kernels


def test_a_stage_that_ends_badly_does_not_keep_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.chdir(ROOT)
    broken = (Stage(name="correctness", limit_s=0.2), Stage(name="nothing_there", limit_s=20))
    monkeypatch.setattr(stages, "STAGES", broken)
    assert stages.main(["--dry-run", "--out", str(out)]) == 2
    ended = {stage["stage"]: stage["ended"] for stage in report_of(out)["stages"]}
    assert ended == {"correctness": "out of time", "nothing_there": "failed (1)"}
    assert "No module named" in str(report_of(out)["stages"][1]["output"])


def test_stages_fit_in_six_minutes() -> None:
    assert sum(stage.limit_s for stage in stages.STAGES) <= stages.TOTAL_S < 360


def test_what_changes_on_a_device_comes_back() -> None:
    """Seen on the CPU, where the copies are real ones too."""
    wide = torch.arange(12.0).view(3, 4)
    part = wide[:, 1:3]
    assert carried(part, torch.device("cpu")).stride() == (4, 1)

    def double(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x[1:]

    result = through(double, torch.device("cpu"))(part)
    assert part.tolist() == [[2.0, 4.0], [10.0, 12.0], [18.0, 20.0]]
    assert result.data_ptr() == part[1:].data_ptr()
    assert wide[:, 0].tolist() == [0.0, 4.0, 8.0]
