"""Weights in 8 and 4 bits: how far from themselves, and what bits can't hold."""

import pytest
import torch

from kernels.quantization import GROUP, quantize


def drawn(*shape: int) -> torch.Tensor:
    """Normal numbers, each row of another size."""
    sizes = torch.logspace(-3, 3, shape[0])[:, None]
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * sizes


def test_of_8_bits_a_weight_is_half_a_level_off_at_most() -> None:
    weight = drawn(50, 96)
    found = quantize(weight, 8)
    assert found.levels.dtype == torch.int8
    assert found.levels.abs().amax(1).eq(127).all()  # the largest of each column is exact
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((found.dequantized() - weight).abs() <= step * 0.5001).all()


def test_of_4_bits_a_weight_is_half_a_level_of_its_group_off() -> None:
    """A little more: scale and least are rounded to bf16, by a 256th of themselves at most."""
    weight = drawn(50, 4 * GROUP)
    found = quantize(weight, 4)
    assert found.levels.dtype == torch.uint8
    assert int(found.levels.max()) == 15
    groups = weight.unflatten(1, (4, GROUP))
    step = (groups.amax(2) - groups.amin(2)) / 15
    off = (found.dequantized() - weight).abs().unflatten(1, (4, GROUP)).amax(2)
    assert (off <= step * 0.5 + (15 * step + groups.abs().amax(2)) / 256).all()
    assert found.least is not None
    for kept in (found.scale, found.least):
        assert torch.equal(kept.bfloat16().float(), kept)


def test_a_grid_of_16_levels_is_found_again() -> None:
    """Weights that were of 4 bits before, as those of many files are, lose nothing more."""
    levels = torch.randint(0, 16, (20, 2, GROUP), generator=torch.Generator().manual_seed(1))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * 0.25 - 2.0).flatten(1)
    assert torch.equal(quantize(weight, 4).dequantized(), weight)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_equal_weights_stay_equal(bits: int, value: float) -> None:
    weight = torch.full((3, GROUP), value)
    found = quantize(weight, bits).dequantized()
    assert torch.allclose(found, weight, rtol=1e-6)
    assert (found == found[0, 0]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_nan_is_not_hidden(bits: int) -> None:
    weight = torch.ones(2, GROUP)
    weight[1, 7] = float("nan")
    found = quantize(weight, bits).dequantized()
    assert found[1].isnan().all()
    assert torch.allclose(found[0], torch.ones(GROUP), rtol=1e-6)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 5 bits: there are 8 and 4"):
        quantize(torch.ones(2, 32), 5)
    with pytest.raises(ValueError, match="groups of 32, got 33 inputs"):
        quantize(torch.ones(2, 33), 4)
