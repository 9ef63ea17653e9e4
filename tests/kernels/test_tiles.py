"""Which tiles a device and a model's shape get; what is refused before anything is launched."""

import itertools

import pytest
import torch

from kernels import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), 80),
        ((8, 6), 86),
        ((8, 7), 86),
        ((8, 9), 86),
        ((9, 0), 90),
        ((10, 0), 90),
        ((10, 3), 90),
        ((12, 0), 86),
        ((12, 1), 86),
    ],
)
def test_a_device_has_the_row_of_its_shared_memory(capability: tuple[int, int], arch: int) -> None:
    assert tiles.architecture(capability) == arch


def test_older_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 8\.0, got 7\.5"):
        tiles.architecture((7, 5))


@pytest.mark.parametrize(
    ("head_dim", "bound"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)]
)
def test_a_head_dim_has_the_next_larger_row(head_dim: int, bound: int) -> None:
    for arch, dtype in itertools.product((80, 86, 90), DTYPES):
        row = tiles.TABLE[arch, dtype.itemsize, bound]
        assert tiles.tiles_for(head_dim, dtype, arch, 1) == row
        assert tiles.tiles_for(head_dim, dtype, arch, 16) == row


@pytest.mark.parametrize("group", [17, 24, 32, 64])
def test_a_wide_group_has_warps_for_its_registers(group: int) -> None:
    for arch, dtype, head_dim in itertools.product((80, 86, 90), DTYPES, (64, 128, 256)):
        chosen = tiles.tiles_for(head_dim, dtype, arch, group)
        assert chosen.decode_num_warps == 8
        if dtype == torch.float32:
            assert (chosen.num_warps, chosen.block_n, chosen.decode_block_n) == (8, 16, 16)


def test_where_keys_are_cut_does_not_hang_on_the_shape() -> None:
    shapes = itertools.product((8, 256), DTYPES, (80, 86, 90), (1, 64))
    assert {tiles.tiles_for(*shape).split for shape in shapes} == {tiles.DECODE_SPLIT}


def test_shapes_without_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="no tiles for head dim 257"):
        tiles.tiles_for(257, torch.bfloat16, 90, 1)
    with pytest.raises(ValueError, match="no tiles for 65 query heads a KV head: at most 64"):
        tiles.tiles_for(128, torch.bfloat16, 90, 65)
