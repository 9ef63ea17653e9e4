"""Times the kernels; `python -m benchmarks.kernels [--out FILE] [--threads N] [--dtype bf16]`.

For each kernel, back end and shape: the median time, GB/s of what must be read and written at
least, the share of the floor, and how many times the torch back end takes. The floor is what a
plain torch copy reaches on this machine in the same run. Linear layers and the sampler at many rows
are bound by arithmetic: their GFLOP/s stand beside. On the CPU the back ends are torch and, where
they were compiled, the native kernels; with a CUDA device torch and triton run there as well.

Rounds of the back ends take turns, so that what else runs on the machine slows all of them. Nothing
is asserted: figures depend on the machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_cases
from benchmarks.kernel_cases import Case
from gpu_worker.runner import keep_freed_memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY_BYTES = 256 << 20
MIN_ROUNDS, MAX_ROUNDS, ROUND_BUDGET_S = 5, 200, 1.0


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
    """Of a bounded number of rounds in turn, after two to warm up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(2):
        for function in functions:
            function()
    started = time.perf_counter()
    while len(times[0]) < MIN_ROUNDS or (
        len(times[0]) < MAX_ROUNDS and time.perf_counter() - started < budget_s * len(functions)
    ):
        for function, of in zip(functions, times, strict=True):
            _wait(device)
            before = time.perf_counter()
            function()
            _wait(device)
            of.append(time.perf_counter() - before)
    return tuple(sorted(of)[len(of) // 2] for of in times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bytes_per_s(device: str, size: int = COPY_BYTES) -> float:
    """Bytes that a torch copy reads and writes in a second."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (seconds,) = medians_s([lambda: target.copy_(source)], device, ROUND_BUDGET_S)
    return 2 * size / seconds


def backends(device: str) -> tuple[str, ...]:
    """What runs there; torch is always the first."""
    if device == "cuda":
        return ("torch", "triton")
    from kernels.native import library

    return ("torch",) if library.reason_unavailable() else ("torch", "native", "onednn")


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
    dtype_name: str, emit: Callable[[Result], None], *, quick: bool = False
) -> dict[str, float]:
    """Emits every result; returns the floor in GB/s per device. `quick` shows that it works."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    size = COPY_BYTES >> 6 if quick else COPY_BYTES
    floors = {device: copy_bytes_per_s(device, size) for device in devices}
    for device in devices:
        cases = kernel_cases.cases(DTYPES[dtype_name], dtype_name, device, quick=quick)
        with torch.inference_mode():
            for case in cases:
                for result in measure(case, device, floors[device], 0 if quick else ROUND_BUDGET_S):
                    emit(result)
    return {device: round(floor / 1e9, 1) for device, floor in floors.items()}


def line(result: Result) -> str:
    """Of the table."""
    flops = f"{result.gflop_per_s:7.0f} GF/s" if result.gflop_per_s else " " * 12
    return (
        f"{result.kernel:17} {result.backend:7} {result.device:5} {result.shape:30}"
        f" {result.median_us:10.1f} us {result.gb_per_s:8.2f} GB/s {result.floor_share:7.1%}"
        f" {flops} {result.torch_ratio:6.1f} x torch\n"
    )


def main(argv: list[str]) -> None:
    """Prints the table while it grows, then writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="JSON file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=kernel_cases.usual_dtype())
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work?")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    results: list[Result] = []

    def emit(result: Result) -> None:
        results.append(result)
        sys.stdout.write(line(result))
        sys.stdout.flush()

    floors = run(options.dtype, emit, quick=options.quick)
    sys.stdout.write(f"floor (torch copy, read + write): {floors} GB/s\n")
    report = {
        "threads": options.threads,
        "torch": torch.__version__,
        "floor_gb_per_s": floors,
        "results": [asdict(result) for result in results],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
