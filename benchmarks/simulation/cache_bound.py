"""What prefix caches of a size could give at most, from a trace's prefix ids alone.

An id stands for a block of tokens and all that is before it, so what one request leaves in a cache
another can use from its beginning up to the first id that is not there. Three caches:

- unlimited: everything that was asked for before;
- the best of a size: it knows the future and drops what is needed last (Belady, "A study of
  replacement algorithms for a virtual-storage computer", 1966), or does not keep a block that all
  others are needed before. It counts each block that is there, also behind one that is not, and
  keeps for nothing what is shorter than a whole block, so that no cache of that size has more hits;
- least recently used of a size, block by block, tails dropped before their heads.

The size counts whole blocks and nothing else: a real worker keeps the KV of running requests, with
their outputs, in the same memory, so it can reach neither of the two.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.sim.arrivals import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A request's prompt: its ids, whole blocks first, and the tokens of each."""

    ids: Sequence[int]
    tokens: Sequence[int]
    block_tokens: int

    @property
    def num_whole(self) -> int:
        """Ids that stand for a whole block."""
        return sum(count == self.block_tokens for count in self.tokens)


def accesses(arrivals: Iterable[Arrival], block_tokens: int) -> list[Access]:
    """What a trace asks of a cache, in its order."""
    found = []
    for arrival in arrivals:
        counts = [block_tokens] * len(arrival.prefix_ids)
        excess = len(counts) * block_tokens - arrival.num_prompt_tokens
        if counts and excess > 0:
            counts[-1] -= excess
        found.append(Access(ids=arrival.prefix_ids, tokens=counts, block_tokens=block_tokens))
    return found


def unlimited(trace: Iterable[Access]) -> int:
    """Prompt tokens that a cache has which forgets nothing."""
    seen: set[int] = set()
    hits = 0
    for access in trace:
        for name, count in zip(access.ids, access.tokens, strict=True):
            if name not in seen:
                break
            hits += count
        seen.update(access.ids)
    return hits


def best(trace: Sequence[Access], num_blocks: int) -> int:
    """Prompt tokens that no cache of so many blocks could have more of."""
    never = len(trace)
    next_uses: list[list[int]] = []
    next_use: dict[int, int] = {}
    for at in range(len(trace) - 1, -1, -1):
        next_uses.append([next_use.get(name, never) for name in trace[at].ids])
        next_use.update(dict.fromkeys(trace[at].ids, at))
    next_uses.reverse()
    hits = 0
    kept: dict[int, int] = {}  # a whole block and its next use
    latest: list[tuple[int, int]] = []  # the same with the sign turned; old entries stay in it
    parts: set[int] = set()
    for access, uses in zip(trace, next_uses, strict=True):
        for name, count, use in zip(access.ids, access.tokens, uses, strict=True):
            if count < access.block_tokens:
                hits += count * (name in parts)
                parts.add(name)
                continue
            hits += count * (name in kept)
            if use == never:
                kept.pop(name, None)
                continue
            kept[name] = use
            heapq.heappush(latest, (-use, name))
        while len(kept) > num_blocks:
            turned, name = heapq.heappop(latest)
            if kept.get(name) == -turned:
                del kept[name]
    return hits


def least_recently_used(trace: Iterable[Access], num_blocks: int) -> int:
    """Prompt tokens that a cache of so many blocks has which drops what was used longest ago."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for access in trace:
        hit = True
        for name, count in zip(access.ids, access.tokens, strict=True):
            hit = hit and name in kept
            hits += count * hit
        # The head is the most recent, so that tails go first.
        for name in reversed(access.ids):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hits
