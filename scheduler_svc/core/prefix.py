"""Names of full blocks: a keyed hash chain.

The name of block i covers every token up to its end, so that equal names mean equal prefixes. The
key comes from the configuration and the tenant's salt, never from the process: names agree between
processes and restarts, and one tenant can't probe another's prompts.
"""

from array import array
from functools import lru_cache
from hashlib import blake2b

from scheduler_svc.core.types import BlockHash

HASH_BYTES = 16
# Parents of first blocks that are remembered: tenants have few salts.
_MAX_STARTS = 1024


@lru_cache(maxsize=_MAX_STARTS)
def chain_start(hash_key: bytes, cache_salt: bytes, hash_bytes: int = HASH_BYTES) -> BlockHash:
    """Parent of a request's first block. All names after it have its length."""
    key = blake2b(hash_key, digest_size=32).digest()
    start = blake2b(cache_salt, key=key, digest_size=hash_bytes, person=b"quire-salt")
    return BlockHash(start.digest())


def child(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Name of the block that holds `tokens` after `parent`.

    The key is in the parent: without it no name of the chain can be told or made.
    """
    return BlockHash(blake2b(parent + tokens, digest_size=len(parent)).digest())


def extend_chain(
    hashes: list[BlockHash], start: BlockHash, token_ids: "array[int]", block_size: int
) -> None:
    """Appends to `hashes` the names of all full blocks of token_ids not named yet."""
    first, num_full = len(hashes), len(token_ids) // block_size
    if first >= num_full:
        return
    tokens = token_ids[first * block_size : num_full * block_size].tobytes()
    size, length = block_size * token_ids.itemsize, len(start)
    parent = hashes[-1] if hashes else start
    for begin in range(0, len(tokens), size):
        # As `child`, without a call for each block.
        name = blake2b(parent + tokens[begin : begin + size], digest_size=length).digest()
        parent = BlockHash(name)
        hashes.append(parent)
