"""What each part of a step must at least move and compute, and how fast this machine can.

`python -m benchmarks.profile.floors [fp32|bf16]` prints the machine's Rates as JSON, by default for
what a worker would take here. A part's floor is
the longer of its bytes at the rate of reading memory and its arithmetic at the rate of a large
product of matrices by torch.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.profile.record import (
    ACTIVATION,
    ATTENTION,
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    NORM,
    OUT,
    QKV,
    STORE,
)

READ_BYTES = 512 << 20
SIDE = 1536  # of the matrices
BUDGET_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of all cores together, the best that was seen."""

    read_gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of a whole step, all layers."""

    num_bytes: float
    flops: float = 0.0

    def floor_us(self, rates: Rates) -> float:
        """The least time for it."""
        by_bytes = self.num_bytes / rates.read_gb_per_s / 1e3
        return max(by_bytes, self.flops / rates.gflop_per_s / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a Llama-like model; a number takes `itemsize` bytes outside of packed weights."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    itemsize: int

    @classmethod
    def of(cls, folder: Path, itemsize: int) -> "Sizes":
        """From the model's configuration."""
        config = json.loads((folder / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            width=int(config["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            inner=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            itemsize=itemsize,
        )


def work(
    sizes: Sizes,
    weight_bytes: Mapping[str, int],
    rows: float,
    contexts: float,
    *,
    pairs: float | None = None,
    sampled: float | None = None,
) -> dict[str, Work]:
    """By part, for a step of `rows` tokens over contexts of `contexts` tokens in all.

    A token attends to `pairs` / rows keys on average, and `sampled` tokens go behind the attention
    of the last layer; without these it is a decode, in which each token has a context of its own
    and is sampled from. Parts in which nothing is done are left out.
    """
    pairs = contexts if pairs is None else pairs
    sampled = rows if sampled is None else sampled
    layers, width, inner, size = sizes.num_layers, sizes.width, sizes.inner, sizes.itemsize
    heads, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    behind = (rows * (layers - 1) + sampled) / layers  # rows of a layer behind its attention

    def linear(part: str, depth: int, columns: int, times: int, of: float) -> Work:
        weights = weight_bytes.get(part, times * depth * columns * size)
        return Work(
            num_bytes=weights + times * of * (depth + columns) * size,
            flops=2 * times * of * depth * columns,
        )

    works = {
        EMBED: Work(num_bytes=2 * rows * width * size),
        NORM: Work(num_bytes=(2 * layers + 1) * 4 * rows * width * size),
        QKV: linear(QKV, width, heads + 2 * kv, layers, rows),
        STORE: Work(num_bytes=layers * 2 * rows * (heads + 2 * kv) * size),
        ATTENTION: Work(
            num_bytes=layers * (2 * contexts * kv + 2 * rows * heads) * size,
            flops=layers * 4 * pairs * heads,
        ),
        OUT: linear(OUT, heads, width, layers, behind),
        GATE_UP: linear(GATE_UP, width, 2 * inner, layers, behind),
        ACTIVATION: Work(num_bytes=layers * 3 * behind * inner * size),
        DOWN: linear(DOWN, inner, width, layers, behind),
    }
    if sampled:
        works[HEAD] = linear(HEAD, width, sizes.vocab_size, 1, sampled)
        works["sample"] = Work(num_bytes=sampled * sizes.vocab_size * size)
    return works


def probe(dtype: str) -> Rates:
    """Measures, in this process; an empty dtype is the usual one of this machine."""
    import torch

    from benchmarks import kernel_cases, kernels

    of = kernels.DTYPES[dtype or kernel_cases.usual_dtype()]

    def least_s(call: Callable[[], Any]) -> float:
        call()
        times: list[float] = []
        while sum(times) < BUDGET_S:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)

    source = torch.ones(READ_BYTES // 4)
    read_s = least_s(source.sum)
    square = torch.ones((SIDE, SIDE), dtype=of)
    product_s = least_s(lambda: torch.mm(square, square))
    return Rates(
        read_gb_per_s=round(source.nbytes / read_s / 1e9, 1),
        gflop_per_s=round(2 * SIDE**3 / product_s / 1e9, 1),
    )


def in_a_process(dtype: str) -> Rates:
    """As `probe`, in a process that gives its memory back. Raises OSError."""
    command = [sys.executable, "-m", "benchmarks.profile.floors", *([dtype] if dtype else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise OSError(f"the floor could not be measured: {ended.stderr[-500:]}")
    return Rates(**json.loads(ended.stdout))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(probe(sys.argv[1] if len(sys.argv) > 1 else ""))) + "\n")
