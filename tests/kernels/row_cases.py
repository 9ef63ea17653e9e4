"""Cases of the operators on rows and heads, and their float64 answers. Nothing imports triton."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.cache_layout import CacheLayout, layer_views
from tests.kernels.cases import TOLERANCES

POSITIONS = 50


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def worst_of(got: Tensor, want: Tensor, size: Tensor | None = None) -> float:
    """Greatest error in the dtype's tolerances; at most 1 passes. Both are finite or neither.

    The tolerance is relative to `size`, what the answer is a difference of, where that is given.
    """
    if got.numel() == 0:
        return 0.0
    error = (got.double() - want).abs() / (1 + (want.abs() if size is None else size))
    same = (got.double() == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, torch.nan_to_num(error, nan=float("inf")))
    return float(error.max()) / TOLERANCES[got.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCase:
    """rms_norm of num_tokens rows; `apart` elements lie between rows."""

    num_tokens: int
    dim: int
    dtype: torch.dtype = torch.float32
    delta: bool = False
    offset: bool = False
    apart: int = 0
    seed: int = 0

    def error(self, function: Any) -> float:
        """Of the norm and, with a delta, of what x becomes."""
        wide = self.dim + self.apart
        x = (randn(self.num_tokens, wide, seed=self.seed, dtype=self.dtype) * 3)[:, : self.dim]
        weight = randn(self.dim, seed=self.seed + 1, dtype=self.dtype)
        delta = None
        summed = x.clone()
        if self.delta:
            delta = randn(self.num_tokens, wide, seed=self.seed + 2, dtype=self.dtype)
            delta = delta[:, : self.dim]
            summed = x + delta
        y = summed.double()
        y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        want = y * (weight.double() + (1.0 if self.offset else 0.0))
        got = function(x, weight, 1e-5, delta=delta, offset=self.offset)
        if not torch.equal(x, summed):
            return float("inf")
        return worst_of(got, want)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """gated_activation of num_tokens rows."""

    num_tokens: int
    dim: int
    dtype: torch.dtype = torch.float32
    gelu: bool = False
    apart: int = 0
    scale: float = 4.0
    seed: int = 0

    def error(self, function: Any) -> float:
        """Of the product."""
        both = randn(self.num_tokens, 2 * self.dim + self.apart, seed=self.seed, dtype=self.dtype)
        both = (both * self.scale)[:, : 2 * self.dim]
        gate, up = both.double().chunk(2, -1)
        tanh_form = torch.nn.functional.gelu(gate, approximate="tanh")
        want = (tanh_form if self.gelu else gate * gate.sigmoid()) * up
        return worst_of(function(both, gelu=self.gelu), want)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryCase:
    """rotary_store; `half` of a head's elements turn with another half, the rest stays."""

    num_tokens: int
    head_dim: int
    half: int
    num_heads: int = 3
    num_kv_heads: int = 2
    block_size: int = 5
    dtype: torch.dtype = torch.float32
    normed: bool = False
    offset: bool = False
    fault: str = ""
    seed: int = 0

    def error(self, function: Any) -> float:
        """Of queries and of the cache; infinite where a slot is touched that is not to be."""
        generator = torch.Generator().manual_seed(self.seed)
        dim, total = self.head_dim, self.num_heads + 2 * self.num_kv_heads
        layout = CacheLayout(
            num_blocks=self.num_tokens // self.block_size + 3,
            num_layers=2,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=dim,
        )
        cache = torch.randn(layout.shape, generator=generator).to(self.dtype)
        qkv = torch.randn(self.num_tokens, total * dim + 3, generator=generator).to(self.dtype)
        qkv = qkv[:, : total * dim]
        angles = torch.randn(POSITIONS, self.half, generator=generator)
        cosine, sine = (t.to(self.dtype).float() for t in (angles.cos(), angles.sin()))
        positions = torch.randint(0, POSITIONS, (self.num_tokens,), generator=generator)
        num_slots = layout.num_blocks * self.block_size
        slots = torch.randperm(num_slots, generator=generator)[: self.num_tokens]
        slots[torch.rand(self.num_tokens, generator=generator) < 0.2] = -1
        weights = torch.randn(2, dim, generator=generator).to(self.dtype)

        want, size = cache.double(), cache.double().abs()
        wide = qkv.double().unflatten(1, (total, dim))
        q, k, v = wide.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        turned, sizes = [], []
        for heads, weight in zip((q, k), weights.double(), strict=True):
            x = heads
            if self.normed:
                x = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                x = x * (weight + (1.0 if self.offset else 0.0))
            c, s = (table.double()[positions][:, None] for table in (cosine, sine))
            a, b, rest = x.split((self.half, self.half, dim - 2 * self.half), -1)
            turned.append(torch.cat((a * c - b * s, b * c + a * s, rest), -1))
            largest = x.abs().amax(-1, keepdim=True)
            sizes.append(largest.expand(x.shape))
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, place = slot // self.block_size, slot % self.block_size
                want[block, 1, 0, :, place] = turned[1][token]
                size[block, 1, 0, :, place] = sizes[1][token]
                want[block, 1, 1, :, place] = v[token]
        if self.fault == "positions":
            positions = (positions + 1) % POSITIONS
        if self.fault == "slots":
            slots = slots.roll(1)
        given = {"q_weight": weights[0], "k_weight": weights[1]} if self.normed else {}
        tables = (slots, positions, cosine, sine)
        got = function(
            qkv, *layer_views(cache, 1), *tables, **given, epsilon=1e-6, offset=self.offset
        )
        if got.data_ptr() != qkv.data_ptr() and self.num_tokens:
            return float("inf")
        return max(worst_of(got, turned[0], sizes[0]), worst_of(cache, want, size))


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (1, 2, 8, 31, 64, 65, 255, 256, 257, 576, 1000, 1025)
HEADS = ((64, 32), (64, 16), (80, 40), (8, 4), (256, 128), (18, 9), (96, 24), (2, 1), (128, 64))

NORMS = [
    NormCase(
        num_tokens=(0, 1, 2, 3, 7)[(index + dim) % 5],
        dim=dim,
        dtype=dtype,
        delta=delta,
        offset=offset,
        apart=index % 3,
        seed=index,
    )
    for index, dim in enumerate(DIMS)
    for dtype in DTYPES
    for delta in (False, True)
    for offset in (False, True)
]
GATES = [
    GateCase(
        num_tokens=(0, 1, 2, 3, 7)[(index + dim) % 5],
        dim=dim,
        dtype=dtype,
        gelu=gelu,
        apart=index % 3,
        scale=(1.0, 4.0, 90.0)[index % 3] if dtype != torch.float16 else 4.0,
        seed=index,
    )
    for index, dim in enumerate((*DIMS, 2049))
    for dtype in DTYPES
    for gelu in (False, True)
]
ROTARIES = [
    RotaryCase(
        num_tokens=(0, 1, 2, 4)[index % 4] if dtype == torch.float32 else 3,
        head_dim=head_dim,
        half=half,
        num_heads=(1, 3, 8)[index % 3],
        num_kv_heads=(1, 2)[index % 2],
        block_size=(4, 5, 16)[index % 3],
        dtype=dtype,
        normed=normed,
        offset=index % 2 == 0,
        seed=index,
    )
    for index, (head_dim, half) in enumerate(HEADS)
    for dtype in DTYPES
    for normed in (False, True)
]
# More heads than one program does.
ROTARIES += [
    RotaryCase(num_tokens=2, head_dim=256, half=128, num_heads=17, num_kv_heads=9),
    RotaryCase(num_tokens=2, head_dim=64, half=32, num_heads=66, num_kv_heads=1, normed=True),
]
assert len(NORMS) + len(GATES) + len(ROTARIES) >= 250


def planted(case: RotaryCase, fault: str) -> RotaryCase:
    """The same case called with a fault."""
    return replace(case, fault=fault)
