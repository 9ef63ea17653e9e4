"""The kernels compile for sm_80 and sm_90 within their shared memory, without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
# Bytes a thread keeps in local memory: a few saved values are fine, a spilled tile is not.
STACK_LIMIT_BYTES = 32


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
        assert line.get("stack_bytes", 0) <= STACK_LIMIT_BYTES, line
        touches_cache = line["kernel"] != "reduce"
        assert line["wide_places"] == touches_cache, f"block offsets must be 64 bits: {line}"


def test_bf16_of_head_dim_128_for_sm_90(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "90", "bf16", "128", "plain")
    assert {line["kernel"] for line in lines} == {"prefill", "decode", "reduce", "kv_store"}
    check(lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", [80, 90])
def test_all_dtypes_and_head_dims(tmp_path: Path, arch: int) -> None:
    lines = compiled(tmp_path, str(arch))
    assert len({(line["dtype"], line["head_dim"]) for line in lines}) == 7
    check(lines)
