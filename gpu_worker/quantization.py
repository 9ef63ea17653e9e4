"""Owns what QUIRE_QUANTIZATION means for a model: the bits of each linear layer.

All linear layers of the lean forward are quantized, and nothing else: embedding, norms, keys and
values stay as they are. The head has 8 bits at least, for 4 bits of it alone cost several per cent
of perplexity; so have layers whose inputs are no whole groups.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.quantization import BITS, GROUP, quantize

NONE = "none"
# Weights that are rounded at once: on the way they stand in fp32 several times.
ROUNDED_AT_ONCE = 1 << 22


def layer_bits(quantization: str, num_inputs: int, *, head: bool) -> int:
    """Of a linear layer; `head` makes the logits."""
    bits = BITS[quantization]
    return bits if not head and num_inputs % GROUP == 0 else 8


def round_weights(module: Any, quantization: str) -> None:
    """Gives the linear layers of a module the weights that the quantized ones stand for.

    The lean forward is the module's own function again then, which models.check_parity shows,
    whatever rounding costs. A head that shares its weights with the embedding gets its own.
    """
    for part in module.modules():
        if type(part) is torch.nn.Linear:
            bits = layer_bits(quantization, part.in_features, head=part is module.lm_head)
            part.weight = torch.nn.Parameter(_rounded(part.weight, bits), requires_grad=False)


def _rounded(weight: Tensor, bits: int) -> Tensor:
    """Fresh weights, piece by piece: each row has scales of its own."""
    rows = max(1, ROUNDED_AT_ONCE // weight.shape[1])
    rounded = torch.empty_like(weight, requires_grad=False)
    for piece, into in zip(
        torch.split(weight.detach(), rows), torch.split(rounded, rows), strict=True
    ):
        into.copy_(quantize(piece, bits).dequantized())
    return rounded
