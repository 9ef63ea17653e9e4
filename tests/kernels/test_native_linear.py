"""Linear layers over packed weights: against float64; a row's bits are its own."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native import library
from kernels.native import linear as module
from kernels.native.linear import (
    BF16,
    BF16_HALVES,
    FP32,
    OneDnnLinear,
    PackedLinear,
    choose_linear,
    fits_bf16,
    pack,
)
from tests.kernels.native import needs_native

pytestmark = needs_native

# Sums of up to 700 terms of size 1, in fp32; bf16 rounds the answer, and its unit adds in pairs.
TOLERANCE = {torch.float32: 4e-5, torch.bfloat16: 1e-2}


def layer(
    columns: int, depth: int, dtype: torch.dtype, seed: int, exact: bool, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights, in numbers that bf16 holds where `exact`."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(columns, depth, generator=generator)
    weight = weight.bfloat16().to(dtype) if exact else weight.to(dtype)
    return weight, torch.randn(columns, generator=generator).to(dtype) if bias else None


def error_of(out: torch.Tensor, want: torch.Tensor, depth: int) -> float:
    """In tolerances: at most 1 passes."""
    scale = 1 + want.abs() + (depth**0.5 if out.dtype == torch.float32 else 0)
    return float(((out.double() - want).abs() / scale).max()) / TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 15), st.sampled_from((24, 31, 48, 49, 64, 97, 150))),
    columns=st.one_of(st.sampled_from((1, 16, 17, 32, 33, 48)), st.integers(1, 200)),
    depth=st.one_of(st.sampled_from((1, 2, 3, 64)), st.integers(1, 700)),
    exact=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_linear(
    dtype: torch.dtype, rows: int, columns: int, depth: int, exact: bool, bias: bool, seed: int
) -> None:
    weight, offset = layer(columns, depth, dtype, seed, exact, bias)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, depth + 5, generator=generator).to(dtype)[:, :depth]
    out = PackedLinear(weight, offset)(x)
    want = x.double() @ weight.double().T + (0.0 if offset is None else offset.double())
    assert out.shape == (rows, columns)
    assert out.dtype == dtype
    if rows:
        assert error_of(out, want, depth) <= 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, exact: bool) -> None:
    """Batches of 1 to 64, every place in them, and chunks of a prompt; on one thread and three."""
    weight, offset = layer(100, 300, dtype, 3, exact, bias=True)
    linear = PackedLinear(weight, offset)
    most = 257
    x = torch.randn(most, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(most)])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for size in (*range(1, 65), 95, 96, 97, 145, 256, most):
            assert torch.equal(linear(x[:size]), alone[:size]), (threads, size)
            assert torch.equal(linear(x[most - size :]), alone[most - size :]), (threads, size)


def test_weights_that_bf16_holds_take_half_the_memory_and_give_the_same_bits() -> None:
    weight, _ = layer(64, 200, torch.float32, 5, exact=True, bias=False)
    x = torch.randn(5, 200)
    small = PackedLinear(weight)
    assert small.packed.dtype == torch.bfloat16
    nudged = weight.clone()
    nudged[0, 0] *= 1 + 2**-20
    large = PackedLinear(nudged)
    assert large.packed.dtype == torch.float32
    assert torch.equal(small(x)[:, 1:], large(x)[:, 1:])


def test_fits_bf16_finds_the_one_that_does_not() -> None:
    weight = torch.ones(3000, 2000)
    assert fits_bf16(weight)
    weight[2999, 1999] = 1 + 2**-12
    assert not fits_bf16(weight)


def test_panels_hold_the_columns_and_zeros_behind_them() -> None:
    weight = torch.arange(51.0).view(17, 3)
    packed = pack(weight, FP32)
    assert packed.shape == (2, 3, 16)
    assert torch.equal(packed[0].T, weight[:16])
    assert torch.equal(packed[1, :, 0], weight[16])
    assert not packed[1, :, 1:].any()
    assert pack(weight, BF16).dtype == torch.bfloat16


def test_halves_stand_two_columns_to_a_number_of_a_register() -> None:
    weight = torch.arange(51.0).view(17, 3)
    order = [column for pair in zip(range(8), range(8, 16), strict=True) for column in pair]
    assert torch.equal(pack(weight, BF16_HALVES), pack(weight, BF16)[:, :, order])


@pytest.mark.parametrize("kind", [BF16, BF16_HALVES])
def test_a_kind_that_this_build_does_not_have_is_refused(kind: int) -> None:
    """Each build has one of the two orders of columns, and does not take the other for it."""
    weight, x, out = torch.ones(16, 4), torch.ones(1, 4), torch.zeros(1, 16)
    packed = pack(weight, kind)
    loaded = library.load()
    call = library.LinearCall(
        out=out.data_ptr(), x=x.data_ptr(), packed=packed.data_ptr(), rows=1, columns=16, depth=4,
        out_row=16, x_row=4, packed_kind=kind,
    )  # fmt: skip
    assert bool(loaded.linear(call)) == (kind != loaded.bf16_kind)
    assert out.eq(4.0 if kind == loaded.bf16_kind else 0.0).all()


def test_a_row_with_nan_leaves_the_others_alone() -> None:
    weight, _ = layer(40, 64, torch.float32, 5, exact=True, bias=False)
    linear = PackedLinear(weight)
    x = torch.randn(7, 64)
    good = linear(x)
    x[3, 5] = float("nan")
    bad = linear(x)
    assert bad[3].isnan().all()
    assert torch.equal(bad[[0, 1, 2, 4, 5, 6]], good[[0, 1, 2, 4, 5, 6]])


def test_mistakes_are_refused() -> None:
    linear = PackedLinear(torch.ones(4, 8))
    for x in (torch.ones(2, 7), torch.ones(8), torch.ones(2, 8).double(), torch.ones(8, 2).T):
        with pytest.raises(ValueError, match=r"x must be \[rows, 8\] of torch.float32"):
            linear(x)
    with pytest.raises(ValueError, match="native kernels take fp32 and bf16"):
        PackedLinear(torch.ones(4, 8).half())
    with pytest.raises(ValueError, match=r"bias must be \[columns\]"):
        PackedLinear(torch.ones(4, 8), torch.ones(8))
    with pytest.raises(ValueError, match=r"weight must be \[columns, depth\]"):
        PackedLinear(torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_onednn_computes_the_same_function(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """As near to float64 as the native layer has to be; no bits are promised."""
    if dtype == torch.bfloat16 and not module.onednn_takes_bf16():
        pytest.skip("oneDNN has no bf16 on this processor")
    weight, offset = layer(100, 300, dtype, 3, exact=True, bias=bias)
    x = torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows)).to(dtype)
    want = x.double() @ weight.double().T + (0.0 if offset is None else offset.double())
    for linear in (OneDnnLinear(weight, offset), PackedLinear(weight, offset)):
        assert error_of(linear(x), want, 300) <= 1


class OneDnn:
    """Stands for oneDNN's layer where the processor has none for bf16."""

    kind = "onednn"

    def __init__(self, weight: torch.Tensor, bias: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("dtype", "deterministic", "onednn_s", "takes_bf16", "kind"),
    [
        (torch.bfloat16, False, 0.5, True, "onednn"),
        (torch.bfloat16, False, 0.95, True, "native"),  # not clearly faster
        (torch.bfloat16, False, 0.5, False, "native"),
        (torch.bfloat16, True, 0.5, True, "native"),
        (torch.float32, False, 0.5, True, "native"),
    ],
)
def test_the_faster_layer_is_chosen_where_the_batch_may_decide(
    dtype: torch.dtype,
    deterministic: bool,
    onednn_s: float,
    takes_bf16: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "OneDnnLinear", OneDnn)
    monkeypatch.setattr(module, "onednn_takes_bf16", lambda: takes_bf16)
    monkeypatch.setattr(module, "_onednn_is_faster", {})
    times = {"native": 1.0, "onednn": onednn_s}
    monkeypatch.setattr(module, "_seconds", lambda of, rows, weight: times[of.kind])
    weight = torch.ones(32, 16, dtype=dtype)
    for _ in range(2):
        assert choose_linear(weight, None, deterministic=deterministic).kind == kind


def test_the_native_layer_is_not_timed_beside_threads_that_torch_left_looking_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hold its cores for a while after packing, and after each call of oneDNN's."""
    seen = []

    def seconds(of: Any, rows: int, weight: torch.Tensor) -> float:
        seen.append(of.kind)
        return 1.0

    monkeypatch.setattr(module, "OneDnnLinear", OneDnn)
    monkeypatch.setattr(module, "onednn_takes_bf16", lambda: True)
    monkeypatch.setattr(module, "_onednn_is_faster", {})
    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr("kernels.native.linear.time.sleep", lambda _seconds: seen.append("pause"))
    choose_linear(torch.ones(32, 16, dtype=torch.bfloat16), None, deterministic=False)
    assert seen == ["pause", "native", "native", "onednn", "onednn"]
