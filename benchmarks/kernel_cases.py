"""What benchmarks.kernels times: a case for each kernel and shape, the same on every back end.

Shapes are those of SmolLM2-135M: width 576, 9 query and 3 KV heads of 64, 1,536 in the MLP, 49,152
tokens.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.kv_cache import allocate
from kernels import reference
from kernels.cache_layout import CacheLayout, layer_views

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 4
WIDTH, INNER, VOCABULARY = 576, 1536, 49_152
QKV = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A step; rows holds (query_len, seq_len)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    window: int = 0


STEPS = (
    Rows(name="decode 1 x 509", rows=((1, 509),)),
    Rows(name="decode 32 x 509", rows=((1, 509),) * 32),
    Rows(name="decode 32 x 509, window 128", rows=((1, 509),) * 32, window=128),
    Rows(name="decode 1 x 4093 + 31 x 61", rows=((1, 4093), *((1, 61),) * 31)),
    Rows(name="prefill 256 of 256", rows=((256, 256),)),
    Rows(name="prefill 256 of 1280", rows=((256, 1280),)),
    Rows(name="mixed 24 x 300 + 232 of 232", rows=(*((1, 300),) * 24, (232, 232))),
)
TOKENS = (1, 32, 256)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape; calls by back end, torch first."""

    kernel: str
    shape: str
    dtype: str
    num_bytes: int  # read and written at least
    calls: dict[str, Callable[[], Any]]
    flops: int = 0  # where arithmetic binds


def usual_dtype() -> str:
    """What a worker on this machine computes in."""
    from gpu_worker.models import native_bfloat16

    return "bf16" if torch.cuda.is_available() or native_bfloat16() else "fp32"


def cases(dtype: torch.dtype, name: str, device: str, *, quick: bool) -> Iterator[Case]:
    """All, made one after the other; `quick` takes small ones."""
    steps, tokens = (STEPS[:1], TOKENS[:1]) if quick else (STEPS, TOKENS)
    for step in steps:
        yield from _over_the_cache(_Step(step, dtype, device), name)
    for count in tokens:
        yield from _over_rows(count, dtype, name, device)
        yield from _linear(count, dtype, name, device, quick=quick)
    if device == "cpu":
        yield from _sampler(1 if quick else 32)


class _Step:
    """Tensors of one step, its rows' blocks scattered over the cache."""

    def __init__(self, of: Rows, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.of, self.device = of, device
        needed = [-(-s // BLOCK_SIZE) for _, s in of.rows]
        layout = CacheLayout(
            num_blocks=sum(needed) + 8,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
        )
        cache = allocate(layout, dtype, torch.device(device))
        cache.copy_(torch.randn(layout.shape, generator=generator))
        free = torch.randperm(layout.num_blocks, generator=generator).to(torch.int32)
        tables = torch.zeros((len(of.rows), max(needed)), dtype=torch.int32)
        slots, used = [], 0
        for row, (query_len, seq_len) in enumerate(of.rows):
            tables[row, : needed[row]] = free[used : used + needed[row]]
            used += needed[row]
            position = torch.arange(seq_len - query_len, seq_len)
            slots.append(
                tables[row].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            )
        query_lens = [q for q, _ in of.rows]
        self.qkv = torch.randn(sum(query_lens), QKV, generator=generator).to(device, dtype)
        heads = self.qkv.view(len(self.qkv), -1, HEAD_DIM)
        self.q = heads[:, :NUM_HEADS]
        self.k = heads[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]
        self.v = heads[:, NUM_HEADS + NUM_KV_HEADS :]
        self._layers = itertools.cycle([layer_views(cache, at) for at in range(NUM_LAYERS)])
        self.caches = layer_views(cache, 1)
        self.tables = (
            tables.to(device),
            torch.tensor([s for _, s in of.rows], dtype=torch.int32, device=device),
            torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        )
        self.slots = torch.cat(slots).to(device)
        self.positions = torch.cat([torch.arange(s - q, s) for q, s in of.rows]).to(device)
        angles = torch.rand(8192, HEAD_DIM // 2, generator=generator)
        self.rotary = (angles.cos().to(device), angles.sin().to(device))

    def next_layer(self) -> tuple[Tensor, Tensor]:
        """Another layer's cache than before, as a model's layers find it: not near any more."""
        return next(self._layers)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of paged_attention, besides tensors."""
        return {
            "scale": HEAD_DIM**-0.5,
            "window": self.of.window,
            "max_query_len": max(q for q, _ in self.of.rows),
            "max_seq_len": max(s for _, s in self.of.rows),
        }

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the rows must read once."""
        window = self.of.window
        tokens = sum(min(s, q + window - 1) if window else s for q, s in self.of.rows)
        return tokens * 2 * NUM_KV_HEADS * HEAD_DIM * int(self.q.element_size())

    @property
    def flops(self) -> int:
        """Of scores and weighted values of prefills; a decode is bound by what it reads."""
        pairs = sum(q * (s - q) + q * (q + 1) // 2 for q, s in self.of.rows if q > 1)
        return 4 * pairs * NUM_HEADS * HEAD_DIM


def _over_the_cache(step: _Step, dtype: str) -> Iterator[Case]:
    plan = reference.make_attention_plan(*step.tables, BLOCK_SIZE, step.of.window)
    attention: dict[str, Callable[[], Any]] = {
        "torch": lambda: reference.paged_attention(
            step.q, *step.next_layer(), *step.tables, **step.arguments, plan=plan
        )
    }
    rotary: dict[str, Callable[[], Any]] = {
        "torch": lambda: reference.rotary_store(
            step.qkv, *step.caches, step.slots, step.positions, *step.rotary
        )
    }
    store: dict[str, Callable[[], Any]] = {
        "torch": lambda: reference.store_kv(step.k, step.v, *step.caches, step.slots)
    }
    if step.device == "cuda":
        from kernels import kv_store, paged_attention, rotary_store

        attention["triton"] = lambda: paged_attention.paged_attention(
            step.q, *step.next_layer(), *step.tables, **step.arguments
        )
        store["triton"] = lambda: kv_store.store_kv(step.k, step.v, *step.caches, step.slots)
        rotary["triton"] = lambda: rotary_store.rotary_store(
            step.qkv, *step.caches, step.slots, step.positions, *step.rotary
        )
    elif _native():
        from kernels.native import operators

        attend = operators.Attention(
            step.caches[0], *step.tables, scale=HEAD_DIM**-0.5, window=step.of.window
        )
        into = operators.RotaryStore(step.caches[0], step.slots, step.positions, *step.rotary)
        attention["native"] = lambda: attend(step.q, *step.next_layer())
        store["native"] = lambda: operators.store_kv(step.k, step.v, *step.caches, step.slots)
        rotary["native"] = lambda: into(step.qkv, *step.caches)
    name = step.of.name
    yield Case("paged_attention", name, dtype, step.kv_bytes, attention, flops=step.flops)
    if step.of.window:
        return
    size = step.qkv.element_size() * len(step.qkv) * HEAD_DIM
    yield Case("store_kv", name, dtype, 4 * NUM_KV_HEADS * size, store)
    moved = (2 * NUM_HEADS + 4 * NUM_KV_HEADS) * size
    yield Case("rotary_store", name, dtype, moved, rotary)


def _over_rows(count: int, dtype: torch.dtype, name: str, device: str) -> Iterator[Case]:
    x, delta = (torch.randn(count, WIDTH).to(device, dtype) for _ in range(2))
    weight = torch.ones(WIDTH).to(device, dtype)
    both = torch.randn(count, 2 * INNER).to(device, dtype)
    norm: dict[str, Callable[[], Any]] = {
        "torch": lambda: reference.rms_norm(x, weight, 1e-5, delta=delta)
    }
    gate: dict[str, Callable[[], Any]] = {"torch": lambda: reference.gated_activation(both)}
    if device == "cuda":
        from kernels import gated_activation, rms_norm

        norm["triton"] = lambda: rms_norm.rms_norm(x, weight, 1e-5, delta=delta)
        gate["triton"] = lambda: gated_activation.gated_activation(both)
    elif _native():
        from kernels.native import operators

        normed, gated = operators.RmsNorm(weight, 1e-5), operators.GatedActivation()
        norm["native"] = lambda: normed(x, delta)
        gate["native"] = lambda: gated(both)
    yield Case("rms_norm", f"{count} tokens", name, 4 * x.nbytes, norm)
    yield Case("gated_activation", f"{count} tokens", name, both.nbytes * 3 // 2, gate)


def _linear(
    count: int, dtype: torch.dtype, name: str, device: str, *, quick: bool
) -> Iterator[Case]:
    """Weights as of a model saved in bf16; their bytes are counted at two each."""
    shapes = {"qkv": (QKV, WIDTH), "gate and up": (2 * INNER, WIDTH), "down": (WIDTH, INNER)}
    if not quick:
        shapes["head"] = (VOCABULARY, WIDTH)
    for layer, (columns, depth) in shapes.items():
        weight = torch.randn(columns, depth).bfloat16().to(device, dtype)
        x = torch.randn(count, depth).to(device, dtype)
        yield Case(
            "linear",
            f"{layer}, {count} tokens",
            name,
            2 * weight.numel() + x.nbytes + count * columns * x.element_size(),
            _linear_calls(weight, x, device),
            flops=2 * count * weight.numel(),
        )


def _linear_calls(weight: Tensor, x: Tensor, device: str) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {"torch": lambda: F.linear(x, weight)}
    if device == "cpu" and _native():
        from kernels.native.linear import OneDnnLinear, PackedLinear, onednn_takes_bf16

        packed = PackedLinear(weight)
        calls["native"] = lambda: packed(x)
        if weight.dtype == torch.float32 or onednn_takes_bf16():
            other = OneDnnLinear(weight)
            calls["onednn"] = lambda: other(x)
    return calls


def _sampler(count: int) -> Iterator[Case]:
    from gpu_worker import sampler
    from gpu_worker.ports import SamplingSpec
    from gpu_worker.sampling_columns import columns

    logits = torch.randn(count, VOCABULARY) * 3
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "top_k, top_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    }
    for kind, chosen in kinds.items():
        rows: list[sampler.Row] = [
            (SamplingSpec(max_tokens=1, seed=seed, **chosen), 0, None) for seed in range(count)
        ]
        calls = _sampler_calls(logits, rows, columns(rows, VOCABULARY))
        yield Case("sampler", f"{kind}, {count} rows", "fp32", logits.nbytes, calls)


def _sampler_calls(logits: Tensor, rows: Any, columns: Any) -> dict[str, Callable[[], Any]]:
    from gpu_worker import sampler

    calls: dict[str, Callable[[], Any]] = {"torch": lambda: sampler.sample_on_host(logits, rows)}
    if _native():
        from kernels.native import sampling

        calls["native"] = lambda: sampling.sample(logits, columns)
    return calls


def _native() -> bool:
    from kernels.native import library

    return library.reason_unavailable() is None
