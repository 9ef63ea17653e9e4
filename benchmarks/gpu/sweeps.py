"""Times the operators over step shapes; shares are of the copy and the product measured here.

Attention reads its keys and values from the layers of a cache in turn, so that they do not stay in
the device's own cache.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bandwidth import copy_bytes_per_s, product_per_s
from benchmarks.gpu.common import Place, emit, place, seconds_of
from kernels.cache_layout import CacheLayout, layer_views
from kernels.sampling import Sampling

BLOCK_SIZE = 16
CACHE_BYTES = 2 << 30  # of the layers together, at least
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of a model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = (
    Heads(name="1B", num_heads=32, num_kv_heads=8, head_dim=64),
    Heads(name="8B", num_heads=32, num_kv_heads=8, head_dim=128),
)
DRY_HEADS = (Heads(name="tiny", num_heads=4, num_kv_heads=2, head_dim=16),)
# (rows, query tokens, tokens) of every row
DECODES = ((1, 1, 512), (8, 1, 2048), (32, 1, 512), (32, 1, 4096), (128, 1, 1024), (256, 1, 512))
PREFILLS = ((1, 512, 512), (1, 2048, 2048), (1, 2048, 16_384), (4, 2048, 2048), (1, 8192, 8192))
DRY_STEPS = ((2, 1, 40), (1, 9, 30))


def attention(heads: Heads, step: tuple[int, int, int], where: Place) -> Callable[[], Any]:
    """A call over one layer after the other."""
    from kernels.paged_attention import paged_attention

    rows, query_len, seq_len = step
    blocks_a_row = -(-seq_len // BLOCK_SIZE)
    one = CacheLayout(
        num_blocks=rows * blocks_a_row,
        num_layers=1,
        num_kv_heads=heads.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=heads.head_dim,
    )
    num_layers = 2 if where.dry else max(1, min(64, CACHE_BYTES // one.total_bytes(2)))
    shape = (one.num_blocks, num_layers, *one.shape[2:])
    cache = torch.randn(shape, device=where.device, dtype=DTYPE)
    tables = torch.randperm(one.num_blocks, device=where.device).to(torch.int32)
    tables = tables.view(rows, blocks_a_row)
    lens = torch.full((rows,), seq_len, dtype=torch.int32, device=where.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=where.device) * query_len
    q_shape = (rows * query_len, heads.num_heads, heads.head_dim)
    q = torch.randn(q_shape, device=where.device, dtype=DTYPE)
    layers = itertools.cycle([layer_views(cache, layer) for layer in range(num_layers)])

    def call() -> Any:
        return paged_attention(
            q,
            *next(layers),
            tables,
            lens,
            starts,
            scale=heads.head_dim**-0.5,
            max_query_len=query_len,
            max_seq_len=seq_len,
        )

    return call


def attend(where: Place, copy: float, product: float) -> Iterator[dict[str, Any]]:
    """Decode against the copy, prefill against the product."""
    steps = DRY_STEPS if where.dry else (*DECODES, *PREFILLS)
    for heads, step in itertools.product(DRY_HEADS if where.dry else HEADS, steps):
        rows, query_len, seq_len = step
        seconds = seconds_of(attention(heads, step, where), where)
        line: dict[str, Any] = {
            "kernel": "decode" if query_len == 1 else "prefill",
            "heads": heads.name,
            "rows": rows,
            "query_len": query_len,
            "seq_len": seq_len,
            "us": round(seconds * 1e6, 1),
        }
        if query_len == 1:
            read = rows * seq_len * 2 * heads.num_kv_heads * heads.head_dim * DTYPE.itemsize
            line |= {
                "gb_per_s": round(read / seconds / 1e9, 1),
                "share": round(read / seconds / copy, 4),
            }
        else:
            pairs = rows * sum(range(seq_len - query_len + 1, seq_len + 1))
            operations = 4 * pairs * heads.num_heads * heads.head_dim
            line |= {
                "tflop_per_s": round(operations / seconds / 1e12, 2),
                "share": round(operations / seconds / product, 4),
            }
        yield line


def row_calls(num_tokens: int, where: Place) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes that must move, call) of the operators on rows, 8B-shaped."""
    from kernels.gated_activation import gated_activation
    from kernels.kv_store import store_kv
    from kernels.rms_norm import rms_norm
    from kernels.rotary_store import rotary_store

    heads = DRY_HEADS[0] if where.dry else HEADS[1]
    width, inner = (64, 96) if where.dry else (4096, 14_336)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=where.device, dtype=DTYPE)

    x, delta, weight = randn(num_tokens, width), randn(num_tokens, width), randn(width)
    yield "rms_norm", 4 * x.nbytes, lambda: rms_norm(x, weight, 1e-5, delta=delta)
    both = randn(num_tokens, 2 * inner)
    yield "gated_activation", 3 * both.nbytes // 2, lambda: gated_activation(both)
    layout = CacheLayout(
        num_blocks=-(-num_tokens // BLOCK_SIZE),
        num_layers=1,
        num_kv_heads=heads.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=heads.head_dim,
    )
    caches = layer_views(torch.zeros(layout.shape, device=where.device, dtype=DTYPE), 0)
    total = heads.num_heads + 2 * heads.num_kv_heads
    qkv = randn(num_tokens, total * heads.head_dim)
    at = torch.arange(num_tokens, device=where.device)
    table = torch.ones(num_tokens, heads.head_dim // 2, device=where.device)
    yield (
        "rotary_store",
        2 * qkv.nbytes,
        lambda: rotary_store(qkv, *caches, at, at, table, table),
    )
    split = qkv.view(num_tokens, total, heads.head_dim)
    k = split[:, heads.num_heads : heads.num_heads + heads.num_kv_heads]
    v = split[:, heads.num_heads + heads.num_kv_heads :]
    yield "store_kv", 4 * k.nbytes, lambda: store_kv(k, v, *caches, at)


def sampler_calls(num_rows: int, where: Place) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes of the logits, call)."""
    from kernels.logprobs import logprobs
    from kernels.sampler import sample

    vocabulary = 300 if where.dry else 128_256
    logits = torch.randn(num_rows, vocabulary, device=where.device, dtype=DTYPE) * 3

    def sampling(temperature: float, top_p: float, top_k: int) -> Sampling:
        def real(value: float) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=torch.float64, device=where.device)

        zeros = torch.zeros(num_rows, dtype=torch.int64, device=where.device)
        return Sampling(
            temperature=real(temperature),
            top_p=real(top_p),
            min_p=real(0.0),
            top_k=zeros + top_k,
            seed=zeros + 1,
            position=zeros,
            sample_index=zeros,
        )

    for name, chosen in (
        ("sample greedy", sampling(0.0, 1.0, 0)),
        ("sample", sampling(1.0, 1.0, 0)),
        ("sample top_k 50 top_p 0.9", sampling(1.0, 0.9, 50)),
    ):
        yield name, logits.nbytes, lambda chosen=chosen: sample(logits, chosen)  # type: ignore[misc]
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=where.device)
    yield "logprobs 20", logits.nbytes, lambda: logprobs(logits, tokens, 20)


def main(argv: list[str]) -> None:
    """A line for every shape, until the time is over."""
    where = place(argv, __doc__ or "")
    deadline = time.monotonic() + where.seconds
    copy, product = copy_bytes_per_s(where), product_per_s(where)
    emit(copy_gb_per_s=round(copy / 1e9, 1), product_tflop_per_s=round(product / 1e12, 2))
    others: list[tuple[int, Iterator[tuple[str, int, Callable[[], Any]]]]] = [
        (count, row_calls(count, where)) for count in ((3,) if where.dry else (1, 256, 8192))
    ]
    others += [(count, sampler_calls(count, where)) for count in ((2,) if where.dry else (32, 256))]
    for count, calls in others:
        for name, num_bytes, call in calls:
            seconds = seconds_of(call, where)
            emit(
                kernel=name,
                rows=count,
                us=round(seconds * 1e6, 1),
                gb_per_s=round(num_bytes / seconds / 1e9, 1),
                share=round(num_bytes / seconds / copy, 4),
            )
            if time.monotonic() > deadline:
                return
    for line in attend(where, copy, product):
        emit(**line)
        if time.monotonic() > deadline:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
