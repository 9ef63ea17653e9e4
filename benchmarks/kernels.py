"""Times the kernels; `python -m benchmarks.kernels [--out FILE] [--threads N] [--dtype bf16]`.

For each kernel and shape: microseconds, GB/s of keys and values read (or written, for the store),
and the share of what a plain torch copy reaches on this machine at the same time. The torch back
end runs on the CPU; with a CUDA device both back ends run there as well. Nothing is asserted:
figures depend on the machine and on what else runs on it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.cache_layout import CacheLayout, layer_views

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY_BYTES = 256 << 20
MIN_ROUNDS, MAX_ROUNDS, ROUND_BUDGET_S = 5, 200, 1.0
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """rows holds (query_len, seq_len)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    window: int = 0


SHAPES = (
    Shape(name="decode 1 x 509", rows=((1, 509),)),
    Shape(name="decode 32 x 509", rows=((1, 509),) * 32),
    Shape(name="decode 32 x 509, window 128", rows=((1, 509),) * 32, window=128),
    Shape(name="decode 1 x 4093 + 31 x 61", rows=((1, 4093), *((1, 61),) * 31)),
    Shape(name="prefill 256 of 256", rows=((256, 256),)),
    Shape(name="prefill 256 of 1280", rows=((256, 1280),)),
    Shape(name="mixed 24 x 300 + 232 of 232", rows=(*((1, 300),) * 24, (232, 232))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    kernel: str
    backend: str
    device: str
    dtype: str
    shape: str
    median_us: float
    kv_gb_per_s: float
    floor_share: float


def median_s(function: Callable[[], Any], device: str) -> float:
    """Median of a bounded number of rounds, after two to warm up."""
    times: list[float] = []
    for _ in range(2):
        function()
    started = time.perf_counter()
    while len(times) < MIN_ROUNDS or (
        len(times) < MAX_ROUNDS and time.perf_counter() - started < ROUND_BUDGET_S
    ):
        _wait(device)
        before = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - before)
    return sorted(times)[len(times) // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bytes_per_s(device: str) -> float:
    """Bytes that a torch copy reads (and as many that it writes) in a second."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tensors of one step over one layer."""

    q: Tensor
    k: Tensor
    caches: tuple[Tensor, Tensor]
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor


def make_step(shape: Shape, dtype: torch.dtype, device: str) -> Step:
    """Rows whose blocks are scattered over the cache."""
    generator = torch.Generator().manual_seed(1)
    needed = [-(-s // BLOCK_SIZE) for _, s in shape.rows]
    layout = CacheLayout(
        num_blocks=sum(needed) + 8,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        block_size=BLOCK_SIZE,
        head_dim=HEAD_DIM,
    )
    cache = torch.randn(layout.shape, generator=generator).to(device, dtype)
    free = torch.randperm(layout.num_blocks, generator=generator).to(torch.int32)
    tables = torch.zeros((len(shape.rows), max(needed)), dtype=torch.int32)
    slots, used = [], 0
    for row, (query_len, seq_len) in enumerate(shape.rows):
        tables[row, : needed[row]] = free[used : used + needed[row]]
        used += needed[row]
        position = torch.arange(seq_len - query_len, seq_len)
        slots.append(
            tables[row].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        )
    query_lens = [q for q, _ in shape.rows]
    num_tokens = sum(query_lens)
    return Step(
        q=torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator).to(device, dtype),
        k=torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(device, dtype),
        caches=layer_views(cache, 1),
        block_tables=tables.to(device),
        seq_lens=torch.tensor([s for _, s in shape.rows], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        slot_mapping=torch.cat(slots).to(device),
    )


def attention_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Keys and values that the rows must read once."""
    tokens = sum(min(s, q + shape.window - 1) if shape.window else s for q, s in shape.rows)
    return tokens * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize


def calls(shape: Shape, step: Step, backend: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(attention, store) of a back end, ready to be timed."""
    tables = (step.block_tables, step.seq_lens, step.query_start_loc)
    arguments: dict[str, Any] = {
        "scale": HEAD_DIM**-0.5,
        "window": shape.window,
        "max_query_len": max(q for q, _ in shape.rows),
        "max_seq_len": max(s for _, s in shape.rows),
    }
    attention: Any = reference.paged_attention
    store: Any = reference.store_kv
    if backend == "triton":
        from kernels import kv_store, paged_attention

        attention, store = paged_attention.paged_attention, kv_store.store_kv
    else:
        arguments["plan"] = reference.make_attention_plan(*tables, BLOCK_SIZE, shape.window)
    return (
        lambda: attention(step.q, *step.caches, *tables, **arguments),
        lambda: store(step.k, step.k, *step.caches, step.slot_mapping),
    )


def run(dtype_name: str, emit: Callable[[Result], None]) -> dict[str, float]:
    """Emits every result; returns the floor in GB/s per device."""
    dtype = DTYPES[dtype_name]
    places = [("cpu", "torch")]
    if torch.cuda.is_available():
        places += [("cuda", "torch"), ("cuda", "triton")]
    floors = {device: copy_bytes_per_s(device) for device in {d for d, _ in places}}
    for device, backend in places:
        for shape in SHAPES:
            step = make_step(shape, dtype, device)
            attention, store = calls(shape, step, backend)
            sizes = (attention_bytes(shape, dtype), 2 * step.k.nbytes)
            for kernel, call, num_bytes in zip(
                ("paged_attention", "store_kv"), (attention, store), sizes, strict=True
            ):
                seconds = median_s(call, device)
                emit(
                    Result(
                        kernel=kernel,
                        backend=backend,
                        device=device,
                        dtype=dtype_name,
                        shape=shape.name,
                        median_us=round(seconds * 1e6, 1),
                        kv_gb_per_s=round(num_bytes / seconds / 1e9, 2),
                        floor_share=round(num_bytes / seconds / floors[device], 3),
                    )
                )
    return {device: round(floor / 1e9, 1) for device, floor in floors.items()}


def main(argv: list[str]) -> None:
    """Prints the table while it grows, then writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="JSON file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    results: list[Result] = []

    def emit(result: Result) -> None:
        results.append(result)
        sys.stdout.write(
            f"{result.kernel:16} {result.backend:7} {result.device:5} {result.shape:30}"
            f" {result.median_us:10.1f} us {result.kv_gb_per_s:8.2f} GB/s"
            f" {result.floor_share:7.1%} of floor\n"
        )
        sys.stdout.flush()

    floors = run(options.dtype, emit)
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
