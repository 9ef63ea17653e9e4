"""Attention cases, their tensors, and the dense float64 answer from first principles.

A cache starts full of NaN, and a table's entries that a row must not use point far outside the
cache: whatever reads too much shows it. Nothing here imports triton.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.cache_layout import CacheLayout, layer_views

NOWHERE = 2**30  # a block number that no cache has
LAYER, NUM_LAYERS = 1, 2

# |out - expected| <= tolerance * (1 + |expected|). fp32 sums of a few hundred terms; bf16 and fp16
# round the answer itself (half a unit in the last place) and, before the last product, the weights.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """rows holds (query_len, seq_len); a row of (1, 0) or (0, 0) is padding."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    extra_tokens: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        rows = "+".join(f"{q}of{s}" for q, s in self.rows)
        extras = f"w{self.window}" if self.window else ""
        extras += f"c{self.softcap:g}" if self.softcap else ""
        extras += "s" if self.sinks else ""
        heads = f"h{self.num_heads}:{self.num_kv_heads}"
        return f"{rows}-{heads}-d{self.head_dim}-b{self.block_size}{extras}"

    def at(self, dtype: torch.dtype) -> "Case":
        """The same case in another dtype."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What a kernel is called with, and each row's dense keys and values [seq_len, Hkv, D]."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    sinks: Tensor | None
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def call(self, function: Any, case: Case, device: str = "cpu", **more: Any) -> Tensor:
        """function(...) with this case's arguments; the answer on the CPU."""
        positional = (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )
        arguments: dict[str, Any] = {
            "scale": case.head_dim**-0.5,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": None if self.sinks is None else self.sinks.to(device),
            "max_query_len": max(1, max((q for q, _ in case.rows), default=1)),
            "max_seq_len": max((s for _, s in case.rows), default=0),
            **more,
        }
        result: Tensor = function(*(t.to(device) for t in positional), **arguments)
        return result.cpu()


def build(case: Case) -> Tensors:
    """Random tensors of a case: every row's blocks are scattered over the cache."""
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    layout = CacheLayout(
        num_blocks=sum(-(-s // case.block_size) for _, s in case.rows) + 3,
        num_layers=NUM_LAYERS,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        head_dim=case.head_dim,
    )
    cache = torch.full(layout.shape, float("nan"), dtype=case.dtype)
    k_cache, v_cache = layer_views(cache, LAYER)
    free = torch.randperm(layout.num_blocks, generator=generator).tolist()
    width = max((layout.blocks_for(s) for _, s in case.rows), default=0) + 1
    tables = torch.full((len(case.rows), width), NOWHERE, dtype=torch.int32)
    keys, values = [], []
    for row, (query_len, seq_len) in enumerate(case.rows):
        k, v = (randn(seq_len, case.num_kv_heads, case.head_dim) for _ in range(2))
        keys.append(k)
        values.append(v)
        for index in range(layout.blocks_for(seq_len)):
            start = index * case.block_size
            end = min(start + case.block_size, seq_len)
            if case.window and end <= seq_len - query_len - case.window + 1:
                continue  # no query of the row reaches this block: it is in no table
            block = free.pop()
            tables[row, index] = block
            k_cache[block, :, : end - start] = k[start:end].transpose(0, 1)
            v_cache[block, :, : end - start] = v[start:end].transpose(0, 1)
    query_lens = [q for q, _ in case.rows]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return Tensors(
        q=randn(sum(query_lens) + case.extra_tokens, case.num_heads, case.head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        seq_lens=torch.tensor([s for _, s in case.rows], dtype=torch.int32),
        query_start_loc=starts,
        sinks=randn(case.num_heads) if case.sinks else None,
        keys=tuple(keys),
        values=tuple(values),
    )


def expected(case: Case, tensors: Tensors) -> Tensor:
    """Dense attention in float64, one query and one head at a time as far as the formula goes."""
    out = torch.zeros(tensors.q.shape, dtype=torch.float64)
    group = case.num_heads // case.num_kv_heads
    token = 0
    for row, (query_len, seq_len) in enumerate(case.rows):
        for i in range(query_len):
            if seq_len:
                position = seq_len - query_len + i
                first = max(0, position + 1 - case.window) if case.window else 0
                for kv_head in range(case.num_kv_heads):
                    heads = slice(kv_head * group, (kv_head + 1) * group)
                    out[token, heads] = _one(
                        tensors.q[token, heads].double(),
                        tensors.keys[row][first : position + 1, kv_head].double(),
                        tensors.values[row][first : position + 1, kv_head].double(),
                        case,
                        None if tensors.sinks is None else tensors.sinks[heads].double(),
                    )
            token += 1
    return out


def _one(q: Tensor, k: Tensor, v: Tensor, case: Case, sink: Tensor | None) -> Tensor:
    """q [G, D] over all of k, v [L, D]."""
    scores = (q @ k.T) / case.head_dim**0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    exponentials = torch.exp(scores)
    total = exponentials.sum(1)
    if sink is not None:
        total = total + torch.exp(sink)
    return (exponentials @ v) / total[:, None]


def worst(out: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """Greatest error in units of the dtype's tolerance: at most 1 passes; NaN becomes infinity."""
    if out.numel() == 0:
        return 0.0
    error = (out.double() - want).abs() / (1 + want.abs())
    return float(torch.nan_to_num(error, nan=float("inf")).max()) / TOLERANCES[dtype]


FAULTS = ("window", "kv_head", "blocks", "position", "scale")


def plant(fault: str, case: Case, tensors: Tensors) -> tuple[Case, Tensors]:
    """The call as a program with that fault would make it."""
    if fault == "window":
        return replace(case, window=case.window - 1), tensors
    if fault == "scale":
        return case, replace(tensors, q=tensors.q * 1.05)
    if fault == "position":
        return case, replace(tensors, seq_lens=tensors.seq_lens - 1)
    if fault == "kv_head":
        k_cache = tensors.k_cache[:, torch.arange(case.num_kv_heads).roll(1)]
        v_cache = torch.empty_like(k_cache).copy_(tensors.v_cache)
        return case, replace(tensors, k_cache=k_cache, v_cache=v_cache)
    assert fault == "blocks"
    tables = tensors.block_tables.clone()
    tables[0, 2], tables[1, 1] = tensors.block_tables[1, 1], tensors.block_tables[0, 2]
    return case, replace(tensors, block_tables=tables)
