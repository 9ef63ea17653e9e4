"""Token ids of simulated prompts: equal where prefix ids are equal, else a request's own."""

from functools import lru_cache

import numpy as np

from scheduler_svc.sim.arrivals.arrival import Arrival

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# Pieces of this many blocks are kept: what is shared is asked for again soon.
_KEPT_BLOCKS = 4_096
_OWN, _SHARED = 1, 2


def prompt_token_ids(
    arrival: Arrival, number: int, prefix_block_tokens: int, vocab_size: int
) -> tuple[int, ...]:
    """The prompt of a source's arrival of that number, ids from 0 to vocab_size - 1.

    The same prefix ids give the same tokens in every request. As with the recorded traffic, an id
    stands for the tokens of its block and of all before it, so it is not mixed with its place.
    """
    tokens: list[int] = []
    for prefix_id in arrival.prefix_ids:
        tokens += _block(prefix_id, prefix_block_tokens, vocab_size)
    missing = arrival.num_prompt_tokens - len(tokens)
    if missing < 0:
        del tokens[missing:]
    elif missing:
        tokens += _drawn(_OWN, number, missing, vocab_size)
    return tuple(tokens)


@lru_cache(maxsize=_KEPT_BLOCKS)
def _block(prefix_id: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(_drawn(_SHARED, prefix_id, num_tokens, vocab_size))


def _drawn(kind: int, key: int, count: int, vocab_size: int) -> list[int]:
    """Noise by counter (splitmix64): the same for the same key in every process."""
    start = ((key * 4 + kind) * 0xD1B54A32D192ED03) & _MASK
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return [int(token) for token in (x % np.uint64(vocab_size)).tolist()]
