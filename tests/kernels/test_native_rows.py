"""Norm, activation, rotary embedding with the store: against float64 and against torch's bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.cache_layout import CacheLayout, layer_views
from kernels.native import operators
from tests.kernels.native import needs_native

pytestmark = needs_native
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}  # bf16: twice half a unit, rounded thrice
EDGES = (1, 15, 16, 17, 64, 80, 576, 1000)

shapes = st.tuples(st.integers(0, 40), st.one_of(st.sampled_from(EDGES), st.integers(1, 700)))


def close(out: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    error = (out.double() - want).abs() / (1 + want.abs())
    return out.numel() == 0 or float(error.max()) <= TOLERANCE[dtype]


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A part of a wider tensor, so that rows have a stride of their own."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator).to(dtype)
    return wide[..., : shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=80, deadline=None)
@given(shape=shapes, offset=st.booleans(), residual=st.booleans(), seed=st.integers(0, 999))
def test_norm(
    dtype: torch.dtype, shape: tuple[int, int], offset: bool, residual: bool, seed: int
) -> None:
    x = random(*shape, seed=seed, dtype=dtype)
    delta = random(*shape, seed=seed + 1, dtype=dtype) if residual else None
    weight = random(shape[1], seed=seed + 2, dtype=dtype).contiguous()
    total = x if delta is None else x + delta
    wide = total.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    want = want * (weight.double() + (1.0 if offset else 0.0))
    out = operators.rms_norm(x, weight, 1e-5, delta=delta, offset=offset)
    assert torch.equal(x, total), "the residual is added in place, with torch's bits"
    assert close(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=80, deadline=None)
@given(shape=shapes, gelu=st.booleans(), seed=st.integers(0, 999))
def test_gate(dtype: torch.dtype, shape: tuple[int, int], gelu: bool, seed: int) -> None:
    both = random(shape[0], 2 * shape[1], seed=seed, dtype=dtype) * 4
    left, right = both.double().chunk(2, -1)
    want = torch.nn.functional.gelu(left, approximate="tanh") if gelu else left * left.sigmoid()
    assert close(operators.gated_activation(both, gelu=gelu), want * right, dtype)


@pytest.mark.parametrize("gelu", [False, True])
def test_gate_of_extremes(gelu: bool) -> None:
    left = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30]])
    out = operators.gated_activation(torch.cat((left, torch.ones_like(left)), 1), gelu=gelu)
    want = reference.gated_activation(torch.cat((left, torch.ones_like(left)), 1), gelu=gelu)
    assert torch.allclose(out, want, atol=1e-6, rtol=1e-6)
    bad = torch.full((1, 2), float("nan"))
    assert operators.gated_activation(bad, gelu=gelu).isnan().all()


class Rotary:
    """A step's tokens, a cache and rotary tables; `run` calls an operator on fresh copies."""

    def __init__(self, dtype: torch.dtype, num_tokens: int, dim: int, half: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = CacheLayout(
            num_blocks=num_tokens // 4 + 3, num_layers=2, num_kv_heads=2, block_size=5, head_dim=dim
        )
        self.cache = torch.randn(self.layout.shape, generator=generator).to(dtype)
        self.qkv = torch.randn(num_tokens, 7 * dim + 3, generator=generator).to(dtype)
        angles = torch.randn(50, half, generator=generator)
        self.cosine, self.sine = (t.to(dtype).float() for t in (angles.cos(), angles.sin()))
        self.positions = torch.randint(0, 50, (num_tokens,), generator=generator)
        slots = torch.randperm(self.layout.num_blocks * 5, generator=generator)[:num_tokens]
        slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
        self.slots = slots
        self.weight = torch.randn(2, dim, generator=generator).to(dtype)

    def run(self, function: Any, normed: bool, offset: bool) -> tuple[Tensor, Tensor]:
        """Rotated queries and the cache afterwards."""
        cache, qkv = self.cache.clone(), self.qkv.clone()[:, : 7 * self.layout.head_dim]
        weights = {"q_weight": self.weight[0], "k_weight": self.weight[1]} if normed else {}
        caches = layer_views(cache, 1)
        tables = (self.slots, self.positions, self.cosine, self.sine)
        q = function(qkv, *caches, *tables, **weights, epsilon=1e-6, offset=offset)
        assert q.shape == (len(self.slots), 3, self.layout.head_dim)
        return q, cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    dims=st.sampled_from([(64, 32), (64, 16), (80, 40), (8, 4), (256, 128), (18, 9), (96, 24)]),
    seed=st.integers(0, 999),
)
def test_rotary_store_has_the_bits_of_torch(
    dtype: torch.dtype, num_tokens: int, dims: tuple[int, int], seed: int
) -> None:
    step = Rotary(dtype, num_tokens, *dims, seed)
    got = step.run(operators.rotary_store, normed=False, offset=False)
    want = step.run(reference.rotary_store, normed=False, offset=False)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [False, True])
def test_rotary_store_with_a_norm_of_each_head(dtype: torch.dtype, offset: bool) -> None:
    for dims in ((64, 32), (80, 20), (18, 9)):
        step = Rotary(dtype, 23, *dims, seed=1)
        got = step.run(operators.rotary_store, normed=True, offset=offset)
        want = step.run(reference.rotary_store, normed=True, offset=offset)
        for ours, theirs in zip(got, want, strict=True):
            assert close(ours, theirs.double(), dtype)


def test_positions_and_slots_outside_are_refused() -> None:
    for name, value in (("positions", 50), ("positions", -1), ("slots", -2), ("slots", 10**6)):
        step = Rotary(torch.float32, 6, 64, 32, seed=2)
        getattr(step, name)[4] = value
        with pytest.raises(ValueError, match="token 4: its slot or its position is outside"):
            step.run(operators.rotary_store, normed=False, offset=False)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_batch(threads: int) -> None:
    """Enough rows for several threads, against each row alone."""
    torch.set_num_threads(threads)
    x = torch.randn(200, 576)
    weight = torch.randn(576)
    both = torch.randn(200, 1000)
    normed, gated = operators.rms_norm(x, weight, 1e-5), operators.gated_activation(both)
    for row in (0, 1, 99, 199):
        part = slice(row, row + 1)
        assert torch.equal(operators.rms_norm(x[part], weight, 1e-5), normed[part])
        assert torch.equal(operators.gated_activation(both[part]), gated[part])


MISTAKES: dict[str, tuple[Any, str]] = {
    "norm_dims": (lambda f: f.rms_norm(torch.ones(2, 3, 4), torch.ones(4), 1.0), "x must be"),
    "norm_weight": (lambda f: f.rms_norm(torch.ones(2, 3), torch.ones(4), 1.0), "weight must be"),
    "norm_dtype": (lambda f: f.rms_norm(torch.ones(2, 3), torch.ones(3).half(), 1.0), "one dtype"),
    "norm_delta": (
        lambda f: f.rms_norm(torch.ones(2, 3), torch.ones(3), 1.0, delta=torch.ones(1, 3)),
        "delta must have",
    ),
    "gate_odd": (lambda f: f.gated_activation(torch.ones(2, 3)), "both must be"),
    "gate_strided": (lambda f: f.gated_activation(torch.ones(4, 2).T), "both must be"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name: str) -> None:
    call, words = MISTAKES[name]
    for function in (operators, reference):
        with pytest.raises(ValueError, match=words):
            call(function)


ROTARY_MISTAKES: dict[str, tuple[str, Any, str]] = {
    "columns": ("qkv", lambda t: torch.ones(6, 4 * 64), "qkv must be"),
    "dtype": ("qkv", lambda t: t.bfloat16(), "one dtype"),
    "slots": ("slots", lambda t: t[:3], "slot_mapping must have one entry"),
    "slots_dtype": ("slots", lambda t: t.int(), "slot_mapping must be int64"),
    "positions": ("positions", lambda t: t.int(), "positions must be int64"),
    "half": ("cosine", lambda t: torch.ones(50, 33), "cosine and sine must be"),
    "table_dtype": ("sine", lambda t: t.double(), "sine must be contiguous and fp32"),
    "weight": ("weight", lambda t: torch.ones(2, 63), "q_weight must be"),
}


@pytest.mark.parametrize("name", ROTARY_MISTAKES)
def test_rotary_mistakes_are_refused(name: str) -> None:
    field, change, words = ROTARY_MISTAKES[name]
    for function in (operators.rotary_store, reference.rotary_store):
        step = Rotary(torch.float32, 6, 64, 32, seed=2)
        setattr(step, field, change(getattr(step, field)))
        with pytest.raises(ValueError, match=words):
            step.run(function, normed=True, offset=False)
