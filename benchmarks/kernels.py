"""Times the kernels; `python -m benchmarks.kernels [--out FILE] [--threads N] [--dtypes bf16]`.

For each kernel and shape: the median time on each back end, and of Quire's own GB/s of what must be
read and written at least, the share of the floor, and how many times the torch back end takes. The
floor is what a plain torch copy reaches on this machine in the same run. Linear layers and the
sampler at many rows are bound by arithmetic: their GFLOP/s stand beside. On the CPU the back ends
are torch and, where they were compiled, the native kernels, for linear layers oneDNN's packed
weights as well; with a CUDA device torch and triton run there. Of the kernels those that
QUIRE_DETERMINISTIC=1 takes are the native ones; whole forwards are timed in either mode.

Back ends take turns, so that what else runs on the machine slows all of them. On a CPU a turn
begins with a pause: torch's OpenMP threads look out for work for several milliseconds after a call,
on the cores that the next one needs. Its first call wakes the threads of that back end, and does
not count where others follow. Nothing is asserted: figures depend on the machine.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_cases, report, step_cases
from benchmarks.kernel_cases import Case
from gpu_worker.runner import keep_freed_memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY_BYTES = 256 << 20
MIN_TURNS, MAX_TURNS, BUDGET_S = 5, 40, 1.0
# A turn makes so many calls, or fewer where the time is over.
CALLS_OF_TURN, TURN_S = 6, 0.02
PAUSE_S = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    kernel: str
    backend: str
    device: str
    dtype: str
    shape: str
    median_us: float
    gb_per_s: float
    floor_share: float
    gflop_per_s: float | None
    torch_ratio: float  # torch's time over this one's


def medians_s(
    functions: Sequence[Callable[[], Any]], device: str, budget_s: float
) -> tuple[float, ...]:
    """Of a bounded number of turns, after one to warm up."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    turns, started = 0, time.perf_counter()
    while turns < MIN_TURNS or (
        turns < MAX_TURNS and time.perf_counter() - started < budget_s * len(functions)
    ):
        turns += 1
        for function, of in zip(functions, times, strict=True):
            if device == "cpu":
                time.sleep(min(PAUSE_S, budget_s))
            of.extend(_turn_s(function, device))
    return tuple(sorted(of)[len(of) // 2] for of in times)


def _turn_s(function: Callable[[], Any], device: str) -> list[float]:
    """Of the calls that count."""
    times: list[float] = []
    while len(times) < CALLS_OF_TURN and sum(times) < TURN_S:
        _wait(device)
        before = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - before)
    return times[1:] or times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bytes_per_s(device: str, size: int = COPY_BYTES) -> float:
    """Bytes that a torch copy reads and writes in a second."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (seconds,) = medians_s([lambda: target.copy_(source)], device, BUDGET_S)
    return 2 * size / seconds


def backends(device: str) -> tuple[str, ...]:
    """What runs there; torch is always the first."""
    if device == "cuda":
        return ("torch", "triton")
    from kernels.native import library

    others = ("native", "onednn", "deterministic")
    return ("torch", *(() if library.reason_unavailable() else others))


def measure(case: Case, device: str, floor: float, budget_s: float) -> Iterator[Result]:
    """A line for each back end that has the kernel."""
    calls = {name: case.calls[name] for name in backends(device) if name in case.calls}
    times = medians_s(list(calls.values()), device, budget_s)
    for backend, seconds in zip(calls, times, strict=True):
        yield Result(
            kernel=case.kernel,
            backend=backend,
            device=device,
            dtype=case.dtype,
            shape=case.shape,
            median_us=round(seconds * 1e6, 1),
            gb_per_s=round(case.num_bytes / seconds / 1e9, 2),
            floor_share=round(case.num_bytes / seconds / floor, 3),
            gflop_per_s=round(case.flops / seconds / 1e9, 1) if case.flops else None,
            torch_ratio=round(times[0] / seconds, 2),
        )


def run(
    dtypes: Sequence[str], emit: Callable[[Sequence[Result]], None], *, quick: bool = False
) -> dict[str, float]:
    """Emits the results of each case; returns the floor in GB/s per device.

    `quick` shows that it works.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    size = COPY_BYTES >> 6 if quick else COPY_BYTES
    floors = {device: copy_bytes_per_s(device, size) for device in devices}
    budget_s = 0 if quick else BUDGET_S
    seen = set()  # the sampler's dtype is always the same
    for device, dtype in itertools.product(devices, dtypes):
        of = DTYPES[dtype]
        steps = step_cases.cases(of, dtype, quick=quick) if device == "cpu" else ()
        kernels = kernel_cases.cases(of, dtype, device, quick=quick)
        with torch.inference_mode():
            for case in itertools.chain(kernels, steps):
                key = (device, case.kernel, case.dtype, case.shape)
                if key not in seen:
                    emit(tuple(measure(case, device, floors[device], budget_s)))
                seen.add(key)
    return {device: round(floor / 1e9, 1) for device, floor in floors.items()}


HEADINGS = (
    "| kernel | dtype | shape | torch µs | native or triton µs | oneDNN µs | deterministic µs "
    "| GB/s | of a copy | GFLOP/s | x torch |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def line(results: Sequence[Result]) -> str:
    """Of the table: the times of all back ends, the other figures of Quire's own kernel."""
    by = {result.backend: result for result in results}
    own = by.get("native") or by.get("triton") or by["torch"]
    times = [by["torch"], own if own is not by["torch"] else None, by.get("onednn")]
    cells = [f"{of.median_us:,.1f}" if of else "" for of in (*times, by.get("deterministic"))]
    flops = f"{own.gflop_per_s:,.0f}" if own.gflop_per_s else ""
    return (
        f"| {own.kernel} | {own.dtype} | {own.shape} | {' | '.join(cells)} | {own.gb_per_s:.2f} "
        f"| {own.floor_share:.0%} | {flops} | {own.torch_ratio:.1f} |\n"
    )


def main(argv: list[str]) -> None:
    """Prints the table while it grows, then writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="JSON file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work?")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    all_results: list[Result] = []

    def emit(results: Sequence[Result]) -> None:
        all_results.extend(results)
        sys.stdout.write(line(results))
        sys.stdout.flush()

    sys.stdout.write(HEADINGS)
    floors = run(options.dtypes, emit, quick=options.quick)
    about = report.machine()
    sys.stdout.write(
        f"\nfloor (torch copy, read + write): {floors} GB/s; {options.threads} threads on "
        f"{about['cores']} cores {about['cpu']}, commit {about['commit'] or 'unknown'}\n"
    )
    document = {
        "machine": about,
        "threads": options.threads,
        "torch": torch.__version__,
        "floor_gb_per_s": floors,
        "results": [asdict(result) for result in all_results],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
