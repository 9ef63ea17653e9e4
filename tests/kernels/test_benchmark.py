"""The table of the kernels' times can be made, and says what it is said to say."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernel_cases import Case
from tests.kernels.native import REASON

KERNELS = {
    "paged_attention",
    "store_kv",
    "rotary_store",
    "rms_norm",
    "gated_activation",
    "linear",
    "sampler",
    "step",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kernel_has_its_lines(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    kernels.main(["--quick", "--dtypes", dtype, "--threads", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["floor_gb_per_s"]["cpu"] > 0
    lines = [r for r in report["results"] if r["device"] == "cpu"]
    on = {backend: {r["kernel"] for r in lines if r["backend"] == backend} for backend in
          ("torch", "native", "deterministic")}  # fmt: skip
    assert on["torch"] == KERNELS
    assert on["native"] == (set() if REASON else KERNELS)
    assert on["deterministic"] == (set() if REASON else {"step"})
    for result in lines:
        assert result["median_us"] > 0
        assert result["gb_per_s"] > 0
        assert (result["backend"] != "torch") or result["torch_ratio"] == 1.0
    printed = capsys.readouterr().out
    cases = {(r["kernel"], r["device"], r["shape"]) for r in report["results"]}
    assert printed.count("\n| ") == len(cases)  # after the headings a line for each


def test_the_share_of_the_floor_is_that_of_the_bytes() -> None:
    case = Case("nothing", "-", "fp32", 1000, {"torch": torch.get_num_threads})
    (result,) = kernels.measure(case, "cpu", floor=1e9, budget_s=0.0)
    seconds = result.median_us / 1e6
    assert result.gb_per_s == pytest.approx(1000 / seconds / 1e9, rel=0.6)
    assert result.floor_share == pytest.approx(result.gb_per_s, rel=0.1)
