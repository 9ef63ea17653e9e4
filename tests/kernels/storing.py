"""store_kv against a loop over tokens."""

from typing import Any

import torch

from kernels.cache_layout import CacheLayout, layer_views


def differs(
    function: Any,
    num_tokens: int,
    head_dim: int,
    block_size: int,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """True when function leaves another cache, in any layer, than storing token by token."""
    generator = torch.Generator().manual_seed(seed)
    layout = CacheLayout(
        num_blocks=num_tokens // block_size + 3,
        num_layers=3,
        num_kv_heads=3,
        block_size=block_size,
        head_dim=head_dim,
    )
    cache = torch.randn(layout.shape, generator=generator).to(dtype)
    # Sliced out of a wider tensor, as projections of queries, keys and values in one leave them.
    both = torch.randn(num_tokens, 9, head_dim, generator=generator).to(dtype)
    k, v = both[:, 3:6], both[:, 6:9]
    slots = torch.randperm(layout.num_blocks * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1

    want = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // block_size, 1, 0, :, slot % block_size] = k[token]
            want[slot // block_size, 1, 1, :, slot % block_size] = v[token]
    function(k, v, *layer_views(cache, 1), slots)
    return not torch.equal(cache, want)
