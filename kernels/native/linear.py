"""Linear layers over packed weights; linear.cpp has the formula and the order of its sums."""

import torch
from torch import Tensor

from kernels.checks import check_linear, check_native
from kernels.native import library

LANES = 16
FP32, BF16, BF16_PAIRS = 0, 1, 2  # kinds of packed weights, as linear.cpp numbers them


def fits_bf16(weight: Tensor) -> bool:
    """Whether bf16 holds every weight exactly, as it does when the model was saved in bf16."""
    rows = max(1, (1 << 22) // max(1, weight.shape[1]))
    return all(bool((part.bfloat16().to(part.dtype) == part).all()) for part in weight.split(rows))


def pack(weight: Tensor, kind: int) -> Tensor:
    """weight [N, K] as panels of 16 columns, zeros after the last: [panels, K, 16] or as pairs."""
    columns, depth = weight.shape
    missing = -columns % LANES
    if missing:
        weight = torch.cat((weight, weight.new_zeros((missing, depth))))
    panels = weight.to(torch.float32 if kind == FP32 else torch.bfloat16)
    panels = panels.view(-1, LANES, depth)
    if kind == BF16_PAIRS:
        return panels.view(-1, LANES, depth // 2, 2).transpose(1, 2).contiguous()
    return panels.transpose(1, 2).contiguous()


class PackedLinear:
    """x -> x weight^T + bias for x [T, K] of one dtype, fp32 or bf16; a row's bits are its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_native(weight)
        check_linear(weight, bias)
        loaded = library.load()
        self.dtype = weight.dtype
        self.columns, self.depth = weight.shape
        self._inputs = torch.Size((self.depth,))
        if weight.dtype == torch.float32:
            kind = BF16 if fits_bf16(weight) else FP32
        else:
            kind = loaded.bf16_kind if self.depth % 2 == 0 else BF16
        self.packed = pack(weight, kind)
        self._bias = None if bias is None else bias.float().contiguous()
        self._function = loaded.linear
        self._call = library.LinearCall(
            packed=self.packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=self.columns,
            depth=self.depth,
            out_row=self.columns,
            x_is_bf16=self.dtype == torch.bfloat16,
            packed_kind=kind,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], a fresh tensor."""
        rows = x.shape[0]
        if x.dtype != self.dtype or x.shape[1:] != self._inputs or x.stride(1) != 1 or not x.is_cpu:
            raise ValueError(
                f"x must be [rows, {self.depth}] of {self.dtype} with dense rows, got "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        out = torch.empty((rows, self.columns), dtype=self.dtype)
        call = self._call
        call.out, call.x, call.rows, call.x_row = out.data_ptr(), x.data_ptr(), rows, x.stride(0)
        refused = self._function(call)
        assert not refused, "a kind of weights that this library does not multiply"
        return out
