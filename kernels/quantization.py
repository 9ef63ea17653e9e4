"""Weight-only quantization: linear weights in 8 or 4 bits; activations stay as they are.

8 bits: w = scale[n] q, with q from -127 to 127 and one scale for each column n of the outputs.
4 bits: w = scale[n, g] q + least[n, g], with q from 0 to 15, for each group g of 32 inputs; scale
and least are numbers that bf16 holds, so that a weight takes 5 bits.

Levels are the nearest ones; nothing is calibrated. kernels/native/quantized.cpp multiplies with
them, `Quantized.dequantized` is what they stand for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
BITS = {"int8": 8, "int4": 4}
LARGEST_LEVEL = {8: 127, 4: 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Weights [N, K] of one linear layer."""

    bits: int
    levels: Tensor  # [N, K] int8, of 4 bits uint8
    scale: Tensor  # [N, groups] fp32; of 8 bits there is one group
    least: Tensor | None  # [N, groups] fp32, of 4 bits

    def dequantized(self) -> Tensor:
        """[N, K] fp32."""
        grouped = self.levels.float().unflatten(1, (self.scale.shape[1], -1))
        weight = grouped * self.scale[..., None]
        if self.least is not None:
            weight += self.least[..., None]
        return weight.flatten(1)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """weight [N, K] -> levels and scales. Raises ValueError where `bits` can't hold its shape."""
    if bits not in LARGEST_LEVEL:
        raise ValueError(f"weights of {bits} bits: there are 8 and 4")
    weight, most = weight.detach().float(), LARGEST_LEVEL[bits]
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True) / most
        levels = _nearest(weight, scale).clamp_(-most, most)
        return Quantized(bits=bits, levels=levels.to(torch.int8), scale=scale, least=None)
    if weight.shape[1] % GROUP:
        raise ValueError(f"weights of 4 bits have groups of {GROUP}, got {weight.shape[1]} inputs")
    grouped = weight.unflatten(1, (-1, GROUP))
    least = _as_bf16_holds(grouped.amin(2))
    scale = _as_bf16_holds(((grouped.amax(2) - least) / most).clamp_(min=0.0))
    levels = _nearest(grouped - least[..., None], scale[..., None]).clamp_(0, most)
    return Quantized(bits=bits, levels=levels.flatten(1).to(torch.uint8), scale=scale, least=least)


def _nearest(x: Tensor, scale: Tensor) -> Tensor:
    """Levels as floats; 0 where all weights of a scale are the same."""
    return (x / torch.where(scale == 0, 1.0, scale)).round_()


def _as_bf16_holds(x: Tensor) -> Tensor:
    return x.bfloat16().float()
