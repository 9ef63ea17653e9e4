"""Triton kernel of the gated activation: act(gate) * up for gate and up side by side.

Torch twin: kernels.reference.gated_activation. gelu's tanh form is x * sigmoid(2 u) with
u = sqrt(2 / pi) * (x + 0.044715 x^3), since 1 + tanh(u) = 2 sigmoid(2 u).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_float, check_gate, check_runs_triton, interpreted
from kernels.rounding import rounded
from kernels.tiles import ELEMENTWISE_BLOCK

TWICE_ROOT = tl.constexpr(2.0 * 0.7978845608028654)  # 2 sqrt(2 / pi)


# fmt: off
@triton.jit
def gated_activation_kernel(
    out,  # [T, D]
    both,  # [T, 2 D]
    out_stride, both_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, GELU: tl.constexpr, BY_HAND: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = dim < DIM
    element: tl.constexpr = out.dtype.element_ty
    row = both + token * both_stride
    gate = tl.load(row + dim, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + DIM + dim, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = TWICE_ROOT * (gate + 0.044715 * gate * gate * gate)
    active = rounded(gate / (1.0 + tl.exp(-inner)), element, BY_HAND)
    result = rounded(active * up, element, BY_HAND)
    tl.store(out + token * out_stride + dim, result.to(element), mask=inside)


def gated_activation(both: Tensor, *, gelu: bool = False) -> Tensor:
    """act(both[:, :D]) * both[:, D:] for both [T, 2 D]; act is silu, or gelu in its tanh form."""
    check_gate(both)
    check_float(both)
    check_runs_triton(both.device, gated_activation_kernel)
    num_tokens, dim = both.shape[0], both.shape[1] // 2
    out = torch.empty((num_tokens, dim), dtype=both.dtype, device=both.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(dim), ELEMENTWISE_BLOCK)
    gated_activation_kernel[(num_tokens, triton.cdiv(dim, block))](
        out,
        both,
        out.stride(0),
        both.stride(0),
        DIM=dim,
        BLOCK_D=block,
        GELU=gelu,
        BY_HAND=interpreted(gated_activation_kernel),
        num_warps=4,
    )
    return out
