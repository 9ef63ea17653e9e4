"""What weights of 8 and 4 bits give and cost; `python -m benchmarks.quantization [--quick]`.

The launcher's model, as a CPU worker loads it, with each value of QUIRE_QUANTIZATION: the bytes of
linear weights that a step reads, the time in which this machine reads so many (the floor of a
decode of one row), whole forwards without sampling, and the perplexity of benchmarks.perplexity's
text. The forwards take turns, so that what else runs slows all of them. Linear layers are the
native ones throughout. Nothing is asserted: figures depend on the machine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor, kernels, perplexity, report, step_cases, target
from benchmarks.kernel_cases import BLOCK_SIZE
from benchmarks.stack import ROOT

QUANTIZATIONS = ("none", "int8", "int4")
BUDGET_S, QUICK_TOKENS = 2.0, 64
CPU = torch.device("cpu")
OUT = ROOT / "benchmarks" / "results" / "quantization.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one kind of weights."""

    quantization: str
    weight_bytes: int  # of all linear layers, with the head
    floor_ms: float  # to read them once
    step_ms: dict[str, float]  # medians by step_cases.STEPS
    perplexity: float


def loaded(folder: Path) -> dict[str, Any]:
    """The model by quantization, each with a lean forward of its own over one module."""
    from gpu_worker import models

    log = step_cases.QuietLog()
    plain = models.load(folder, dtype="auto", device=CPU, log=log)
    served = {}
    for name in QUANTIZATIONS:
        served[name] = models.fuse(
            plain, "native", wanted=True, deterministic=True, quantization=name, log=log
        )
        models.fix_rotary(served[name], 2048)
    return served


def measure(folder: Path, *, quick: bool) -> tuple[list[Result], float]:
    """A result for each, and the bandwidth of reading in GB/s."""
    served = loaded(folder)
    budget_s = 0.0 if quick else BUDGET_S
    source = torch.ones((floor.QUICK_BYTES if quick else floor.READ_BYTES) // 4)
    (read_s,) = kernels.medians_s([source.sum], "cpu", budget_s)
    bytes_per_s = source.nbytes / read_s
    steps = step_cases.STEPS[:1] if quick else step_cases.STEPS
    step_ms: dict[str, dict[str, float]] = {name: {} for name in served}
    with torch.inference_mode():
        for of in steps:
            calls = [_call(model, of) for model in served.values()]
            medians = kernels.medians_s(calls, "cpu", budget_s)
            for name, seconds in zip(served, medians, strict=True):
                step_ms[name][of.name] = round(seconds * 1e3, 2)
    tokens = perplexity.token_ids(folder)
    tokens = tokens[:QUICK_TOKENS] if quick else tokens
    results = []
    for name, model in served.items():
        num_bytes = model.fused.packed_bytes
        results.append(
            Result(
                quantization=name,
                weight_bytes=num_bytes,
                floor_ms=round(num_bytes / bytes_per_s * 1e3, 2),
                step_ms=step_ms[name],
                perplexity=round(perplexity.perplexity(model, "native", tokens), 4),
            )
        )
    return results, round(bytes_per_s / 1e9, 1)


def _call(model: Any, of: Any) -> Callable[[], Any]:
    from gpu_worker import attention, kv_cache

    blocks = len(of.rows) * -(-256 // BLOCK_SIZE)
    layout = kv_cache.layout(model.kv_shape, BLOCK_SIZE, blocks)
    cache = kv_cache.allocate(layout, model.dtype, CPU)
    context = attention.PagedContext(cache, attention.make_backend("native", CPU))
    return step_cases.step_call(model, context, of)


def table(results: Sequence[Result]) -> str:
    """Figures with their ratio to those of the first line, weights as they are."""
    first, steps = results[0], list(results[0].step_ms)
    headings = ("weights", "MB a step", "floor ms", *(f"{step}, ms" for step in steps))
    rows = []
    for of in results:
        cells = [
            f"{of.step_ms[step]:.1f} ({of.step_ms[step] / first.step_ms[step]:.2f})"
            for step in steps
        ]
        apart = of.perplexity / first.perplexity - 1
        cells.append(f"{of.perplexity:.3f} ({apart:+.2%})")
        megabytes, least = f"{of.weight_bytes / 1e6:.1f}", f"{of.floor_ms:.1f}"
        rows.append((of.quantization, megabytes, least, *cells))
    return report.markdown((*headings, "perplexity"), rows)


def main(argv: Sequence[str]) -> int:
    """Prints the table and writes the JSON. Status 1 without native kernels."""
    from gpu_worker.runner import keep_freed_memory
    from kernels.native import library

    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work?")
    options = parser.parse_args(argv)
    missing = library.reason_unavailable()
    if missing is not None:
        print(f"[bench] no native kernels: {missing}", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    results, read_gb_per_s = measure(Path(target.model_folder("")), quick=options.quick)
    about = report.machine()
    print(table(results))
    print(
        f"\nreading: {read_gb_per_s} GB/s; {options.threads} threads on {about['cores']} cores "
        f"{about['cpu']}, commit {about['commit'] or 'unknown'}"
    )
    document = {
        "machine": about,
        "threads": options.threads,
        "read_gb_per_s": read_gb_per_s,
        "results": [asdict(result) for result in results],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
