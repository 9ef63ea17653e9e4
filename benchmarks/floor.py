"""What this machine can do today, by plain torch: bandwidth, linear layers, paged attention.

`python -m benchmarks.floor [--dtype fp32] [--threads N] [--quick]` prints JSON. benchmarks.serving
runs it in a process of its own, before any stack. Shapes are those of SmolLM2-135M: 30 layers of
width 576, 9 query and 3 KV heads of 64, 1,536 in the MLP, 49,152 tokens. Weights of all layers are
walked over, so that they come from memory, as in a step.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NUM_LAYERS, WIDTH, KV_WIDTH, INNER, VOCABULARY = 30, 576, 192, 1536, 49_152
SHAPES = (  # (columns, depth): query, key, value, output, gate, up, down
    (WIDTH, WIDTH), (KV_WIDTH, WIDTH), (KV_WIDTH, WIDTH), (WIDTH, WIDTH),
    (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER),
)  # fmt: skip
ROWS = (1, 8, 32)
READ_BYTES, QUICK_BYTES = 512 << 20, 64 << 20
BUDGET_S, QUICK_BUDGET_S = 2.0, 0.2
ATTENTION, ATTENTION_SHAPE = "paged_attention", "decode 32 x 509"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Medians of one run. Figures of attention are of KV read once, one layer."""

    dtype: str
    threads: int
    native: bool  # whether there are native kernels
    read_gb_per_s: float
    copy_gb_per_s: float
    linear_ms: dict[str, float] = field(default_factory=dict)  # all layers, by number of rows
    head_ms: dict[str, float] = field(default_factory=dict)
    attention_gb_per_s: dict[str, float] = field(default_factory=dict)  # by back end

    def step_ms(self, rows: int) -> float:
        """Linear layers and head of a step of so many rows."""
        return self.linear_ms[str(rows)] + self.head_ms[str(rows)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def probe(dtype: str, threads: int, *, quick: bool) -> Floor:
    """Measures, in this process."""
    import torch
    import torch.nn.functional as F

    from benchmarks import kernel_cases, kernels
    from gpu_worker.runner import keep_freed_memory
    from kernels.native import library

    torch.set_num_threads(threads)
    keep_freed_memory()
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    of = kernels.DTYPES[dtype]

    def seconds(*functions: Callable[[], Any]) -> tuple[float, ...]:
        return kernels.medians_s(functions, "cpu", budget_s)

    source = torch.ones((QUICK_BYTES if quick else READ_BYTES) // 4)
    target = torch.empty_like(source)
    read_s, copy_s = seconds(source.sum, lambda: target.copy_(source))
    layers = [[torch.full(shape, 0.01, dtype=of) for shape in SHAPES] for _ in range(NUM_LAYERS)]
    head = torch.full((VOCABULARY, WIDTH), 0.01, dtype=of)
    linear_ms, head_ms = {}, {}
    with torch.inference_mode():
        for rows in ROWS:
            inputs = {depth: torch.ones((rows, depth), dtype=of) for depth in (WIDTH, INNER)}

            def all_layers(x: dict[int, Any] = inputs) -> None:
                for weights in layers:
                    for weight in weights:
                        F.linear(x[weight.shape[1]], weight)

            def only_head(x: Any = inputs[WIDTH]) -> None:
                F.linear(x, head)

            step_s, last_s = seconds(all_layers, only_head)
            linear_ms[str(rows)] = round(step_s * 1e3, 2)
            head_ms[str(rows)] = round(last_s * 1e3, 2)
        attention = _attention(kernel_cases, kernels, of, dtype, budget_s)
    return Floor(
        dtype=dtype,
        threads=threads,
        native=library.reason_unavailable() is None,
        read_gb_per_s=round(source.nbytes / read_s / 1e9, 1),
        copy_gb_per_s=round(2 * source.nbytes / copy_s / 1e9, 1),
        linear_ms=linear_ms,
        head_ms=head_ms,
        attention_gb_per_s=attention,
    )


def _attention(cases: Any, kernels: Any, of: Any, dtype: str, budget_s: float) -> dict[str, float]:
    """GB/s of KV by back end: gathered by torch, and over the blocks where there are kernels."""
    case = next(
        case
        for case in cases.cases(of, dtype, "cpu", quick=False)
        if (case.kernel, case.shape) == (ATTENTION, ATTENTION_SHAPE)
    )
    results = kernels.measure(case, "cpu", 1.0, budget_s)
    return {result.backend: result.gb_per_s for result in results}


def in_a_process(dtype: str, *, quick: bool) -> Floor:
    """As `probe`, with all cores, in a process that gives its memory back. Raises OSError."""
    command = [sys.executable, "-m", "benchmarks.floor", *(["--dtype", dtype] if dtype else [])]
    command += ["--quick"] if quick else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise OSError(f"the floor could not be measured: {ended.stderr[-500:]}")
    return Floor(**json.loads(ended.stdout))


def main(argv: Sequence[str]) -> None:
    """Prints the figures as JSON."""
    import torch

    from benchmarks import kernel_cases

    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=kernel_cases.usual_dtype())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    floor = probe(options.dtype, options.threads, quick=options.quick)
    sys.stdout.write(json.dumps(floor.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
