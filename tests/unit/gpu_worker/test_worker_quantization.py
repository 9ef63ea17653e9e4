"""Rounding weights: piece by piece, and the same numbers as of a whole layer at once."""

import pytest
import torch

from gpu_worker import quantization
from kernels.quantization import quantize


class Small(torch.nn.Module):
    """A layer and a head that shares the embedding's weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(67, 64, dtype=dtype)
        self.layer = torch.nn.Linear(64, 51, bias=False, dtype=dtype)
        self.lm_head = torch.nn.Linear(64, 67, bias=False, dtype=dtype)
        self.lm_head.weight = self.embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_rounding_in_pieces_gives_what_a_whole_layer_gives(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, bits: int
) -> None:
    module = Small(dtype)
    shared = module.embedding.weight.clone()
    want = quantize(module.layer.weight, bits).dequantized().to(dtype)
    of_head = quantize(module.lm_head.weight, 8).dequantized().to(dtype)
    largest = 0

    def noting(weight: torch.Tensor, num_bits: int) -> object:
        nonlocal largest
        largest = max(largest, weight.numel())
        return quantize(weight, num_bits)

    monkeypatch.setattr(quantization, "quantize", noting)
    monkeypatch.setattr(quantization, "ROUNDED_AT_ONCE", 7 * 64 + 5)
    quantization.round_weights(module, name)
    assert largest == 7 * 64
    assert torch.equal(module.layer.weight, want)
    assert torch.equal(module.lm_head.weight, of_head)
    assert torch.equal(module.embedding.weight, shared)
    assert module.layer.weight.dtype == dtype
    assert not module.layer.weight.requires_grad
