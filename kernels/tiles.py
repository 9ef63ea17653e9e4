"""Tile choices of the Triton kernels, one table row per (head dim, element size, architecture).

A choice never depends on the batch: row counts and lengths change between steps, and a token's
arithmetic must not change with them. The rows were chosen so that the compiled kernels stay under
the shared memory of their architecture without spilling much; they have not been tuned on a
device.
"""

from dataclasses import dataclass, replace

import torch

# Tokens of a decode row that one program reads. Sums of a row are cut at its multiples, whatever
# the batch.
DECODE_SPLIT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """block_m: query tokens x query heads; block_n: keys of one loop turn, divides split."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    decode_block_n: int
    decode_num_warps: int
    decode_num_stages: int
    split: int = DECODE_SPLIT

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "decode_block_n", "split"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {value}")
        if self.split % self.decode_block_n:
            raise ValueError("decode_block_n must divide split")


def _tiles(m: int, n: int, warps: int, stages: int, dn: int, dw: int, ds: int) -> Tiles:
    return Tiles(
        block_m=m,
        block_n=n,
        num_warps=warps,
        num_stages=stages,
        decode_block_n=dn,
        decode_num_warps=dw,
        decode_num_stages=ds,
    )


# The interpreter runs a Python statement per tile: few, small splits, so that short rows cross
# their borders.
INTERPRETER_TILES = Tiles(
    block_m=16,
    block_n=32,
    num_warps=1,
    num_stages=1,
    decode_block_n=32,
    decode_num_warps=1,
    decode_num_stages=1,
    split=64,
)

# (architecture, bytes of an element, padded head dim up to) -> tiles. sm_86 stands for all devices
# with 99 KiB of shared memory a block: 8.6, 8.9, 12.x.
TABLE: dict[tuple[int, int, int], Tiles] = {
    (80, 2, 64): _tiles(128, 64, 8, 3, 64, 4, 3),
    (80, 2, 128): _tiles(64, 64, 8, 3, 64, 4, 3),
    (80, 2, 256): _tiles(64, 32, 8, 2, 32, 4, 3),
    (80, 4, 64): _tiles(32, 32, 4, 2, 32, 4, 2),
    (80, 4, 128): _tiles(32, 32, 4, 2, 32, 4, 2),
    (80, 4, 256): _tiles(16, 16, 4, 2, 16, 4, 2),
    (86, 2, 64): _tiles(64, 64, 4, 2, 64, 4, 2),
    (86, 2, 128): _tiles(64, 32, 4, 2, 32, 4, 2),
    (86, 2, 256): _tiles(32, 16, 4, 2, 16, 4, 2),
    (86, 4, 64): _tiles(32, 32, 4, 2, 32, 4, 2),
    (86, 4, 128): _tiles(32, 16, 4, 2, 16, 4, 2),
    (86, 4, 256): _tiles(16, 16, 4, 1, 16, 4, 1),
    (90, 2, 64): _tiles(128, 64, 4, 3, 64, 4, 3),
    (90, 2, 128): _tiles(128, 64, 8, 3, 64, 4, 3),
    (90, 2, 256): _tiles(64, 64, 8, 2, 64, 4, 2),
    (90, 4, 64): _tiles(32, 32, 8, 2, 32, 8, 2),
    (90, 4, 128): _tiles(16, 32, 8, 2, 32, 8, 2),
    (90, 4, 256): _tiles(16, 16, 4, 2, 16, 8, 2),
}


# Query heads a KV head. The heads of a group stand side by side in a tile, of decode too. Above
# WIDE_GROUP some of the table's rows spill, so tiles get more warps; above MAX_GROUP these do too.
WIDE_GROUP, MAX_GROUP = 16, 64
WIDE_WARPS = 8
WIDE_FP32_KEYS = 16


def architecture(capability: tuple[int, int]) -> int:
    """The table's architecture for a device's compute capability; ValueError below 8.0."""
    major, minor = capability
    if major < 8:
        raise ValueError(f"compute capability must be at least 8.0, got {major}.{minor}")
    if (major == 8 and minor > 0) or major >= 12:
        return 86
    return 80 if major == 8 else 90


def tiles_for(head_dim: int, dtype: torch.dtype, arch: int, group: int) -> Tiles:
    """The tiles of a model's shape: `arch` as `architecture` gives it, `group` query heads a KV
    head. ValueError for a head dim or a group that no tiles fit.
    """
    if group > MAX_GROUP:
        raise ValueError(f"no tiles for {group} query heads a KV head: at most {MAX_GROUP}")
    for bound in (64, 128, 256):
        if head_dim <= bound:
            chosen = TABLE[arch, dtype.itemsize, bound]
            return chosen if group <= WIDE_GROUP else _for_wide_groups(chosen, dtype)
    raise ValueError(f"no tiles for head dim {head_dim}")


def _for_wide_groups(chosen: Tiles, dtype: torch.dtype) -> Tiles:
    """More warps share the tile's registers; in fp32, which has the largest, keys are fewer too."""
    wide = replace(chosen, decode_num_warps=WIDE_WARPS)
    if dtype.itemsize < 4:
        return wide  # their prefill tiles hold such a group as they are
    return replace(
        wide, num_warps=WIDE_WARPS, block_n=WIDE_FP32_KEYS, decode_block_n=WIDE_FP32_KEYS
    )


ELEMENTWISE_BLOCK = 1024  # elements of one program that does the same to each
VOCABULARY_BLOCK = 4096  # logits that a program of the sampler reads in one turn
VOCABULARY_WARPS = 8
INTERPRETER_VOCABULARY_BLOCK = 256  # small vocabularies cross its borders too
ROTARY_TILE = 2048  # elements of the heads that one program rotates


def row_warps(width: int) -> int:
    """Warps of a program that holds a whole row: about eight elements a thread."""
    return max(1, min(16, width // 256))


def rotary_heads(head_dim: int) -> int:
    """Heads that one program of rotary_store does, a power of two."""
    return max(1, ROTARY_TILE // max(16, 1 << (head_dim - 1).bit_length()))
