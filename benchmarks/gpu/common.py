"""What the stages share: the device or the interpreter, timing, and their lines of JSON."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MIN_ROUNDS, MAX_ROUNDS, ROUND_BUDGET_S = 3, 100, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stage runs and how long it may look for more to do."""

    device: torch.device
    dry: bool
    seconds: float


def place(argv: Sequence[str], what: str) -> Place:
    """From a stage's command line. A dry run is in Triton's interpreter on the CPU."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(argv)
    if options.dry_run:
        assert os.environ.get("TRITON_INTERPRET") == "1", "set by benchmarks.gpu.stages"
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device; try --dry-run")
    device = torch.device("cpu" if options.dry_run else "cuda")
    return Place(device=device, dry=options.dry_run, seconds=options.seconds)


def emit(**line: Any) -> None:
    """One result, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def seconds_of(call: Callable[[], Any], where: Place) -> float:
    """Median of some rounds after warming up; on a device by its own clock."""
    if where.dry:
        call()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    times: list[float] = []
    while len(times) < MIN_ROUNDS or (
        len(times) < MAX_ROUNDS and time.perf_counter() - began < ROUND_BUDGET_S
    ):
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]
