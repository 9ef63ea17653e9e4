"""Shapes, strides and sizes of the cache, in plain ints and as torch sees them."""

import pytest
import torch

from kernels.cache_layout import CacheLayout, layer_views

LAYOUT = CacheLayout(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8)


def test_strides_are_those_of_a_contiguous_tensor() -> None:
    cache = torch.zeros(LAYOUT.shape)
    assert cache.stride() == LAYOUT.strides
    for view in layer_views(cache, 2):
        assert tuple(view.shape) == LAYOUT.layer_shape
        assert view.stride() == LAYOUT.layer_strides


def test_a_block_with_all_its_layers_is_one_contiguous_piece() -> None:
    cache = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
    assert cache[3].is_contiguous()
    assert cache[3].numel() == LAYOUT.block_elements == 3 * 2 * 2 * 4 * 8
    assert cache[3].nbytes == LAYOUT.block_bytes(2)
    assert cache.nbytes == LAYOUT.total_bytes(2)


def test_views_write_through_to_their_layer() -> None:
    cache = torch.zeros(LAYOUT.shape)
    k_cache, v_cache = layer_views(cache, 1)
    k_cache[2, 1, 3] = 7
    v_cache[2, 1, 3] = 8
    assert cache[2, 1, 0, 1, 3].tolist() == [7] * 8
    assert cache[2, 1, 1, 1, 3].tolist() == [8] * 8
    assert cache.count_nonzero() == 16


def test_slots_and_blocks() -> None:
    assert LAYOUT.slot(3, 2) == 14
    assert [LAYOUT.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(AssertionError):
        LAYOUT.slot(0, 4)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be a positive int, got 0"):
        CacheLayout(num_blocks=1, num_layers=0, num_kv_heads=1, block_size=4, head_dim=8)
