"""The kernels compile for GPUs that are not here, within their shared memory and without spills."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_BYTES = {
    "80": 163 << 10,
    "86": 99 << 10,
    "90": 227 << 10,
    "100": 227 << 10,
    "gfx942": 64 << 10,
}
# Bytes a thread keeps in local memory: a few saved values are fine, a spilled tile is not.
STACK_LIMIT_BYTES = 32
LOCAL_LIMIT = 16  # instructions that save such a value or fetch it back
ATTENTION = {"prefill", "decode", "reduce"}
ROWS = {"kv_store", "rotary_store", "rms_norm", "gated_activation"}
SAMPLING = {"sample", "logprobs", "change_tokens", "count", "penalize"}


def compiled(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return lines


def check(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["shared_bytes"] <= SHARED_LIMIT_BYTES[line["arch"]], line
        if not line["arch"].startswith("gfx"):  # only CUDA's tools read a binary here
            assert line["registers"] > 0, line
            assert line["stack_bytes"] <= STACK_LIMIT_BYTES, line
            assert line["local_accesses"] <= LOCAL_LIMIT, line
        assert line["wide_places"], f"block offsets must be 64 bits: {line}"


@pytest.mark.timeout(300)
def test_every_kernel_for_sm_80_and_sm_90(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "80:each", "90:each")
    check(lines)
    for arch in ("80", "90"):
        mine = [line for line in lines if line["arch"] == arch]
        assert {line["kernel"] for line in mine} == ATTENTION | ROWS | SAMPLING
        wide = [line for line in mine if line["group"] == 32]
        assert [(line["kernel"], line["dtype"], line["head_dim"]) for line in wide] == [
            ("decode", "fp32", 256)
        ]


def test_spills_are_seen(tmp_path: Path) -> None:
    """A tile too large for its warps: on the stack, and in the disassembled instructions."""
    (line,) = compiled(tmp_path, "80:spilling")
    assert line["stack_bytes"] > STACK_LIMIT_BYTES
    assert line["local_accesses"] > LOCAL_LIMIT
    with pytest.raises(AssertionError, match=r"assert \d+ <= 32"):
        check([line])


def test_a_missing_tool_is_no_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.kernels import compiling

    monkeypatch.setattr(compiling, "TOOLS", tmp_path)
    with pytest.raises(RuntimeError, match=r"spills can't be read: .*nvdisasm is missing"):
        compiling.of_cubin("nvdisasm", b"", "--print-code")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_all_architectures(tmp_path: Path) -> None:
    """In two processes: this is the longest test of the kernels."""
    halves = (("80:all", "gfx942:quick"), ("90:all", "86:quick", "100:quick"))
    with ThreadPoolExecutor(2) as pool:
        lines = [
            line
            for found in pool.map(lambda half: compiled(tmp_path, *half), halves)
            for line in found
        ]
    check(lines)
    for arch in ("80", "90"):
        mine = [line for line in lines if line["arch"] == arch]
        assert {line["kernel"] for line in mine} == ATTENTION | ROWS | SAMPLING
        shapes = {(line["dtype"], line["head_dim"]) for line in mine if line["head_dim"]}
        assert len(shapes) == 7
    assert {line["arch"] for line in lines} == set(SHARED_LIMIT_BYTES)
