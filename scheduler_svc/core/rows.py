"""What a worker's running requests have computed, as columns by slot.

Planning and booking a decode touch these columns only, so that a step costs a few array operations
and not a call for each request. A request that does not run has nothing computed: the columns are
the only place of these numbers.
"""

from collections.abc import Iterable

import numpy as np

Column = np.ndarray[tuple[int], np.dtype[np.int64]]
Digests = np.ndarray[tuple[int], np.dtype[np.uint64]]
Objects = np.ndarray[tuple[int], np.dtype[np.object_]]


def column(values: Iterable[int]) -> Column:
    """A column of these numbers."""
    return np.fromiter(values, np.int64)


class Rows:
    """Mutable; owned by the worker's state. Rows of free slots hold what they last held.

    num_tokens counts the known tokens of a request and those that planned steps will sample;
    num_computed the tokens whose KV planned steps will have written; num_confirmed those whose step
    has returned. The gap between num_tokens and num_computed is what is left to plan, nothing once
    num_tokens has reached limit (prompt and max_tokens). known is num_tokens at the admission: a
    row that is still there has no sample planned. room is how many tokens the block table holds,
    planned the tokens in the plan before, 0 for none, and num_planned counts those that have some;
    digest is the sum over the block table, and key what its entries have in common. requests and
    token_ids are the requests and their known tokens.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_tokens: Column = np.zeros(num_slots, np.int64)
        self.num_computed: Column = np.zeros(num_slots, np.int64)
        self.num_confirmed: Column = np.zeros(num_slots, np.int64)
        self.limit: Column = np.zeros(num_slots, np.int64)
        self.known: Column = np.zeros(num_slots, np.int64)
        self.room: Column = np.zeros(num_slots, np.int64)
        self.planned: Column = np.zeros(num_slots, np.int64)
        self.num_planned = 0
        self.generation: Column = np.zeros(num_slots, np.int64)
        self.key: Digests = np.zeros(num_slots, np.uint64)
        self.digest: Digests = np.zeros(num_slots, np.uint64)
        self.requests: Objects = np.full(num_slots, None)
        self.token_ids: Objects = np.full(num_slots, None)

    def begin(self, slot: int, *, num_tokens: int, num_cached: int, limit: int, room: int) -> int:
        """A request takes a slot: num_tokens are known, of which the cache gives num_cached.

        Returns the slot's generation.
        """
        self.num_tokens[slot] = self.known[slot] = num_tokens
        self.num_computed[slot] = self.num_confirmed[slot] = num_cached
        self.limit[slot], self.room[slot], self.planned[slot] = limit, room, 0
        generation = self.generation.item(slot) + 1
        self.generation[slot] = generation
        return generation

    def num_wanted(self, slot: int) -> int:
        """Tokens left to plan; 0 once the last output token has been planned."""
        num_tokens = self.num_tokens.item(slot)
        if num_tokens >= self.limit.item(slot):
            return 0
        return num_tokens - self.num_computed.item(slot)

    def is_unsampled(self, slot: int) -> bool:
        """No plan since the admission samples a token."""
        return self.num_tokens.item(slot) == self.known.item(slot)
