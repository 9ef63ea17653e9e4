"""Owns the order of bytes in the KV cache: shape, strides, sizes, slot arithmetic; plain ints.

One tensor holds the cache of all layers:

    [block][layer][K, V][kv head][token of the block][head dim]

so a block with all its layers is one contiguous piece, and copying it out or in is one copy.
Every kernel takes its strides from the views that `layer_views` cuts; none assumes another order.
All offsets can exceed 32 bits: a kernel multiplies block numbers in int64.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SKIPPED_SLOT = -1  # in a slot mapping: this token is padding and is not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Shape of one KV cache; sizes and strides count elements unless a name says bytes."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_layers", "num_kv_heads", "block_size", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Of the whole cache tensor."""
        return (
            self.num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )

    @property
    def strides(self) -> tuple[int, int, int, int, int, int]:
        """Of the whole cache tensor, which is contiguous."""
        head = self.block_size * self.head_dim
        side = self.num_kv_heads * head
        return (self.num_layers * 2 * side, 2 * side, side, head, self.head_dim, 1)

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Of one layer's K (or V) view: [block, kv head, token, head dim]."""
        return (self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layer_strides(self) -> tuple[int, int, int, int]:
        """Of one layer's K (or V) view."""
        block, _, _, head, token, dim = self.strides
        return (block, head, token, dim)

    @property
    def block_elements(self) -> int:
        """Elements of one block over all layers, keys and values."""
        return self.strides[0]

    def block_bytes(self, element_bytes: int) -> int:
        """Bytes of one block over all layers: what one swap or transfer moves."""
        return self.block_elements * element_bytes

    def total_bytes(self, element_bytes: int) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_bytes(element_bytes)

    def slot(self, block: int, offset: int) -> int:
        """Number of a token's place, as a slot mapping names it."""
        assert 0 <= block < self.num_blocks
        assert 0 <= offset < self.block_size
        return block * self.block_size + offset

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)


def layer_views(cache: "torch.Tensor", layer: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """K and V of one layer, each [block, kv head, token, head dim]; no copy, writes go through."""
    return cache[:, layer, 0], cache[:, layer, 1]
