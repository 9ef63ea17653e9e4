"""Linear layers over weights of 8 and 4 bits: right sums of levels; a row's bits are its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native import quantized as module
from kernels.native.quantized import QuantizedLinear, pack
from kernels.quantization import GROUP, quantize
from tests.kernels.native import needs_native

pytestmark = needs_native

# Sums of up to 704 terms of size 1, in fp32; bf16 rounds the answer.
TOLERANCE = {torch.float32: 4e-5, torch.bfloat16: 1e-2}
BOTH = (8, 4)


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", BOTH)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 15), st.sampled_from((24, 31, 48, 49, 64, 97, 150))),
    columns=st.one_of(st.sampled_from((1, 16, 17, 32, 33, 48)), st.integers(1, 200)),
    depth=st.one_of(st.sampled_from((1, 2, 3, 4, 64)), st.integers(1, 700)),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_linear(
    bits: int, dtype: torch.dtype, rows: int, columns: int, depth: int, bias: bool, seed: int
) -> None:
    if bits == 4:
        depth = -(-depth // GROUP) * GROUP
    weight = drawn(columns, depth, seed=seed).to(dtype)
    offset = drawn(columns, seed=seed + 1).to(dtype) if bias else None
    x = drawn(rows, depth + 5, seed=seed + 2).to(dtype)[:, :depth]
    out = QuantizedLinear(weight, offset, bits=bits)(x)
    want = x.double() @ quantize(weight, bits).dequantized().double().T
    want += 0.0 if offset is None else offset.double()
    assert out.shape == (rows, columns)
    assert out.dtype == dtype
    if rows:
        scale = 1 + want.abs() + (depth**0.5 if dtype == torch.float32 else 0)
        assert float(((out.double() - want).abs() / scale).max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", BOTH)
def test_a_row_has_the_same_bits_in_any_batch(bits: int, dtype: torch.dtype) -> None:
    """Batches of 1 to 64, every place in them, and chunks of a prompt; on one thread and three."""
    linear = QuantizedLinear(drawn(100, 320).to(dtype), drawn(100).to(dtype), bits=bits)
    most = 257
    x = drawn(most, 320, seed=1).to(dtype)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(most)])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for size in (*range(1, 65), 95, 96, 97, 145, 256, most):
            assert torch.equal(linear(x[:size]), alone[:size]), (threads, size)
            assert torch.equal(linear(x[most - size :]), alone[most - size :]), (threads, size)


@pytest.mark.parametrize("bits", BOTH)
def test_weights_are_packed_piece_by_piece_as_at_once(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = drawn(100, 64)
    whole = QuantizedLinear(weight, bits=bits).packed
    monkeypatch.setattr(module, "PACKED_AT_ONCE", 64 * 33)  # 32 columns
    assert torch.equal(QuantizedLinear(weight, bits=bits).packed, whole)
    assert torch.equal(whole, pack(quantize(weight, bits)))
    assert len(whole) == 7


@pytest.mark.parametrize(("bits", "per_weight"), [(8, 1.0625), (4, 0.625)])
def test_what_a_weight_takes(bits: int, per_weight: float) -> None:
    """In bytes: of 64 inputs the scale of 8 bits takes a sixteenth, of many nothing."""
    weight = drawn(32, 64)
    assert QuantizedLinear(weight, bits=bits).packed.nbytes == weight.numel() * per_weight


@pytest.mark.parametrize("bits", BOTH)
def test_a_row_with_nan_leaves_the_others_alone(bits: int) -> None:
    linear = QuantizedLinear(drawn(40, 64), bits=bits)
    x = drawn(7, 64, seed=9)
    good = linear(x)
    x[3, 5] = float("nan")
    bad = linear(x)
    assert bad[3].isnan().all()
    assert torch.equal(bad[[0, 1, 2, 4, 5, 6]], good[[0, 1, 2, 4, 5, 6]])


def test_mistakes_are_refused() -> None:
    linear = QuantizedLinear(torch.ones(4, 8), bits=8)
    for x in (torch.ones(2, 7), torch.ones(8), torch.ones(2, 8).double(), torch.ones(8, 2).T):
        with pytest.raises(ValueError, match=r"x must be \[rows, 8\] of torch.float32"):
            linear(x)
    with pytest.raises(ValueError, match="native kernels take fp32 and bf16"):
        QuantizedLinear(torch.ones(4, 8).half(), bits=8)
    with pytest.raises(ValueError, match=r"bias must be \[columns\]"):
        QuantizedLinear(torch.ones(4, 8), torch.ones(8), bits=8)
    with pytest.raises(ValueError, match=r"weight must be \[columns, depth\]"):
        QuantizedLinear(torch.ones(4), bits=8)
    with pytest.raises(ValueError, match="4 bits have groups of 32, got 48 inputs"):
        QuantizedLinear(torch.ones(4, 48), bits=4)
