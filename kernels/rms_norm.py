"""Triton kernel of the RMSNorm of rows, with the residual added to them first.

Torch twin and formula: kernels.reference.rms_norm. One program does one row, so that a row's sum
does not depend on the batch.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import (
    check_float,
    check_norm,
    check_runs_triton,
    check_triton_width,
    interpreted,
)
from kernels.rounding import rounded
from kernels.tiles import row_warps


# fmt: off
@triton.jit
def rms_norm_kernel(
    out,  # [T, D]
    x,  # [T, D]
    delta,  # [T, D] or None
    weight,  # [D]
    epsilon,
    out_stride, x_stride, delta_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_DELTA: tl.constexpr, OFFSET: tl.constexpr, BY_HAND: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    inside = dim < DIM
    element: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + token * x_stride + dim, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        more = tl.load(delta + token * delta_stride + dim, mask=inside, other=0.0)
        wide = rounded(wide + more.to(tl.float32), element, BY_HAND)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
    if HAS_DELTA:  # all threads have loaded by now
        tl.store(x + token * x_stride + dim, wide.to(element), mask=inside)
    scale = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    y = y * (1.0 + scale) if OFFSET else rounded(y, element, BY_HAND) * scale
    y = rounded(y, element, BY_HAND)
    tl.store(out + token * out_stride + dim, y.to(element), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    delta: Tensor | None = None,
    offset: bool = False,
) -> Tensor:
    """Norm of the rows of x [T, D]; delta, where given, is added to x in place first."""
    check_norm(x, weight, delta)
    check_float(x)
    check_runs_triton(x.device, rms_norm_kernel)
    check_triton_width(x.shape[1])
    num_tokens, dim = x.shape
    out = torch.empty((num_tokens, dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(dim)
    rms_norm_kernel[(num_tokens,)](
        out,
        x,
        delta,
        weight,
        epsilon,
        out.stride(0),
        x.stride(0),
        0 if delta is None else delta.stride(0),
        DIM=dim,
        BLOCK_D=block,
        HAS_DELTA=delta is not None,
        OFFSET=offset,
        BY_HAND=interpreted(rms_norm_kernel),
        num_warps=row_warps(block),
    )
    return out
