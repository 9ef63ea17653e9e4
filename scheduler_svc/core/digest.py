"""Digest of a worker's block tables, the same sum on both ends of a session."""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.rows import Digests

_MASK = (1 << 64) - 1
_SLOT, _GENERATION, _INDEX, _BLOCK = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
)
_GROUP = 0x165667B19E3779F9
# Arrays without dimensions: a scalar would be made one in each operation.
_INDEX64, _BLOCK64, _SHIFT64 = (np.array(n, np.uint64) for n in (_INDEX, _BLOCK, 32))
# Up to here plain integers are faster than arrays.
FEW = 12


def mix(slot: int, generation: int, group: int, index: int, block: int) -> int:
    """64-bit hash of one table entry."""
    value = slot * _SLOT ^ generation * _GENERATION ^ group * _GROUP ^ index * _INDEX
    value = (value ^ block * _BLOCK) & _MASK
    value ^= value >> 32
    value = (value * _INDEX) & _MASK
    return value ^ (value >> 32)


def row_key(slot: int, generation: int) -> int:
    """What all entries of a slot have in common."""
    return (slot * _SLOT ^ generation * _GENERATION) & _MASK


def mix_columns(row_keys: Digests, indexes: Digests, blocks: Digests) -> Digests:
    """`mix` for many entries of group 0, in 64-bit arithmetic."""
    value = indexes * _INDEX64
    value ^= row_keys
    other = blocks * _BLOCK64
    value ^= other
    value ^= np.right_shift(value, _SHIFT64, other)
    value *= _INDEX64
    value ^= np.right_shift(value, _SHIFT64, other)
    return value


def mix_few(row_keys: Sequence[int], indexes: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """`mix_columns` in plain integers: faster up to FEW entries."""
    mixed = []
    for key, index, block in zip(row_keys, indexes, blocks, strict=True):
        value = (key ^ index * _INDEX ^ block * _BLOCK) & _MASK
        value = ((value ^ value >> 32) * _INDEX) & _MASK
        mixed.append(value ^ value >> 32)
    return mixed


def table_sum(slot: int, generation: int, first_index: int, blocks: Sequence[int]) -> int:
    """Sum of the entries of one table from first_index on, group 0, mod 2^64."""
    return row_sum(row_key(slot, generation), first_index, blocks)


def row_sum(key: int, first_index: int, blocks: Sequence[int]) -> int:
    """`table_sum` for a slot whose row_key is known."""
    num_blocks = len(blocks)
    if num_blocks <= FEW:
        # As mix_few, without lists: once for each admission.
        total = 0
        for index, block in enumerate(blocks, start=first_index):
            value = (key ^ index * _INDEX ^ block * _BLOCK) & _MASK
            value = ((value ^ value >> 32) * _INDEX) & _MASK
            total += value ^ value >> 32
        return total & _MASK
    mixed = mix_columns(
        np.full(num_blocks, key, np.uint64),
        np.arange(first_index, first_index + num_blocks, dtype=np.uint64),
        np.fromiter(blocks, np.uint64),
    )
    return int(mixed.sum(dtype=np.uint64))


def add(digest: int, amount: int) -> int:
    """digest + amount mod 2^64; amount may be negative."""
    return (digest + amount) & _MASK
