"""Triton helpers. `rounded` gives what another dtype holds, as torch does between operators.

Triton's interpreter cuts bf16 off instead of rounding to nearest; there it is done by hand.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def is_nan(x):
    """Where x is NaN."""
    return x != x  # noqa: PLR0124  # the only numbers that differ from themselves


@triton.jit
def rounded(x, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """fp32 x, rounded to nearest even in TYPE, as fp32."""
    if tl.float32 == TYPE:
        return x
    elif BY_HAND and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(is_nan(x), x, bits.to(tl.float32, bitcast=True))
    else:
        return x.to(TYPE).to(tl.float32)
