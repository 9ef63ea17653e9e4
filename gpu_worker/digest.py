"""Digest of the worker's block tables, the same sum on both ends of a session. Pure."""

from collections.abc import Iterable

_MASK = (1 << 64) - 1


def mix(slot: int, generation: int, group: int, index: int, block: int) -> int:
    """64-bit hash of one table entry."""
    value = (
        (slot * 0x9E3779B97F4A7C15)
        ^ (generation * 0xC2B2AE3D27D4EB4F)
        ^ (group * 0x165667B19E3779F9)
        ^ (index * 0xD6E8FEB86659FD93)
        ^ (block * 0xA0761D6478BD642F)
    ) & _MASK
    value ^= value >> 32
    value = (value * 0xD6E8FEB86659FD93) & _MASK
    return value ^ (value >> 32)


def table_sum(slot: int, generation: int, first_index: int, blocks: Iterable[int]) -> int:
    """Sum of the entries of one table of group 0 from first_index on, mod 2^64."""
    total = 0
    for index, block in enumerate(blocks, first_index):
        total += mix(slot, generation, 0, index, block)
    return total & _MASK


def add(digest: int, amount: int) -> int:
    """digest + amount mod 2^64; amount may be negative."""
    return (digest + amount) & _MASK
