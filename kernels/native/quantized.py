"""Linear layers over weights of 8 or 4 bits; quantized.cpp has the layout and the order of sums."""

import torch
from torch import Tensor

from kernels.checks import check_linear, check_native
from kernels.native import library, memory
from kernels.native.linear import LANES
from kernels.quantization import GROUP, Quantized, quantize

# Weights that are packed at a time: what that takes in fp32 is a small part of a large layer.
PACKED_AT_ONCE = 1 << 22


def pack(of: Quantized) -> Tensor:
    """Weights as bytes [panels, bytes of a panel], zeros in the columns after the last."""
    missing = -len(of.levels) % LANES
    scale, levels = _panels(of.scale, missing), _panels(of.levels, missing)  # [panels, 16, ...]
    if of.least is None:
        parts = (scale[..., 0].contiguous(), levels.transpose(1, 2).contiguous())
        return torch.cat([part.view(torch.uint8).flatten(1) for part in parts], dim=1)
    heads = [
        part.bfloat16().transpose(1, 2).contiguous().view(torch.uint8)  # [panels, groups, 32]
        for part in (scale, _panels(of.least, missing))
    ]
    pairs = levels[..., 0::2] | levels[..., 1::2] << 4  # the first of two in the lower half
    words = pairs.unflatten(2, (-1, GROUP // 8, 4))  # [panels, 16, groups, words, 4 bytes]
    words = words.permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat((*heads, words), dim=2).flatten(1)


def _panels(x: Tensor, missing: int) -> Tensor:
    if missing:
        x = torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))
    return x.unflatten(0, (-1, LANES))


class QuantizedLinear:
    """x -> x weight^T + bias for x [T, K], fp32 or bf16: a row's bits are its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, bits: int) -> None:
        check_native(weight)
        check_linear(weight, bias)
        self.dtype = weight.dtype
        self.kind = f"int{bits}"
        self.columns, self.depth = weight.shape
        self._inputs = torch.Size((self.depth,))
        self.packed = _packed(weight, bits)
        self._bias = None if bias is None else bias.float().contiguous()
        self._function = library.load().quantized
        self._call = library.QuantizedCall(
            packed=self.packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=self.columns,
            depth=self.depth,
            out_row=self.columns,
            x_is_bf16=self.dtype == torch.bfloat16,
            bits=bits,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], a fresh tensor."""
        out = torch.empty((x.shape[0], self.columns), dtype=self.dtype)
        refused = self._function(self.bind(x, out))
        assert not refused, "weights that this library does not multiply"
        return out

    def bind(self, x: Tensor, out: Tensor) -> library.QuantizedCall:
        """The call, checked, for `out` [T, N], which is dense; good until the next one."""
        if x.dtype != self.dtype or x.shape[1:] != self._inputs or x.stride(1) != 1 or not x.is_cpu:
            raise ValueError(
                f"x must be [rows, {self.depth}] of {self.dtype} with dense rows, got "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        call = self._call
        call.out, call.x = out.data_ptr(), x.data_ptr()
        call.rows, call.x_row = x.shape[0], x.stride(0)
        return call


def _packed(weight: Tensor, bits: int) -> Tensor:
    """All of it, piece by piece."""
    rows = max(1, PACKED_AT_ONCE // weight.shape[1] // LANES) * LANES
    whole: Tensor | None = None
    done = 0
    for part in weight.split(rows):
        panels = pack(quantize(part, bits))
        if whole is None:
            num_panels = -(-len(weight) // LANES)
            whole = memory.zeros((num_panels, panels.shape[1]), torch.uint8)
        whole[done : done + len(panels)] = panels
        done += len(panels)
    assert whole is not None  # check_linear: there are weights
    return whole
